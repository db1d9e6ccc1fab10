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

import dataclasses
import inspect
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import envs
import starpo
from model import ModelError, load_model
from rollout import Chat, ContextError, collect, make_batch, train_episodes, validation_episodes
from settings import UserError, load_config


@dataclass
class Config:
    # what is trained
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"   # hub name, local folder, an earlier run's policy, a PEFT adapter
    env: str = "FrozenLake"             # a name in envs.ENVS
    env_args: dict = field(default_factory=dict)    # keyword arguments of the environment's class
    algo: str = "ppo"                   # ppo | grpo | brpo | arpo
    lora_rank: int = 64                 # rank = alpha on all linear layers (8 .. 128); 0 = train all weights
    seed: int = 0                       # tasks, luck and sampling noise of training; evaluation has its own
    out_dir: str = "runs/default"       # must not hold a run yet
    device: str = ""                    # "" = CUDA if there is one, else CPU; or "cuda", "cpu"

    # how long, how often
    max_iters: int = 200                # rollout-update iterations; 0 = evaluate only
    eval_every: int = 10                # iterations; also before the first and after the last; 0 = never. Saves too
    eval_tasks: int = 256               # fixed validation tasks, one sample each (standard error 3 points)
    eval_temperature: float = 0.5       # 0 = most likely token
    log_every: int = 1                  # iterations per printed line
    log_rollouts_every: int = 10        # iterations per file of sample episodes in out_dir/rollouts
    log_rollouts: int = 8               # episodes in such a file

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

    # StarPO
    filter_keep: float = 0.25           # fraction of groups kept, by the spread of their returns; 1 = no filter
    clip_low: float = 0.2               # the ratio is clipped to 1 - clip_low .. 1 + clip_high
    clip_high: float = 0.28             # 0.2 = plain StarPO
    kl_coef: float = 0.0                # 0 = no KL (StarPO-S); 0.001 = plain: in the reward (ppo), else in the loss;
    #                                     the reference is the start, with LoRA the model without its adapter
    kl_kind: str = "k3"                 # estimator of the KL in the loss: k2 | k3; ppo's reward takes k1
    entropy_coef: float = 0.001         # bonus per nat (0 .. 0.01)
    gamma: float = 1.0                  # ppo: discount per token
    lam: float = 1.0                    # ppo: GAE's λ per token (0.9 .. 1)
    value_clip: float = 0.5             # ppo: values move at most this far from the old ones; 0 = free
    loss_divisor: str = "token-mean"    # or seq-mean-token-mean (the paper's), seq-mean-token-sum-norm (Dr. GRPO)

    # optimisation
    lr: float = 1e-5                    # policy (LoRA 1e-5 .. 1e-4, all weights of a large model 1e-6 .. 1e-5)
    critic_lr: float = 1e-4             # ppo's critic (ten times lr)
    update_batch: int = 32              # E, episodes per optimizer step, over all ranks
    updates_per_rollout: int = 1        # passes over the kept episodes (Online-k, 1 .. 4)
    micro_batch_tokens: int = 16384     # padded tokens per forward pass (memory only; the result is the same)
    share_prefix: bool = True           # run a prompt once for all its episodes (speed only); False = every row whole
    gradient_checkpointing: bool = False    # compute activations twice: less memory, slower, no share_prefix
    grad_clip: float = 1.0              # norm, policy and critic apart
    weight_decay: float = 0.01          # AdamW


# ---------------------------------------------------------------------------------------------- settings

ONLY_PPO = ("gamma", "lam", "value_clip", "critic_lr")


def check_config(cfg, typed=(), filed=()):
    """Refuse impossible settings, and settings that the chosen algorithm doesn't read; return notes to print."""
    def need(ok, name, what):
        if not ok:
            raise UserError(f"{name} must be {what}, got {getattr(cfg, name)!r}")

    need(cfg.algo in starpo.ALGOS, "algo", "one of " + ", ".join(starpo.ALGOS))
    for name in ("prompts_per_iter", "group_size", "max_turns", "max_actions", "max_actions_per_turn",
                 "max_new_tokens", "update_batch", "updates_per_rollout", "micro_batch_tokens", "eval_tasks",
                 "log_every", "log_rollouts_every"):
        need(getattr(cfg, name) >= 1, name, "at least 1")
    for name in ("max_iters", "eval_every", "lora_rank", "rollout_batch", "log_rollouts", "lr", "critic_lr",
                 "eval_temperature", "weight_decay", "kl_coef", "entropy_coef", "value_clip", "seed"):
        need(getattr(cfg, name) >= 0, name, "at least 0")
    need(cfg.max_iters or cfg.eval_every, "max_iters", "above 0 where eval_every is 0: nothing would happen")
    need(cfg.temperature > 0, "temperature", "above 0: the loss needs a distribution")
    need(cfg.grad_clip > 0, "grad_clip", "above 0 (inf = no clipping)")
    need(cfg.max_context >= 2, "max_context", "at least 2")
    need(0 < cfg.filter_keep <= 1, "filter_keep", "above 0 and at most 1")
    need(0 < cfg.clip_low < 1, "clip_low", "between 0 and 1")
    need(cfg.clip_high > 0, "clip_high", "above 0")
    need(0 <= cfg.gamma <= 1, "gamma", "between 0 and 1")
    need(0 <= cfg.lam <= 1, "lam", "between 0 and 1")
    need(cfg.kl_kind in ("k2", "k3"), "kl_kind", "k2 or k3 (k1 has no gradient in a loss)")
    need(cfg.loss_divisor in starpo.DIVISORS, "loss_divisor", "one of " + ", ".join(starpo.DIVISORS))
    need(cfg.action_sep.strip() != "", "action_sep", "some visible text")
    need(cfg.device in ("", "cpu", "cuda"), "device", "'', 'cpu' or 'cuda'")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda' was asked for, but PyTorch sees no CUDA device. Leave device='' for the CPU, "
                        "or install a CUDA build of torch.")
    if cfg.algo == "grpo" and cfg.group_size == 1:
        raise UserError("algo='grpo' compares the members of a group: group_size must be at least 2, got 1")
    if cfg.filter_keep < 1 and cfg.group_size == 1:
        raise UserError("filter_keep < 1 ranks groups by their spread: group_size must be at least 2, got 1 "
                        "(or set filter_keep=1)")

    unused = {} if cfg.algo == "ppo" else dict.fromkeys(ONLY_PPO, "only algo='ppo' has a critic")
    if cfg.algo == "ppo":
        unused["kl_kind"] = "algo='ppo' puts the KL (k1) into the reward"
    elif cfg.kl_coef == 0:
        unused["kl_kind"] = "kl_coef is 0"
    if cfg.gradient_checkpointing:
        unused["share_prefix"] = "gradient_checkpointing runs every row whole"
    for name in sorted(set(unused) & set(typed)):
        raise UserError(f"--{name} would have no effect: {unused[name]}")
    return [f"note: {name} from the config file has no effect: {unused[name]}"
            for name in sorted(set(unused) & set(filed))]


def batch_arithmetic(cfg):
    """Say in words what one iteration does, and whether clipping can act."""
    kept = starpo.kept_count(cfg.prompts_per_iter, cfg.filter_keep)
    episodes = kept * cfg.group_size
    steps = cfg.updates_per_rollout * -(-episodes // cfg.update_batch)      # the last batch may be smaller
    clip = "clipping can act" if steps > 1 else "the ratio is exactly 1 and clipping cannot act"
    return (f"{cfg.prompts_per_iter} prompts x {cfg.group_size} = {cfg.prompts_per_iter * cfg.group_size} episodes "
            f"an iteration; {kept} of {cfg.prompts_per_iter} groups kept = {episodes} episodes; "
            f"{cfg.updates_per_rollout} pass(es) in batches of {cfg.update_batch} = {steps} optimizer step(s): {clip}")


# ---------------------------------------------------------------------------------------------- helpers

def set_threads():
    """Use every core: the launcher sets OMP_NUM_THREADS to 1, which leaves the others idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


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


def baselines(make_env, cfg):
    """(random, optimal) success on the validation tasks; None where the environment has no such policy."""
    seeds = [e.task_seed for e in validation_episodes(range(cfg.eval_tasks))]
    budget = min(cfg.max_actions, cfg.max_turns * cfg.max_actions_per_turn)
    rates = (envs.success_rate(make_env, policy, seeds, budget) for policy in ("random", "optimal"))
    return [None if math.isnan(rate) else rate for rate in rates]


def evaluate(policy, chat, make_env, cfg, accelerator, base):
    """Success on the fixed validation tasks, split over ranks, as metrics beside the baselines."""
    tasks = share(range(cfg.eval_tasks), accelerator)
    played = collect(policy, chat, make_env, validation_episodes(tasks), cfg, cfg.eval_temperature)
    wins = gather([t.success for t in played], accelerator)
    success, (random, optimal) = sum(wins) / len(wins), base
    known = None not in base and optimal != random
    score = (success - random) / (optimal - random) if known else None
    return {f"eval/{cfg.env}/{k}": v for k, v in
            (("success", success), ("random", random), ("optimal", optimal), ("score", score))}


def write_rollouts(folder, iteration, trajectories, count):
    """Write a sample of episodes, evenly spaced over all of them, one JSON object a line."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"iter_{iteration:06d}.jsonl"), "w") as f:
        for t in trajectories[::max(1, len(trajectories) // max(1, count))][:count]:
            f.write(json.dumps({"iter": iteration, "group": t.group, "member": t.member, "success": t.success,
                                "return": t.traj_return, "turn_rewards": t.turn_rewards, "format_ok": t.format_ok,
                                "truncated": t.truncated, "messages": t.messages}) + "\n")


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


METRICS = ["policy_loss", "value_loss", "entropy", "approx_kl", "clip_frac_low", "clip_frac_high", "logprob_gap",
           "grad_norm"]     # value_loss is 0 without a critic


class Stats:
    """Sums of metrics on the device, so that nothing waits for it before the end of the iteration."""

    def __init__(self, device):
        self.device, self.sums, self.ratio_max = device, {}, torch.zeros((), device=device)
        self.steps = self.skipped = 0

    def add(self, values):
        for name, value in values.items():
            if name == "ratio_max":
                self.ratio_max = torch.maximum(self.ratio_max, value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def averages(self, accelerator, names):
        """Mean over the optimizer steps, summed over ranks: one message. A rank without rows adds zeros."""
        zero = torch.zeros((), device=self.device)
        total = torch.stack([torch.as_tensor(self.sums.get(n, zero), device=self.device).float() for n in names])
        total = accelerator.reduce(total, "sum") / max(self.steps, 1)
        out = dict(zip(names, total.tolist()))
        out["ratio_max"] = accelerator.gather(self.ratio_max[None]).max().item()
        return out | {"optimizer_steps": self.steps, "skipped_steps": self.skipped}


def split_steps(trajectories, kept, cfg, accelerator, device):
    """Cut the kept episodes (row numbers, whole groups in order) into update batches, and those over ranks."""
    shared = cfg.share_prefix and not cfg.gradient_checkpointing
    steps = []
    for i in range(0, len(kept), cfg.update_batch):
        rows = kept[i:i + cfg.update_batch]
        mine = micro_batches(trajectories, share(rows, accelerator), cfg.micro_batch_tokens, shared)
        steps.append(Step([make_batch(trajectories, m, device, shared) for m in mine],
                          sum(sum(trajectories[j].loss_mask) for j in rows), len(rows)))
    return steps


@torch.no_grad()
def prepare(model, steps, scores, cfg, accelerator):
    """Fill in what the update holds fixed: old log-probs, reference, old values, advantages, returns.

    scores (n,): the group algorithms' advantage of each trajectory; None for ppo. The old log-probs are left
    out where the rollouts get one optimizer step: then the update's own are the old ones, the ratio exactly 1.
    """
    ppo, many = scores is None, cfg.updates_per_rollout * len(steps) > 1
    roles = ["policy"] * (many or bool(ppo and cfg.kl_coef)) + ["reference"] * (cfg.kl_coef > 0) + ["critic"] * ppo
    for step in steps:
        for b in step.batches:
            out = model(b.tokens, b.loss_mask, b.last, temperature=cfg.temperature, roles=roles,
                        prefix=b.prefix, entropy=False) if roles else {}
            b.old_logprobs, b.ref_logprobs = out.get("logprobs"), out.get("ref_logprobs")
            if not ppo:
                b.advantages = starpo.group_advantages(scores[b.index.cpu()].to(b.tokens.device), b.loss_mask)
                continue
            b.old_values = out["values"]
            rewards = starpo.token_rewards(b.turn_rewards, b.turn_ids, b.loss_mask)
            if cfg.kl_coef:
                kl = starpo.kl_estimate(b.old_logprobs, b.ref_logprobs, "k1")
                rewards = rewards - cfg.kl_coef * kl.where(b.loss_mask, 0.0)
            b.advantages, b.returns = starpo.gae(rewards, b.old_values, b.loss_mask, cfg.gamma, cfg.lam,
                                                 out["bootstrap"] * b.truncated)
        if ppo:
            white = starpo.whiten([b.advantages for b in step.batches], [b.loss_mask for b in step.batches],
                                  lambda x: accelerator.reduce(x, "sum"), accelerator.device)
            for b, advantages in zip(step.batches, white):
                b.advantages = advantages
    if ppo:
        pairs = [torch.cat([getattr(b, name)[b.loss_mask] for s in steps for b in s.batches] or
                           [torch.zeros(0, device=accelerator.device)]).cpu() for name in ("old_values", "returns")]
        values, returns = (torch.cat(gather([x], accelerator)) for x in pairs)
        return {"explained_variance": starpo.explained_variance(values, returns).item()}
    return {}


def update(model, optimizer, step, cfg, accelerator, stats):
    """Take one optimizer step on an update batch; skip it, and count, if a gradient is not finite."""
    policy = accelerator.unwrap_model(model)
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
                entropy_coef=cfg.entropy_coef, kl_coef=0.0 if b.returns is not None else cfg.kl_coef,
                kl_kind=cfg.kl_kind, ref_logprobs=b.ref_logprobs, values=out.get("values"),
                old_values=b.old_values, returns=b.returns, value_clip=cfg.value_clip)
            loss.backward()
        gap = (old - b.logprobs).abs().where(b.loss_mask, 0.0).sum() / step.num_tokens
        stats.add(parts | {"logprob_gap": gap})
    norms = []
    for params in (policy.policy_parameters(), policy.critic_parameters()):
        if params:
            reduce_gradients(params, accelerator)
            norms.append(torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip))
    if all(torch.isfinite(n) for n in norms):
        optimizer.step()
    else:
        stats.skipped += 1
    optimizer.zero_grad(set_to_none=True)
    stats.steps += 1
    stats.add({"grad_norm": norms[0] / accelerator.num_processes})      # equal on all ranks, summed over them


def rollout_metrics(trajectories, spread):
    """Metrics of an iteration's episodes before the filter; spread (G,): in-group std of the returns."""
    n = len(trajectories)
    turns = sum(len(t.turn_rewards) for t in trajectories)
    sampled = sum(sum(t.loss_mask) for t in trajectories)
    return {"success": sum(t.success for t in trajectories) / n,
            "traj_return": sum(t.traj_return for t in trajectories) / n,
            "group_reward_std": spread.mean().item(),
            "frac_zero_std_groups": (spread == 0).double().mean().item(),
            "turns": turns / n,
            "response_len": sampled / turns,
            "format_ok": sum(sum(t.format_ok) for t in trajectories) / turns,
            "truncated": sum(t.truncated for t in trajectories) / n,
            "sampled_tokens": sampled}


def log_line(m, env):
    """One line for people; the file has everything."""
    parts = [f"iter {m['iter']:4d}"]
    if "success" in m:
        parts += [f"success {m['success']:.3f}", f"return {m['traj_return']:.3f}",
                  f"std {m['group_reward_std']:.3f}", f"entropy {m['entropy']:.3f}",
                  f"grad {m['grad_norm']:.3f}"]
        if m["skipped_steps"]:
            parts.append(f"SKIPPED {m['skipped_steps']} STEP(S): a gradient was not finite")
        parts += [f"rollout {m['rollout_s']:.1f} s", f"update {m['update_s']:.1f} s"]
    e = {k: m.get(f"eval/{env}/{k}") for k in ("success", "random", "optimal", "score")}
    if e["success"] is not None:
        parts.append("eval success {} (random {}, optimal {}, score {})".format(
            *("n/a" if v is None else f"{v:.3f}" for v in e.values())))
    return " | ".join(parts)


# ---------------------------------------------------------------------------------------------- the loop

def main(cfg, notes=()):
    """Train; return the last line of metrics.

    Raises UserError, ModelError or ContextError for what the user can mend.
    """
    # 1. setup
    start = time.perf_counter()
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs
    # CUDA or the CPU, whatever accelerate would choose; bf16 is model.py's business, whatever it has on file.
    # Ranks may run unequal numbers of forward passes, so none of them may wait for the others' buffers.
    accelerator = Accelerator(cpu=cfg.device == "cpu" or not torch.cuda.is_available(), mixed_precision="no",
                              kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    set_threads()
    device, is_main = accelerator.device, accelerator.is_main_process
    say = lambda text: tqdm.write(text) if is_main else None
    metrics_path = os.path.join(cfg.out_dir, "metrics.jsonl")
    if os.path.isdir(cfg.out_dir) and os.listdir(cfg.out_dir):
        raise UserError(f"out_dir={cfg.out_dir!r} already holds a run, or other files. Choose another with "
                        f"--out_dir=..., or delete that folder.")
    accelerator.wait_for_everyone()     # before rank 0 writes into it
    make_env = lambda: envs.make_env(cfg.env, **cfg.env_args)
    try:
        make_env().reset(0)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"env={cfg.env!r} with env_args={cfg.env_args}: {error}") from None

    # 2. model and optimizer
    group_algo = cfg.algo != "ppo"
    torch.manual_seed(cfg.seed)     # LoRA's first weights; nothing else draws from the global generator
    policy, tokenizer = load_model(cfg.model, lora_rank=cfg.lora_rank, critic=not group_algo,
                                   reference=cfg.kl_coef > 0, bf16=device.type == "cuda",
                                   gradient_checkpointing=cfg.gradient_checkpointing)
    policy.to(device)
    eos = policy.causal_lm.generation_config.eos_token_id
    try:
        chat = Chat(tokenizer, cfg.think, eos if isinstance(eos, list) else [eos])
    except ValueError as error:
        raise UserError(f"model={cfg.model!r}: {error}") from None
    policy_params, critic_params = policy.policy_parameters(), policy.critic_parameters()
    param_groups = [{"params": policy_params, "lr": cfg.lr}]
    if critic_params:
        param_groups.append({"params": critic_params, "lr": cfg.critic_lr})
    optimizer = torch.optim.AdamW(param_groups, betas=(0.9, 0.999), weight_decay=cfg.weight_decay)
    model = accelerator.prepare(policy)         # DDP where there are several ranks: equal weights on all

    # 3. say what will happen
    trainable = sum(p.numel() for p in policy_params)
    for line in (*notes, f"{cfg.algo} on {cfg.env} with {cfg.model}: {trainable:,} trainable weights, "
                 f"{accelerator.num_processes} process(es) on {device.type}", batch_arithmetic(cfg)):
        say(line)
    base = baselines(make_env, cfg) if cfg.eval_every else None

    def finish(metrics):
        """Evaluate where it is due, write the line of metrics, print it."""
        it = metrics["iter"]
        due = cfg.eval_every and (it % cfg.eval_every == 0 or it == cfg.max_iters)
        if due:
            metrics |= evaluate(policy, chat, make_env, cfg, accelerator, base)
        metrics["time_s"] = time.perf_counter() - start
        if is_main:
            if it and (due or it == cfg.max_iters):
                policy.save(os.path.join(cfg.out_dir, "policy"), tokenizer)
            if not os.path.exists(metrics_path):        # only now: a run that never starts leaves nothing behind
                os.makedirs(cfg.out_dir, exist_ok=True)
                with open(os.path.join(cfg.out_dir, "config.json"), "w") as f:
                    json.dump(dataclasses.asdict(cfg), f, indent=2)
            with open(metrics_path, "a") as f:
                f.write(json.dumps(metrics) + "\n")
            if due or it % cfg.log_every == 0:
                say(log_line(metrics, cfg.env))
        return metrics

    metrics = finish({"iter": 0}) if cfg.eval_every else {}
    bar = tqdm(range(1, cfg.max_iters + 1), disable=not is_main or cfg.max_iters == 0, unit="iter")
    for it in bar:
        # 4. rollout: every rank plays its share of the groups; episodes are small and go to all ranks
        tick = time.perf_counter()
        groups = share(range(cfg.prompts_per_iter), accelerator)
        episodes = train_episodes(cfg.seed, it, groups, cfg.group_size)
        played = collect(policy, chat, make_env, episodes, cfg, cfg.temperature)
        trajectories = gather(played, accelerator)
        rollout_s = time.perf_counter() - tick

        # 5. filter: keep the groups that the policy is least certain about (Eq. 7)
        returns = torch.tensor([t.traj_return for t in trajectories])                   # (n,)
        group = torch.tensor([t.group for t in trajectories])                           # (n,)
        kept = starpo.filter_groups(returns, group, cfg.filter_keep).nonzero()[:, 0]    # row numbers

        # 6. score and advantages, on all ranks alike for the group algorithms, per token for ppo
        steps = split_steps(trajectories, kept.tolist(), cfg, accelerator, device)
        if group_algo:
            scores = torch.zeros_like(returns)
            scores[kept] = starpo.normalize_returns(returns[kept], group[kept], starpo.RETURN_NORM[cfg.algo])
        else:
            scores = None
        stats = Stats(device)
        extra = prepare(model, steps, scores, cfg, accelerator)

        # 7. update
        for _ in range(cfg.updates_per_rollout):
            for step in steps:
                update(model, optimizer, step, cfg, accelerator, stats)
        update_s = time.perf_counter() - tick - rollout_s

        # 8. log
        metrics = {"iter": it, "rollout_s": rollout_s, "update_s": update_s}
        metrics |= rollout_metrics(trajectories, starpo.group_stats(returns, group)[2])
        metrics["rollout_tokens_per_s"] = metrics.pop("sampled_tokens") / rollout_s
        metrics |= stats.averages(accelerator, METRICS + ["kl_ref"] * (cfg.kl_coef > 0)) | extra
        if is_main and cfg.log_rollouts and (it == 1 or it % cfg.log_rollouts_every == 0):
            write_rollouts(os.path.join(cfg.out_dir, "rollouts"), it, trajectories, cfg.log_rollouts)
        metrics = finish(metrics)
        bar.set_postfix_str(f"success {metrics['success']:.2f}, std {metrics['group_reward_std']:.2f}, "
                            f"entropy {metrics['entropy']:.2f}, {rollout_s + update_s:.1f} s")
    accelerator.wait_for_everyone()     # no rank takes its connections away while another still writes
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, inspect.getsource(Config), sep="\n")
        sys.exit(0)
    try:
        config, typed, filed = load_config(Config, sys.argv[1:])
        main(config, check_config(config, typed, filed))
    except (UserError, ModelError, ContextError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
