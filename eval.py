"""Evaluate policies on tasks: a table beside random and optimal play, results.json, and every episode.

    python eval.py --policy runs/tiny_frozenlake                        # on its own task: the run's last figure once more
    python eval.py --policy runs/tiny_frozenlake --envs FrozenLakeNoSlip,Sokoban --samples=4 --out_dir=runs/eval
    python eval.py --policy runs/tiny_frozenlake --compare assets/tiny  # with the interval of the difference
    python eval.py --policy runs/frozenlake --merge runs/frozenlake/merged      # its adapter merged, for vLLM and others

The tasks with their luck and the sampling noise are those of train.py's evaluation (rollout.validation_episodes): the
same for every policy.
"""

import dataclasses
import inspect
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import envs
import starpo
from diagnostics import pass_at_k
from model import ModelError, load_model, portable
from record import show
from rollout import ContextError, Trajectory, collect, validation_episodes
from settings import UserError, load_config, read_file
from train import (Config, baselines, check_config, env_makers, keep_memory, make_chat, returns_and_groups,
                   rollout_metrics, score, set_threads)


@dataclass
class EvalConfig:
    policy: str = ""                    # a run's folder, one of its checkpoints, anything train.py takes as a model;
    #                                     or random, optimal
    compare: str = ""                   # a second one, on the same tasks
    envs: str = ""                      # names in envs.ENVS, with commas; "" = the run's own
    register: str = ""                  # a Python file that adds names to envs.ENVS, as a run's config file may
    samples: int = 1                    # episodes per task; with more the table has pass@k
    temperature: float = 0.5            # 0 = most likely token; default: the run's eval_temperature
    out_dir: str = ""                   # new folder for results.json and the episodes, NAME.jsonl; "" = print only
    merge: str = ""                     # new folder for the policy as a full model; nothing is played then
    device: str = ""                    # "" = CUDA if there is one, else CPU; or "cuda", "cpu"

    # as in train.Config; for a policy that comes from a run, what is not set here is that run's
    env_args: dict = field(default_factory=dict)    # of one environment; a run's own go with its own task alone
    eval_tasks: int = 256
    max_turns: int = 5
    max_actions: int = 10
    max_actions_per_turn: int = 5
    max_new_tokens: int = 400
    max_context: int = 3600
    think: bool = True
    terse: bool = False
    action_sep: str = "||"
    rollout_batch: int = 256


PLAYERS = ("random", "optimal")         # policies without a model
# what two policies have to share; think, terse and lengths of text are each one's own
SHARED = ("eval_tasks", "temperature", "max_turns", "max_actions", "max_actions_per_turn", "env_args")
Z = statistics.NormalDist().inv_cdf(0.975)
PLACES = ("policy", "compare", "register", "out_dir", "merge", "device")       # of this machine: not in results.json
LOGGED = ("turn_rewards", "actions", "format_ok", "truncated", "messages", "error")      # of a Trajectory


# ---------------------------------------------------------------------------------------------- settings

def find(policy):
    """(what load_model takes, the settings of the run that it comes from or {})."""
    run = os.path.normpath(policy).removesuffix(os.sep + "policy")
    folder, config = os.path.join(run, "policy"), os.path.join(run, "config.json")
    if os.path.isdir(folder) and os.path.isfile(config):
        with open(config) as f:
            return folder, json.load(f)
    if os.path.isfile(os.path.join(policy, "metrics.jsonl")):
        raise UserError(f"policy={policy!r} is a run that has saved no policy yet: train.py does with every evaluation")
    return policy, {}


def fill(cfg, run, given):
    """The settings for a policy: what is not given is as in its run."""
    run = run | {"temperature": run["eval_temperature"], "envs": run["env"]} if run else {}
    names = {f.name for f in dataclasses.fields(cfg)} - {"out_dir", "device"} - given
    return dataclasses.replace(cfg, **{k: v for k, v in run.items() if k in names})


def check(cfg, given):
    """Refuse impossible settings, by train.check_config's rules where it has the same."""
    if not cfg.envs:
        raise UserError(f"policy={cfg.policy!r} is no run's folder, so nothing names its task: check the path, or set "
                        f"--envs, of {', '.join(envs.ENVS)}")
    if cfg.samples < 1:
        raise UserError(f"samples must be at least 1, got {cfg.samples}")
    same = {f.name for f in dataclasses.fields(Config)} & {f.name for f in dataclasses.fields(cfg)}
    same -= {"temperature"} | {"env_args"} - given      # here it may be 0; a run's env_args may stand beside other tasks
    check_config(Config(env=cfg.envs, eval_temperature=cfg.temperature, **{k: getattr(cfg, k) for k in same}))


def worlds(cfg, own):
    """{name: callable that returns a fresh environment}; cfg.env_args go with the name `own`."""
    makers = {}
    for name in cfg.envs.split(","):
        args = cfg.env_args if name.strip() == own else {}
        makers |= env_makers(Config(env=name, env_args=args))
        try:
            makers[name.strip()]().reset(0)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"envs={cfg.envs!r} with env_args={args}: {error} (--register=FILE reads a file that adds "
                            f"others)") from None
    return makers


def claim(folder, what):
    """Refuse to write among other files."""
    if os.path.isdir(folder) and os.listdir(folder):
        raise UserError(f"{what}={folder!r} already holds files. Choose another folder, or delete that one.")


# ---------------------------------------------------------------------------------------------- play

def load(path, cfg, device):
    """(policy, chat) as in training: a LoRA adapter stays beside its base, since a sum in bfloat16 would round it away."""
    file, rank = os.path.join(path, "adapter_config.json"), 0
    if os.path.isfile(file):
        with open(file) as f:
            adapter = json.load(f)
        rank = adapter["r"] if adapter["peft_type"] == "LORA" else 0
    policy, tokenizer = load_model(path, lora_rank=rank, bf16=device == "cuda")
    policy.to(device)
    return policy, make_chat(policy, tokenizer, cfg.think, path)


def play(player, make_env, episodes, cfg):
    """Episodes of random or optimal play as Trajectories without text, their return that of a single turn."""
    budget = min(cfg.max_actions, cfg.max_turns * cfg.max_actions_per_turn)
    played = []
    for e in episodes:
        try:
            traj_return, success = envs.play(make_env(), player, e.task_seed, e.noise_seed, budget)
        except NotImplementedError as error:
            raise UserError(f"policy={player!r} can't play: {error}") from None
        played.append(Trajectory(turn_rewards=[traj_return], success=success, group=e.group, member=e.member))
    return played


def write_episodes(path, name, played):
    with open(path, "w", encoding="utf-8") as f:
        for t in played:
            f.write(json.dumps({"env": name, "task": t.group, "member": t.member, "success": t.success,
                                "return": t.traj_return, **{k: getattr(t, k) for k in LOGGED}}) + "\n")


# ---------------------------------------------------------------------------------------------- figures

def task_means(played, samples):
    """Success on each task, mean over its samples."""
    return [sum(t.success for t in played[i:i + samples]) / samples for i in range(0, len(played), samples)]


def interval(means, samples):
    """95 % interval [low, high] of the mean success over tasks.

    With one sample a task it is Wilson's, which stays honest near 0 and 1; with more the mean ± 1.96 standard errors
    over tasks, the samples of which are no independent draws. Where no task differs from another there is no
    spread to go by: Wilson's again, on the number of tasks.

    >>> [round(x, 3) for x in interval([1.0] * 8 + [0.0] * 2, 1)]
    [0.49, 0.943]
    """
    n, mean = len(means), statistics.fmean(means)
    if samples > 1 and len(set(means)) > 1:
        centre, half = mean, Z * statistics.stdev(means) / math.sqrt(n)
    else:
        centre = (n * mean + Z ** 2 / 2) / (n + Z ** 2)
        half = Z / (n + Z ** 2) * math.sqrt(n * mean * (1 - mean) + Z ** 2 / 4)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def difference(a, b):
    """Mean of a - b over tasks that both played, with its 95 % interval: mean ± 1.96 standard errors of the pairs."""
    d = [x - y for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(d)
    half = Z * statistics.stdev(d) / math.sqrt(len(d)) if len(d) > 1 else math.inf
    return {"success": mean, "interval": [max(-1.0, mean - half), min(1.0, mean + half)]}


def figures(played, base, samples):
    """What is said about a policy on a task; base: (random, optimal) success there."""
    success, returns = [t.success for t in played], [t.traj_return for t in played]
    mean = sum(success) / len(success)
    text = {}
    if played[0].messages:      # random and optimal play have no text to count
        text = rollout_metrics(played, starpo.group_stats(*returns_and_groups(played))[2])
        if samples == 1:        # nothing stands beside an episode that it could be compared with
            text |= dict.fromkeys(("group_reward_std", "frac_zero_std_groups", "distinct_frac"))
    powers = [2 ** i for i in range(samples.bit_length())]
    at_k = {k: pass_at_k(success, [t.group for t in played], k) for k in sorted({*powers, samples})}
    return text | {"success": mean, "interval": interval(task_means(played, samples), samples), "random": base[0],
                   "optimal": base[1], "score": score(mean, *base), "traj_return": statistics.fmean(returns),
                   "pass_at_k": at_k}


def table(results, cfg):
    """The figures as an aligned table in Markdown."""
    head = ["task", "policy", "success (95 %)", "random", "optimal", "score", "return", "turns", "tokens a turn", "format"]
    head += [f"pass@{cfg.samples}"] * (cfg.samples > 1)
    rows = [head]
    for name in results["policy"]["tasks"]:
        for tag, shown in (("policy", cfg.policy), ("compare", cfg.compare)):
            if tag in results:
                x = results[tag]["tasks"][name]
                keys = ("random", "optimal", "score", "traj_return", "turns", "response_len", "format_ok")
                rows.append([name, shown, "{:.3f} ({:.3f} to {:.3f})".format(x["success"], *x["interval"]),
                             *(show(x.get(k)) for k in keys)])
                rows[-1] += [show(x["pass_at_k"][cfg.samples])] * (cfg.samples > 1)
        if "compare" in results:
            x = results["difference"][name]
            rows.append([name, "difference", "{:+.3f} ({:+.3f} to {:+.3f})".format(x["success"], *x["interval"])])
            rows[-1] += [""] * (len(head) - 3)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


# ---------------------------------------------------------------------------------------------- what is asked for

def merge(cfg, given):
    """Write a policy as a full model that any library loads.

    An adapter is added to its base in float32, and the sum rounded to what the base is stored in.
    """
    from transformers import AutoConfig
    for name in sorted(given - {"policy", "merge"}):
        raise UserError(f"--{name} would have no effect: --merge only writes a model")
    claim(cfg.merge, "merge")
    path, _ = find(cfg.policy)
    if path in PLAYERS:
        raise UserError(f"policy={path!r} has no model to merge")
    policy, tokenizer = load_model(path)
    stored = AutoConfig.from_pretrained(policy.config.name_or_path).dtype
    stored = stored or torch.float32
    policy.lm.to(stored)
    card, file = "", os.path.join(path, "README.md")
    if os.path.isfile(file):        # as ActorCritic.save wrote it: its facts and its base are of the old folder
        with open(file, encoding="utf-8") as f:
            card = f.read().split("---\n", 2)[-1].rpartition("\nBase model: ")[0]
    policy.save(cfg.merge, tokenizer, f"{card}\nWritten as a full model by `eval.py --merge`.")
    print(f"{cfg.merge} holds {cfg.policy} as a full model, {str(stored).removeprefix('torch.')}")


def main(cfg, given=frozenset()):
    """Evaluate; return what results.json holds. given: the names of the settings that the user set.

    Raises UserError, ModelError or ContextError for what the user can mend.
    """
    if not cfg.policy:
        raise UserError("say which policy: --policy=FOLDER, a hub name, random or optimal")
    if cfg.merge:
        return merge(cfg, given)
    # 1. settings: each policy's own run's; a policy without a run is asked like the other one
    if cfg.register:
        read_file(cfg.register)
    players = {tag: find(policy) for tag, policy in (("policy", cfg.policy), ("compare", cfg.compare)) if policy}
    known = [run for _, run in players.values() if run] or [{}]
    runs = {tag: run or known[0] for tag, (_, run) in players.items()}
    cfgs = {tag: fill(cfg, run, given) for tag, run in runs.items()}
    cfg = cfgs["policy"]
    for c in cfgs.values():
        c.envs = cfg.envs
        check(c, given)
        for name in SHARED:
            if getattr(c, name) != getattr(cfg, name):
                raise UserError(f"{name} is {getattr(cfg, name)!r} in the run of {cfg.policy!r} and {getattr(c, name)!r} in "
                                f"that of {cfg.compare!r}: to compare them, choose with --{name}=...")
    claim(cfg.out_dir, "out_dir")
    makers = worlds(cfg, cfg.envs if "env_args" in given else runs["policy"].get("env"))

    # 2. play, one policy after the other
    set_threads()
    keep_memory()
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    base = {name: baselines(make_env, cfg) for name, make_env in makers.items()}
    episodes = validation_episodes(range(cfg.eval_tasks), cfg.samples)
    results, means = {}, {}
    with tqdm(total=len(players) * len(makers) * len(episodes), unit="episode") as bar:
        for tag, (path, _) in players.items():
            c, player = cfgs[tag], None     # the earlier model goes before the next one comes
            player = None if path in PLAYERS else load(path, c, device)
            settings = {k: v for k, v in dataclasses.asdict(c).items() if k not in PLACES}
            settings |= {"policy": portable(path, cfg.out_dir or os.curdir), "device": device}
            results[tag] = {"settings": settings, "tasks": {}}
            for name, make_env in makers.items():
                bar.set_postfix_str(name)
                played = []
                while len(played) < len(episodes):
                    part = episodes[len(played):][:c.rollout_batch or None]
                    played += collect(*player, make_env, part, c, c.temperature) if player else \
                        play(path, make_env, part, c)
                    bar.update(len(part))
                means[tag, name] = task_means(played, cfg.samples)
                results[tag]["tasks"][name] = figures(played, base[name], cfg.samples)
                if cfg.out_dir:
                    os.makedirs(cfg.out_dir, exist_ok=True)
                    write_episodes(os.path.join(cfg.out_dir, name + ".compare" * (tag == "compare") + ".jsonl"), name, played)

    # 3. say it
    if cfg.compare:
        results["difference"] = {name: difference(means["policy", name], means["compare", name]) for name in makers}
    if cfg.out_dir:
        with open(os.path.join(cfg.out_dir, "results.json"), "w") as f:
            json.dump(results, f, indent=2)
    print(f"{cfg.eval_tasks} tasks, {cfg.samples} episode(s) each, temperature {cfg.temperature:g}\n\n{table(results, cfg)}")
    return results


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, inspect.getsource(EvalConfig), sep="\n")
        sys.exit(0)
    try:
        config, typed, filed = load_config(EvalConfig, sys.argv[1:])
        main(config, typed | filed)
    except (UserError, ModelError, ContextError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
