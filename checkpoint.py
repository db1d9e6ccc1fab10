"""What lets a run survive: checkpoints to resume from, signals that stop it cleanly, files that are never torn.

    out_dir/checkpoints/iter_000040/
      policy/                   as model.save writes it: plain transformers or peft load it
      critic.safetensors        the critic's weights, where there is one
      optimizer.safetensors     Adam's moments and step counts by parameter name
      state.json, config.json   the loop's counters and running means; the settings
      manifest.json             size and CRC-32 of every other file: a damaged checkpoint is known before it is used

Everything is written to a temporary folder, flushed to the disk and renamed, so that a kill at any instant leaves
the last good one. No state of a random generator is saved: every episode's numbers follow from (seed, iteration,
group, member). Nothing is unpickled.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import zlib

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

# What makes a run this run: a resumed one can't change it. (A new run can start from an old one's policy.)
FIXED = ("model", "env", "env_args", "algo", "lora_rank", "seed")
WRITE_ERRORS = (OSError, SafetensorError)       # a full disk, a folder that is read-only or gone


# ---------------------------------------------------------------------------------------------- files

def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk and not only in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path, text):
    """Replace a file by text, whole or not at all."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    sync(path + ".tmp")
    os.replace(path + ".tmp", path)


def write_folder(path, fill):
    """Replace a folder by what fill(temporary folder) writes, whole or not at all; raises what fill raises.

    A folder can't be replaced in one step: the old one is renamed, not deleted, before the new one takes its name.
    """
    new, old = path + ".tmp", path + ".old"

    def tidy():         # also what a run that was killed has left
        if os.path.isdir(old) and not os.path.isdir(path):
            os.rename(old, path)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
    tidy()
    os.makedirs(new)
    try:
        fill(new)
        for folder, _, names in os.walk(new):
            for name in (*names, "."):
                sync(os.path.join(folder, name))
        if os.path.isdir(path):
            os.rename(path, old)
        os.rename(new, path)
        sync(os.path.dirname(path) or ".")
    finally:
        tidy()


def crc(path):
    """Return [size in bytes, CRC-32] of a file."""
    size = check = 0
    with open(path, "rb") as f:
        while block := f.read(2 ** 22):
            size, check = size + len(block), zlib.crc32(block, check)
    return [size, check]


class Lines:
    """A file of JSON lines that only ever grows by whole lines; what can't be written waits for the next time.

    path: the file. until: keep the lines whose "iter" is at most this; later ones, and a torn last one, are dropped.
    """

    def __init__(self, path, until=None):
        self.path, self.waiting, self.size = path, "", 0
        if until is not None and os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as f:
                text = "".join(line for line in f if line.endswith("\n") and parsed(line).get("iter", until + 1) <= until)
            write_text(path, text)
            self.size = os.path.getsize(path)

    def add(self, *records):
        """Append records (dicts), a line each; numbers that are not finite become null. Raises OSError."""
        self.waiting += "".join(json.dumps(finite(r), allow_nan=False) + "\n" for r in records)
        with open(self.path, "ab") as f:
            f.truncate(self.size)               # what an attempt that failed has left
            f.write(self.waiting.encode())
            f.flush()
            os.fsync(f.fileno())
        self.size, self.waiting = os.path.getsize(self.path), ""


def parsed(line):
    try:
        return json.loads(line)
    except ValueError:
        return {}


def finite(x):
    """Replace every float that JSON has no name for (nan, inf) by None, in dicts and lists of any depth."""
    if isinstance(x, dict):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not abs(x) < float("inf") else x


# ---------------------------------------------------------------------------------------------- checkpoints

def folder_of(out_dir, iteration):
    return os.path.join(out_dir, "checkpoints", f"iter_{iteration:06d}")


def save(path, policy, tokenizer, optimizer, state, settings, card):
    """Write a checkpoint folder. state, settings: dicts for JSON. Raises one of WRITE_ERRORS; then nothing is there."""
    names = {p: name for name, p in policy.named_parameters()}
    moments = {f"{names[p]}.{key}": x.contiguous() for p, s in optimizer.state.items() for key, x in s.items()}
    critic = {names[p]: p.data.contiguous() for p in policy.critic_parameters()}

    def fill(folder):
        policy.save(os.path.join(folder, "policy"), tokenizer, card)
        for name, tensors in (("critic", critic), ("optimizer", moments)):
            if tensors:
                save_file(tensors, os.path.join(folder, name + ".safetensors"))
        for name, values in (("state", state), ("config", settings)):
            write_text(os.path.join(folder, name + ".json"), json.dumps(values, indent=2))
        write_text(os.path.join(folder, "manifest.json"), json.dumps(sums(folder), indent=2))
    write_folder(path, fill)


def size_of(policy, optimizer):
    """About how many bytes a checkpoint takes: trainable weights and moments."""
    tensors = [*policy.policy_parameters(), *policy.critic_parameters()]
    return sum(x.numel() * x.element_size() for x in [*tensors, *(x for s in optimizer.state.values() for x in s.values())])


def refusal(what, path, error, size=0):
    """Say that a write failed, where, why and how much room it needs; the run goes on."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(os.path.dirname(path)).free
        error = f"{error}; it needs about {size / 2 ** 20:.1f} MB, {free / 2 ** 20:.1f} MB are free" if size else error
    return f"note: {what} could not be written to {path} ({error}). What was there before is untouched; the run goes on"


def sums(folder):
    """{relative name: [size, CRC-32]} of all files in a folder but its manifest."""
    paths = [os.path.join(f, name) for f, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(p, folder): crc(p) for p in sorted(paths) if os.path.basename(p) != "manifest.json"}


def prune(out_dir, keep_last, best):
    """Delete all checkpoints but the newest keep_last and that of iteration best (None: none)."""
    found = every(out_dir)
    for path in found[:-keep_last]:
        if path != folder_of(out_dir, -1 if best is None else best):
            shutil.rmtree(path, ignore_errors=True)


def every(out_dir):
    """The paths of all checkpoints, the oldest first, whole or not."""
    root = os.path.join(out_dir, "checkpoints")
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    return [os.path.join(root, n) for n in names if n.startswith("iter_") and n[5:].isdigit()]


def newest(out_dir, say):
    """Return the path of the newest whole checkpoint, None without any; say what is damaged."""
    for path in reversed(every(out_dir)):
        problem = damage(path)
        if not problem:
            return path
        say(f"note: checkpoint {path} is damaged ({problem}) and is skipped")


def damage(path):
    """What is wrong with a checkpoint, in words; "" where nothing is."""
    try:
        want, got = read_json(path, "manifest"), sums(path)
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    missing, changed = want.keys() - got.keys(), [n for n in want if n in got and want[n] != got[n]]
    return ", ".join([f"{n} is missing" for n in sorted(missing)] + [f"{n} has other content" for n in changed])


def read_json(path, name):
    with open(os.path.join(path, name + ".json"), encoding="utf-8") as f:
        return json.load(f)


def load(path, policy, optimizer):
    """Put a checkpoint's weights and moments into a policy and its optimizer; return its state (dict)."""
    policy.load(os.path.join(path, "policy"))
    read = lambda name: load_file(file) if os.path.exists(file := os.path.join(path, name + ".safetensors")) else {}
    critic, moments = read("critic"), read("optimizer")
    names = {p: name for name, p in policy.named_parameters()}
    with torch.no_grad():
        for p in policy.critic_parameters():
            p.copy_(critic[names[p]])
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = {i: {key: moments[f"{names[p]}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
             for i, p in enumerate(params) if f"{names[p]}.step" in moments}
    optimizer.load_state_dict({"state": found, "param_groups": optimizer.state_dict()["param_groups"]})
    return read_json(path, "state")


def changes(old, new):
    """The settings (dicts) that differ, each in words, and those of them that a run can't change."""
    names = [n for n in new if n not in ("resume", "out_dir") and n in old and old[n] != new[n]]
    return [f"{n} {old[n]!r} -> {new[n]!r}" for n in names], [n for n in names if n in FIXED]


# ---------------------------------------------------------------------------------------------- signals

class Abandoned(BaseException):
    """Raised by a signal where a rollout can be given up; no `except Exception` of an environment may catch it."""


class Signals:
    """Turn SIGTERM, SIGINT and SIGUSR1 into a wish to stop, which the loop asks for; a second one exits at once.

        with Signals() as signals: ...      signals.name is "" or the name of the first one

    Where `can_abandon` is set, the first one raises Abandoned. accelerate's launcher doesn't hand SIGTERM on to a
    single process, but dies and leaves it behind: so under it, this process asks Linux for a SIGUSR1 at that moment.
    """
    CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self):
        self.name, self.can_abandon = "", False

    def __enter__(self):
        self.before = {s: signal.signal(s, self.handle) for s in self.CAUGHT}
        if "ACCELERATE_MIXED_PRECISION" in os.environ and "LOCAL_RANK" not in os.environ and sys.platform == "linux":
            parent_death_signal = 1         # PR_SET_PDEATHSIG of sys/prctl.h
            ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGUSR1)
        return self

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def handle(self, number, frame):
        if self.name and number != signal.SIGUSR1:      # the launcher's death often follows a Ctrl-C
            os.write(2, b"second signal: exiting at once, the last checkpoint is whole\n")
            os._exit(128 + number)
        self.name = self.name or signal.Signals(number).name
        if self.can_abandon:
            self.can_abandon = False
            raise Abandoned
