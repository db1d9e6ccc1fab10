"""What a run says and leaves behind, beside its weights: the console's line, episodes for people, the policy's card,
and trackers (TensorBoard, Weights & Biases, trackio) through accelerate.
"""

import dataclasses
import importlib.util
import os
import shlex

from model import portable
from rollout import segments
from settings import UserError

TRACKERS = ("tensorboard", "wandb", "trackio")


def show(x):
    return "n/a" if x is None else f"{x:.3f}"


def log_line(m, makers):
    """One line for people; the file has everything."""
    parts = [f"iter {m['iter']:4d}"]
    if "success" in m:
        parts += [f"{label} {show(m[key])}" for label, key in (
            ("success", "success"), ("return", "traj_return"), ("std", "group_reward_std"), ("entropy", "entropy"),
            ("grad", "grad_norm"))]
        if not m["optimizer_steps"]:
            parts.append("NO GROUP KEPT: no update")
        if m["skipped_steps"]:
            parts.append(f"SKIPPED {m['skipped_steps']} STEP(S): the loss or a gradient was not finite")
        if m["env_errors"]:
            parts.append(f"{m['env_errors']} EPISODE(S) ENDED IN AN ERROR")
        if m["health"] != "ok":
            parts.append(f"{m['health'].upper()}: {', '.join(m['health_signs'])}")
        parts += [f"rollout {m['rollout_s']:.1f} s", f"update {m['update_s']:.1f} s"]
    for name in makers:
        if f"eval/{name}/success" in m:
            e = [show(m[f"eval/{name}/{k}"]) for k in ("success", "random", "optimal", "score")]
            label = f"eval {name}" if len(makers) > 1 else "eval"
            parts.append("{} success {} (random {}, optimal {}, score {})".format(label, *e))
    return " | ".join(parts)


def episode_record(t, iteration, env, tokenizer):
    """A trajectory as a dict for JSON; its segments are [text, whether the policy sampled it] in turn."""
    return {"iter": iteration, "env": env, "group": t.group, "member": t.member, "success": t.success,
            "return": t.traj_return, "turn_rewards": t.turn_rewards, "format_ok": t.format_ok, "actions": t.actions,
            "truncated": t.truncated, "messages": t.messages, "segments": segments(t, tokenizer)}


def command(cfg):
    """The command line of a run: the settings that differ from the defaults, but for its own folder."""
    default, mine = dataclasses.asdict(type(cfg)()), dataclasses.asdict(cfg) | {"model": portable(cfg.model, os.curdir)}
    words = [shlex.quote(f"--{k}={v}") for k, v in mine.items() if v != default[k] and k not in ("out_dir", "resume", "dry_run")]
    return " ".join(["accelerate launch train.py", *words])


def model_card(cfg, metrics):
    """What a saved policy is, in Markdown: its task, how it was made, how good it is."""
    keys = ("success", "random", "optimal", "score")
    rows = [[name, *(show(metrics[f"eval/{name}/{k}"]) for k in keys)]
            for name in cfg.env.split(",") if f"eval/{name}/success" in metrics]
    lines = [f"# A policy for {cfg.env}", "", f"Trained with StarPO by nanoRAGEN, iteration {metrics['iter']} of", "",
             f"    {command(cfg)}", ""]
    if rows:
        lines += [f"On {cfg.eval_tasks} held-out tasks, one episode each at temperature {cfg.eval_temperature:g}; score = "
                  f"(success - random) / (optimal - random):", ""]
        lines += ["| " + " | ".join(row) + " |" for row in [["task", *keys], ["---"] * 5, *rows]] + [""]
    return "\n".join([*lines, f"Its prompts are those of `rollout.Chat` and `rollout.user_message` with think={cfg.think}, "
                      f"terse={cfg.terse}."])


def start_trackers(cfg, settings, accelerator):
    """Open the trackers that cfg.track names, with the settings (dict); a resumed run opens them anew, by its name."""
    flat = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
    name = os.path.basename(os.path.normpath(cfg.out_dir))
    accelerator.init_trackers("nanoragen", flat, {"wandb": {"name": name, "dir": cfg.out_dir}, "trackio": {"name": name}})


def check_trackers(names):
    """The trackers in a setting like "tensorboard,wandb", as a list. Raises UserError where one isn't to be had."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in TRACKERS:
            raise UserError(f"track must name some of {', '.join(TRACKERS)}, with commas, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"track={name!r} needs its package: pip install {name}")
    return found


def track(accelerator, metrics, records):
    """Hand an iteration's numbers, and its sample episodes as a table, to the trackers. On the main process."""
    step = metrics["iter"]
    accelerator.log({k: v for k, v in metrics.items() if isinstance(v, (int, float)) and k != "iter"}, step=step)
    columns = ["env", "group", "member", "success", "return", "episode"]
    rows = [[r["env"], r["group"], r["member"], r["success"], r["return"],
             "\n\n".join(f"[{m['role']}] {m['content']}" for m in r["messages"])] for r in records]
    for tracker in accelerator.trackers if rows else ():
        if tracker.name == "tensorboard":
            cell = lambda x: str(x).replace("|", "\\|").replace("\n", "<br>")
            lines = [" | ".join(map(cell, row)) for row in [columns, ["---"] * len(columns), *rows]]
            tracker.writer.add_text("episodes", "\n".join(lines), step)
        elif tracker.name == "wandb":
            tracker.log_table("episodes", columns, rows, step=step)
        else:
            import trackio
            tracker.log({"episodes": trackio.Table(columns=columns, data=rows)}, step=step)
