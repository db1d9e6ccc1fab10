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
import time
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
        # some network disks can't do it for folders
        with contextlib.suppress(OSError) if os.path.isdir(path) else contextlib.nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path, text):
    """Replace a file by text, whole or not at all."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    sync(path + ".tmp")
    os.replace(path + ".tmp", path)


def tidy(path):
    """Clear what a write of a folder that was cut short has left: the old one comes back if the new one never came."""
    if os.path.isdir(path + ".old") and not os.path.isdir(path):
        os.rename(path + ".old", path)
    for end in (".tmp", ".old"):
        shutil.rmtree(path + end, ignore_errors=True)


def write_folder(path, fill):
    """Replace a folder by what fill(temporary folder) writes, whole or not at all; raises what fill raises.

    A folder can't be replaced in one step: the old one is renamed, not deleted, before the new one takes its name.
    """
    new, old = path + ".tmp", path + ".old"
    tidy(path)
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
        tidy(path)


def crc(path):
    """Return [size in bytes, CRC-32] of a file."""
    size = check = 0
    with open(path, "rb") as f:
        while block := f.read(2 ** 22):
            size, check = size + len(block), zlib.crc32(block, check)
    return [size, check]


class Lines:
    """A file of JSON lines that only ever grows by whole lines; what can't be written waits for the next time.

    Nothing is touched before the first line; a file that is there is written anew then, unless `cut` keeps some of it.
    """

    def __init__(self, path):
        self.path, self.waiting, self.size = path, "", 0

    def cut(self, until):
        """Keep the lines up to the last with an "iter" of at most this; cut later ones off, and a torn one. Raises OSError."""
        if os.path.exists(self.path):
            with open(self.path, "rb") as f:
                for line in f:
                    if not line.endswith(b"\n") or parsed(line).get("iter", until + 1) > until:
                        break
                    self.size += len(line)
            os.truncate(self.path, self.size)       # needs no room, and is done or not

    def add(self, *records):
        """Append records (dicts), a line each; numbers that are not finite become null. Raises OSError."""
        self.waiting += "".join(json.dumps(finite(r), allow_nan=False) + "\n" for r in records)
        with open(self.path, "ab") as f:
            if f.tell() > self.size:            # what an attempt that failed has left; a file that is gone starts anew
                f.truncate(self.size)
            f.write(self.waiting.encode())
            f.flush()
            os.fsync(f.fileno())
        self.size, self.waiting = os.path.getsize(self.path), ""


def parsed(line):
    """The dict in a line of JSON, or {}."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


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
    """Return the path of the newest whole checkpoint, None where there is no checkpoint at all.

    What a kill has left is cleared. Damaged newer ones are said and set aside as iter_000040.damaged, so that they don't
    count among the newest that are kept. Raises ValueError where all are damaged: to start anew would lose the run.
    """
    root = os.path.join(out_dir, "checkpoints")
    for name in os.listdir(root) if os.path.isdir(root) else ():
        if name.endswith((".tmp", ".old")):
            tidy(os.path.join(root, name[:-4]))
    aside = []
    for path in reversed(every(out_dir)):
        problem = damage(path)
        if not problem:
            for bad in aside:
                shutil.rmtree(bad + ".damaged", ignore_errors=True)
                os.rename(bad, bad + ".damaged")
            return path
        say(f"note: checkpoint {path} is damaged ({problem}) and is skipped")
        aside.append(path)
    if aside:
        raise ValueError(f"no checkpoint in {root} is whole. If the disk is at fault, mend it; to start anew, delete {root}")


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
    # copies: on a CPU they would be views of the file, which may change
    read = lambda name: {key: x.clone() for key, x in load_file(file).items()} if os.path.exists(
        file := os.path.join(path, name + ".safetensors")) else {}
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

class Signals:
    """Turn SIGTERM, SIGINT and SIGUSR1 into a wish to stop, which the loop asks for; a second one exits at once.

        with Signals() as signals: ...      signals.name is "" or the name of the first one

    accelerate's launcher doesn't hand SIGTERM on to a single process, but dies and leaves it behind; so does torchrun, of
    some signals. So under a launcher this process asks Linux for a SIGUSR1 at its parent's death. And torchrun's ranks get
    a signal twice where their whole group is signalled, so under it a second one within ECHO seconds isn't counted.
    """
    CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ECHO = 3

    def __init__(self):
        self.name, self.since = "", 0.0

    def __enter__(self):
        self.before = {s: signal.signal(s, self.handle) for s in self.CAUGHT}
        if {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"} & os.environ.keys() and sys.platform == "linux":
            parent_death_signal = 1         # PR_SET_PDEATHSIG of sys/prctl.h
            ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGUSR1)
        return self

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def handle(self, number, frame):
        wait = self.ECHO if "LOCAL_RANK" in os.environ else 0
        if self.name and number != signal.SIGUSR1 and time.monotonic() >= self.since + wait:
            os.write(2, b"second signal: exiting at once, the last checkpoint is whole\n")
            os._exit(128 + number)
        if not self.name:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
