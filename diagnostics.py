"""
Diagnostics as plain maths: is a run about to collapse, does it still think, and about its prompt?

  EchoTrap                            a verdict for each iteration's metrics: ok, warn or collapse
  thought, reasoning_health           what the responses of an iteration look like
  repeated_ngrams, pass_at_k          ... how repetitive, how good the best of k
  cross_score, template_collapse      RAGEN-2's test whether reasoning depends on its prompt

Nothing here changes a run. v1 is RAGEN, arXiv 2504.20073, v2 is RAGEN-2, arXiv 2604.06268.
"""
import copy
import math
from collections import defaultdict
from typing import Callable

import torch
from torch import Tensor


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
    solved    no warning from this fraction of the ceiling on
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
                if x > usual + math.log(self.spike):
                    signs["collapse"].append("grad_norm spikes")
            self.follow("log_grad", x)
        for key in values.keys() - {"grad_norm", "success"}:
            self.follow(key, values[key])
        if "success" in values:
            self.follow_success(values["success"])
        if s["fallen"] >= self.patience:
            signs["collapse"].append("success has fallen")
        if s["stale"] >= self.patience and s["ema"]["success"] < self.solved * self.ceiling:
            for key in ("group_reward_std", "entropy"):
                if num.get(key, 0) >= self.warmup and s["ema"][key] < self.fall * s["early"][key]:
                    signs["warn"].append(f"{key} is low")
        for level in ("warn", "collapse"):
            if signs[level] and s["first"][level] is None:
                s["first"][level] = metrics.get("iter")
        self.signs = signs["collapse"] + signs["warn"]
        return "collapse" if signs["collapse"] else "warn" if signs["warn"] else "ok"

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


def reasoning_health(responses, group, valid, thought_tokens=None) -> dict:
    """
    Describe an iteration's responses, one entry per turn in each list; linear in the text.

    responses       texts, with the prefilled tag
    group           any name of what stands side by side, say (group, turn); distinct_frac compares inside it
    valid           bool, the answer was well-formed and known
    thought_tokens  the token ids of each thinking part, if they are known; else the metric is left out
    Returns a dict of numbers, {} for no response:
      thought_words, thought_tokens  mean length of the thinking part; collapse shortens it
      thought_frac                   turns with any thought
      distinct_frac                  distinct responses / responses, mean over groups; 1 / size = all the same
      repeat_frac                    repeated_ngrams of the words, n = 4
      valid_frac                     turns with a valid answer
    """
    if not responses:
        return {}
    thoughts = [thought(r).split() for r in responses]
    groups = defaultdict(list)
    for r, g in zip(responses, group, strict=True):
        groups[g].append(r)
    num = len(responses)
    out = {"thought_words": sum(map(len, thoughts)) / num,
           "thought_frac": sum(map(bool, thoughts)) / num,
           "distinct_frac": sum(len(set(x)) / len(x) for x in groups.values()) / len(groups),
           "repeat_frac": repeated_ngrams([r.split() for r in responses]),
           "valid_frac": sum(map(bool, valid)) / num}
    if thought_tokens is not None:
        out["thought_tokens"] = sum(map(len, thought_tokens)) / num
    return out


# Template collapse

@torch.no_grad()
def cross_score(prompts, reasonings, score: Callable[[Tensor, Tensor], Tensor], max_tokens: int,
                device: torch.device | str = "cpu") -> Tensor:
    """
    Score every reasoning under every prompt by teacher forcing, L[i, j] = mean log p(z_i | x_j) (v2).

    prompts, reasonings  N lists of token ids each, none empty; reasoning i was sampled after prompt i
    score                (tokens (b, T) int64, loss_mask (b, T) bool) to log-probs (b, T), with column t about
                         tokens[:, t]; the rows are padded on the right with id 0
    max_tokens           padded tokens of one call, a bound on memory; a single longer row goes alone
    Returns L (N, N) float64 on the CPU, in nats per token. N^2 rows are scored: choose N small.
    """
    if len(prompts) != len(reasonings) or not all(map(len, [*prompts, *reasonings])):
        raise ValueError("cross_score needs one prompt for each reasoning, none of them empty, got lengths "
                         f"{[len(x) for x in prompts]} and {[len(z) for z in reasonings]}")
    rows = sorted((len(x) + len(z), i, j) for i, z in enumerate(reasonings) for j, x in enumerate(prompts))
    scored, start = [], 0
    while start < len(rows):
        stop = start + 1                                              # by length: the last row is the widest
        while stop < len(rows) and (stop + 1 - start) * rows[stop][0] <= max_tokens:
            stop += 1
        chunk, width = rows[start:stop], rows[stop - 1][0]
        tokens = torch.tensor([prompts[j] + reasonings[i] + [0] * (width - n) for n, i, j in chunk])  # (b, T)
        first, end = torch.tensor([[len(prompts[j]), n] for n, i, j in chunk]).T[:, :, None]          # (b, 1)
        columns = torch.arange(width)
        mask = ((columns >= first) & (columns < end)).to(device)      # (b, T) the reasoning
        logprobs = score(tokens.to(device), mask).double().where(mask, 0.0)
        scored.append(logprobs.sum(1) / mask.sum(1))
        start = stop
    out = torch.empty(len(prompts), len(prompts), dtype=torch.float64)
    _, i, j = torch.tensor(rows).T
    out[i, j] = torch.cat(scored).cpu()
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
