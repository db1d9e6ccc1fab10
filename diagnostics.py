"""
Diagnostics: is a run about to collapse, does it still think, and about its prompt?

  EchoTrap                            a verdict for each iteration's metrics: ok, warn or collapse
  thought, reasoning_health           what the responses of an iteration look like
  repeated_ngrams, pass_at_k          ... how repetitive, how good the best of k
  template_metrics                    RAGEN-2's test whether reasoning depends on its prompt
  thought_pairs, cross_score, template_collapse      ... its three steps

Nothing here changes a run. v1 is RAGEN, arXiv 2504.20073, v2 is RAGEN-2, arXiv 2604.06268.
"""
import bisect
import copy
import math
from collections import defaultdict

import torch
from torch import Tensor

from rollout import Trajectory, make_batch, micro_batches


class EchoTrap:
    """
    Tell a run that collapses from one that learns or has learnt (v1 Sec. 4.1: the Echo Trap).

    The signs in their order: the in-group std of returns falls, entropy falls, the gradient norm spikes (the
    point of no return), success falls. A run that solves its task loses std and entropy as well, so they
    count only while success has stopped rising, short of `solved` * `ceiling`.

    ceiling   the best possible success, 1 or the optimal policy's
    warmup    iterations without a verdict; their mean is the early level
    fall      warn where the EMA of std or entropy is under this fraction of its early level
    patience  iterations without a new best success that count as "stopped rising", and iterations of a fallen
              success that count as "lasting"
    solved    from this fraction of the ceiling on only a lasting fall of success counts
    spike     collapse where the gradient norm is this many times its usual one: the larger of the early level
              and the EMA, both geometric means, so that one spike doesn't hide the next
    drop      collapse where success stays under (1 - drop) * its best
    alpha     weight of the newest value in the EMAs; 0.1 looks back about 10 iterations
    Success is noisy with few prompts an iteration: a new best is RISE above the old one, and a fall exceeds
    FALL standard errors of the EMA as well, which follow from the changes between iterations.
    The thresholds are ours, set on healthy runs of the tiny model; the papers give the signs, not the numbers
    (v2's early stop: std under 10 % of its first-10 mean for 10 steps).

    >>> trap = EchoTrap(warmup=2)
    >>> [trap.update({"iter": i, "grad_norm": g}) for i, g in enumerate([0.5, 0.6, None, 0.5, 9.0])]
    ['ok', 'ok', 'ok', 'ok', 'collapse']
    >>> trap.first, trap.signs
    ({'warn': None, 'collapse': 4}, ['grad_norm spikes'])
    """
    RISE, FALL = 0.01, 5

    def __init__(self, ceiling: float = 1.0, warmup: int = 10, fall: float = 0.4, patience: int = 15,
                 solved: float = 0.8, spike: float = 10.0, drop: float = 0.25, alpha: float = 0.1):
        self.ceiling, self.warmup, self.fall, self.patience = ceiling, warmup, fall, patience
        self.solved, self.spike, self.drop, self.alpha = solved, spike, drop, alpha
        self.signs = []         # what the last verdict rests on, in words
        self.state = {"ema": {}, "early": {}, "num": {}, "last_success": None, "best": 0.0, "stale": 0,
                      "fallen": 0, "first": {"warn": None, "collapse": None}}

    @property
    def first(self) -> dict:
        """The iteration at which "warn" and "collapse" first fired, or None."""
        return self.state["first"]

    def update(self, metrics: dict) -> str:
        """
        Take an iteration's metrics, return "ok", "warn" or "collapse".

        metrics  iter, success, group_reward_std, entropy, grad_norm; one that is missing, None or not finite
                 (or a gradient of 0: nothing to learn from) says nothing
        """
        s, num = self.state, self.state["num"]
        signs = {"collapse": [], "warn": []}
        values = {key: metrics.get(key) for key in ("group_reward_std", "entropy", "grad_norm", "success")}
        values = {key: x for key, x in values.items() if x is not None and math.isfinite(x)}
        if values.get("grad_norm", 0) > 0:
            x = math.log(values.pop("grad_norm"))
            if num.get("log_grad", 0) >= self.warmup:
                usual = max(s["ema"]["log_grad"], s["early"]["log_grad"])
                if x > usual + math.log(self.spike) and not self.has_solved:
                    signs["collapse"].append("grad_norm spikes")
            self.follow("log_grad", x)
        for key in values.keys() - {"grad_norm", "success"}:
            self.follow(key, values[key])
        if "success" in values:
            self.follow_success(values["success"])
        if s["fallen"] >= self.patience:
            signs["collapse"].append("success has fallen")
        if s["stale"] >= self.patience and not self.has_solved:
            for key in ("group_reward_std", "entropy"):
                if num.get(key, 0) >= self.warmup and s["ema"][key] < self.fall * s["early"][key]:
                    signs["warn"].append(f"{key} is low")
        for level in ("warn", "collapse"):
            if signs[level] and s["first"][level] is None:
                s["first"][level] = metrics.get("iter")
        self.signs = signs["collapse"] + signs["warn"]
        return "collapse" if signs["collapse"] else "warn" if signs["warn"] else "ok"

    @property
    def has_solved(self) -> bool:
        """Success is near its ceiling: little is left to learn, and any failure moves a gradient that is nearly 0."""
        return self.state["ema"].get("success", -math.inf) >= self.solved * self.ceiling

    def follow(self, key, x):
        """Move the EMA (a plain mean at first) and, during the warm-up, the early level."""
        s = self.state
        num = s["num"][key] = s["num"].get(key, 0) + 1
        ema = s["ema"].get(key, 0.0)
        s["ema"][key] = ema + max(self.alpha, 1 / num) * (x - ema)
        if num <= self.warmup:
            early = s["early"].get(key, 0.0)
            s["early"][key] = early + (x - early) / num

    def follow_success(self, success):
        """Count the iterations since success (its EMA) last rose, and those in a row that it has been low."""
        s = self.state
        if s["last_success"] is not None:
            self.follow("change", (success - s["last_success"]) ** 2)         # on average twice the variance
        s["last_success"] = success
        self.follow("success", success)
        if s["num"]["success"] < max(self.warmup, 2):
            return                                                    # the first means are mere noise
        ema = s["ema"]["success"]
        if ema > s["best"] + self.RISE:
            s["best"], s["stale"] = ema, 0
        else:
            s["stale"] += 1
        error = math.sqrt(s["ema"]["change"] / 2 * self.alpha / (2 - self.alpha))     # of the EMA
        is_low = s["best"] - ema > max(self.drop * s["best"], self.FALL * error)
        s["fallen"] = s["fallen"] + 1 if is_low else 0

    def state_dict(self) -> dict:
        """Copy what a resumed run needs, as plain numbers; the settings are the constructor's."""
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict) -> None:
        self.state = copy.deepcopy(state)


# Reasoning health

def thought(response: str) -> str:
    """
    Cut the thinking part out of a response, "" if there is none; one that was cut off counts up to its end.

    >>> [thought(x) for x in ("<think> up! </think><answer>Up</answer>", "<answer>Up</answer>", "<think>so")]
    ['up!', '', 'so']
    """
    head, closed, _ = response.partition("</think>")
    before, opened, after = head.partition("<think>")
    if not opened:
        return before.strip() if closed else ""
    return (after if closed else after.partition("<answer>")[0]).strip()


def repeated_ngrams(sequences, n: int = 4) -> float:
    """
    Measure the share of n-grams in a batch that occurred in it before, 1 - distinct / all; 0 without any.

    sequences  lists of tokens or words; n-grams don't cross from one to the next
    Near 1 all responses follow one template; text of several thoughts has, with n = 4, a low share.

    >>> repeated_ngrams([[1, 2, 3], [1, 2], [2, 3]], n=2)
    0.5
    """
    seen, num = set(), 0
    for seq in sequences:
        for i in range(len(seq) - n + 1):
            seen.add(tuple(seq[i:i + n]))
            num += 1
    return 1 - len(seen) / num if num else 0.0


def pass_at_k(success, group, k: int) -> float | None:
    """
    Estimate the chance that one of k episodes of a task succeeds, mean over groups (arXiv 2107.03374, Eq. 1).

    success, group  one entry per episode: bool, and any name of its group
    Of n episodes of which c succeeded: 1 - C(n - c, k) / C(n, k), unbiased. Groups of fewer than k are left
    out; None if all are.

    >>> pass_at_k([True, False, False, False, True], [0, 0, 0, 0, 1], 2)
    0.5
    """
    groups = defaultdict(list)
    for s, g in zip(success, group, strict=True):
        groups[g].append(bool(s))
    chances = [1 - math.comb(len(x) - sum(x), k) / math.comb(len(x), k)
               for x in groups.values() if len(x) >= k]
    return sum(chances) / len(chances) if chances else None


def reasoning_health(responses, group) -> dict:
    """
    Describe an iteration's responses, one entry per turn in each list; linear in the text.

    responses  texts, with the prefilled tag
    group      any name of what stands side by side, say (group, turn); distinct_frac compares inside it
    Returns a dict of numbers, {} for no response:
      thought_words  mean length of the thinking part; collapse shortens it
      thought_frac   turns with any thought
      distinct_frac  distinct responses / responses, mean over groups; 1 / size = all the same
      repeat_frac    repeated_ngrams of the words, n = 4
    """
    if not responses:
        return {}
    thoughts = [thought(r).split() for r in responses]
    groups = defaultdict(list)
    for r, g in zip(responses, group, strict=True):
        groups[g].append(r)
    num = len(responses)
    return {"thought_words": sum(map(len, thoughts)) / num,
            "thought_frac": sum(map(bool, thoughts)) / num,
            "distinct_frac": sum(len(set(x)) / len(x) for x in groups.values()) / len(groups),
            "repeat_frac": repeated_ngrams([r.split() for r in responses])}


# Template collapse

@torch.no_grad()
def cross_score(policy, contexts, thoughts, temperature: float, budget: int) -> Tensor:
    """
    Score every thought under every context by teacher forcing, L[i, j] = mean log p(z_i | x_j) (v2).

    policy              model.ActorCritic
    contexts, thoughts  N lists of token ids each, none empty; thought i was sampled after context i
    temperature, budget of sampling; padded tokens of one pass, a bound on memory
    Returns L (N, N) float64 on the CPU, in nats per token. N^2 rows are scored, each context run once: choose
    N small.
    """
    rows = [Trajectory(tokens=x + z, loss_mask=[0] * len(x) + [1] * len(z), logprobs=[0.0] * len(x + z),
                       turn_ids=[0] * len(x + z)) for z in thoughts for x in contexts]
    out = torch.empty(len(rows), dtype=torch.float64)
    for run in micro_batches(rows, range(len(rows)), budget, share_prefix=True):
        b = make_batch(rows, run, policy.device, share_prefix=True)
        logprobs = policy(b.tokens, b.loss_mask, temperature=temperature, prefix=b.prefix, entropy=False)["logprobs"]
        out[run] = (logprobs.double().sum(1) / b.loss_mask.sum(1)).cpu()
    return out.view(len(thoughts), len(contexts))


def thought_pairs(trajectories, decode, first_turn: bool, most: int) -> tuple[list, list]:
    """
    Sample contexts (all tokens before a response) and thoughts (its tokens up to "</think>"), one of each group.

    decode      token ids to text
    first_turn  the first response, else one in turn: the first group's first, the second group's second, ...
    most        at most so many pairs; groups of one and the same context count once
    """
    firsts, pairs = {}, {}
    for t in trajectories:
        firsts.setdefault(t.group, t)
    for t in firsts.values():
        turn = 0 if first_turn else len(pairs) % len(t.turn_rewards)
        at = [i for i, (sampled, k) in enumerate(zip(t.loss_mask, t.turn_ids)) if sampled and k == turn]
        ids = t.tokens[at[0]:at[-1] + 1]
        closed = bisect.bisect_left(range(len(ids)), True, key=lambda n: "</think>" in decode(ids[:n]))
        pairs.setdefault(tuple(t.tokens[:at[0]]), ids[:closed])
    pairs = list(pairs.items())[:most]
    return [list(x) for x, _ in pairs], [z for _, z in pairs]


def template_metrics(policy, tokenizer, trajectories, cfg) -> dict:
    """
    Test on an iteration's episodes whether thoughts depend on what they follow: template_collapse of a sample.

    cfg  settings template_pairs, temperature, micro_batch_tokens
    Returns its numbers as template/first/... (first turns, under first prompts) and template/all/... (any turn,
    under whole histories); {} where fewer than two prompts differ. Contexts that leave the model no room for the
    longest thought are left out. After an update the scores are the new policy's.
    """
    out = {}
    for name, first_turn in (("first", True), ("all", False)):
        contexts, thoughts = thought_pairs(trajectories, tokenizer.decode, first_turn, cfg.template_pairs)
        room = policy.max_positions - max(map(len, thoughts))
        contexts, thoughts = [x for x in contexts if len(x) <= room], [
            z for x, z in zip(contexts, thoughts) if len(x) <= room]
        if len(contexts) > 1:
            scores = cross_score(policy, contexts, thoughts, cfg.temperature, cfg.micro_batch_tokens)
            out |= {f"template/{name}/{key}": x for key, x in template_collapse(scores).items()}
    return out


def template_collapse(scores: Tensor) -> dict:
    """
    Tell whether reasonings depend on their prompts, from L (N, N) of cross_score (v2).

    Returns a dict of numbers:
      conditional_entropy  H(Z|X) = -mean L[i, i], nats per token: how varied the reasoning is
      mutual_information   mean (L[i, i] - log p_mix(z_i)), log p_mix(z_i) = logsumexp_j L[i, j] - log N; 0
                           where the prompt doesn't matter, at most log N. Low at high entropy: a template
      retrieval_accuracy   how often L[i, i] is the largest of its row; of equals each counts for its share
      retrieval_chance     1 / N

    >>> template_collapse(torch.tensor([[-1., -3.], [-2., -2.]]))["retrieval_accuracy"]
    0.75
    """
    scores = scores.double()
    num, own = len(scores), scores.diagonal()
    mixture = scores.logsumexp(1) - math.log(num)
    best = scores == scores.amax(1, keepdim=True)                     # (N, N)
    return {"conditional_entropy": -own.mean().item(),
            "mutual_information": (own - mixture).mean().item(),
            "retrieval_accuracy": (best.diagonal() / best.sum(1)).mean().item(),
            "retrieval_chance": 1 / num}
