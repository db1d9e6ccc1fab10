"""Small experiments on the laptop model, three seeds each: the tables of the README, one command each.

    python study.py algorithms      # every algorithm on the lake at equal episodes
    python study.py collapse        # plain StarPO until it collapses, beside StarPO-S, with the first warnings
    python study.py template        # thoughts that stop to depend on their prompts, beside some that don't

Runs lie in runs/study/NAME_SEED and are not made again; `--jobs=2` runs two at a time, one core each (then the
seconds are those of one core).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import starpo
from settings import UserError, load_config

LAKE = ["--config=configs/tiny_frozenlake.py", "--micro_batch_tokens=4096"]
PUSHED = ["--config=configs/tiny_bandit.py", "--algo=grpo", "--max_iters=80", "--eval_every=0", "--prompts_per_iter=16",
          "--lr=1e-3", "--update_batch=32", "--updates_per_rollout=2"]
PLAIN = ["--filter_keep=1", "--kl_coef=0.001", "--clip_high=0.2"]
STARPO_S = ["--filter_keep=0.25", "--kl_coef=0", "--clip_high=0.28"]
STUDIES = {
    "algorithms": {algo: [*LAKE, f"--algo={algo}", "--max_iters=25", "--eval_every=25",
                          "--prompts_per_iter=16", "--update_batch=64",
                          *(["--critic_lr=1e-3", "--lam=0.95"] if algo in starpo.CRITICS else [])]
                   for algo in starpo.ALGOS},
    "collapse": {
        f"{name} on {env}": [*PUSHED, f"--env={env}", *words]
        for env in ("Bandit", "BanditSafe") for name, words in (("plain StarPO", PLAIN), ("StarPO-S", STARPO_S))},
    "template": {
        "reward ignores the state": ["--config=configs/tiny_template.py"],
        "reward of the lake": ["--config=configs/tiny_template.py", "--env=FrozenLakeNoSlip", "--max_turns=6"]},
}
THINKER = ["sft.py", "--model=assets/tiny", "--tasks=FrozenLakeNoSlip:1:0.5", "--think=True", "--steps=800", "--lr=1e-3",
           "--max_new_tokens=24", "--out_dir=runs/study/thinker"]


@dataclass(frozen=True)
class Options:
    seeds: int = 3      # runs of each
    jobs: int = 1       # at the same time


def run(name, words, seed, core):
    """Train unless it has been done; return the lines of metrics."""
    out = os.path.join("runs", "study", f"{name.replace(' ', '_')}_{seed}")
    path = os.path.join(out, "metrics.jsonl")
    if not os.path.exists(os.path.join(out, "policy")):         # written at the end
        shutil.rmtree(out, ignore_errors=True)                  # what an interrupted run left
        pin = ["taskset", "-c", str(core)] if core is not None else []
        os.makedirs("runs/study", exist_ok=True)
        with open(f"{out}.log", "w") as log:
            subprocess.run([*pin, sys.executable, "train.py", *words, f"--seed={seed}", f"--out_dir={out}"], check=True,
                           stdout=log, stderr=log)
    with open(path) as f:
        return [json.loads(line) for line in f]


def spread(values, form="{:.3f}"):
    """Mean and the range over seeds."""
    return form.format(statistics.mean(values)) + " (" + ", ".join(form.format(v) for v in values) + ")"


def first(lines, level):
    """The first iteration with a verdict, or None."""
    return next((m["iter"] for m in lines if m.get("health") == level), None)


def show_algorithms(name, runs):
    return [name, spread([lines[-1]["eval/FrozenLakeNoSlip/success"] for lines in runs]),
            spread([sum(m["rollout_s"] + m["update_s"] for m in lines if m["iter"]) for lines in runs], "{:.0f}")]


def show_collapse(name, runs):
    best = [max(range(len(x) - 4), key=lambda i: sum(m["success"] for m in x[i:i + 5])) for x in runs]
    return [name, spread([statistics.mean(m["success"] for m in x[:5]) for x in runs], "{:.2f}"),
            spread([statistics.mean(m["success"] for m in x[i:i + 5]) for x, i in zip(runs, best)], "{:.2f}"),
            spread([statistics.mean(m["success"] for m in x[-5:]) for x in runs], "{:.2f}"),
            ", ".join(str(first(x, "warn")) for x in runs), ", ".join(str(first(x, "collapse")) for x in runs)]


def show_template(name, runs):
    def at(place, key):
        return spread([[m[key] for m in x if key in m][place] for x in runs], "{:.2f}")
    keys = [f"template/first/{key}" for key in ("retrieval_accuracy", "mutual_information", "conditional_entropy")]
    return [name, *(f"{at(0, key)} → {at(-1, key)}" for key in keys), spread([x[-1]["success"] for x in runs], "{:.2f}")]


SHOW = {"algorithms": (show_algorithms, ["algo", "success", "seconds"]),
        "collapse": (show_collapse, ["run", "first 5", "best 5", "last 5 iterations", "first warn", "first collapse"]),
        "template": (show_template, ["run", "retrieval accuracy", "mutual information", "conditional entropy", "success"])}


def main(study, o):
    """Run a study and print its table in Markdown."""
    if study == "template" and not os.path.exists("runs/study/thinker/model.safetensors"):
        subprocess.run([sys.executable, *THINKER], check=True)
    tasks = [(name, words, seed) for name, words in STUDIES[study].items() for seed in range(o.seeds)]
    cores = list(range(o.jobs))

    def work(task):
        core = cores.pop() if o.jobs > 1 else None
        try:
            return run(*task, core)
        finally:
            cores.append(core)
    with ThreadPoolExecutor(o.jobs) as pool:
        done = dict(zip([(name, seed) for name, _, seed in tasks], pool.map(work, tasks)))
    show, head = SHOW[study]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name in STUDIES[study]:
        print("| " + " | ".join(show(name, [done[name, seed] for seed in range(o.seeds)])) + " |")


if __name__ == "__main__":
    try:
        if len(sys.argv) < 2 or sys.argv[1] not in STUDIES:
            raise UserError(f"say which study: {', '.join(STUDIES)}\n{__doc__}")
        main(sys.argv[1], load_config(Options, sys.argv[2:])[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:
        print(f"error: a run ended with status {error.returncode}: {' '.join(error.cmd)}", file=sys.stderr)
        sys.exit(1)
