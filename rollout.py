"""The border between text and tokens: chat context, batched KV-cached generation, Trajectory, Batch.

This is the only file that knows both. Token in, token out: a Trajectory keeps the ids that were sampled and the
ids of the observations that were fed. History is never decoded and re-encoded, responses are never rewritten,
and the loss mask is written when a token is sampled.

Read `collect` first. Legend: B rows, T tokens, K turns, V vocabulary.
"""

import hashlib
import itertools
import math
import sys
import traceback
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.nn as nn
from transformers.cache_utils import Cache, DynamicLayer

SYSTEM = "You are a helpful assistant."
FORMAT_PENALTY = -0.1       # once for a turn without a well-formed answer or with an unknown action (paper B.2)
PATIENCE = 4                # decode steps of the whole batch that finished rows may waste before they are set aside
VALIDATION_SEED = 123       # first validation task; training tasks have seeds of 2**63 and more

# For a base model that brings no chat template: plain headings, every message closed by the eos token.
PLAIN_TEMPLATE = ("{{ bos_token }}{% for m in messages %}### {{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
                  "{% if add_generation_prompt %}### assistant\n{% endif %}")


class Abandoned(Exception):
    """Episodes that were given up on request."""


class ContextError(ValueError):
    """A prompt that leaves no room for an answer; the message says what to change."""


# ---------------------------------------------------------------------------------------------- data

@dataclass
class Trajectory:
    """One episode, as plain Python. All lists of the first block have one entry per token (T)."""
    tokens: list = field(default_factory=list)      # ids: the first prompt, then responses and observations in turn
    loss_mask: list = field(default_factory=list)   # 1 where the policy sampled the token, its stop token included
    logprobs: list = field(default_factory=list)    # log-prob at sampling, nats; 0 where not sampled
    turn_ids: list = field(default_factory=list)    # turn, from 0; an observation belongs to the turn it opens

    turn_rewards: list = field(default_factory=list)  # (K,) reward of each turn, format penalty included
    state_keys: list = field(default_factory=list)    # (K,) int, names the state that each turn starts from
    format_ok: list = field(default_factory=list)     # (K,) bool: the answer was well-formed, all actions known
    actions: list = field(default_factory=list)       # (K,) names of the actions that were played in each turn
    messages: list = field(default_factory=list)      # the episode as chat messages, for people and logs
    group: int = 0                                  # episodes of one group share their task and their prompt
    member: int = 0                                 # number inside the group
    success: bool = False                           # the environment's verdict
    truncated: bool = False                         # cut off by max_context, max_new_tokens or the environment;
    #                                                 the end of the told budget is a real end, not a cut
    error: str = ""                                 # traceback of an environment that raised: not to be trained on

    @property
    def prompt_len(self):
        """Tokens before the first trained one."""
        return self.loss_mask.index(1)

    @property
    def traj_return(self):
        """R(τ): the sum of the turns' rewards, undiscounted (Eq. 2)."""
        return float(sum(self.turn_rewards))


@dataclass
class Prefix:
    """The prompts that rows of a Batch begin with alike, each to be run once (model.ActorCritic.states)."""
    rows: torch.Tensor                  # (G,) int64, a row that begins with each prompt
    of: torch.Tensor                    # (B,) int64, the prompt that each row begins with
    lengths: torch.Tensor               # (G,) int64, tokens of each prompt
    width: int                          # tokens of the longest prompt
    rest: int                           # tokens of the longest remainder
    ragged: bool                        # whether the prompts differ in length


@dataclass
class Batch:
    """Trajectories as tensors, right-padded. Column t is about tokens[:, t]; column 0 is never trained."""
    tokens: torch.Tensor                # (B, T) int64
    loss_mask: torch.Tensor             # (B, T) bool, sampled tokens
    turn_ids: torch.Tensor              # (B, T) int64
    logprobs: torch.Tensor              # (B, T) nats, as sampled
    last: torch.Tensor                  # (B,) int64, index of each row's last token
    turn_rewards: torch.Tensor          # (B, K) reward of each turn
    truncated: torch.Tensor             # (B,) bool: the value after the last token is bootstrapped
    index: torch.Tensor                 # (B,) int64, row's number in the list the batch was made from
    prefix: Prefix | None = None        # where rows share prompts
    # filled in by train.py, in this order, where the algorithm needs them; all (B, T)
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def take(self, x):
        """This batch's rows of a tensor that has one for each trajectory of the list."""
        return x[self.index.to(x.device)].to(self.index.device)


    def halves(self):
        """Cut the batch into two of half the rows, or one of its only row."""
        middle = (len(self.tokens) + 1) // 2
        return [self.part(rows) for rows in (slice(0, middle), slice(middle, None))[:len(self.tokens)]]

    def part(self, rows):
        """Return the batch of some rows, a slice; what was filled in comes along."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: x[rows] if torch.is_tensor(x) else x for name, x in values.items()}
        if self.prefix is not None:
            kept, of = self.prefix.of[rows].unique(return_inverse=True)         # prompts that still have a row
            lengths = self.prefix.lengths[kept]
            values["prefix"] = Prefix(
                rows=(of == torch.arange(len(kept), device=of.device)[:, None]).int().argmax(1), of=of, lengths=lengths,
                width=int(lengths.max()), rest=int((values["last"] + 1 - lengths[of]).max()),
                ragged=bool(lengths.min() < lengths.max()))
        return Batch(**values)


def make_batch(trajectories, index, device, share_prefix=False):
    """Stack trajectories[i] for i in index as a Batch on a device; share_prefix: find the prompts they share."""
    rows = [trajectories[i] for i in index]
    longest, turns = max(len(r.tokens) for r in rows), max(len(r.turn_rewards) for r in rows)

    def pad(name, dtype, width):
        out = np.zeros((len(rows), width), dtype)
        for i, r in enumerate(rows):
            out[i, :len(getattr(r, name))] = getattr(r, name)
        return torch.from_numpy(out).to(device)

    return Batch(
        tokens=pad("tokens", np.int64, longest), loss_mask=pad("loss_mask", bool, longest),
        turn_ids=pad("turn_ids", np.int64, longest), logprobs=pad("logprobs", np.float32, longest),
        turn_rewards=pad("turn_rewards", np.float32, turns),
        last=torch.tensor([len(r.tokens) - 1 for r in rows], device=device),
        truncated=torch.tensor([r.truncated for r in rows], device=device),
        index=torch.tensor(list(index), device=device),
        prefix=shared_prefix(rows, device) if share_prefix else None)


def shared_prefix(rows, device):
    """Find the prompts that rows (list of Trajectory) begin with alike: a Prefix; None where no two do."""
    prompts = [tuple(t.tokens[:t.prompt_len]) for t in rows]
    first = {}          # prompt -> the first row that begins with it
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt, i)
    if len(first) == len(rows):
        return None
    number, lengths = {prompt: g for g, prompt in enumerate(first)}, [len(prompt) for prompt in first]
    return Prefix(rows=torch.tensor(list(first.values()), device=device),
                  of=torch.tensor([number[prompt] for prompt in prompts], device=device),
                  lengths=torch.tensor(lengths, device=device), width=max(lengths),
                  rest=max(len(t.tokens) - t.prompt_len for t in rows), ragged=min(lengths) < max(lengths))


def micro_batches(trajectories, rows, budget, share_prefix=False):
    """Split row numbers into runs whose padded size is at most `budget` tokens (or one row).

    share_prefix: a prompt counts once for all the rows of a run. Runs of similar length waste the least padding,
    runs of whole groups the fewest prompts: the split with the fewest tokens in all is taken.
    """
    lead = {i: trajectories[i].prompt_len if share_prefix else 0 for i in rows}
    rest = {i: len(trajectories[i].tokens) - lead[i] for i in rows}
    texts = {i: tuple(trajectories[i].tokens[:lead[i]]) for i in rows}
    number = {text: n for n, text in enumerate(dict.fromkeys(texts.values()))}
    prompt = {i: number[texts[i]] for i in rows}
    longest = {}        # prompt -> the longest remainder of its rows
    for i in rows:
        longest[prompt[i]] = max(longest.get(prompt[i], 0), rest[i])

    def split(order):
        runs, sizes = [[]], [0]
        prompts, width, tail = set(), 0, 0          # of the run that grows: its prompts, their and its rests' width
        for i in order:
            prompts, width, tail = prompts | {prompt[i]}, max(width, lead[i]), max(tail, rest[i])
            size = len(prompts) * width + (len(runs[-1]) + 1) * tail
            if runs[-1] and size > budget:
                prompts, width, tail = {prompt[i]}, lead[i], rest[i]
                size = width + tail
                runs.append([])
                sizes.append(0)
            runs[-1].append(i)
            sizes[-1] = size
        return sum(sizes), [run for run in runs if run]

    by_length = split(sorted(rows, key=rest.get))
    by_group = split(sorted(rows, key=lambda i: (longest[prompt[i]], prompt[i], rest[i])))
    return min(by_length, by_group, key=lambda x: x[0])[1]


# ---------------------------------------------------------------------------------------------- seeds

@dataclass(frozen=True)
class Episode:
    """What fixes one episode but for the weights: its place, its two seeds, and its sampling noise."""
    group: int
    member: int
    task_seed: int      # the world; shared by the group
    noise_seed: int     # the world's luck; the member's own
    noise_key: tuple    # (run seed, iteration): with group and member it keys the stream of sampling noise


def train_episodes(run_seed, iteration, groups, members):
    """The episodes of a training iteration: `members` for each group number in `groups`.

    Every number follows from (run seed, iteration, group, member) through numpy's SeedSequence: no global
    state, no repeat over ranks or iterations, the same episodes on any number of ranks.
    """
    def draw(*key):
        return int(np.random.SeedSequence(run_seed, spawn_key=key).generate_state(1, np.uint64)[0])
    return [Episode(g, m, draw(0, iteration, g) | 2 ** 63, draw(1, iteration, g, m), (run_seed, iteration))
            for g in groups for m in range(members)]


def validation_episodes(tasks, samples=1):
    """The fixed validation episodes with the numbers in `tasks`, `samples` of each; the same for every run.

    Member 0 is the one that train.py evaluates; those after it have luck and sampling noise of their own.
    """
    def luck(k, m):
        draw = np.random.SeedSequence(VALIDATION_SEED, spawn_key=(3, k, m)).generate_state(1, np.uint64)
        return int(draw[0]) if m else VALIDATION_SEED + k
    return [Episode(k, m, VALIDATION_SEED + k, luck(k, m), (VALIDATION_SEED, 0)) for k in tasks for m in range(samples)]


def token_noise(episodes, turns, tokens):
    """Uniform numbers in [0, 1) that the episodes' tokens are drawn with: float32 (E, turns, tokens).

    Philox is a counter-based generator: the key is the iteration's, the high words of the counter are the
    episode's, so that an episode's noise doesn't depend on the batch it is sampled in.
    """
    out = np.empty((len(episodes), turns, tokens), np.float32)
    keys = {}
    for i, e in enumerate(episodes):
        if e.noise_key not in keys:
            keys[e.noise_key] = np.random.SeedSequence(e.noise_key[0], spawn_key=(2, e.noise_key[1])
                                                       ).generate_state(2, np.uint64)
        bits = np.random.Philox(key=keys[e.noise_key], counter=[0, 0, e.member, e.group])
        np.random.Generator(bits).random(out=out[i], dtype=np.float32)
    return torch.from_numpy(out)


# ---------------------------------------------------------------------------------------------- text

class Chat:
    """Turns text into token ids by a tokenizer's own chat template, found by rendering, not by model name.

    A short dummy chat is rendered, and cut at its contents: `close` is what stands between an assistant's text
    and the next user's, `open` what stands between a user's text and the assistant's. prefill is put at the
    start of each assistant turn ("<think>" or "<answer>"); it is fed, not sampled, and carries no loss.
    stop_ids: the token that closes an assistant turn first, then whatever the tokenizer or `extra_stops` call eos.
    """

    def __init__(self, tokenizer, think=True, extra_stops=()):
        self.tokenizer = tokenizer
        tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE     # so that it is saved with the policy
        self.template = tokenizer.get_chat_template()
        user, assistant, system = "first user text", "assistant text", "system text"
        try:
            self.has_system = system in self.render([("system", system), ("user", user)])
        except Exception:       # a template without a system role raises from inside Jinja (Gemma)
            self.has_system = False
        full = self.render([("user", user), ("assistant", assistant), ("user", "second user text")])
        self.close, self.open = full.split(assistant)[1].split("second user text")
        self.prefill = "<think>" if think else "<answer>"
        if self.open.rstrip().endswith("<think>"):      # a template that opens the thinking itself
            self.prefill = "" if think else "\n</think>\n\n<answer>"
        self.given = self.prefill or "<think>"          # what the parser must put back
        self.closing = self.encode([self.close])[0][:3]         # where the template's own stop token stands
        # all_special_ids holds only what an attribute names: not Gemma's <end_of_turn>, nor Phi's <|end|>
        own = [i for i in self.closing if i in tokenizer.added_tokens_decoder][:1]
        stops = dict.fromkeys([*own, tokenizer.eos_token_id, *extra_stops])     # the template's own comes first
        self.stop_ids = [i for i in stops if i is not None]
        if not self.stop_ids:
            raise ValueError("The tokenizer names no eos token and its chat template closes a turn with none: "
                             "a turn could never end. Set tokenizer.eos_token.")

    def render(self, turns):
        return self.tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in turns],
            chat_template=self.template, tokenize=False, add_generation_prompt=True)

    def encode(self, texts):
        texts = [text.encode(errors="replace").decode() for text in texts]     # no tokenizer takes lone surrogates
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def first(self, texts):
        """Ids of whole prompts, one for each first user text."""
        fold = [[("system", SYSTEM), ("user", t)] if self.has_system else [("user", f"{SYSTEM}\n\n{t}")]
                for t in texts]
        return self.encode([self.render(turns) + self.prefill for turns in fold])

    def next(self, texts, last_ids):
        """Ids to feed after a response: its closing (but for the stop token already sampled), text, opening.

        last_ids: each response's stop token. Another one than the template's is followed by the template's own.
        """
        feeds = self.encode([self.close + t + self.open + self.prefill for t in texts])
        return [ids[self.closing.index(last) + 1:] if last in self.closing else ids
                for ids, last in zip(feeds, last_ids)]

    def answer(self, text, thought=""):
        """Ids of a response that gives `text` as its answer, after a thought if it thinks, for supervised play."""
        opened = f"{thought}</think> <answer>" if self.given.startswith("<think>") else ""
        return self.encode([f"{opened}{text}</answer>"])[0] + [self.stop_ids[0]]

    def decode(self, ids):
        """The text of a response as the environment reads it: what was given, what was sampled, no stop token."""
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.given + self.tokenizer.decode(ids, skip_special_tokens=False)


def user_message(env, observation, turn, reward, actions_left, cfg):
    """The user's side of a turn. turn 0 also holds the instruction, the legend, the actions and the budget."""
    if cfg.terse:
        return f"{env.brief if turn == 0 else format(reward, 'g')}\n{observation}\n{actions_left}"
    parts = []
    if turn == 0:
        parts.append(env.instruction)
        if env.legend:
            parts.append("The meaning of each symbol is: " + ", ".join(f"{k}: {v}" for k, v in env.legend.items()))
        if env.actions:
            parts.append("Your available actions are: " + ", ".join(env.actions))
        parts.append(f"You have at most {cfg.max_turns} turns and {cfg.max_actions} actions in all, at most "
                     f"{cfg.max_actions_per_turn} in a turn, separated by \"{cfg.action_sep}\".")
    else:
        parts.append(f"Reward: {reward:g}")
    shape = "<think> [your thoughts] </think> <answer> [your answer] </answer>" if cfg.think else \
        "<answer> [your answer] </answer>"
    parts.append(f"Turn {turn + 1}:\nState:\n{observation}\nYou have {actions_left} actions left. Always output: "
                 f"{shape} with no extra text. Strictly follow this format. "
                 f"Max response length: {cfg.max_new_tokens} tokens.")
    return "\n\n".join(parts)


def parse_response(text, actions, limit, sep="||", think=True):
    """Read the actions out of a response; linear time on any text.

    text: the response with its prefill. actions: the valid names, matched case-insensitively; None = free text,
    where the whole answer is one action. limit: more actions than this are cut, not punished.
    Returns (the valid actions, format_ok); format_ok is False without a well-formed answer or with any unknown
    action, and the valid ones still run.

    >>> parse_response("<think>go</think><answer>up || Jump</answer>", ("Up", "Down"), 5)
    (['Up'], False)
    """
    start = 0
    ok = True
    if think:
        end = text.find("</think>")
        ok = text.lstrip().startswith("<think>") and end >= 0
        start = max(end, 0)
    i = text.find("<answer>", start)
    j = text.find("</answer>", i + 8) if i >= 0 else -1
    if j < 0:
        return [], False
    content = text[i + 8:j]
    if actions is None:
        return ([content.strip()], ok) if content.strip() else ([], False)
    known = {a.lower(): a for a in actions}
    named = [known.get(part.strip().lower()) for part in content.split(sep, limit)[:limit]]
    valid = [a for a in named if a is not None]
    return valid, ok and len(valid) == len(named)


def segments(trajectory, tokenizer):
    """Return an episode as the model saw it: a list of [text, whether it was sampled and is trained]."""
    runs = itertools.groupby(zip(trajectory.tokens, trajectory.loss_mask), key=lambda pair: pair[1])
    return [[tokenizer.decode([t for t, _ in run]), bool(trained)] for trained, run in runs]


def show(trajectory, tokenizer):
    """Print an episode as the model saw it, the trained tokens in green, with the rewards of its turns."""
    print("".join(("\033[32m{}\033[0m" if trained else "{}").format(text)
                  for text, trained in segments(trajectory, tokenizer)))
    end = "truncated" if trajectory.truncated else "ended"
    print(f"turn rewards {[round(r, 2) for r in trajectory.turn_rewards]}, return {trajectory.traj_return:.2f}, "
          f"success {trajectory.success}, {end}")


# ---------------------------------------------------------------------------------------------- the cache

class RoomyLayer(DynamicLayer):
    """A cache layer that writes into spare room instead of copying itself for every token.

    `keys` and `values` stay what transformers expects, (B, heads, seen, dim): views of a larger buffer.
    """
    ROOM = 128          # columns added when the buffer is full
    column = None       # set by FixedStep: write there, and return the whole buffer

    def update(self, key_states, value_states, *args, **kwargs):
        if self.column is not None:
            for buffer, x in zip(self.buffers, (key_states, value_states)):
                buffer.index_copy_(2, self.column, x)
            return self.buffers
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.buffers = (self.keys, self.values)
        seen, new = self.keys.shape[2], key_states.shape[2]
        if self.buffers[0].shape[2] < seen + new:
            self.reserve(new + self.ROOM)
        for buffer, x in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, seen:seen + new] = x
        self.show(seen + new)
        return self.keys, self.values

    def reserve(self, columns):
        """Make room for so many columns more."""
        seen = self.keys.shape[2]
        size = list(self.keys.shape)
        size[2] = -(-(seen + columns) // 64) * 64       # few widths, so that freed memory fits again
        old, self.buffers = (self.keys, self.values), tuple(x.new_zeros(size) for x in (self.keys, self.values))
        for buffer, x in zip(self.buffers, old):
            buffer[:, :, :seen] = x
        self.show(seen)

    def show(self, seen):
        self.keys, self.values = (b[:, :, :seen] for b in self.buffers)

    def rearrange(self, rows, columns):
        """Keep `rows` (index or None = all), then gather `columns` (B, W) of each (None = all)."""
        for name in ("keys", "values"):
            x = getattr(self, name)
            x = x if rows is None else x[rows]
            if columns is not None:
                x = x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            setattr(self, name, x)
        self.buffers = (self.keys, self.values)


class Rows:
    """The rows in flight: their cache, its mask, and the operations that keep it a left-padded rectangle.

    No holes: after each ragged feed and each turn the rows are right-aligned by one gather, so that
    sliding-window layers, which measure distance in columns, stay right.
    """

    def __init__(self, policy):
        self.policy = policy
        self.cache = Cache(layer_class_to_replicate=RoomyLayer)
        self.mask = None        # (B, columns) int64, 1 where the cache holds a real token
        self.lengths = 0        # (B,) int64, real tokens of each row

    def feed(self, ids, mask):
        """Run ids (B, M) where mask (B, M) is 1 through the model; return the last hidden states (B, M, D)."""
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)
        real = mask.cumsum(1)
        positions = (real + self.lengths[:, None] if torch.is_tensor(self.lengths) else real) - 1
        self.lengths = self.lengths + real[:, -1]
        return self.policy.hidden(ids, self.mask, positions.clamp(min=0), self.cache)

    def feed_ragged(self, lists):
        """Feed lists of ids of unequal length; return the hidden state after each row's last one, (B, D)."""
        lengths = torch.tensor([len(x) for x in lists])
        ids = torch.zeros(len(lists), int(lengths.max()), dtype=torch.long)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        ids[mask.bool()] = torch.tensor([t for x in lists for t in x])
        device = self.policy.device
        hidden = self.feed(ids.to(device), mask.to(device))
        last = hidden[torch.arange(len(lists), device=device), (lengths - 1).to(device)]
        self.align()
        return last

    def align(self):
        """Right-align every row."""
        width = int(self.lengths.max())
        if int(self.lengths.min()) == self.mask.shape[1]:
            return      # no padding and no hole anywhere
        columns = torch.argsort(self.mask, dim=1, stable=True)[:, -width:]       # padding first, order kept
        self.rearrange(None, columns)
        self.mask = self.mask.gather(1, columns)

    def select(self, rows):
        """Keep (or repeat) rows, an int64 index."""
        self.rearrange(rows, None)
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]

    def rearrange(self, rows, columns):
        for layer in self.cache.layers:
            layer.rearrange(rows, columns)

    def part(self, rows):
        """Return a copy of some rows."""
        other = Rows(self.policy)
        for layer in self.cache.layers:
            copied = RoomyLayer()
            copied.lazy_initialization(layer.keys, layer.values)
            copied.keys, copied.values = layer.keys, layer.values
            other.cache.layers.append(copied)
        other.mask, other.lengths = self.mask, self.lengths
        other.select(rows)
        return other

    def join(self, parts, order):
        """Put parts (list of Rows) behind these rows, right-aligned, then bring all into an order, an index."""
        all_rows = [self, *parts]
        width = max(r.mask.shape[1] for r in all_rows)
        pad = lambda x, dim: nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [width - x.shape[dim], 0])
        self.mask = torch.cat([pad(r.mask, 1) for r in all_rows])[order]
        self.lengths = torch.cat([r.lengths for r in all_rows])[order]
        for layer, *others in zip(*(r.cache.layers for r in all_rows)):
            layer.keys, layer.values = (torch.cat([pad(getattr(x, name), 2) for x in (layer, *others)])[order]
                                        for name in ("keys", "values"))
            layer.buffers = (layer.keys, layer.values)


class FixedStep:
    """A decode step whose shapes never change, so that a GPU can replay it as one CUDA graph.

    Without it a GPU waits for Python to launch some hundred kernels for every token. The step writes to a column
    that a tensor names, and attends the whole buffer under a mask. Only for layers of full attention.
    """
    WARM_UP = 3         # steps before the capture: libraries set themselves up in the first ones

    def __init__(self, rows, steps):
        self.rows, self.graph, self.done = rows, None, 0
        device, (b, seen) = rows.mask.device, rows.mask.shape
        self.column = torch.tensor([seen], device=device)
        for layer in rows.cache.layers:
            layer.reserve(steps)
            layer.column = self.column
        width = rows.cache.layers[0].buffers[0].shape[2]
        dtype = torch.bfloat16 if rows.policy.bf16 else torch.float32
        self.off = torch.full((b, 1, 1, 1), torch.finfo(dtype).min, dtype=dtype, device=device)
        self.mask = self.off.repeat(1, 1, 1, width)         # (B, 1, 1, W), added to the scores: 0 or the least number
        self.mask[:, 0, 0, :seen].masked_fill_(rows.mask.bool(), 0)
        self.token = torch.zeros(b, 1, dtype=torch.long, device=device)
        self.alive = torch.ones(b, dtype=torch.bool, device=device)
        self.position = rows.lengths[:, None].clone()       # (B, 1)
        self.lived = []

    def feed(self, token, alive):
        """Run token (B,) of the rows that are alive (B,) through the model; return hidden states (B, D)."""
        self.token.copy_(token[:, None])
        self.alive.copy_(alive)
        self.lived.append(alive)
        if self.graph is None and self.done == self.WARM_UP and token.is_cuda:
            self.graph = self.capture()
        self.graph.replay() if self.graph else self.step()
        self.done += 1
        return self.hidden

    def step(self):
        self.mask.index_copy_(3, self.column, self.off.masked_fill(self.alive[:, None, None, None], 0))
        self.hidden = self.rows.policy.hidden(self.token, self.mask, self.position, self.rows.cache)[:, 0]
        self.column += 1
        self.position += self.alive[:, None]

    def capture(self):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):       # recorded, not run
                self.step()
            return graph
        except RuntimeError as error:
            torch.cuda.set_stream(stream)       # a capture that fails at its end leaves its own behind
            if isinstance(error, torch.OutOfMemoryError):
                raise       # fewer rows may fit
            print(f"note: the decode step can't be captured as a CUDA graph, decoding goes on without: {error}",
                  file=sys.stderr)
            FixedStep.WARM_UP = None        # not tried again

    def close(self):
        """Hand the rows back as a cache of seen columns."""
        for layer in self.rows.cache.layers:
            layer.column = None
            layer.show(self.rows.mask.shape[1] + self.done)
        self.rows.mask = torch.cat([self.rows.mask, *(x[:, None].long() for x in self.lived)], 1)
        self.rows.lengths = self.position[:, 0]


# ---------------------------------------------------------------------------------------------- sampling

def draw(logits, uniforms, temperature):
    """Draw one token per row by inverse CDF from softmax(logits / temperature).

    logits (B, V) float32, uniforms (B,) in [0, 1). temperature 0 takes the most likely token.
    Returns (token (B,), its log-prob (B,)). The sum runs in float64 and the uniform is scaled by its last
    value, so that rounding never picks a token of probability 0.
    """
    if temperature == 0:
        logp = torch.log_softmax(logits, -1)
        return logp.argmax(-1), logp.amax(-1)
    probs = torch.softmax(logits / temperature, -1)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, uniforms.double()[:, None] * cdf[:, -1:], right=True)
    token.clamp_(max=logits.shape[1] - 1)       # only logits that are not finite lead there: log-prob nan, step skipped
    return token[:, 0], probs.gather(1, token)[:, 0].log()


def sample_turn(rows, hidden, uniforms, limit, stop_ids, temperature, fixed=False):
    """Sample one response per row, token by token, all rows at once.

    hidden (B, D): the state after the last fed token. uniforms (B, M), limit (B,): most tokens for each row.
    fixed: decode in steps of fixed shapes (FixedStep), with all rows to the end. Else, on a CPU, rows that have finished
    are set aside as soon as they have wasted PATIENCE steps of the whole batch, and put back at the end.
    Returns (tokens (B, n), logprobs (B, n), lengths (B,)) on the CPU. A row's last token, its stop token as a
    rule, is not in the cache yet: it is fed with the next observation, which saves a forward pass.
    """
    device, (b, most) = hidden.device, uniforms.shape
    stops = torch.tensor(stop_ids, device=device)
    tokens = torch.zeros(b, most, dtype=torch.long, device=device)
    logprobs, lengths = torch.zeros(b, most, device=device), torch.zeros(b, dtype=torch.long, device=device)
    flight = torch.arange(b, device=device)         # the rows in flight; the others lie in `aside`
    alive = torch.ones(b, dtype=torch.bool, device=device)
    aside, gone, wasted = [], [], 0
    step = FixedStep(rows, most) if fixed else None
    for k in range(most):
        token, logp = draw(rows.policy.logits(hidden), uniforms[flight, k], temperature)
        tokens[flight, k], logprobs[flight, k] = token, logp
        lengths[flight] += alive
        alive = alive & ~torch.isin(token, stops) & (limit[flight] > k + 1)
        if k + 1 == most:
            break
        if device.type == "cpu" or k % 8 == 7:      # asking makes a GPU wait: every eighth token is often enough
            finished = len(alive) - int(alive.sum())
            wasted += finished
            if finished == len(alive):
                break
            if device.type == "cpu" and not fixed and wasted >= PATIENCE * len(alive):
                aside.append(rows.part(~alive))
                gone.append(flight[~alive])
                rows.select(alive)
                token, flight, wasted = token[alive], flight[alive], 0
                alive = alive[alive]
        hidden = step.feed(token, alive) if fixed else rows.feed(token[:, None], alive.long()[:, None])[:, 0]
    if fixed:
        step.close()
    if aside:
        rows.join(aside, torch.cat([flight, *gone]).argsort())
    rows.align()
    n = k + 1
    return tokens[:, :n].cpu(), logprobs[:, :n].cpu(), lengths.cpu()


# ---------------------------------------------------------------------------------------------- episodes

@torch.no_grad()
def collect(policy, chat, make_env, episodes, cfg, temperature, give_up=None):
    """Play episodes, all rows at once, with one KV cache over each whole episode.

    policy: ActorCritic. chat: Chat. make_env: a callable that returns a fresh TextEnv.
    episodes: list of Episode; a group's members stand together and its prompt is prefilled once.
    cfg: settings max_turns, max_actions, max_actions_per_turn, max_new_tokens, max_context, action_sep, think,
    terse, rollout_batch (rows decoded at once, 0 = all; the result doesn't depend on it).
    give_up: asked before each turn; True gives all of them up with Abandoned.
    Returns a list of Trajectory in the order of `episodes`.
    Raises ContextError if a prompt leaves no room in the context, or the context none in the model.
    """
    if cfg.max_context > policy.max_positions:
        raise ContextError(f"max_context={cfg.max_context} is more than the {policy.max_positions} positions that the "
                           f"model has. Lower max_context.")
    played = []
    while len(played) < len(episodes):      # a rank may have no episode at all
        batch = episodes[len(played):][:cfg.rollout_batch or None]
        try:
            with policy.decoding():
                played += play_batch(policy, chat, make_env, batch, cfg, temperature, give_up)
            continue
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        # outside of the handler, where the traceback no longer holds the tensors of the attempt
        cfg.rollout_batch = len(batch) // 2
        free_memory(policy.device, f"rollout_batch={cfg.rollout_batch}")
    return played


def free_memory(device, change):
    """Give unused memory of a GPU back after an attempt that needed too much, and say what goes on how."""
    print(f"note: out of memory; going on with {change}, which changes no result", file=sys.stderr)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def play_batch(policy, chat, make_env, episodes, cfg, temperature, give_up=None):
    games, trajectories = [], []
    for e in episodes:
        try:
            games.append(Game(make_env(), e, cfg))
            trajectories.append(games[-1].traj)
        except Exception:           # whatever a user's environment raises: the others play on
            trajectories.append(Trajectory(group=e.group, member=e.member, error=traceback.format_exc()))
    if not games:
        return trajectories
    texts = list(dict.fromkeys(game.message for game in games))                 # a group's members share one
    prompts = chat.first(texts)
    longest = max(map(len, prompts))
    if longest >= cfg.max_context:
        raise ContextError(f"the first prompt has {longest} tokens, which leaves no room in max_context="
                         f"{cfg.max_context}. Raise max_context, or set terse=True for a shorter prompt.")
    noise = token_noise([game.episode for game in games], cfg.max_turns, cfg.max_new_tokens).to(policy.device)

    rows = Rows(policy)
    hidden = rows.feed_ragged(prompts)                                          # one row per prompt
    number = {text: i for i, text in enumerate(texts)}
    spread = [number[game.message] for game in games]
    rows.select(torch.tensor(spread, device=policy.device))                     # one row per episode
    hidden = hidden[spread]
    for game, i in zip(games, spread):
        game.feed(prompts[i])

    live = list(range(len(games)))          # row r plays game live[r]
    for turn in range(cfg.max_turns):
        if give_up and give_up():
            raise Abandoned
        limit = torch.tensor([cfg.max_context - len(games[i].traj.tokens) for i in live], device=policy.device)
        at = torch.tensor(live, device=policy.device)
        sampled = sample_turn(rows, hidden, noise[at, turn], limit, chat.stop_ids, temperature, policy.can_fix_shapes)
        for i, ids, logps, n in zip(live, *(x.tolist() for x in sampled)):
            games[i].respond(chat, ids[:n], logps[:n])
        going = [r for r, i in enumerate(live) if not games[i].over]
        if not going:
            break
        last = {r: games[live[r]].traj.tokens[-1] for r in going}               # sampled, not in the cache yet
        feeds = dict(zip(going, chat.next([games[live[r]].message for r in going], last.values())))
        going = [r for r in going if games[live[r]].take(feeds[r])]             # False: the context is full
        if not going:
            break
        if len(going) < len(live):
            rows.select(torch.tensor(going, device=policy.device))
        live = [live[r] for r in going]
        hidden = rows.feed_ragged([[last[r]] + feeds[r] for r in going])
    return trajectories


class Game:
    """One episode's text side: an environment, what it told, and the Trajectory that grows."""

    def __init__(self, env, episode, cfg):
        self.env, self.episode, self.cfg = env, episode, cfg
        self.traj = Trajectory(group=episode.group, member=episode.member)
        self.actions_left, self.turn, self.over = cfg.max_actions, 0, False
        self.observation = env.reset(episode.task_seed, episode.noise_seed)
        self.message = user_message(env, self.observation, 0, 0.0, self.actions_left, cfg)

    def append(self, ids, logprobs, sampled):
        t = self.traj
        t.tokens += ids
        t.logprobs += logprobs
        t.loss_mask += [int(sampled)] * len(ids)
        t.turn_ids += [self.turn] * len(ids)

    def feed(self, ids):
        """Take observation ids into the record, with no loss."""
        self.traj.messages.append({"role": "user", "content": self.message})
        self.append(ids, [0.0] * len(ids), False)

    def take(self, ids):
        """Feed an observation if the context holds it and one token more; else end as truncated."""
        if len(self.traj.tokens) + len(ids) >= self.cfg.max_context:
            self.traj.truncated = self.over = True
            return False
        self.turn += 1
        self.feed(ids)
        return True

    def respond(self, chat, ids, logprobs):
        """Take a sampled response: record it, and play the actions that it names."""
        self.append(ids, logprobs, True)
        text = chat.decode(ids)
        self.traj.messages.append({"role": "assistant", "content": text})
        try:
            self.play(*parse_response(text, self.env.actions, self.cfg.max_actions_per_turn, self.cfg.action_sep,
                                      self.cfg.think), cut=ids[-1] not in chat.stop_ids)
        except Exception:           # whatever a user's environment raises
            self.traj.error, self.traj.success, self.over = traceback.format_exc(), False, True

    def play(self, actions, format_ok, cut=False):
        """Play a turn's actions and word the next message. cut: no stop token within max_new_tokens or context."""
        traj, reward = self.traj, 0.0
        name = hashlib.blake2b(self.env.state_key(self.observation).encode(errors="replace"), digest_size=8).digest()
        traj.state_keys.append(int.from_bytes(name, "big") >> 1)        # not hash(): the same on every rank
        traj.actions.append([])
        for action in actions[:self.actions_left]:
            self.observation, r, terminated, truncated, info = self.env.step(action)
            if not math.isfinite(r):
                raise ValueError(f"the environment's reward for {action!r} must be a finite number, got {r}")
            self.actions_left -= 1
            reward += r
            traj.actions[-1].append(action)
            traj.success, traj.truncated = bool(info["success"]), truncated
            if terminated or truncated:
                self.over = True
                break
        traj.turn_rewards.append(reward + (0.0 if format_ok else FORMAT_PENALTY))
        traj.format_ok.append(format_ok)
        self.over |= self.actions_left == 0
        traj.truncated |= cut and not self.over     # with nothing left to play, the rest of the text is worth nothing
        self.over |= traj.truncated or self.turn + 1 == self.cfg.max_turns
        if not self.over:       # the reward that is told is the environment's alone
            self.message = user_message(self.env, self.observation, self.turn + 1, reward, self.actions_left,
                                        self.cfg)
