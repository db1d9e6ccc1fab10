"""What this code costs, beside the least it could cost and beside others: one command, a table, a JSON file.

    python bench.py                                         # everything, under 5 minutes on 2 CPU cores
    python bench.py --only=rollout,update --repeats=7 --json=bench.json
    python bench.py --device=cuda --shape=qwen2.5-0.5b      # in bfloat16; not yet run on a GPU

Every comparison is a race: the contestants run in turn, `repeats` rounds, every other round in reverse order. A ratio
is the median of the rounds' ratios, a time the median of the rounds' times; with three rounds that passes over a cold
first one. Weights are random and lengths fixed, no token ends a response: all contestants do the same work.
TRL, gymnasium and gym-sokoban are measured where they are installed.
"""

import contextlib
import copy
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")    # nothing here needs the hub; transformers reads it at its import

import torch
import transformers
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

import envs
import rollout
import train
from model import ActorCritic, load_model
from settings import UserError, load_config

ROOT = os.path.dirname(os.path.abspath(__file__))
LARGE_VOCAB = 151_936       # words of Qwen2.5
LORA_RANK = 16              # at width 256 about the extra work that rank 64 is at the 896 of Qwen2.5-0.5B
SHAPES = {
    "6.3m": dict(vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
                 num_attention_heads=8, num_key_value_heads=2),
    "qwen2.5-0.5b": dict(vocab_size=LARGE_VOCAB, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2)}
TARGETS = {"iteration_vs_trl": (">=", 4), "rollout_vs_generate": (">=", 3), "rollout_vs_floor": (">=", 0.7),
           "update_vs_plain": (">=", 2.5), "update_memory_vs_full_logits": ("<=", 1 / 3),
           "outside_model_share": ("<=", 0.05), "turns_10_vs_5": ("<=", 2.7)}       # on 2 CPU cores


@dataclass(frozen=True)
class Options:
    json: str = ""              # file to write; "" = none
    only: str = ""              # names in BENCHES with commas between; "" = all
    repeats: int = 3            # rounds of each race
    device: str = ""            # "" = CUDA if there is one, else CPU; or "cuda", "cpu"
    shape: str = "6.3m"         # a name in SHAPES
    vocab: int = 0              # words; 0 = the shape's
    prompts: int = 4            # groups
    members: int = 8            # episodes of a group
    turns: int = 5
    prompt: int = 200           # tokens of a first prompt (at least 3)
    new: int = 40               # sampled tokens per turn
    observed: int = 40          # tokens of an observation (at least 3)


# ---------------------------------------------------------------------------------------------- measuring

def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run):
    """Wall time of run(), a GPU's work included."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def race(repeats, runs):
    """Time {name: callable} in interleaved rounds; return {name: [seconds of each round]}."""
    times = {name: [] for name in runs}
    for i in range(repeats):
        for name in list(runs)[::-1 if i % 2 else 1]:       # a drift of the machine's speed hits all alike
            times[name].append(seconds(runs[name]))
    return times


def ratio(times, over, under):
    """The median over rounds of one contestant's time over another's."""
    return statistics.median(a / b for a, b in zip(times[over], times[under]))


def elsewhere(work, o):
    """A callable that lets another process do one more step of work(bed, o, pause), which pauses after each.

    What others' code costs is measured as their users have it: without what this code changes in its process, the
    attention (model.grouped_attention) and the C library's way with memory (train.keep_memory), which would speed
    them up too. The process waits while others run; its first step isn't counted.
    """
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    context.Process(target=stand_by, args=(work, o, end), daemon=True).start()
    end.close()         # or a process that dies would be waited for
    pipe.recv()
    return lambda: (pipe.send("go on"), pipe.recv())


def stand_by(work, o, pipe):
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    train.set_threads()

    def pause():
        synchronize()
        pipe.send("done")
        try:
            pipe.recv()
        except EOFError:
            os._exit(0)     # the one who asked has gone
    work(Bed(o).as_others_have_it(), o, pause)


class Report:
    """The table, printed as it grows, and the numbers for the JSON file."""

    def __init__(self):
        self.values = {}

    def head(self, title):
        print(f"\n{title}", flush=True)

    def put(self, name, value, unit="", digits=3):
        sign, goal = TARGETS.get(name, ("", 0))
        met = value >= goal if sign == ">=" else value <= goal
        verdict = f"target {sign} {goal:.3g}: {'met' if met else 'missed'}" if sign else ""
        self.values[name] = value
        print(f"  {name:<42}{value:>12,.{digits}f} {unit:<10}{verdict}".rstrip(), flush=True)

    def times(self, prefix, times):
        for name, rounds in times.items():
            self.put(f"{prefix}_s/{name}", statistics.median(rounds), "s")


def machine(device):
    """What absolute times depend on; not the machine's name."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            cpu = subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
        else:
            with open("/proc/cpuinfo") as f:
                cpu = next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), cpu)
    versions = {}
    for package in ("torch", "transformers", "trl", "peft", "gymnasium", "gym-sokoban"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"cpu": cpu, "threads": torch.get_num_threads(), **gpu, "python": platform.python_version(), **versions}


# ---------------------------------------------------------------------------------------------- fixed lengths

class EveryId(list):
    """Stop ids that contain any token when asked, and hold one that is never sampled: nothing ends early or is cut."""

    def __contains__(self, token):
        return True


class FixedChat:
    """A rollout.Chat without a template: a word is a token, and every response has max_new_tokens."""

    def __init__(self, tokenizer, vocab):
        self.tokenizer, self.stop_ids = tokenizer, EveryId([vocab])

    def first(self, texts):
        return self.tokenizer(texts)["input_ids"]

    def next(self, texts, last_ids):
        return self.first(texts)

    def decode(self, ids):
        return f"<answer>{self.tokenizer.decode(ids)}</answer>"


class Endless(envs.TextEnv):
    """A world that takes any text and never ends. prompt, observed: words of its messages."""

    brief, actions = "play", None

    def __init__(self, prompt, observed, vocab):
        self.prompt, self.observed, self.vocab = prompt, observed, vocab

    def say(self, words):       # user_message puts one word before and one behind
        return " ".join(f"w{self.rng.randrange(3, self.vocab)}" for _ in range(words - 2))

    def reset(self, seed, noise_seed=0):
        self.rng = random.Random(seed)
        return self.say(self.prompt)

    def step(self, action):
        return self.say(self.observed), reward(action), False, False, {"success": False}


def reward(text):
    """Some number that differs within a group."""
    return float(len(text) % 7)


def word_tokenizer(vocab):
    words = {"[UNK]": 0, "[PAD]": 1, "[EOS]": 2} | {f"w{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]",
                                                eos_token="[EOS]", padding_side="left")


def settings(o):
    """The train.Config of a shape."""
    return train.Config(
        algo="grpo", lora_rank=0, think=False, terse=True, filter_keep=1.0, prompts_per_iter=o.prompts,
        group_size=o.members, update_batch=o.prompts * o.members, rollout_batch=0, max_turns=o.turns,
        max_actions=o.turns + 1, max_actions_per_turn=1, max_new_tokens=o.new,
        max_context=o.prompt + o.turns * (o.new + o.observed) + 1)


class Bed:
    """A random model of the asked shape with its optimizer, and the pieces of an iteration as train.main calls them.

    o in its methods: Options, those of the whole run or with other sizes.
    """

    def __init__(self, o):
        self.o, self.device = o, torch.device(o.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.vocab = o.vocab or SHAPES[o.shape]["vocab_size"]
        torch.manual_seed(0)
        lm = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            **SHAPES[o.shape] | {"vocab_size": self.vocab}, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=None, pad_token_id=None))
        self.policy = ActorCritic(lm, bf16=self.device.type == "cuda").to(self.device)
        self.tokenizer = word_tokenizer(self.vocab)
        self.accelerator = Accelerator(cpu=self.device.type == "cpu", mixed_precision="no")
        self.optimizer = torch.optim.AdamW(self.policy.policy_parameters(), lr=1e-6, fused=True)

    def as_others_have_it(self):
        """transformers' own attention in place of model.grouped_attention."""
        self.policy.causal_lm.set_attn_implementation("sdpa")
        return self

    def ids(self, *shape):
        return torch.randint(3, self.vocab, shape, device=self.device)

    def rollout(self, o, policy=None):
        return rollout.collect(policy or self.policy, FixedChat(self.tokenizer, self.vocab),
                               lambda: Endless(o.prompt, o.observed, self.vocab),
                               rollout.train_episodes(0, 0, range(o.prompts), o.members), settings(o), 1.0)

    def steps(self, trajectories, o):
        """Trajectories as optimizer steps, advantages included."""
        cfg, kept = settings(o), torch.ones(len(trajectories), dtype=torch.bool)
        steps = train.split_steps(trajectories, list(range(len(kept))), cfg, self.accelerator, self.device)
        train.prepare(self.policy, steps, train.assign_credit(trajectories, kept, cfg), cfg, self.accelerator)
        return steps

    def update(self, steps, o, variant="ours"):
        """Train on steps once. variant: "ours"; "plain", without shared prompts, logits only where tokens carry
        loss; "full", logits at every position. The micro-batches are the same."""
        model = self.policy if variant != "full" else FullLogits(self.policy)
        for step in steps if variant == "ours" else map(unshared, steps):
            train.update(model, self.optimizer, step, settings(o), self.accelerator, train.Stats(self.device))


def unshared(step):
    """The same step without shared prompts: the one difference between "ours" and "plain"."""
    return replace(step, batches=[replace(b, prefix=None) for b in step.batches])


class FullLogits(torch.nn.Module):
    """ActorCritic's log-probs the usual way: logits at all positions, log_softmax, gather, mask. No entropy at all."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.policy_parameters, self.critic_parameters = policy.policy_parameters, policy.critic_parameters

    def forward(self, tokens, loss_mask, last=None, **_):
        with self.policy.autocast():
            logits = self.policy.causal_lm(input_ids=tokens, use_cache=False).logits            # (B, T, V)
        logp = torch.log_softmax(logits.float(), -1).gather(2, tokens.roll(-1, 1)[..., None])[..., 0]
        return {"logprobs": F.pad(logp[:, :-1], (1, 0)) * loss_mask, "entropy": torch.zeros_like(logp)}


# ---------------------------------------------------------------------------------------------- rollout

def generate_rollout(bed, o):
    """The rollout as the reference does it: every turn `model.generate` starts again from the whole history.

    No log-probs, no text, no shorter rows; prompts are not shared. Returns all ids (B, T).
    """
    config = transformers.GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, use_cache=True, pad_token_id=1, eos_token_id=None,
        min_new_tokens=o.new, max_new_tokens=o.new)
    history = bed.ids(o.prompts, o.prompt).repeat_interleave(o.members, 0)
    for turn in range(o.turns):
        if turn:
            history = torch.cat([history, bed.ids(len(history), o.observed)], 1)
        with bed.policy.autocast():
            history = bed.policy.causal_lm.generate(history, attention_mask=torch.ones_like(history),
                                                    generation_config=config)
    return history


def step_generate(bed, o, pause):
    while True:
        generate_rollout(bed, o)
        pause()


class InPlace(DynamicLayer):
    """A cache layer that writes into room that stands ready, and does nothing else."""

    room = 0        # columns

    def update(self, keys, values, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.buffers = tuple(x.new_zeros(*x.shape[:2], self.room, x.shape[3]) for x in (keys, values))
            self.rewind(0)
        start = self.keys.shape[2]
        for buffer, x in zip(self.buffers, (keys, values)):
            buffer[:, :, start:start + x.shape[2]] = x
        self.rewind(start + keys.shape[2])
        return self.keys, self.values

    def rewind(self, columns):
        """Hold the first `columns`."""
        self.keys, self.values = (b[:, :, :columns] for b in self.buffers)


class Floor:
    """The passes of a rollout through the model, and nothing else.

    run() makes the prompts' prefill, the passes over the observations and those over the single tokens, with the head
    where a token would be drawn, on given ids and attending over the real lengths. No sampling, no cache that grows or
    is rearranged (the columns of the prompts are filled in before the clock starts), no text.
    """

    def __init__(self, bed, o):
        self.policy, self.o = bed.policy, o
        self.prompts, self.fed = bed.ids(o.prompts, o.prompt), bed.ids(o.prompts * o.members, 1 + o.observed)
        self.cache = Cache(layer_class_to_replicate=type("Layer", (InPlace,), {
            "room": o.prompt + o.turns * (o.new + o.observed)}))
        with torch.no_grad():
            self.policy.hidden(self.prompts.repeat_interleave(o.members, 0), cache=self.cache)

    def rewind(self):
        for layer in self.cache.layers:
            layer.rewind(self.o.prompt)

    @torch.no_grad()
    def run(self):
        with self.policy.decoding():
            self.passes()

    def passes(self):
        self.rewind()
        hidden = self.policy.hidden(self.prompts)[:, -1].repeat_interleave(self.o.members, 0)
        for turn in range(self.o.turns):
            if turn:        # the turn's last token goes in with the observation
                hidden = self.policy.hidden(self.fed, cache=self.cache)[:, -1]
            self.policy.logits(hidden)
            for _ in range(self.o.new - 1):
                self.policy.logits(self.policy.hidden(self.fed[:, :1], cache=self.cache)[:, 0])


def bench_rollout(bed, o, report):
    report.head(f"rollout: {o.prompts} x {o.members} episodes, prompt {o.prompt}, {o.turns} turns of {o.new} new + "
                f"{o.observed} observed tokens")
    times = race(o.repeats, {"ours": lambda: bed.rollout(o), "generate": elsewhere(step_generate, o),
                             "floor": Floor(bed, o).run})
    report.times("rollout", times)
    report.put("rollout_vs_generate", ratio(times, "generate", "ours"), "x faster")
    report.put("rollout_vs_floor", ratio(times, "floor", "ours"), "of it")


def bench_growth(bed, o, report):
    """How a rollout's time grows with turns, and that of one turn with episodes and with the response's length."""
    one = replace(o, turns=1)
    sweeps = {"turns": {n: replace(o, turns=n) for n in (1, 2, 5, 10)},
              "episodes": {n: replace(one, prompts=max(1, n // o.members)) for n in (16, 32, 64, 128, 256)},
              "response": {n: replace(one, new=n) for n in (20, 40, 80, 160)}}
    for name, shapes in sweeps.items():
        # only the turns have a target; one round is enough to see the others grow
        report.head(f"rollout against {name}" + (", one turn, one round" if name != "turns" else ""))
        runs = {n: lambda s=s: bed.rollout(s) for n, s in shapes.items()}
        times = race(1, runs) if name != "turns" else race(1, {n: runs[n] for n in (1, 2)}) | race(
            o.repeats, {n: runs[n] for n in (5, 10)})
        report.times(f"rollout_{name}", times)
        if name == "turns":
            report.put("turns_10_vs_5", ratio(times, 10, 5), "x")


def bench_lora(bed, o, report):
    """Decoding with an adapter on all linear layers beside decoding without: one turn."""
    from peft import LoraConfig, get_peft_model
    report.head(f"rollout with a LoRA adapter of rank {LORA_RANK}, one turn")
    lm = get_peft_model(copy.deepcopy(bed.policy.causal_lm), LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_RANK, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"))
    adapted, one = ActorCritic(lm, bf16=bed.policy.bf16), replace(o, turns=1)
    times = race(3 * o.repeats, {"base": lambda: bed.rollout(one), "lora": lambda: bed.rollout(one, adapted)})
    report.times("decode", times)
    report.put("lora_decode_vs_base", ratio(times, "lora", "base"), "x slower")


# ---------------------------------------------------------------------------------------------- update

VARIANTS = ("ours", "plain", "full")


def bench_update(bed, o, report):
    """An update on one turn and on all, in races; its memory, and that with the large vocabulary, once each."""
    for shape, end in ((replace(o, turns=1), ""), (replace(o, prompts=1), "_multi_turn")):
        report.head(f"update: {shape.prompts} x {o.members} episodes, {shape.turns} turn(s)")
        trajectories = bed.rollout(shape)
        steps = bed.steps(trajectories, shape)
        runs = {v: lambda v=v: bed.update(steps, shape, v) for v in VARIANTS}
        if not end:
            race(1, runs)       # warms up: the first round gets its memory from the system
        times = race(o.repeats, runs)
        report.times("update" + end, times)
        report.put("update_vs_plain" + end, ratio(times, "plain", "ours"), "x faster")
        report.put("update_vs_full_logits" + end, ratio(times, "full", "ours"), "x faster")
    # full logits of 4 x 8 such episodes would take 40 GB at the large vocabulary: one group, two turns stand for them
    shape = replace(o, prompts=1, turns=min(2, o.turns))
    trajectories = bed.rollout(shape)
    for vocab, end in {bed.vocab: "_own_vocab", max(LARGE_VOCAB, bed.vocab): ""}.items():
        report.head(f"update: 1 x {o.members} episodes, {shape.turns} turns, {vocab:,} words: once each, in a fresh "
                    f"process; memory on top of weights and optimizer")
        runs = {v: alone(replace(shape, vocab=vocab), trajectories, v) for v in VARIANTS}
        for v, (peak, taken) in runs.items():
            report.put(f"update_mb{end or '_large_vocab'}/{v}", peak / 1e6, "MB", 0)
            report.put(f"update{end or '_large_vocab'}_s/{v}", taken, "s")
        report.put(f"update_memory_vs_full_logits{end}", runs["ours"][0] / runs["full"][0], "of it")


def alone(*args):
    """measure_update(*args) in a process of its own, where nothing has been allocated and freed before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench"])       # the imports once for all
    with context.Pool(1) as pool:
        return pool.apply(measure_update, args)


def measure_update(o, trajectories, variant):
    """(bytes that one update takes at most on top of what it starts with, its seconds)."""
    train.set_threads()
    train.keep_memory()
    bed = Bed(o)
    bed.update(bed.steps(trajectories[:1], o), o, variant)      # from now on Adam has its moments
    steps = bed.steps(trajectories, o)
    before, _ = memory(bed.device)
    taken = seconds(lambda: bed.update(steps, o, variant))
    return memory(bed.device)[1] - before, taken


def memory(device):
    """(bytes in use, most since the last call): of the GPU, else of this process; macOS keeps the most of all time."""
    if device.type == "cuda":
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return now, most
    if sys.platform == "linux":     # getrusage is no good here: a process starts with its parent's mark
        with open("/proc/self/status") as f:
            lines = dict(line.split(":", 1) for line in f)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as f:
            f.write("5")            # forget the mark
        return tuple(int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    import resource
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,) * 2


# ---------------------------------------------------------------------------------------------- one idea at a time

class Copying(rollout.RoomyLayer):
    """The cache as transformers' DynamicCache has it: copied whole for every token."""

    def update(self, keys, values, *args, **kwargs):
        out = DynamicLayer.update(self, keys, values)
        self.buffers = out
        return out


def multinomial(logits, uniforms, temperature):
    probs = torch.softmax(logits / temperature, -1)
    token = torch.multinomial(probs, 1)
    return token[:, 0], probs.gather(1, token)[:, 0].log()


def bench_ideas(bed, o, report):
    """What each idea saves: one turn with it taken away, beside one turn with all of them."""
    o = replace(o, turns=1)
    report.head("one idea taken away at a time: a rollout and an update of one turn")
    trajectories = bed.rollout(o)
    steps = bed.steps(trajectories, o)
    attention = bed.policy.causal_lm.set_attn_implementation

    @contextlib.contextmanager
    def sdpa():
        attention("sdpa")
        try:
            yield
        finally:
            attention("grouped")

    @contextlib.contextmanager
    def as_they_lie(self):
        with self.autocast():
            yield

    off = {"with all": contextlib.nullcontext,
           "weights by rows": lambda: mock.patch.object(ActorCritic, "decoding", as_they_lie),
           "keys copied for each head": sdpa,
           "cache copied for each token": lambda: mock.patch.object(rollout, "RoomyLayer", Copying),
           "torch.multinomial": lambda: mock.patch.object(rollout, "draw", multinomial)}
    for kind, contexts, work in (
            ("rollout", off, lambda: bed.rollout(o)),
            ("update", {"with all": contextlib.nullcontext, "keys copied for each head": sdpa},
             lambda: bed.update(steps, o))):
        def run(context):
            with context():
                work()
        runs = {name: lambda c=context: run(c) for name, context in contexts.items()}
        times = race(o.repeats, runs)
        for name in list(times)[1:]:
            report.put(f"{kind}/{name}", ratio(times, name, "with all"), "x the time")


# ---------------------------------------------------------------------------------------------- a whole iteration

def bench_trl(bed, o, report):
    """A whole iteration of one turn, rollout, rewards and one update, beside one of TRL's GRPOTrainer.

    Its gradient checkpointing is off: by default it trades a second forward pass for memory.
    """
    o = replace(o, turns=1)
    report.head(f"iteration: {o.prompts} x {o.members} episodes, prompt {o.prompt}, one turn of {o.new} new tokens")
    if importlib.util.find_spec("trl") is None:
        return print("  TRL skipped: it is not installed (pip install trl)")
    ours = lambda: bed.update(bed.steps(bed.rollout(o), o), o)
    ours()
    times = race(o.repeats, {"ours": ours, "trl": elsewhere(step_trl, o)})
    report.times("iteration", times)
    report.put("iteration_vs_trl", ratio(times, "trl", "ours"), "x faster")


def step_trl(bed, o, pause):
    """Step a GRPOTrainer, with a pause after each step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Pause(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            pause()

    world = Endless(o.prompt, 3, bed.vocab)
    data = Dataset.from_list([{"prompt": f"play {world.reset(i)} 0"} for i in range(o.prompts * (o.repeats + 2))])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=o.prompts * o.members, num_generations=o.members,
            max_completion_length=o.new, generation_kwargs={"min_new_tokens": o.new}, max_steps=o.repeats + 2, beta=0.0,
            learning_rate=1e-6, use_vllm=False, bf16=bed.policy.bf16, use_cpu=bed.device.type == "cpu",
            gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True)
        trainer = GRPOTrainer(
            bed.policy.causal_lm, lambda completions, **_: [reward(c) for c in completions],
            args=config, train_dataset=data, processing_class=bed.tokenizer, callbacks=[Pause()])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


# What counts as the model's: its passes with the mask they need, the head, the draw, the cache's rearranging.
MODEL_SIDE = ((ActorCritic, "logits"), (rollout, "draw"), (rollout.Rows, "feed"), (rollout.Rows, "align"),
              (rollout.Rows, "select"), (rollout.Rows, "join"), (rollout.FixedStep, "feed"))


@contextlib.contextmanager
def model_clock():
    """Yield a list whose one number grows by the seconds inside MODEL_SIDE; none of these calls another of them."""
    total = [0.0]

    def timed(function):
        def wrapper(*args, **kwargs):
            out = []
            total[0] += seconds(lambda: out.append(function(*args, **kwargs)))
            return out[0]
        return wrapper

    with contextlib.ExitStack() as stack:
        for owner, name in MODEL_SIDE:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield total


def scripted(ids):
    """Let every row say `ids`, over and over, in place of what it drew: a random model would never move."""
    draw, script = rollout.draw, itertools.cycle(ids)

    def said(logits, uniforms, temperature):
        token, logp = draw(logits, uniforms, temperature)
        return torch.full_like(token, next(script)), logp
    return mock.patch.object(rollout, "draw", said)


def bench_outside(bed, o, report):
    """Share of collect()'s time outside MODEL_SIDE: text, worlds, bookkeeping, with the real Chat and real worlds.

    The model asked for says a thought and a move in `new` tokens a turn. The laptop model, a seventh of the size and
    with a few tokens a turn, plays as in its configs; it has no target.
    """
    report.head("share of a rollout outside " + ", ".join(name for _, name in MODEL_SIDE))
    small, tokenizer = load_model(os.path.join(ROOT, "assets", "tiny"))
    small.to(bed.device)
    talk = rollout.Chat(tokenizer, think=True)
    move = talk.answer("Up")
    thought = talk.encode(["I go up, up to the goal. " * o.new])[0][:max(0, o.new - len(move))]
    worst = 0.0
    for world in ("FrozenLake", "Sokoban"):
        long = replace(settings(o), env=world, think=True, terse=False, max_context=4000)
        short = load_config(train.Config, [f"--config={ROOT}/configs/tiny_{world.lower()}.py"])[0]
        for policy, chat, cfg, said, end in (
                (bed.policy, talk, long, scripted((thought + move)[-o.new:]), ""),
                (small, rollout.Chat(tokenizer, think=False), short, contextlib.nullcontext(), "_tiny")):
            episodes = rollout.train_episodes(0, 0, range(cfg.prompts_per_iter), cfg.group_size)
            with said, model_clock() as inside:
                whole = seconds(lambda: rollout.collect(policy, chat, envs.ENVS[cfg.env], episodes, cfg, 1.0))
            outside = 1 - inside[0] / whole
            report.put(f"outside_model_share/{world}{end}", outside)
            worst = worst if end else max(worst, outside)
    report.put("outside_model_share", worst)


# ---------------------------------------------------------------------------------------------- worlds and hardware

def rate(run, least=0.2):
    """run(i) per second, i = 0, 1, ..., for at least `least` seconds."""
    count, start = 0, time.perf_counter()
    for i in itertools.count():
        with contextlib.suppress(RuntimeWarning, RuntimeError):     # gym-sokoban gives up some rooms
            run(i)
            count += 1
        if time.perf_counter() - start > least:
            return count / (time.perf_counter() - start)


def step_rate(reset, act, least=0.2):
    """Actions per second in episodes of at most 10; reset(i) is not counted, act() returns whether it was the last."""
    count, taken = 0, 0.0
    for i in itertools.count():
        reset(i)
        start = time.perf_counter()
        for _ in range(10):
            count += 1
            if act():
                break
        taken += time.perf_counter() - start
        if taken > least:
            return count / taken


def bench_envs(bed, o, report):
    """New tasks per second, and random actions per second, the text included."""
    report.head("worlds, on one core")
    rng = envs.stream(0)

    def put(name, reset, act):
        report.put(f"rooms_per_s/{name}", rate(reset), "1/s", 0)
        if act:
            report.put(f"steps_per_s/{name}", step_rate(reset, act), "1/s", 0)

    for name, make in envs.ENVS.items():
        env = make()
        put(name, env.reset, lambda: any(env.step(env.random_action(rng))[2:4]))
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):     # its `gym` prints that it is retired
        warnings.simplefilter("ignore")
        try:
            from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
            lake = [None]

            def new_lake(i):
                lake[0] = FrozenLakeEnv(desc=generate_random_map(4, 0.8, seed=i))
                lake[0].reset(seed=i)
            put("gymnasium_FrozenLake", new_lake, lambda: any(lake[0].step(int(rng.integers(4)))[2:4]))
        except ImportError as error:
            print(f"  gymnasium skipped: {error}")
        try:
            from gym_sokoban.envs.room_utils import generate_room
            put("gym_sokoban", lambda i: generate_room(dim=(6, 6), num_steps=20, num_boxes=1), None)
        except ImportError as error:
            print(f"  gym-sokoban skipped: {error}")


def bench_hardware(bed, o, report):
    """Decoding beside reading weights and cache once a token, the update beside a large matmul's rate.

    Both count what bfloat16 (CUDA) or float32 needs at least, attention's products left out. On a CPU whose caches
    hold the weights the first is no limit.
    """
    o, cfg, cuda = replace(o, turns=1), bed.policy.config, bed.device.type == "cuda"
    dtype = torch.bfloat16 if bed.policy.bf16 else torch.float32
    report.head(f"one turn beside what this machine can do in {str(dtype)[6:]}")
    source, n = torch.zeros(2 ** (28 if cuda else 25), dtype=dtype, device=bed.device), 8192 if cuda else 1024
    target, square = torch.empty_like(source), torch.ones(n, n, dtype=dtype, device=bed.device)
    steps = bed.steps(bed.rollout(o), o)
    times = race(o.repeats, {"copy": lambda: target.copy_(source), "matmul": lambda: square @ square,
                             "rollout": lambda: bed.rollout(o), "update": lambda: bed.update(steps, o)})
    middle = {name: statistics.median(rounds) for name, rounds in times.items()}
    bandwidth = 2 * source.numel() * dtype.itemsize / middle["copy"]                        # bytes/s
    rows, words = o.prompts * o.members, bed.vocab * cfg.hidden_size
    weights = sum(p.numel() for p in bed.policy.policy_parameters())
    column = 2 * cfg.num_hidden_layers * cfg.num_key_value_heads * cfg.hidden_size // cfg.num_attention_heads
    read = (weights + rows * (o.prompt + o.new / 2) * column) * dtype.itemsize              # bytes a decode pass
    # 2 operations a weight forward and 4 back; the head where tokens were sampled, a prompt once for its group
    flop = 6 * ((weights - words) * (o.prompts * o.prompt + rows * o.new) + words * rows * o.new)
    report.put("decode_tokens_per_s", rows * o.new / middle["rollout"], "1/s", 0)
    report.put("decode_tokens_per_s/bandwidth_limit", rows * bandwidth / read, "1/s", 0)
    report.put("update_gflop_per_s", flop / middle["update"] / 1e9, "GFLOP/s", 0)
    report.put("update_gflop_per_s/matmul", 2 * n ** 3 / middle["matmul"] / 1e9, "GFLOP/s", 0)


# ---------------------------------------------------------------------------------------------- main

BENCHES = {"rollout": bench_rollout, "update": bench_update, "ideas": bench_ideas, "trl": bench_trl, "outside": bench_outside,
           "growth": bench_growth, "lora": bench_lora, "envs": bench_envs, "hardware": bench_hardware}


def check_options(o):
    """Refuse what can't be run, with what can."""
    for name in o.only.split(",") if o.only else ():
        if name not in BENCHES:
            raise UserError(f"only={o.only!r}: {name!r} is none of {', '.join(BENCHES)}")
    for name, least in dict(repeats=1, prompts=1, members=2, turns=1, new=1, prompt=3, observed=3).items():
        if getattr(o, name) < least:
            raise UserError(f"{name} must be at least {least}, got {getattr(o, name)}")
    if o.shape not in SHAPES:
        raise UserError(f"shape must be one of {', '.join(SHAPES)}, got {o.shape!r}")
    if o.device not in ("", "cpu", "cuda") or o.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device must be '', 'cpu' or, where PyTorch sees one, 'cuda'; got {o.device!r}")


def main(o):
    """Run the benches asked for, print the table, write the JSON file; return what it holds."""
    start = time.perf_counter()
    bed, report = Bed(o), Report()
    about = machine(bed.device)
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    for name in o.only.split(",") if o.only else BENCHES:
        BENCHES[name](bed, o, report)
    wall = time.perf_counter() - start
    print(f"\n{wall:.0f} s in all")
    sizes = {k: v for k, v in dataclasses.asdict(o).items() if k != "json"}
    out = {"machine": about, "options": sizes, "wall_s": wall,
           "targets": {k: f"{sign} {goal:.3g}" for k, (sign, goal) in TARGETS.items()}, **report.values}
    if o.json:
        with open(o.json, "w") as f:
            json.dump(out, f, indent=2)
    return out


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, inspect.getsource(Options), sep="\n")
        sys.exit(0)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")       # of the libraries, about each other
    try:
        options = load_config(Options, sys.argv[1:])[0]
        check_options(options)
        train.set_threads()
        train.keep_memory()
        main(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
