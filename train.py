"""nanoRAGEN: train LLM agents with StarPO (State-Thinking-Actions-Reward Policy Optimization), arXiv 2504.20073.

    accelerate launch train.py --config configs/tiny_frozenlake.py               # a laptop: no GPU, no download
    accelerate launch train.py --config configs/frozenlake.py                    # GPU(s): Qwen2.5-0.5B, LoRA
    accelerate launch train.py --config configs/frozenlake.py --algo=grpo --lr 1e-5 --out_dir runs/grpo

This file is the map: settings, then `main`, the loop in the paper's order: rollout -> filter -> score ->
advantages -> update -> evaluate. Where StarPO differs from plain PPO/GRPO on single answers: an episode is many
turns, all its sampled tokens are trained at once on the whole episode's return, and the observations between the
turns are attended, never trained. StarPO-S, the default, also filters groups by the spread of their returns,
drops the KL term and clips asymmetrically.
"""

import contextlib
import ctypes
import dataclasses
import inspect
import json
import math
import os
import re
import resource
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from tqdm import tqdm

import checkpoint
import diagnostics
import envs
import starpo
from dryrun import dry_run
from model import ModelError, load_model
from record import check_trackers, episode_record, log_line, model_card, start_trackers, track
from rollout import (Abandoned, Chat, ContextError, collect, free_memory, make_batch, micro_batches, train_episodes,
                     validation_episodes)
from settings import UserError, load_config


@dataclass
class Config:
    # what is trained
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"   # hub name, local folder, an earlier run's policy, a PEFT adapter
    env: str = "FrozenLake"             # a name in envs.ENVS; several with commas: the groups take turns
    env_args: dict = field(default_factory=dict)    # keyword arguments of the environment's class (of one)
    algo: str = "ppo"                   # ppo | bi_level_gae | grpo | dr_grpo | brpo | arpo | rloo | reinforce_pp | gigpo
    lora_rank: int = 64                 # rank = alpha on all linear layers (8 .. 128); 0 = train all weights
    seed: int = 0                       # tasks, luck and sampling noise of training; evaluation has its own
    out_dir: str = "runs/default"       # must not hold a run yet, but for resume
    dry_run: bool = False               # print settings, a prompt and the memory needed; load no weights, write nothing
    device: str = ""                    # "" = CUDA if there is one, else CPU; or "cuda", "cpu"

    # how long, how often
    max_iters: int = 200                # rollout-update iterations; 0 = evaluate only
    eval_every: int = 10                # iterations; also before the first and after the last; 0 = never. Saves too
    eval_tasks: int = 256               # fixed validation tasks, one sample each (standard error 3 points)
    eval_temperature: float = 0.5       # 0 = most likely token
    log_every: int = 1                  # iterations per printed line
    log_rollouts_every: int = 10        # iterations per file of sample episodes in out_dir/rollouts
    track: str = ""                     # tensorboard, wandb or trackio, several with commas; "" = the files alone
    log_rollouts: int = 8               # episodes in such a file, and of each evaluation; 0 = none

    # rollout
    prompts_per_iter: int = 8           # P, groups: different tasks per iteration, over all ranks
    group_size: int = 16                # N, episodes per task (8 .. 32)
    max_turns: int = 5                  # responses per episode
    max_actions: int = 10               # environment steps per episode
    max_actions_per_turn: int = 5       # more in one answer are cut, not punished
    max_new_tokens: int = 400           # tokens per response; an episode that hits it ends as truncated
    max_context: int = 3600             # tokens per episode; an episode that hits it ends as truncated
    temperature: float = 1.0            # of sampling, and so of the loss (0.5 .. 1.2)
    think: bool = True                  # <think> before <answer>; False prefills <answer>
    terse: bool = False                 # short messages without instruction, for small models that know the task
    action_sep: str = "||"              # between actions in an answer
    rollout_batch: int = 256            # episodes decoded at once (memory only); 0 = all
    refill: int = 0                     # DAPO: at most so many rollouts more until P groups have spread; 0 = off

    # filter: which groups are trained on
    filter_keep: float = 0.25           # how much of them, in filter_by's unit; 1 = no filter for top_k and top_p
    filter_by: str = "top_k"            # top_k (fraction of groups) | top_k_abs (number) | top_p | top_p_softmax
    #                                     (share of the score) | min_p (of the highest score)
    filter_score: str = "std"           # of a group's returns; or the group's mean of "return", "entropy", "length"
    filter_zero: bool = True            # whether a group of score 0 can be kept
    spread_weight: bool = False         # soft filter: advantages x own std / largest std of a group
    kept_scale: str = "none"            # advantages x the kept fraction ("linear") or its root ("sqrt")
    empty_stop: int = 5                 # stop after so many iterations in a row with nothing kept

    # StarPO
    clip_low: float = 0.2               # the ratio is clipped to 1 - clip_low .. 1 + clip_high
    clip_high: float = 0.28             # 0.2 = plain StarPO
    dual_clip: float = 0.0              # bound of the loss for bad tokens of large ratio (usual: 3); 0 = off
    tis_cap: float = 0.0                # truncated importance sampling of sampler to trainer (usual: 2); 0 = off
    kl_coef: float = 0.0                # 0 = no KL (StarPO-S); 0.001 = plain: with a critic in the reward, else in the loss;
    #                                     the reference is the start, with LoRA the model without its adapter
    kl_kind: str = "k3"                 # estimator of the KL in the loss: k2 | k3; in the reward it is k1
    entropy_coef: float = 0.001         # bonus per nat (0 .. 0.01)
    gamma: float = 1.0                  # ppo, bi_level_gae: discount per token
    lam: float = 1.0                    # ppo, bi_level_gae: GAE's λ (0.9 .. 1)
    gamma_turn: float = 0.95            # bi_level_gae, gigpo: discount per turn
    value_clip: float = 0.5             # ppo, bi_level_gae: values move at most this far from the old ones; 0 = free
    baseline: str = "none"              # reinforce_pp: "group" subtracts the group's mean first
    step_coef: float = 1.0              # gigpo: weight of the advantage among actions from the same state
    gigpo_std: bool = True              # gigpo: divide by the std, on both levels
    whiten: bool = False                # advantages to mean 0, std 1 over the update batch's tokens; ppo, bi_level_gae
    #                                     and reinforce_pp always do
    length_weight: bool = False         # advantages x mean length / own length of the episode
    adv_clip_low: float = 0.0           # normalised returns are cut at -adv_clip_low (usual: 1); 0 = off
    adv_clip_high: float = 0.0          # ... and at adv_clip_high (usual: 3); 0 = off
    loss_divisor: str = "token-mean"    # or seq-mean-token-mean (the paper's), seq-mean-token-sum-norm (Dr. GRPO)

    # optimisation
    lr: float = 1e-5                    # policy (LoRA 1e-5 .. 1e-4, all weights of a large model 1e-6 .. 1e-5)
    critic_lr: float = 1e-4             # ppo, bi_level_gae: the critic's (ten times lr)
    update_batch: int = 32              # E, episodes per optimizer step, over all ranks
    updates_per_rollout: int = 1        # passes over the kept episodes (Online-k, 1 .. 4)
    micro_batch_tokens: int = 16384     # padded tokens per forward pass (memory only; the result is the same)
    share_prefix: bool = True           # run a prompt once for all its episodes (speed only); False = every row whole
    gradient_checkpointing: bool = False    # compute activations twice: less memory, slower, no share_prefix
    grad_clip: float = 1.0              # norm, policy and critic apart
    weight_decay: float = 0.01          # AdamW

    # what the run survives
    save_every: int = 10                # iterations per checkpoint in out_dir/checkpoints; 0 = only where it is stopped
    keep_last: int = 2                  # newest checkpoints kept, besides that of the best evaluation
    resume: bool = False                # go on from the newest whole checkpoint in out_dir; without any, start anew
    max_skipped: int = 5                # save and stop after so many skipped steps in a row: something is not finite
    max_env_errors: float = 0.1         # stop where a larger share of an iteration's episodes ended in an error
    rank_timeout: float = 1800.0        # seconds that a rank waits for the others before all of them end

    # diagnostics
    on_collapse: str = "continue"       # or "stop", where the Echo Trap has closed
    echo_fall: float = 0.4              # warn where std or entropy is under this fraction of its early level ...
    echo_patience: int = 15             # ... and success has not risen for so many iterations
    template_every: int = 20            # iterations between tests whether thoughts depend on their prompts; 0 = never
    template_pairs: int = 16            # prompts and thoughts in such a test, each thought under each prompt


# ---------------------------------------------------------------------------------------------- settings

# settings that only some algorithms read
READ_BY = {**dict.fromkeys(("gamma", "lam", "value_clip", "critic_lr"), starpo.CRITICS),
           **dict.fromkeys(("adv_clip_low", "adv_clip_high", "length_weight"), set(starpo.ALGOS) - starpo.CRITICS),
           "gamma_turn": {"bi_level_gae", "gigpo"}, "baseline": {"reinforce_pp"}, "step_coef": {"gigpo"},
           "gigpo_std": {"gigpo"}, "whiten": set(starpo.ALGOS) - starpo.WHITENED}


def check_config(cfg, typed=(), filed=()):
    """Refuse impossible settings, and settings that the chosen algorithm doesn't read; return notes to print."""
    def need(ok, name, what):
        if not ok:
            raise UserError(f"{name} must be {what}, got {getattr(cfg, name)!r}")

    need(cfg.algo in starpo.ALGOS, "algo", "one of " + ", ".join(starpo.ALGOS))
    for name in ("prompts_per_iter", "group_size", "max_turns", "max_actions", "max_actions_per_turn",
                 "max_new_tokens", "update_batch", "updates_per_rollout", "micro_batch_tokens", "eval_tasks",
                 "log_every", "log_rollouts_every", "empty_stop", "echo_patience", "keep_last", "max_skipped"):
        need(getattr(cfg, name) >= 1, name, "at least 1")
    for name in ("max_iters", "eval_every", "lora_rank", "rollout_batch", "log_rollouts", "lr", "critic_lr",
                 "eval_temperature", "weight_decay", "kl_coef", "entropy_coef", "value_clip", "seed", "refill",
                 "step_coef", "adv_clip_low", "adv_clip_high", "template_every", "save_every"):
        need(getattr(cfg, name) >= 0, name, "at least 0")
    need(cfg.max_iters or cfg.eval_every, "max_iters", "above 0 where eval_every is 0: nothing would happen")
    need(cfg.temperature > 0, "temperature", "above 0: the loss needs a distribution")
    need(cfg.grad_clip > 0, "grad_clip", "above 0 (inf = no clipping)")
    need(cfg.max_context >= 2, "max_context", "at least 2")
    need(cfg.filter_by in starpo.FILTERS, "filter_by", "one of " + ", ".join(starpo.FILTERS))
    if cfg.filter_by == "top_k_abs":
        need(cfg.filter_keep >= 1 and cfg.filter_keep == int(cfg.filter_keep), "filter_keep",
             "a whole number of groups, 1 or more, for filter_by='top_k_abs'")
    else:
        need(0 < cfg.filter_keep <= 1, "filter_keep", "above 0 and at most 1")
    need(cfg.filter_score in FILTER_SCORES, "filter_score", "one of " + ", ".join(FILTER_SCORES))
    need(cfg.kept_scale in ("none", "linear", "sqrt"), "kept_scale", "none, linear or sqrt")
    need(cfg.dual_clip == 0 or cfg.dual_clip > 1, "dual_clip", "above 1 (0 = off)")
    need(cfg.tis_cap == 0 or cfg.tis_cap >= 1, "tis_cap", "at least 1 (0 = off)")
    need(cfg.baseline in starpo.BASELINES, "baseline", "one of " + ", ".join(starpo.BASELINES))
    need(0 <= cfg.gamma_turn <= 1, "gamma_turn", "between 0 and 1")
    need(cfg.on_collapse in ("continue", "stop"), "on_collapse", "continue or stop")
    need(0 <= cfg.echo_fall < 1, "echo_fall", "at least 0 and below 1")
    need(cfg.template_pairs >= 2, "template_pairs", "at least 2")
    need(0 <= cfg.max_env_errors <= 1, "max_env_errors", "between 0 and 1")
    need(cfg.rank_timeout > 0, "rank_timeout", "above 0")
    need(0 < cfg.clip_low < 1, "clip_low", "between 0 and 1")
    need(cfg.clip_high > 0, "clip_high", "above 0")
    need(0 <= cfg.gamma <= 1, "gamma", "between 0 and 1")
    need(0 <= cfg.lam <= 1, "lam", "between 0 and 1")
    need(cfg.kl_kind in ("k2", "k3"), "kl_kind", "k2 or k3 (k1 has no gradient in a loss)")
    need(cfg.loss_divisor in starpo.DIVISORS, "loss_divisor", "one of " + ", ".join(starpo.DIVISORS))
    need(cfg.action_sep.strip() != "", "action_sep", "some visible text")
    check_trackers(cfg.track)
    need(cfg.device in ("", "cpu", "cuda"), "device", "'', 'cpu' or 'cuda'")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda' was asked for, but PyTorch sees no CUDA device. Leave device='' for the CPU, "
                        "or install a CUDA build of torch.")
    in_group = cfg.algo in ("grpo", "dr_grpo", "rloo", "gigpo") or cfg.algo == "reinforce_pp" and cfg.baseline == "group"
    if in_group and cfg.group_size == 1:
        raise UserError(f"algo={cfg.algo!r} compares the members of a group: group_size must be at least 2, got 1")
    by_spread = cfg.filter_score == "std" and (cfg.filter_keep < 1 or cfg.filter_by in ("top_k_abs", "min_p")
                                               or not cfg.filter_zero)
    if (by_spread or cfg.refill or cfg.spread_weight) and cfg.group_size == 1:
        raise UserError("a filter by the spread of a group needs group_size of at least 2, got 1 (or set filter_keep=1 "
                        "with filter_by='top_k' and filter_zero=True, refill=0 and spread_weight=False)")
    if cfg.length_weight and cfg.loss_divisor == "seq-mean-token-mean":
        raise UserError("length_weight=True and loss_divisor='seq-mean-token-mean' would count lengths twice: take one")
    if len(env_makers(cfg)) <= cfg.env.count(","):
        raise UserError(f"env={cfg.env!r} names an environment twice")
    if cfg.env_args and "," in cfg.env:
        raise UserError("env_args belong to one environment, but env names several: register a class of your own for "
                        "each (README, \"Add your own environment\")")

    unused = {name: f"algo={cfg.algo!r} doesn't use it, but " + ", ".join(a for a in starpo.ALGOS if a in algos)
              for name, algos in READ_BY.items() if cfg.algo not in algos}
    if cfg.algo in starpo.CRITICS:
        unused["kl_kind"] = f"algo={cfg.algo!r} puts the KL (k1) into the reward"
    elif cfg.kl_coef == 0:
        unused["kl_kind"] = "kl_coef is 0"
    if not cfg.think:
        unused |= dict.fromkeys(("template_every", "template_pairs"), "think=False leaves no thoughts to test")
    if cfg.gradient_checkpointing:
        unused["share_prefix"] = "gradient_checkpointing runs every row whole"
    for name in sorted(set(unused) & set(typed)):
        raise UserError(f"--{name} would have no effect: {unused[name]}")
    return [f"note: {name} from the config file has no effect: {unused[name]}"
            for name in sorted(set(unused) & set(filed))]


def batch_arithmetic(cfg):
    """Say in words what one iteration does, and whether clipping can act."""
    prompts = cfg.prompts_per_iter
    kept = {"top_k": lambda: starpo.kept_count(prompts * (1 + cfg.refill), cfg.filter_keep),
            "top_k_abs": lambda: int(cfg.filter_keep)}.get(cfg.filter_by, lambda: prompts)()
    kept = min(prompts, kept)
    exact = cfg.filter_by in ("top_k", "top_k_abs") and cfg.filter_zero and not cfg.refill
    most = "" if exact else "at most "
    episodes = kept * cfg.group_size
    steps = cfg.updates_per_rollout * -(-episodes // cfg.update_batch)      # the last batch may be smaller
    clip = "clipping can act" if steps > 1 else "the ratio is exactly 1 and clipping cannot act"
    refill = f" (up to {1 + cfg.refill} times, until {prompts} groups have spread)" if cfg.refill else ""
    return (f"{prompts} prompts x {cfg.group_size} = {prompts * cfg.group_size} episodes an iteration{refill}; "
            f"{most}{kept} of {prompts} groups kept = {most}{episodes} episodes; "
            f"{cfg.updates_per_rollout} pass(es) in batches of {cfg.update_batch} = {most}{steps} optimizer step(s): {clip}")


# ---------------------------------------------------------------------------------------------- helpers

def set_threads():
    """Use every core: the launcher sets OMP_NUM_THREADS to 1, which leaves the others idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def keep_memory():
    """Let the C library on Linux keep freed memory for the next tensor.

    By default it hands large blocks back and gets them anew, page by page, for every activation: a sixth of the
    time of an update on a CPU. Blocks of 64 MB and more still go back: kept, they would leave holes of that size.
    """
    trim_threshold, mmap_threshold = -1, -3         # of malloc.h
    with contextlib.suppress(OSError, AttributeError):      # another system
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(trim_threshold, 2 ** 31 - 1)
        libc.mallopt(mmap_threshold, 2 ** 26)


def peak_memory(device):
    """The most memory so far, in GiB: of the GPU's tensors, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)


def check_out_dir(cfg):
    """Refuse a folder that can't be written, or holds what isn't this run's to go on with."""
    folder = os.path.abspath(cfg.out_dir)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"out_dir={cfg.out_dir!r} can't be made: {folder} is no folder, or is read-only. Choose another "
                        f"with --out_dir=...")
    files = set(os.listdir(cfg.out_dir)) - {"config.json.tmp"} if os.path.isdir(cfg.out_dir) else set()
    if files and not cfg.resume:
        raise UserError(f"out_dir={cfg.out_dir!r} already holds a run, or other files. Choose another with "
                        f"--out_dir=..., delete that folder, or go on with that run by --resume.")
    if files and not files & {"config.json", "checkpoints"}:
        raise UserError(f"out_dir={cfg.out_dir!r} holds files, but no run that could be resumed: its config.json is missing")


def resumable(cfg, lines, errors_log, say, accelerator):
    """Find the checkpoint to go on from, None where there is none, and cut the two checkpoint.Lines to what it knows."""
    found = problem = None
    if accelerator.is_main_process:
        try:
            found = checkpoint.newest(cfg.out_dir, say)
            done = checkpoint.read_json(found, "state")["iter"] if found else -1
            for log in (lines, errors_log):
                log.cut(done)
        except (OSError, ValueError) as error:
            problem = f"can't go on with {cfg.out_dir}: {error}"
    found, problem = shared_from_main((found, problem), accelerator)
    if problem:
        raise UserError(problem)
    return found


def check_changes(saved, settings):
    """Refuse to resume a checkpoint as another run; return what to say of the settings that differ."""
    different, fixed = checkpoint.changes(checkpoint.read_json(saved, "config"), settings)
    if fixed:
        raise UserError(f"{saved} can't be resumed with another {', '.join(fixed)} ({'; '.join(different)}). Set what it "
                        f"had, or start a new run from its policy: --model={os.path.join(saved, 'policy')} --out_dir=...")
    return [f"note: resuming with changed settings: {'; '.join(different)}"] if different else []


def shared_from_main(value, accelerator):
    """Rank 0's value, on all ranks."""
    from accelerate.utils import broadcast_object_list
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def share(items, accelerator):
    """This rank's contiguous part of a list; parts differ by one item at most."""
    n, r, w = len(items), accelerator.process_index, accelerator.num_processes
    return items[n * r // w: n * (r + 1) // w]


def gather(items, accelerator):
    """Concatenate every rank's list, in the order of ranks."""
    if accelerator.num_processes == 1:
        return items
    from accelerate.utils import gather_object
    return gather_object(items)


def env_makers(cfg):
    """{name: callable that returns a fresh environment}, for the names in cfg.env."""
    return {name.strip(): lambda name=name.strip(): envs.make_env(name, **cfg.env_args) for name in cfg.env.split(",")}


def baselines(make_env, cfg):
    """(random, optimal) success on the validation tasks; None where the environment has no such policy, or raises."""
    seeds = [e.task_seed for e in validation_episodes(range(cfg.eval_tasks))]
    budget = min(cfg.max_actions, cfg.max_turns * cfg.max_actions_per_turn)
    rates = []
    for policy in ("random", "optimal"):
        try:
            rate = envs.success_rate(make_env, policy, seeds, budget)
        except Exception:       # whatever a user's environment raises; its episodes will say what
            rate = math.nan
        rates.append(None if math.isnan(rate) else rate)
    return rates


def score(success, random, optimal):
    """Success on a scale from random play, 0, to optimal play, 1; None where one is unknown or both are equal."""
    known = None not in (random, optimal) and optimal != random
    return (success - random) / (optimal - random) if known else None


def make_chat(policy, tokenizer, think, path):
    """The Chat of a policy that was loaded from `path`; whatever its generation config calls eos ends a turn too."""
    eos = policy.causal_lm.generation_config.eos_token_id
    try:
        return Chat(tokenizer, think, eos if isinstance(eos, list) else [eos])
    except ValueError as error:
        raise UserError(f"model={path!r}: {error}") from None


def evaluate(policy, chat, makers, cfg, accelerator, base):
    """Success on the fixed validation tasks, split over ranks, beside the baselines {env: pair}.

    An episode whose environment raises is no success. Returns (metrics, {env: this rank's trajectories}).
    """
    tasks, metrics, episodes = share(range(cfg.eval_tasks), accelerator), {}, {}
    for name, make_env in makers.items():
        played = collect(policy, chat, make_env, validation_episodes(tasks), cfg, cfg.eval_temperature)
        episodes[name] = played
        wins = gather([t.success for t in played], accelerator)
        success, (random, optimal) = sum(wins) / len(wins), base[name]
        metrics |= {f"eval/{name}/{k}": v for k, v in (
            ("success", success), ("random", random), ("optimal", optimal), ("score", score(success, random, optimal)))}
    return metrics, episodes


def roll_out(policy, chat, makers, cfg, accelerator, it, give_up=None):
    """Play an iteration's groups, this rank its share, and gather all of them; more rounds of them with cfg.refill.

    Returns every rank's trajectories in the order of groups, and apart those whose environment raised.
    """
    trajectories, errors, names = [], [], list(makers)
    for rounds in range(1 + cfg.refill):
        first = rounds * cfg.prompts_per_iter
        groups = share(range(first, first + cfg.prompts_per_iter), accelerator)
        played = [t for k, name in enumerate(names) for t in collect(
            policy, chat, makers[name], train_episodes(
                cfg.seed, it, [g for g in groups if g % len(names) == k], cfg.group_size), cfg, cfg.temperature, give_up)]
        played = sorted(gather(played, accelerator), key=lambda t: (t.group, t.member))
        trajectories += [t for t in played if not t.error]
        errors += [t for t in played if t.error]
        returns, group = returns_and_groups(trajectories)
        if not cfg.refill or (starpo.group_stats(returns, group)[2] > 0).sum() >= cfg.prompts_per_iter:
            break
    return trajectories, errors


def less_memory(step, work, cfg, device):
    """Run work(); where memory runs out, halve this rank's micro-batches of the step and run it again.

    Nothing that work() does may last unless it succeeds. Smaller micro-batches stay for the rest of the run: those of the
    steps that were cut before, too, which meet the same limit once more, don't make them smaller still.
    """
    while True:
        try:
            return work()
        except torch.OutOfMemoryError:
            if all(len(b.tokens) == 1 for b in step.batches):
                raise UserError("out of memory with a single episode in a forward pass. Lower max_context, set "
                                "gradient_checkpointing=True, lower lora_rank, or take a smaller model.") from None
        # outside of the handler, where the traceback no longer holds the tensors of the attempt
        step.budget = max(1, step.budget // 2)
        cfg.micro_batch_tokens = min(cfg.micro_batch_tokens, step.budget)
        free_memory(device, f"micro_batch_tokens={cfg.micro_batch_tokens}")
        step.batches = [half for b in step.batches for half in b.halves()]


def reduce_gradients(parameters, accelerator):
    """Sum gradients over ranks in one call. Losses are divided by the whole batch, so the sum is the gradient."""
    if accelerator.num_processes == 1:
        return
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    total = accelerator.reduce(torch.cat([g.flatten() for g in grads]), "sum")
    for p, g in zip(parameters, total.split([p.numel() for p in parameters])):
        p.grad = g.view_as(p)


# ---------------------------------------------------------------------------------------------- one iteration

@dataclass
class Step:
    """One optimizer step's episodes: this rank's micro-batches, and the sizes over all ranks."""
    batches: list       # of rollout.Batch, this rank's rows; may be empty
    num_tokens: int     # trained tokens over all ranks
    num_rows: int       # episodes over all ranks
    budget: int         # the micro_batch_tokens that the batches were cut with


METRICS = ["policy_loss", "value_loss", "entropy", "approx_kl", "clip_frac_low", "clip_frac_high", "logprob_gap",
           "grad_norm"]     # value_loss is 0 without a critic
FILTER_SCORES = ("std", "return", "entropy", "length")


class Stats:
    """Sums of metrics on the device, so that nothing waits for it before the end of the iteration.

    steps: optimizer steps; skipped: those left out; in_a_row: of these, the last ones without one taken in between.
    """

    def __init__(self, device, in_a_row=0):
        self.device, self.sums, self.ratio_max = device, {}, torch.zeros((), device=device)
        self.steps = self.skipped = 0
        self.in_a_row = in_a_row

    def add(self, values):
        for name, value in values.items():
            if name == "ratio_max":
                self.ratio_max = torch.maximum(self.ratio_max, value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def averages(self, accelerator, names):
        """Mean over the optimizer steps taken, summed over ranks: one message. A rank without rows adds zeros."""
        zero = torch.zeros((), device=self.device)
        total = torch.stack([torch.as_tensor(self.sums.get(n, zero), device=self.device).float() for n in names])
        total = accelerator.reduce(total, "sum") / max(self.steps - self.skipped, 1)
        out = dict(zip(names, total.tolist()))
        out["ratio_max"] = accelerator.gather(self.ratio_max[None]).max().item()
        if self.steps == self.skipped:
            out = dict.fromkeys(out)        # no step: there is nothing to say, 0 would be a lie
        return out | {"optimizer_steps": self.steps, "skipped_steps": self.skipped}


def returns_and_groups(trajectories):
    """(R(τ), group number), each (n,)."""
    return torch.tensor([t.traj_return for t in trajectories]), torch.tensor([t.group for t in trajectories])


def keep_groups(trajectories, cfg):
    """Choose the groups to train on (Eq. 7): a bool tensor (n,), True on the rows of kept groups."""
    returns, group = returns_and_groups(trajectories)
    sampled = torch.tensor([sum(t.loss_mask) for t in trajectories]).double()
    rows = {"std": returns, "return": returns, "length": sampled,      # the log-probs at sampling estimate the entropy
            "entropy": -torch.tensor([sum(t.logprobs) for t in trajectories]) / sampled}[cfg.filter_score]
    kept = starpo.filter_groups(rows, group, cfg.filter_keep, cfg.filter_by,
                                "std" if cfg.filter_score == "std" else "mean", cfg.filter_zero)
    if cfg.refill:      # an iteration's worth, of the groups with spread
        index, _, std = starpo.group_stats(returns, group)
        kept &= (std > 0)[index]
        kept &= torch.isin(group, group[kept].unique()[:cfg.prompts_per_iter])
    return kept


@dataclass
class Credit:
    """What the update takes from whole trajectories, for all of them, (n, ...)."""
    weights: torch.Tensor                   # (n,) factor of a row's advantages
    scores: torch.Tensor | None = None      # (n,) advantage of the trajectory; None with a critic
    turns: torch.Tensor | None = None       # (n, K) added to the tokens of each turn (gigpo)


def assign_credit(trajectories, kept, cfg):
    """Compare the kept trajectories with each other, on every rank alike: a Credit, 0 where not kept."""
    returns, group = returns_and_groups(trajectories)
    r, g = returns[kept], group[kept]
    out = Credit(torch.full_like(returns, starpo.kept_scale(kept, cfg.kept_scale)))
    if cfg.spread_weight:
        out.weights[kept] *= starpo.spread_weights(r, g)
    if cfg.algo in starpo.CRITICS:
        return out
    if cfg.length_weight:
        out.weights[kept] *= starpo.length_weights(torch.tensor([sum(t.loss_mask) for t in trajectories])[kept])
    how = starpo.RETURN_NORM[cfg.algo]
    if cfg.algo == "reinforce_pp":
        how = starpo.BASELINES[cfg.baseline]
    if cfg.algo == "gigpo" and not cfg.gigpo_std:
        how = "group-mean"
    out.scores = torch.zeros_like(returns)
    x = starpo.normalize_returns(r, g, how, tag=g % (1 + cfg.env.count(",")))
    out.scores[kept] = starpo.clip_returns(x, -cfg.adv_clip_low or -math.inf, cfg.adv_clip_high or math.inf)
    if cfg.algo == "gigpo":
        longest = max(len(t.turn_rewards) for t in trajectories)
        pad = lambda x, fill: x + [fill] * (longest - len(x))
        rewards = torch.tensor([pad(t.turn_rewards, 0.0) for t in trajectories])
        keys = torch.tensor([pad(t.state_keys, -1) for t in trajectories])
        out.turns = torch.zeros_like(rewards)
        out.turns[kept] = cfg.step_coef * starpo.step_advantages(
            starpo.turn_returns(rewards[kept], cfg.gamma_turn), g, keys[kept], how)
    return out


def split_steps(trajectories, kept, cfg, accelerator, device):
    """Cut the kept episodes (row numbers, whole groups in order) into update batches, and those over ranks."""
    shared = cfg.share_prefix and not cfg.gradient_checkpointing
    steps = []
    for i in range(0, len(kept), cfg.update_batch):
        rows = kept[i:i + cfg.update_batch]
        mine = micro_batches(trajectories, share(rows, accelerator), cfg.micro_batch_tokens, shared)
        steps.append(Step([make_batch(trajectories, m, device, shared) for m in mine],
                          sum(sum(trajectories[j].loss_mask) for j in rows), len(rows), cfg.micro_batch_tokens))
    return steps


@torch.no_grad()
def prepare(model, steps, credit, cfg, accelerator):
    """Fill in what the update holds fixed: old log-probs, reference, old values, advantages, returns.

    The old log-probs are left out where the rollouts get one optimizer step: then the update's own are the old
    ones, the ratio exactly 1. Returns metrics.
    """
    critic, many = credit.scores is None, cfg.updates_per_rollout * len(steps) > 1
    roles = (["policy"] * (many or bool(critic and cfg.kl_coef)) + ["reference"] * (cfg.kl_coef > 0)
             + ["critic"] * critic)

    def fill_in(step):
        for b in step.batches:
            out = model(b.tokens, b.loss_mask, b.last, temperature=cfg.temperature, roles=roles,
                        prefix=b.prefix, entropy=False) if roles else {}
            b.old_logprobs, b.ref_logprobs = out.get("logprobs"), out.get("ref_logprobs")
            if not critic:
                b.advantages = starpo.group_advantages(b.take(credit.scores), b.loss_mask)
                if credit.turns is not None:
                    b.advantages += starpo.spread_turns(b.take(credit.turns), b.turn_ids, b.loss_mask)
                continue
            b.old_values = out["values"]
            rewards = starpo.token_rewards(b.turn_rewards, b.turn_ids, b.loss_mask)
            if cfg.kl_coef:
                kl = starpo.kl_estimate(b.old_logprobs, b.ref_logprobs, "k1")
                rewards = rewards - cfg.kl_coef * kl.where(b.loss_mask, 0.0)
            bootstrap = out["bootstrap"] * b.truncated
            if cfg.algo == "bi_level_gae":
                b.advantages, b.returns = starpo.bi_level_gae(rewards, b.old_values, b.loss_mask, b.turn_ids, cfg.gamma,
                                                              cfg.lam, cfg.gamma_turn, bootstrap)
            else:
                b.advantages, b.returns = starpo.gae(rewards, b.old_values, b.loss_mask, cfg.gamma, cfg.lam, bootstrap)

    for step in steps:
        less_memory(step, lambda: fill_in(step), cfg, accelerator.device)
        advantages = [b.advantages for b in step.batches]
        if cfg.algo in starpo.WHITENED or cfg.whiten:
            advantages = starpo.whiten(advantages, [b.loss_mask for b in step.batches],
                                       lambda x: accelerator.reduce(x, "sum"), accelerator.device)
        for b, x in zip(step.batches, advantages):
            b.advantages = x * b.take(credit.weights)[:, None]
    if critic and steps:
        pairs = [torch.cat([getattr(b, name)[b.loss_mask] for s in steps for b in s.batches] or
                           [torch.zeros(0, device=accelerator.device)]).cpu() for name in ("old_values", "returns")]
        values, returns = (torch.cat(gather([x], accelerator)) for x in pairs)
        return {"explained_variance": starpo.explained_variance(values, returns).item()}
    return {}


def update(model, optimizer, step, cfg, accelerator, stats):
    """Take one optimizer step on an update batch; skip it, and count, if the loss or a gradient is not finite."""
    policy = accelerator.unwrap_model(model)

    def accumulate():
        optimizer.zero_grad(set_to_none=True)
        total, metrics = torch.zeros((), device=accelerator.device), []
        for b in step.batches:
            with accelerator.no_sync(model):        # ranks may hold unequal numbers of micro-batches
                out = model(b.tokens, b.loss_mask, b.last, temperature=cfg.temperature, prefix=b.prefix,
                            roles=("policy",) if b.returns is None else ("policy", "critic"))
                old = b.old_logprobs if b.old_logprobs is not None else out["logprobs"].detach()
                weights = starpo.loss_weights(b.loss_mask, cfg.loss_divisor, step.num_tokens, step.num_rows,
                                              cfg.max_turns * cfg.max_new_tokens)
                loss, parts = starpo.starpo_loss(
                    out["logprobs"], out["entropy"], old, b.advantages, b.loss_mask, weights,
                    num_tokens=step.num_tokens, clip_low=cfg.clip_low, clip_high=cfg.clip_high,
                    dual_clip=cfg.dual_clip, entropy_coef=cfg.entropy_coef,
                    importance=starpo.importance_weights(old, b.logprobs, cfg.tis_cap) if cfg.tis_cap else None,
                    kl_coef=0.0 if b.returns is not None else cfg.kl_coef, kl_kind=cfg.kl_kind,
                    ref_logprobs=b.ref_logprobs, values=out.get("values"), old_values=b.old_values,
                    returns=b.returns, value_clip=cfg.value_clip)
                loss.backward()
            gap = (old - b.logprobs).abs().where(b.loss_mask, 0.0).sum() / step.num_tokens
            total += loss.detach()
            metrics.append(parts | {"logprob_gap": gap})
        return total, metrics

    loss, metrics = less_memory(step, accumulate, cfg, accelerator.device)
    norms = []
    for params in (policy.policy_parameters(), policy.critic_parameters()):
        if params:
            reduce_gradients(params, accelerator)
            norms.append(torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip))
    stats.steps += 1
    if torch.isfinite(torch.stack([accelerator.reduce(loss, "sum"), *norms])).all():
        optimizer.step()
        stats.in_a_row = 0
        for values in metrics:
            stats.add(values)
        stats.add({"grad_norm": norms[0] / accelerator.num_processes})      # equal on all ranks, summed over them
    else:
        stats.skipped += 1
        stats.in_a_row += 1
    optimizer.zero_grad(set_to_none=True)


def rollout_metrics(trajectories, spread):
    """Metrics of an iteration's episodes before the filter; spread (G,): in-group std of the returns."""
    n = len(trajectories)
    turns = sum(len(t.turn_rewards) for t in trajectories)
    sampled = sum(sum(t.loss_mask) for t in trajectories)
    responses = [(m["content"], (t.group, k)) for t in trajectories
                 for k, m in enumerate(m for m in t.messages if m["role"] == "assistant")]
    return {"success": sum(t.success for t in trajectories) / n,
            "pass_at_k": diagnostics.pass_at_k([t.success for t in trajectories], [t.group for t in trajectories],
                                               n // len(spread)),
            "traj_return": sum(t.traj_return for t in trajectories) / n,
            "group_reward_std": spread.mean().item(),
            "frac_zero_std_groups": (spread == 0).double().mean().item(),
            "turns": turns / n,
            "response_len": sampled / turns,
            "format_ok": sum(sum(t.format_ok) for t in trajectories) / turns,
            "truncated": sum(t.truncated for t in trajectories) / n,
            "sampled_tokens": sampled} | diagnostics.reasoning_health(*zip(*responses))


# ---------------------------------------------------------------------------------------------- the loop

def main(cfg, notes=(), signals=None):
    """Train; return the last line of metrics.

    signals: a checkpoint.Signals to listen to. Raises UserError, ModelError or ContextError for what the user can mend.
    """
    # 1. setup
    start = time.perf_counter()
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    asked, signals = dataclasses.replace(cfg), signals or checkpoint.Signals()      # cfg may shrink later: less_memory
    # as config.json has them, so that a resumed run can compare: env_args may hold tuples, and functions
    settings = json.loads(json.dumps(dataclasses.asdict(asked), default=lambda x: getattr(x, "__qualname__", repr(x))))
    # CUDA or the CPU, whatever accelerate would choose; bf16 is model.py's business, whatever it has on file.
    # Ranks may run unequal numbers of forward passes, so none of them may wait for the others' buffers.
    accelerator = Accelerator(cpu=cfg.device == "cpu" or not torch.cuda.is_available(), mixed_precision="no",
                              log_with=check_trackers(cfg.track) or None, project_dir=cfg.out_dir if cfg.track else None,
                              kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False),
                                               InitProcessGroupKwargs(timeout=timedelta(seconds=cfg.rank_timeout))])
    set_threads()
    keep_memory()
    device, is_main = accelerator.device, accelerator.is_main_process

    def say(text):
        if is_main:
            tqdm.write(text)
            sys.stdout.flush()      # a log file is read while it grows
    check_out_dir(cfg)
    lines, errors_log = (checkpoint.Lines(os.path.join(cfg.out_dir, name)) for name in ("metrics.jsonl", "errors.jsonl"))
    saved = resumable(cfg, lines, errors_log, say, accelerator) if cfg.resume else None
    if saved:
        notes = [*notes, *check_changes(saved, settings)]
    makers = env_makers(cfg)
    try:
        for make_env in makers.values():
            make_env().reset(0)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"env={cfg.env!r} with env_args={cfg.env_args}: {error}") from None

    # 2. model and optimizer
    torch.manual_seed(cfg.seed)     # LoRA's first weights; nothing else draws from the global generator
    policy, tokenizer = load_model(cfg.model, lora_rank=cfg.lora_rank, critic=cfg.algo in starpo.CRITICS,
                                   reference=cfg.kl_coef > 0, bf16=device.type == "cuda",
                                   gradient_checkpointing=cfg.gradient_checkpointing)
    policy.to(device)
    chat = make_chat(policy, tokenizer, cfg.think, cfg.model)
    policy_params, critic_params = policy.policy_parameters(), policy.critic_parameters()
    param_groups = [{"params": policy_params, "lr": cfg.lr}]
    if critic_params:
        param_groups.append({"params": critic_params, "lr": cfg.critic_lr})
    optimizer = torch.optim.AdamW(param_groups, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)
    state = checkpoint.load(saved, policy, optimizer) if saved else {}
    model = accelerator.prepare(policy)         # DDP where there are several ranks: equal weights on all

    # 3. say what will happen
    trainable = sum(p.numel() for p in policy_params)
    for line in (*notes, f"{cfg.algo} on {cfg.env} with {cfg.model}: {trainable:,} trainable weights, "
                 f"{accelerator.num_processes} process(es) on {device.type}", batch_arithmetic(cfg)):
        say(line)
    base = {name: baselines(make_env, cfg) for name, make_env in makers.items()} if cfg.eval_every else {}
    best = [optimal for _, optimal in base.values()]
    trap = diagnostics.EchoTrap(sum(best) / len(best) if best and None not in best else 1.0, fall=cfg.echo_fall,
                                patience=cfg.echo_patience)
    empty, in_a_row, top = 0, 0, {"iter": None, "success": -1.0}      # iterations, steps; the best evaluation that is saved
    done = state.get("iter", 0)         # the last whole iteration
    if state:
        trap.load_state_dict(state["trap"])
        empty, in_a_row, top, start = state["empty"], state["in_a_row"], state["top"], start - state["time_s"]
        say(f"going on from {saved}")
    elif cfg.resume:
        say(f"nothing to resume in {cfg.out_dir}: starting anew")

    config_path = os.path.join(cfg.out_dir, "config.json")
    written = {saved}       # what this process has written, and the checkpoint that it comes from

    def write(what, path, work, size=0):
        """Do work(), on rank 0; where the disk refuses it, say so and go on with the run.

        config.json comes before anything else, but not before there is anything: a run that never starts leaves nothing.
        """
        if not is_main:
            return
        if path != config_path and config_path not in written:
            write("settings", config_path, lambda: checkpoint.write_text(config_path, json.dumps(settings, indent=2)))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            work()
            written.add(path)
        except checkpoint.WRITE_ERRORS as error:
            say(checkpoint.refusal(what, path, error, size))

    def save(it, metrics, best):
        """Write the checkpoint of iteration it, unless it is there; best: what is the best evaluation then."""
        nonlocal top
        path = checkpoint.folder_of(cfg.out_dir, it)
        loop = {"iter": it, "time_s": time.perf_counter() - start, "empty": empty, "in_a_row": in_a_row, "top": best,
                "trap": trap.state_dict()}
        if path not in written:
            write("checkpoint", path, lambda: checkpoint.save(path, policy, tokenizer, optimizer, loop, settings,
                                                             model_card(asked, metrics)),
                  checkpoint.size_of(policy, optimizer))
        if path in written:
            top = best
            checkpoint.prune(cfg.out_dir, cfg.keep_last, top["iter"])

    def finish(metrics, last, sample=()):
        """Evaluate and save where it is due, write the line of metrics, print it. sample: records of episodes."""
        nonlocal tracking
        it, records, failed, best = metrics["iter"], [], [], top
        due = cfg.eval_every and (it % cfg.eval_every == 0 or last)
        if due:
            found, episodes = evaluate(policy, chat, makers, cfg, accelerator, base)
            metrics |= found
            records = [episode_record(t, it, name, tokenizer) for name in episodes for t in episodes[name][:cfg.log_rollouts]]
            failed = gather([t for name in episodes for t in episodes[name] if t.error], accelerator)
            success = sum(metrics[f"eval/{name}/success"] for name in makers) / len(makers)
            best = {"iter": it, "success": success} if success > top["success"] else top
        metrics["time_s"] = time.perf_counter() - start
        in_out = lambda *names: os.path.join(cfg.out_dir, *names)
        report_errors(it, failed)
        write("metrics", in_out("metrics.jsonl"), lambda: lines.add(metrics))
        if records:
            name = in_out("rollouts", f"eval_{it:06d}.jsonl")
            write("episodes", name, lambda: checkpoint.Lines(name).add(*records))
        if tracking:
            try:
                if not accelerator.trackers:
                    start_trackers(cfg, settings, accelerator)
                if is_main:
                    track(accelerator, metrics, records or sample)
            except Exception as error:      # whatever a tracker raises: no account, no network, no room
                tracking = False
                say(f"note: track={cfg.track!r} failed, the run goes on without ({type(error).__name__}: {error})")
        if is_main and (due or it % cfg.log_every == 0):
            say(log_line(metrics, makers))
        if it and (due or last):
            write("policy", in_out("policy"), lambda: checkpoint.write_folder(
                in_out("policy"), lambda folder: policy.save(folder, tokenizer, model_card(asked, metrics))))
        if cfg.save_every and it and (it % cfg.save_every == 0 or best != top or last):
            save(it, metrics, best)
        return metrics

    def report_errors(it, episodes):
        """Write the tracebacks of environments that raised; say the first one's last line."""
        if episodes:
            path = os.path.join(cfg.out_dir, "errors.jsonl")
            write("errors", path, lambda: errors_log.add(*(
                {"iter": it, "group": t.group, "member": t.member, "error": t.error} for t in episodes)))
            say(f"note: {len(episodes)} episode(s) ended in an error of the environment and are left out, the first "
                f"with {episodes[0].error.strip().splitlines()[-1]!r}; tracebacks in {path}")

    def asked_to_stop():
        """Whether any rank has had a signal."""
        told = torch.tensor(float(bool(signals.name)), device=device)
        return accelerator.reduce(told, "sum").item() > 0

    tracking = bool(cfg.track)
    # a lone process gives a rollout up at its next turn, several agree after it
    give_up = (lambda: bool(signals.name)) if accelerator.num_processes == 1 else None
    metrics = finish({"iter": 0}, last=False) if cfg.eval_every and not state else {}
    stop = fault = ""
    bar = tqdm(range(done + 1, cfg.max_iters + 1), initial=done, total=cfg.max_iters, unit="iter",
               disable=not is_main or done >= cfg.max_iters)
    for it in bar:
        # 4. rollout: every rank plays its share of the groups; episodes are small and go to all ranks
        if asked_to_stop():
            break
        tick = time.perf_counter()
        with contextlib.suppress(Abandoned):
            trajectories, errors = roll_out(policy, chat, makers, cfg, accelerator, it, give_up)
        if asked_to_stop():
            break
        report_errors(it, errors)
        if len(errors) > cfg.max_env_errors * (len(errors) + len(trajectories)) or not trajectories:
            fault = (f"{len(errors)} of {len(errors) + len(trajectories)} episodes ended in an error of the environment, "
                     f"more than max_env_errors={cfg.max_env_errors}: {errors[0].error.strip().splitlines()[-1]}")
            break
        rollout_s = time.perf_counter() - tick

        # 5. filter: keep the groups that the policy is least certain about (Eq. 7)
        kept = keep_groups(trajectories, cfg)                                           # (n,) bool
        empty = 0 if kept.any() else empty + 1

        # 6. score and advantages, on all ranks alike for whole trajectories, per token with a critic
        steps = split_steps(trajectories, kept.nonzero()[:, 0].tolist(), cfg, accelerator, device)
        stats = Stats(device, in_a_row)
        extra = prepare(model, steps, assign_credit(trajectories, kept, cfg), cfg, accelerator) if steps else {}

        # 7. update
        for _ in range(cfg.updates_per_rollout):
            for step in steps:
                update(model, optimizer, step, cfg, accelerator, stats)
        in_a_row = stats.in_a_row
        update_s = time.perf_counter() - tick - rollout_s

        # 8. diagnose and log
        returns, group = returns_and_groups(trajectories)
        metrics = {"iter": it, "rollout_s": rollout_s, "update_s": update_s}
        metrics |= rollout_metrics(trajectories, starpo.group_stats(returns, group)[2])
        metrics["rollout_tokens_per_s"] = metrics.pop("sampled_tokens") / rollout_s
        metrics |= {"frac_kept": kept.double().mean().item(), "env_errors": len(errors),
                    "peak_memory_gb": peak_memory(device)}
        names = METRICS + ["kl_ref"] * (cfg.kl_coef > 0) + ["clip_frac_dual"] * (cfg.dual_clip > 0)
        metrics |= stats.averages(accelerator, names) | extra
        if cfg.think and cfg.template_every and it % cfg.template_every == 0:
            tick = time.perf_counter()
            metrics |= diagnostics.template_metrics(policy, tokenizer, trajectories, cfg) if is_main else {}
            metrics["template_s"] = time.perf_counter() - tick
        fired = dict(trap.first)
        metrics |= {"health": trap.update(metrics), "health_signs": trap.signs}
        sample = []
        if is_main and cfg.log_rollouts and (it == 1 or it % cfg.log_rollouts_every == 0):
            spread = trajectories[::max(1, len(trajectories) // cfg.log_rollouts)][:cfg.log_rollouts]
            sample = [episode_record(t, it, list(makers)[t.group % len(makers)], tokenizer) for t in spread]
            path = os.path.join(cfg.out_dir, "rollouts", f"iter_{it:06d}.jsonl")
            write("episodes", path, lambda: checkpoint.Lines(path).add(*sample))
        if empty >= cfg.empty_stop:
            stop = f"no group was kept for {empty} iterations in a row, so nothing is left to learn from here"
        elif metrics["health"] == "collapse" and cfg.on_collapse == "stop":
            stop = f"collapse ({', '.join(trap.signs)})"
        elif in_a_row >= cfg.max_skipped:
            fault = (f"{in_a_row} optimizer steps in a row were skipped, since the loss or a gradient was not finite "
                     f"(max_skipped={cfg.max_skipped}). The weights are those from before them. Lower lr or temperature, "
                     f"or look at the environment's rewards in rollouts/")
        metrics = finish(metrics, bool(stop) or it == cfg.max_iters, sample)
        done = it
        for level in ("warn", "collapse"):
            if fired[level] is None and trap.first[level] is not None:
                say(f"Echo Trap: first {level} at iteration {it}: {', '.join(trap.signs)}")
        bar.set_postfix_str(", ".join(f"{name} {metrics[key]:.2f}" for name, key in (
            ("success", "success"), ("std", "group_reward_std"), ("entropy", "entropy")) if metrics[key] is not None)
            + f", {rollout_s + update_s:.1f} s" + f", {metrics['health']}" * (metrics["health"] != "ok"))
        if stop:
            say(f"stopped at iteration {it}: {stop}")
        if stop or fault:
            break
    bar.close()
    if fault or done < cfg.max_iters and not stop:      # a fault, or a signal in an iteration or after it
        save(done, {"iter": done}, top)
        where = f"after iteration {done}; go on with the same command and --resume"
        if not fault:
            say(f"stopped by {signals.name or 'a signal to another rank'} {where}")
    elif done >= cfg.max_iters > 0 and not metrics:
        say(f"the run is finished: {done} iterations of max_iters={cfg.max_iters}. A larger max_iters goes on from here")
    if 0 < done and (stop or done >= cfg.max_iters) and not fault:
        say(f"{cfg.out_dir} holds metrics.jsonl, rollouts/, checkpoints/ and policy/. To see it: python report.py "
            f"{cfg.out_dir}; to test it: python eval.py --policy {cfg.out_dir}")
    for tracker in accelerator.trackers if tracking else ():
        tracker.finish()
    accelerator.wait_for_everyone()     # a rank that ends takes the others with it, whatever they still write
    if fault:
        raise UserError(f"stopped {where}: {fault}")
    return metrics


def run(argv):
    """Train as the command line says; return the exit status: 0, 2 for what the user can mend, 1 for a lost rank."""
    if {"-h", "--help"} & set(argv):
        print(__doc__, inspect.getsource(Config), sep="\n")
        return 0
    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    try:
        cfg, typed, filed = load_config(Config, argv)
        notes = check_config(cfg, typed, filed)
        if cfg.dry_run:
            dry_run(cfg, notes, batch_arithmetic(cfg), int(os.environ.get("WORLD_SIZE", 1)))
            return 0
        with checkpoint.Signals() as signals:
            main(cfg, notes, signals)
        return 0
    except (UserError, ModelError, ContextError) as error:
        print(f"{rank}error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:       # torch.distributed names no class of its own for all of these
        if not rank or not re.search("onnection (closed|reset)|[Tt]imed out", str(error)):
            raise
        print(f"{rank}error: another rank has ended, or kept this one waiting for more than rank_timeout: "
              f"{str(error).splitlines()[0]}", file=sys.stderr)
        return 1


class Console:
    """A text stream that loses what can't be written, a closed pipe or a full disk, and not the run."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        try:
            self.stream.flush()
        except OSError:         # what is left of it would be an error once more at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def script(work):
    """Make work() all that this process does: it ends with the exit status that work returns, 1 for an exception.

    One of several ranks ends at once. Python would take its connections apart first, and gloo can wait there for ever, for
    a lock that Python holds.
    """
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    try:
        status = work()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    script(lambda: run(sys.argv[1:]))
