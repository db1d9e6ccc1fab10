"""One HTML page of a run, or of several: curves and trajectories, to be opened from the file system.

    python report.py runs/tiny_frozenlake                                   # writes runs/tiny_frozenlake/report.html
    python report.py runs/a_0 runs/a_1 runs/b --out=report.html             # seeds of one config are one line

Reads what train.py writes: config.json, metrics.jsonl and rollouts/*.jsonl. What an older run lacks is left out of
the page. This file gathers the numbers; assets/report.html, into which they are put as JSON, draws them.
"""

import argparse
import glob
import json
import math
import os
import re
import statistics
import sys

import envs
from settings import UserError

MOST_POINTS = 2000              # of a curve
MOST_BYTES = 8_000_000          # of episodes on a page
OWN = ("seed", "out_dir", "resume")     # settings in which the runs of one line may differ
CHARTS = (                      # key of metrics.jsonl, title, what it is and how to read it
    ("success", "Success in training", "share of an iteration's episodes, at training temperature"),
    ("traj_return", "Return", "mean of an iteration's episodes, format penalty included"),
    ("group_reward_std", "Spread in a group", "std of the returns of one task; falls first in an Echo Trap"),
    ("entropy", "Entropy", "nats per trained token; falls next"),
    ("grad_norm", "Gradient norm", "before clipping; a spike is the point of no return"),
    ("response_len", "Response length", "sampled tokens per turn"),
    ("thought_words", "Thought", "words of thought per turn"),
    ("template/first/retrieval_accuracy", "Thought follows its prompt", "share likeliest under their own prompt"),
    ("format_ok", "Format", "share of turns with a well-formed, known answer"),
    ("approx_kl", "KL to the old policy", "nats per token; 0 with one step per rollout"),
    ("kl_ref", "KL to the reference", "nats per token"),
    ("rollout_s", "Rollout", "seconds per iteration"),
    ("update_s", "Update", "seconds per iteration"))
SHARES = ("success", "format_ok", "template/first/retrieval_accuracy")      # drawn from 0 to 1
TAGS = re.compile("(</?(?:think|answer)>)")
SYMBOLS = "".join(dict.fromkeys("".join("".join(make().legend) for make in envs.ENVS.values())))


# ---------------------------------------------------------------------------------------------- reading

def read_lines(path, notes):
    """The JSON objects in a file, one a line; what is none (the last line of a killed run) is noted and left out."""
    with open(path, encoding="utf-8", errors="replace") as f:
        found = [parsed(line) for line in f if line.strip()]
    good = [x for x in found if isinstance(x, dict)]
    if len(good) < len(found):
        notes.append(f"{path}: {len(found) - len(good)} unreadable line(s) left out")
    return good


def parsed(text):
    """JSON as Python has it, None for what is none; NaN and Infinity, which a browser would not read, become text."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return None


def number(x):
    """A finite number as it goes into the page, six digits; None for anything else."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
        return None
    return float(f"{x:.6g}")


def read_run(path, notes):
    """A run as {name, config, metrics, files}: files is a list of {kind, iter, episodes}."""
    metrics = os.path.join(path, "metrics.jsonl")
    if not os.path.isfile(metrics):
        raise UserError(f"{path!r} holds no run: there is no metrics.jsonl in it")
    config = {}
    if os.path.isfile(os.path.join(path, "config.json")):
        with open(os.path.join(path, "config.json"), encoding="utf-8", errors="replace") as f:
            config = parsed(f.read()) or {}
    by_iter = {m["iter"]: m for m in read_lines(metrics, notes) if isinstance(m.get("iter"), int)}    # the last counts
    if not by_iter:
        raise UserError(f"{metrics} holds no iteration yet")
    files = []
    for name in sorted(glob.glob(os.path.join(glob.escape(path), "rollouts", "*.jsonl"))):
        kind, _, iteration = os.path.basename(name)[:-len(".jsonl")].partition("_")
        if kind in ("iter", "eval") and iteration.isdigit():
            episodes = [episode(e, config) for e in read_lines(name, notes)]
            files.append({"kind": kind, "iter": int(iteration), "episodes": episodes})
    name = os.path.basename(os.path.abspath(path))
    return {"name": name, "path": path, "config": config, "files": files, "metrics": [by_iter[i] for i in sorted(by_iter)]}


# ---------------------------------------------------------------------------------------------- episodes

def legend(env, config):
    """{symbol: meaning} of a world: {} where it isn't drawn as a grid, None where only the run itself knew it."""
    try:
        return dict(envs.make_env(env, **config.get("env_args", {})).legend)
    except (ValueError, TypeError, RuntimeError):
        return None


def split_grid(text, symbols):
    """Cut a message at its grid: [text before, rows, text after]; [text, [], ""] without one.

    A grid is at least 3 lines of one length, at least 3, of nothing but the world's symbols.

    >>> split_grid("Lake\\nP__\\n_O_\\n__G\\n10", "P_OG")
    ['Lake', ['P__', '_O_', '__G'], '10']
    """
    lines = text.split("\n")
    for start, line in enumerate(lines):
        end = start
        while end < len(lines) and len(lines[end]) == len(line) >= 3 and set(lines[end]) <= set(symbols):
            end += 1
        if end - start >= 3:
            return ["\n".join(lines[:start]), lines[start:end], "\n".join(lines[end:])]
    return [text, [], ""]


def parts(given, said, known=True):
    """Cut a response into [text, its kind, trained]: kind is tag, thought, answer or other.

    given: what was put at its start, and fed. said: what was sampled. known: whether anybody knows which is which;
    else trained is None.

    >>> parts("<answer>", "Up</answer>")
    [['<answer>', 'tag', False], ['Up', 'answer', True], ['</answer>', 'tag', True]]
    """
    kind, out = "other", []
    for text, trained in ((given, False), (said, True)):
        for piece in TAGS.split(text):
            is_tag = TAGS.fullmatch(piece)
            if is_tag:
                kind = "other" if piece[1] == "/" else {"think": "thought", "answer": "answer"}[piece[1:-1]]
            if piece:
                out.append([piece, "tag" if is_tag else kind, trained if known else None])
    return out


def prefill(content, fed, said):
    """What of a response was fed: a message holds fed and sampled text in one, the segments tell them apart."""
    return next((content[:i] for i in range(len(content) + 1)
                 if fed.rstrip().endswith(content[:i].rstrip()) and said.startswith(content[i:])), "")


def episode(record, config):
    """An episode as the page wants it: its turns, each with what was told, said, done and paid."""
    env = record.get("env") or config.get("env", "")
    symbols = legend(env, config)
    symbols = SYMBOLS if symbols is None else symbols
    told, contents = ([m["content"] for m in record.get("messages", ()) if m["role"] == role]
                      for role in ("user", "assistant"))
    segments = record.get("segments", ())
    fed, said = ([text for text, trained in segments if trained is kind] for kind in (False, True))
    known = len(fed) == len(said) == len(contents)      # an older run doesn't tell what was trained
    at = lambda key, k: values[k] if k < len(values := record.get(key, ())) else None
    turns = []
    for k, content in enumerate(contents):
        given = prefill(content, fed[k], said[k]) if known else ""
        turns.append({"fed": fed[k] if known else None, "told": split_grid(told[k], symbols),
                      "said": parts(given, said[k] if known else content, known),
                      "reward": number(at("turn_rewards", k)), "ok": at("format_ok", k), "actions": at("actions", k)})
    return {"env": env, "group": record.get("group"), "member": record.get("member"),
            "success": bool(record.get("success")), "return": number(record.get("return")),
            "truncated": bool(record.get("truncated")), "turns": turns}


def fit(files, budget):
    """Drop every second iteration, never the first or the last, then the later episodes, until files fit budget bytes.

    >>> [f["iter"] for f in fit([{"iter": i, "episodes": []} for i in range(9)], 100)]
    [0, 4, 8]
    """
    while len(json.dumps(files)) > budget:
        if len(files) > 2:
            files = files[:-1:2] + files[-1:]
        elif any(len(f["episodes"]) > 1 for f in files):
            files = [f | {"episodes": f["episodes"][:(len(f["episodes"]) + 1) // 2]} for f in files]
        else:
            break
    return files


# ---------------------------------------------------------------------------------------------- curves

def same_config(runs):
    """Group runs whose settings are the same but for OWN; a run without a config stands alone."""
    groups = {}
    for run in runs:
        shared = {k: v for k, v in run["config"].items() if k not in OWN}
        groups.setdefault(json.dumps(shared, sort_keys=True) if shared else run["path"], []).append(run)
    return list(groups.values())


def line_name(names):
    """What the names of a line's runs have in common.

    >>> line_name(["lake", "lake_1"]), line_name(["lake_10", "lake_11"]), line_name(["a"]), line_name(["a", "b"])
    ('lake', 'lake', 'a', 'a and others')
    """
    if len(names) == 1:
        return names[0]
    prefix = os.path.commonprefix(names)
    if prefix not in names:
        prefix = re.sub(r"[-_. ]*\d*$", "", prefix)     # a seed's first digit may be shared as well
    return prefix or f"{names[0]} and others"


def curve(runs, key):
    """A metric over iterations, over seeds: {x, mid (the mean), low, high, n (runs with a value there)}."""
    values = {}
    for run in runs:
        for m in run["metrics"]:
            if (v := number(m.get(key))) is not None:
                values.setdefault(m["iter"], []).append(v)
    rows = [(i, number(statistics.fmean(v)), min(v), max(v), len(v)) for i, v in sorted(values.items())]
    return dict(zip(("x", "mid", "low", "high", "n"), map(list, zip(*thin(rows, MOST_POINTS))))) if rows else None


def thin(rows, most):
    """At most `most` rows: of each stretch of iterations the lowest and the highest, so that no spike is lost."""
    if len(rows) <= most:
        return rows
    size = math.ceil(len(rows) / (most // 2))
    kept = set()
    for start in range(0, len(rows), size):
        stretch = range(start, min(start + size, len(rows)))
        kept |= {min(stretch, key=lambda i: rows[i][2]), max(stretch, key=lambda i: rows[i][3])}
    return [rows[i] for i in sorted(kept)]


def verdicts(metrics):
    """Stretches of warnings of the Echo Trap: a list of [level, first, last iteration, signs]."""
    spans, before = [], None
    for m in metrics:
        level, signs = m.get("health"), ", ".join(m.get("health_signs") or ())
        if level in ("warn", "collapse"):
            if before == (level, signs):
                spans[-1][2] = m["iter"]
            else:
                spans.append([level, m["iter"], m["iter"], signs])
        before = (level, signs)
    return spans


def worlds(runs):
    """The worlds that were evaluated, in their order."""
    return list(dict.fromkeys(key[len("eval/"):-len("/success")] for run in runs for m in run["metrics"] for key in m
                              if key.startswith("eval/") and key.endswith("/success")))


def levels(runs, key):
    """What a success or an accuracy stands beside: a list of [name, value]."""
    names = ("random", "optimal") if key.startswith("eval/") else ("chance",) if key.endswith("accuracy") else ()
    beside = [(name, re.sub("(success|accuracy)$", name, key)) for name in names]
    return [[name, x] for name, other in beside
            for x in sorted({number(m.get(other)) for run in runs for m in run["metrics"]} - {None})]


def charts(lines):
    """All charts that have anything to draw: a list of {key, title, note, share, levels, series}."""
    runs, found = [run for line in lines for run in line], []
    held_out = [(f"eval/{env}/success", "Success on held-out tasks", f"{env}: share of the fixed tasks")
                for env in worlds(runs)]
    for key, title, note in (*held_out, *CHARTS):
        series = [{"line": i, **c} for i, line in enumerate(lines) if (c := curve(line, key))]
        if series and (key != "thought_words" or any(x for c in series for x in c["mid"])):     # no thinking, no words
            found.append({"key": key, "title": title, "note": note, "share": key in SHARES or key.startswith("eval/"),
                          "levels": levels(runs, key), "series": series})
    return found


# ---------------------------------------------------------------------------------------------- the page

def facts(runs):
    """A line's result in a few [label, value, small print]; means over its runs."""
    found, num = [], len(runs)
    short = lambda x: f"{x:.3f}" if x % 1 else f"{x:.0f}"
    for env in worlds(runs):
        key = f"eval/{env}/success"
        ends = [(c["mid"][0], c["mid"][-1]) for run in runs if (c := curve([run], key))]
        each = [", ".join(short(end) for _, end in ends)] if num > 1 else []
        found.append([f"success on {env}", " → ".join(short(statistics.fmean(x)) for x in zip(*ends)),
                      "; ".join(each + [f"{name} {short(x)}" for name, x in levels(runs, key)])])
    last = [run["metrics"][-1] for run in runs]
    found.append(["iterations", ", ".join(dict.fromkeys(str(m["iter"]) for m in last)), ""])
    seconds = [s for m in last if (s := number(m.get("time_s"))) is not None]
    if seconds:
        s = statistics.fmean(seconds)
        found.append(["time", f"{s:.0f} s" if s < 90 else f"{s / 60:.1f} min" if s < 5400 else f"{s / 3600:.1f} h",
                      "mean of a run" if num > 1 else ""])
    spans = [verdicts(run["metrics"]) for run in runs]
    first = {level: min(s[1] for run in spans for s in run if s[0] == level) for level in ("warn", "collapse")
             if any(s[0] == level for run in spans for s in run)}
    found.append(["Echo Trap", ", ".join(f"{level} at {i}" for level, i in first.items()) or "no warning",
                  f"first of {sum(map(bool, spans))} of {num} runs" if first and num > 1 else ""])
    return found


def thin_episodes(run, budget, notes):
    """Leave out sample episodes of a run until they fit budget bytes, evaluations and training half each; say so."""
    num = sum(len(f["episodes"]) for f in run["files"])
    of_kind = lambda kind: [f for f in run["files"] if f["kind"] == kind]
    run["files"] = fit(of_kind("iter"), budget // 2) + fit(of_kind("eval"), budget // 2)
    kept = sum(len(f["episodes"]) for f in run["files"])
    if kept < num:
        notes.append(f"{run['name']}: {kept:,} of {num:,} sample episodes are on this page, all are in its rollouts/")


def gather(paths):
    """Everything on the page, as one dict for JSON."""
    notes = []
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UserError("a run is named twice")
    runs = [read_run(path, notes) for path in paths]
    names = [run["name"] for run in runs]
    for run in runs:
        run["name"] = run["name"] if names.count(run["name"]) == 1 else run["path"]
        thin_episodes(run, MOST_BYTES // len(runs), notes)
    longest = max(len(run["metrics"]) for run in runs)
    if longest > MOST_POINTS:
        notes.append(f"curves are thinned from {longest:,} iterations to at most {MOST_POINTS:,} points: the lowest and "
                     f"the highest of each stretch")
    lines = same_config(runs)
    configs = [{k: v for k, v in line[0]["config"].items() if k not in OWN} for line in lines]
    differ = sorted({k for c in configs for k in c if any(c.get(k) != other.get(k) for other in configs)})
    worlds_of = lambda run: {e["env"] for f in run["files"] for e in f["episodes"]}
    members = [[run["name"] for run in line] for line in lines]
    names = [line_name(own) for own in members]
    return {"lines": [{"name": name if names.count(name) == 1 else ", ".join(own), "runs": own, "facts": facts(line),
                       "config": config, "differ": {k: config[k] for k in differ if k in config}}
                      for name, own, line, config in zip(names, members, lines, configs)],
            "charts": charts(lines),
            "traps": [{"line": i, "run": run["name"], "spans": spans} for i, line in enumerate(lines) for run in line
                      if (spans := verdicts(run["metrics"]))],
            "runs": [{"name": run["name"], "files": run["files"],
                      "legends": {env: legend(env, run["config"]) or {} for env in worlds_of(run)}} for run in runs],
            "notes": notes}


def page(data):
    """The HTML page. The JSON in it holds no "<", so that nothing a model wrote can end its script element."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "report.html"), encoding="utf-8") as f:
        template = f.read()
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("{{data}}", text)


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)


def main(argv):
    arguments = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", nargs="+", help="folders that train.py wrote")
    arguments.add_argument("--out", help="the page; for one run by default RUN/report.html")
    options = arguments.parse_args(argv)
    if not options.out and len(options.runs) > 1:
        raise UserError("several runs go onto one page: say which, as --out=report.html")
    out = options.out or os.path.join(options.runs[0], "report.html")
    if not out.endswith(".html"):
        raise UserError(f"--out must end in .html, got {out!r}")      # and so never names a file of a run
    try:
        data = gather(options.runs)
        text = page(data)
        with open(out, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError as error:
        raise UserError(f"{error.filename!r}: {error.strerror}") from None
    for note in data["notes"]:
        print(f"note: {note}")
    print(f"wrote {out}, {os.path.getsize(out) / 1e6:.1f} MB: open it in a browser (no server, no network)")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
