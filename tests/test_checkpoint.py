"""A run that survives: exact resume, damaged files, signals, kills, full disks, and faults inside training."""
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import checkpoint
import envs
import model
import rollout
import starpo
import train
from helpers import run_tiny
from rollout import make_batch
from settings import UserError, load_config

SHORT = ["--eval_every=2", "--eval_tasks=16", "--save_every=2", "--prompts_per_iter=6", "--log_rollouts_every=2"]


def figures(lines):
    """Metrics without what a clock or the process says."""
    return [{k: v for k, v in m.items() if not k.endswith(("_s", "_gb"))} for m in lines]


def contents(folder):
    """{relative name: bytes} of all files in a folder, but for those that hold seconds or settings."""
    paths = [os.path.join(f, name) for f, _, names in os.walk(folder) for name in names]
    return {os.path.relpath(p, folder): open(p, "rb").read() for p in paths
            if not p.endswith(("state.json", "config.json", "manifest.json", "metrics.jsonl", "README.md"))}


# ---------------------------------------------------------------------------------------------- resume

@pytest.mark.parametrize("words", [
    ["--algo=ppo", "--kl_coef=0.01", "--updates_per_rollout=2"],
    ["--algo=ppo", "--kl_coef=0.01", "--lora_rank=4", "--lr=1e-3"],
    ["--algo=grpo", "--refill=1"],
], ids=["ppo", "ppo+lora", "grpo"])
def test_two_and_two_is_four(tmp_path, words):
    """On a CPU a resumed run is bit-equal to one that was never stopped: metrics, sampled episodes, weights of policy
    and critic, Adam's moments; the reference stays the start, not the checkpoint."""
    _, whole = run_tiny(tmp_path / "whole", "tiny_bandit", "--max_iters=4", *SHORT, *words)
    run_tiny(tmp_path / "parts", "tiny_bandit", "--max_iters=2", *SHORT, *words)
    last, parts = run_tiny(tmp_path / "parts", "tiny_bandit", "--max_iters=4", "--resume", *SHORT, *words)
    assert figures(whole) == figures(parts) and parts[-1] == last and [m["iter"] for m in parts] == [0, 1, 2, 3, 4]
    one, two = (contents(tmp_path / name / "run") for name in ("whole", "parts"))
    assert one == two
    moments = "checkpoints/iter_000004/optimizer.safetensors"
    assert len(one[moments]) > 1000 and any("rollouts/iter_000004" in name for name in one)
    assert ("checkpoints/iter_000004/critic.safetensors" in one) == ("--algo=ppo" in words)
    assert parts[-1]["time_s"] > parts[2]["time_s"]         # the clock goes on as well
    if "--kl_coef=0.01" in words:
        assert last["kl_ref"] > 0


def test_resume_of_what_is_not_there(tmp_path, capsys):
    """--resume without a checkpoint starts anew, drops an earlier attempt's lines, and doesn't touch foreign files;
    on a finished run it does nothing."""
    last, lines = run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--resume", *SHORT, "--save_every=0")
    assert "starting anew" in capsys.readouterr().out and len(lines) == 2
    _, again = run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--resume", *SHORT)
    assert figures(again) == figures(lines)
    capsys.readouterr()
    _, finished = run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--resume", *SHORT)
    assert finished == again and "the run is finished: 1 iterations" in capsys.readouterr().out
    (tmp_path / "other/run").mkdir(parents=True)
    (tmp_path / "other/run/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files, but no run"):
        run_tiny(tmp_path / "other", "tiny_bandit", "--resume", *SHORT)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file is no folder, or is read-only"):
        run_tiny(tmp_path / "file", "tiny_bandit", *SHORT)


def test_changed_settings(tmp_path, capsys):
    """What may change is told and used, what makes the run this run is refused by name."""
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", *SHORT)
    for word, name in (("--lora_rank=4", "lora_rank"), ("--algo=ppo", "algo"), ("--seed=1", "seed"),
                       ("--env=BanditSafe", "env")):
        with pytest.raises(UserError, match=f"can't be resumed with another {name} .*--model="):
            run_tiny(tmp_path, "tiny_bandit", "--max_iters=2", "--resume", *SHORT, word)
    before = contents(tmp_path / "run")
    capsys.readouterr()
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=2", "--resume", "--lr=0.0", *SHORT)
    assert "note: resuming with changed settings: lr 0.0003 -> 0.0, max_iters 1 -> 2" in capsys.readouterr().out.replace(
        "max_iters 1 -> 2; lr 0.0003 -> 0.0", "lr 0.0003 -> 0.0, max_iters 1 -> 2")
    assert contents(tmp_path / "run")["policy/model.safetensors"] == before["policy/model.safetensors"]
    assert checkpoint.changes({"lr": 1, "env": "A"}, {"lr": 2, "env": "B", "new": 3}) == (["lr 1 -> 2", "env 'A' -> 'B'"], ["env"])


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def flip(path):
    data = bytearray(open(path, "rb").read())
    data[len(data) // 2] ^= 1
    open(path, "wb").write(data)


@pytest.mark.parametrize("harm, name, reason", [
    (cut, "optimizer.safetensors", "optimizer.safetensors has other content"),
    (flip, "policy/model.safetensors", "has other content"),
    (os.remove, "state.json", "state.json is missing"),
    (flip, "state.json", "has other content"),
    (cut, "manifest.json", "manifest.json"),
    (os.remove, "manifest.json", "manifest.json"),
])
def test_damaged_checkpoints_are_skipped(tmp_path, capsys, harm, name, reason):
    """The newest whole one is used, whatever happened to the newest; its lines of metrics stay, later ones go."""
    _, whole = run_tiny(tmp_path, "tiny_bandit", "--max_iters=4", *SHORT)
    run = tmp_path / "run"
    harm(run / "checkpoints/iter_000004" / name)
    os.makedirs(run / "checkpoints/iter_000006.tmp/policy")        # a kill during the next write leaves such a folder
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"iter": 5, "succ')                               # and such a line
    capsys.readouterr()
    _, again = run_tiny(tmp_path, "tiny_bandit", "--max_iters=4", "--resume", *SHORT)
    out = capsys.readouterr().out
    assert "iter_000004 is damaged" in out and reason in out and "going on from" in out and "iter_000002" in out
    assert figures(again) == figures(whole) and checkpoint.damage(run / "checkpoints/iter_000004") == ""


def test_damaged_checkpoints_are_not_the_newest(tmp_path, capsys, monkeypatch):
    """A damaged newer one is set aside: it doesn't push a whole one out. Where none is whole, nothing is thrown away."""
    words = ["--eval_every=0", "--save_every=2", "--keep_last=1", "--prompts_per_iter=2", "--empty_stop=9"]
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=2", *words)
    folder = tmp_path / "run/checkpoints"
    shutil.copytree(folder / "iter_000002", folder / "iter_000004")
    cut(folder / "iter_000004/manifest.json")
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=3", "--resume", *words)
    assert sorted(os.listdir(folder)) == ["iter_000003", "iter_000004.damaged"]
    cut(folder / "iter_000003/optimizer.safetensors")
    before = open(tmp_path / "run/metrics.jsonl").read()
    with pytest.raises(UserError, match="no checkpoint in .* is whole"):
        run_tiny(tmp_path, "tiny_bandit", "--max_iters=3", "--resume", *words)
    assert open(tmp_path / "run/metrics.jsonl").read() == before and len(os.listdir(folder)) == 2


def test_what_a_kill_leaves_is_cleared(tmp_path):
    """Half-written checkpoints go at the next resume; one that was renamed away, and not yet replaced, comes back."""
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", *SHORT, "--save_every=1")
    folder = tmp_path / "run/checkpoints"
    os.makedirs(folder / "iter_000013.tmp/policy")
    os.rename(folder / "iter_000001", folder / "iter_000001.old")
    assert checkpoint.newest(tmp_path / "run", print) == str(folder / "iter_000001")
    assert os.listdir(folder) == ["iter_000001"]


def test_which_checkpoints_are_kept(tmp_path):
    """The newest keep_last and the one of the best evaluation, which is also written where no save was due."""
    wins = iter([0.0, 0.2, 0.9, 0.9, 0.5, 0.1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *a: ({"eval/Bandit/success": next(wins)} | {
            f"eval/Bandit/{k}": None for k in ("random", "optimal", "score")}, {}))
        run_tiny(tmp_path, "tiny_bandit", "--max_iters=5", "--eval_every=1", "--save_every=3", "--keep_last=1",
                 "--prompts_per_iter=2", "--filter_keep=1")
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["iter_000002", "iter_000005"]
    assert checkpoint.read_json(tmp_path / "run/checkpoints/iter_000005", "state")["top"] == {"iter": 2, "success": 0.9}
    for n in (7, 8, 9):
        os.makedirs(tmp_path / f"run/checkpoints/iter_{n:06d}")
    checkpoint.prune(tmp_path / "run", 2, None)
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["iter_000008", "iter_000009"]


def test_a_checkpoint_is_a_policy(tmp_path):
    """Its policy folder is a start for other runs and loads with plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=2", *SHORT)
    folder = tmp_path / "run/checkpoints/iter_000002/policy"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ours, tokenizer = model.load_model(str(folder))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.lm.parameters()))
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_adapters_come_back_bit_for_bit(tmp_path):
    """ActorCritic.load undoes any change of an adapter and leaves the rest alone, its trainable flags too."""
    policy, tokenizer = model.load_model("assets/tiny", lora_rank=4, critic=True)
    for p in policy.policy_parameters():
        p.data.normal_()
    want = {n: p.detach().clone() for n, p in policy.named_parameters()}
    policy.save(str(tmp_path), tokenizer)
    for p in policy.policy_parameters():
        p.data.zero_()
    policy.load(str(tmp_path))
    assert all(torch.equal(want[n], p) for n, p in policy.named_parameters())
    assert len(policy.policy_parameters()) == len([n for n in want if "default" in n]) and policy.critic_parameters()


def test_lines(tmp_path):
    """By hand: numbers that JSON has no name for become null, whole lines up to an iteration are kept, a failed write
    is made good by the next."""
    path = str(tmp_path / "m.jsonl")
    log = checkpoint.Lines(path)
    log.add({"iter": 1, "x": math.nan, "deep": [{"y": math.inf}, (1.5, -math.inf)]})
    assert open(path).read() == '{"iter": 1, "x": null, "deep": [{"y": null}, [1.5, null]]}\n'
    log.path = str(tmp_path)        # a folder can't be appended to
    with pytest.raises(OSError):
        log.add({"iter": 2})
    log.path = path
    with open(path, "a") as f:
        f.write('{"iter": 2, "to')  # what a full disk left of it
    log.add({"iter": 3})
    assert [json.loads(line)["iter"] for line in open(path)] == [1, 2, 3]
    with open(path, "a") as f:
        f.write('{"iter": 4, "to')
    kept = checkpoint.Lines(path)
    kept.cut(until=2)
    assert kept.size == os.path.getsize(path)
    assert [json.loads(line)["iter"] for line in open(path)] == [1, 2]
    os.remove(path)             # a disk that was taken away and came back empty
    kept.add({"iter": 5})
    assert open(path).read() == '{"iter": 5}\n'


def test_folders_are_replaced_whole_or_not_at_all(tmp_path):
    """A write that fails leaves the old folder and no other; so does a kill between the two renames."""
    path = str(tmp_path / "policy")
    put = lambda text: lambda folder: open(os.path.join(folder, "a"), "w").write(text)
    read = lambda: open(os.path.join(path, "a")).read()
    checkpoint.write_folder(path, put("1"))
    checkpoint.write_folder(path, put("2"))

    def fail(folder):
        put("3")(folder)
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError):
        checkpoint.write_folder(path, fail)
    assert read() == "2" and os.listdir(tmp_path) == ["policy"]
    os.rename(path, path + ".old")
    with pytest.raises(OSError):
        checkpoint.write_folder(path, fail)
    assert read() == "2" and os.listdir(tmp_path) == ["policy"]


# ---------------------------------------------------------------------------------------------- full disks

class FileLimit:
    """A disk on which no file grows beyond a size: the kernel refuses, as it does where the disk is full."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_full_disk(tmp_path, capsys, monkeypatch):
    """A checkpoint that can't be written is said with path and size, the one before stays whole, and the run goes on; a
    torn line of metrics is made good as soon as there is room."""
    real, limits = checkpoint.save, iter([2 ** 40, 2 ** 20, 2 ** 20])

    def save(*args):
        with FileLimit(next(limits)):
            real(*args)
    monkeypatch.setattr(checkpoint, "save", save)
    add = checkpoint.Lines.add

    def little_room(self, *records):
        full = self.path.endswith("metrics.jsonl") and records[0]["iter"] == 2
        with FileLimit(self.size + 10 if full else 2 ** 40):
            add(self, *records)
    monkeypatch.setattr(checkpoint.Lines, "add", little_room)
    last, lines = run_tiny(tmp_path, "tiny_bandit", "--max_iters=3", "--eval_every=0", "--save_every=1", "--prompts_per_iter=4")
    out = capsys.readouterr().out
    assert last["iter"] == 3 and [m["iter"] for m in lines] == [1, 2, 3]
    path = tmp_path / "run/checkpoints/iter_000002"
    assert f"note: checkpoint could not be written to {path} (" in out and "it needs about 10.0 MB, " in out
    assert "note: metrics could not be written" in out and "File too large" in out
    assert os.listdir(tmp_path / "run/checkpoints") == ["iter_000001"]
    assert checkpoint.damage(tmp_path / "run/checkpoints/iter_000001") == ""


def test_a_best_that_could_not_be_saved_takes_nothing_away(tmp_path, monkeypatch):
    """The checkpoint of the best evaluation goes only when a better one's is there."""
    wins = iter([0.0, 0.5, 0.2, 0.9, 0.1, 0.3])
    monkeypatch.setattr(train, "evaluate", lambda *a: ({"eval/Bandit/success": next(wins)} | {
        f"eval/Bandit/{k}": None for k in ("random", "optimal", "score")}, {}))
    real = checkpoint.save

    def save(path, *args):
        with FileLimit(2 ** 20 if path.endswith("000003") else 2 ** 40):
            real(path, *args)
    monkeypatch.setattr(checkpoint, "save", save)
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=5", "--eval_every=1", "--keep_last=1", "--prompts_per_iter=2", "--filter_keep=1")
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["iter_000001", "iter_000005"]
    assert checkpoint.read_json(tmp_path / "run/checkpoints/iter_000005", "state")["top"]["iter"] == 1


def test_a_tokenizer_that_can_not_be_written_is_a_full_disk(tmp_path):
    """The tokenizers library has no class for it: model.save gives it one that the run survives."""
    policy, tokenizer = model.load_model("assets/tiny")
    policy.lm.save_pretrained = lambda folder: os.makedirs(folder)      # the weights had room
    with FileLimit(1000), pytest.raises(checkpoint.WRITE_ERRORS, match="File too large"):
        policy.save(str(tmp_path / "policy"), tokenizer)


def test_resume_on_a_full_disk(tmp_path):
    """Cutting the metrics to the checkpoint needs no room."""
    _, whole = run_tiny(tmp_path, "tiny_bandit", "--max_iters=2", *SHORT)
    log = checkpoint.Lines(str(tmp_path / "run/metrics.jsonl"))
    with FileLimit(0):
        log.cut(1)
    assert [json.loads(line)["iter"] for line in open(log.path)] == [0, 1]


def test_a_console_that_is_gone_is_no_end(tmp_path):
    """Whoever reads the output ends, and then a signal comes: the run still saves, and its status is 0."""
    process = start(tmp_path, "--max_iters=100000", "--eval_every=0", "--prompts_per_iter=2", "--empty_stop=100000")
    wait_for(lambda: count_lines(tmp_path / "run/metrics.jsonl") >= 2)
    process.stdout.close()
    done = count_lines(tmp_path / "run/metrics.jsonl")
    wait_for(lambda: count_lines(tmp_path / "run/metrics.jsonl") >= done + 2)
    process.terminate()
    assert process.wait(60) == 0
    last = count_lines(tmp_path / "run/metrics.jsonl")
    assert checkpoint.damage(checkpoint.folder_of(tmp_path / "run", last)) == ""


# ---------------------------------------------------------------------------------------------- signals

def start(tmp_path, *words, launcher=(sys.executable,), out="run"):
    """Start train.py as a process of its own, with its own group, as from a terminal."""
    return subprocess.Popen([*launcher, "train.py", "--config", "configs/tiny_bandit.py", f"--out_dir={tmp_path / out}", *words],
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def count_lines(path):
    return len(open(path).readlines()) if os.path.exists(path) else 0


@pytest.mark.parametrize("number, when", [(signal.SIGTERM, "rollout"), (signal.SIGINT, "update"), (signal.SIGUSR1, "rollout")])
def test_a_signal_stops_the_run_whole(tmp_path, capsys, monkeypatch, number, when):
    """In a rollout the iteration is abandoned at once, in an update finished; then the checkpoint, a line on how to go
    on, status 0. The resumed run equals one that never stopped."""
    words = ["--config", "configs/tiny_bandit.py", "--max_iters=3", *SHORT, "--save_every=100"]
    name = {"rollout": "play_batch", "update": "keep_groups"}[when]
    where = rollout if when == "rollout" else train
    real, calls = getattr(where, name), [0]

    def kill(*args):
        calls[0] += 1
        if calls[0] == 2 + (when == "rollout"):         # the evaluation plays as well
            os.kill(os.getpid(), number)
        return real(*args)
    monkeypatch.setattr(where, name, kill)
    assert train.run([*words, f"--out_dir={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    done = 1 if when == "rollout" else 2
    assert f"stopped by {number.name} after iteration {done}; go on with the same command and --resume" in out
    assert os.listdir(tmp_path / "run/checkpoints") == [f"iter_{done:06d}"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train.run([*words, f"--out_dir={tmp_path / 'run'}", "--resume"]) == 0
    assert train.run([*words, f"--out_dir={tmp_path / 'whole'}"]) == 0
    read = lambda name: figures([json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")])
    assert read("run") == read("whole") and len(read("run")) == 4


def test_a_signal_before_anything_is_there(tmp_path, capsys, monkeypatch):
    """In the first rollout of a run without an evaluation there is nothing yet but the start: that is saved and resumed."""
    words = ["--config", "configs/tiny_bandit.py", "--max_iters=1", "--eval_every=0", "--prompts_per_iter=2",
             f"--out_dir={tmp_path / 'run'}", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "play_batch", lambda *a, real=rollout.play_batch: os.kill(os.getpid(), signal.SIGTERM) or real(*a))
        assert train.run(words) == 0
    assert "stopped by SIGTERM after iteration 0" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoints", "config.json"]
    assert train.run([*words, "--lr=1e-5"]) == 0 and count_lines(tmp_path / "run/metrics.jsonl") == 1
    assert json.load(open(tmp_path / "run/config.json"))["lr"] == 1e-5     # the settings of now


def test_a_signal_in_an_evaluation(tmp_path, monkeypatch):
    """The evaluation is played out, but no rollout after it."""
    played = []

    def play(*args, real=rollout.play_batch):
        played.append(len(args[3]))
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)
    monkeypatch.setattr(rollout, "play_batch", play)
    assert train.run(["--config", "configs/tiny_bandit.py", "--max_iters=3", f"--out_dir={tmp_path / 'run'}", *SHORT]) == 0
    assert played == [16] and os.listdir(tmp_path / "run/checkpoints") == ["iter_000000"]


def test_an_echo_is_no_second_signal(monkeypatch):
    """Under torchrun a signal to the whole group comes twice; later ones, and all in a lone process, count."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    signals = checkpoint.Signals()
    signals.handle(signal.SIGTERM, None)
    signals.handle(signal.SIGTERM, None)
    assert exits == [] and signals.name == "SIGTERM"
    signals.since -= signals.ECHO
    signals.handle(signal.SIGTERM, None)
    assert exits == [128 + signal.SIGTERM]
    monkeypatch.delenv("LOCAL_RANK")
    signals = checkpoint.Signals()
    signals.handle(signal.SIGINT, None)
    signals.handle(signal.SIGINT, None)
    assert exits == [128 + signal.SIGTERM, 128 + signal.SIGINT]


def test_a_second_signal_exits_at_once():
    """Whoever asks twice doesn't want to wait for anything."""
    code = ("import os, signal, time, checkpoint\nwith checkpoint.Signals() as s:\n os.kill(os.getpid(), signal.SIGTERM)\n"
            " assert s.name == 'SIGTERM'\n os.kill(os.getpid(), signal.SIGUSR1)\n os.kill(os.getpid(), signal.SIGINT)\n time.sleep(60)")
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    assert done.returncode == 128 + signal.SIGINT and "second signal" in done.stderr


@pytest.mark.parametrize("launcher", ["python", "accelerate"])
def test_signals_to_real_processes(tmp_path, launcher):
    """SIGTERM to the Python process; and to accelerate's launcher, which dies of it without a word to its child."""
    words = {"python": (sys.executable,), "accelerate": (sys.executable, "-m", "accelerate.commands.launch")}[launcher]
    process = start(tmp_path, "--max_iters=100000", "--eval_every=0", launcher=words)
    wait_for(lambda: count_lines(tmp_path / "run/metrics.jsonl") >= 2)
    process.terminate()
    out = process.communicate(timeout=60)[0]        # the pipe closes when the child has ended too
    if launcher == "python":
        assert process.returncode == 0, out
    done = [json.loads(line)["iter"] for line in open(tmp_path / "run/metrics.jsonl")]
    assert f"after iteration {done[-1]}; go on with the same command and --resume" in out
    assert done == list(range(1, done[-1] + 1))
    assert checkpoint.damage(checkpoint.folder_of(tmp_path / "run", done[-1])) == ""


# ---------------------------------------------------------------------------------------------- kills

SLOW_WRITE = """
import os, sys, time
sys.path.insert(0, ".")
import checkpoint, train
sync = checkpoint.sync
def slow(path):         # every file of a checkpoint takes its time, so that kills fall between them
    if "checkpoints" in path or "policy" in path:
        time.sleep(0.03)
    sync(path)
checkpoint.sync = slow
sys.exit(train.run(sys.argv[1:]))
"""


def kill_and_resume(tmp_path, kills, seed):
    """Kill a run at random moments, every other time while it writes a checkpoint; return how often each happened."""
    words = ["--config", "configs/tiny_bandit.py", f"--max_iters={3 * kills}", "--eval_every=3", "--eval_tasks=16",
             "--save_every=1", "--prompts_per_iter=4", "--algo=ppo", "--log_rollouts=0"]
    rng, run = random.Random(seed), tmp_path / "run"
    in_write = 0
    for n in range(kills):
        process = subprocess.Popen([sys.executable, "-c", SLOW_WRITE, *words, f"--out_dir={run}", "--resume"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = count_lines(run / "metrics.jsonl")
        wait_for(lambda: count_lines(run / "metrics.jsonl") not in (0, before) or process.poll() is not None)
        time.sleep(rng.uniform(0, 0.4))
        writing = lambda: any(name.endswith(".tmp") for name in os.listdir(run / "checkpoints")) if (
            run / "checkpoints").is_dir() else False
        if n % 2:
            wait_for(lambda: writing() or process.poll() is not None)
        in_write += writing() and process.poll() is None
        assert process.poll() is None, "it was finished before the kill: nothing was tested"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert train.run([*words, f"--out_dir={run}", "--resume"]) == 0
    assert train.run([*words, f"--out_dir={tmp_path / 'whole'}"]) == 0
    one, two = ([json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole"))
    assert figures(one) == figures(two) and len(one) == 3 * kills + 1
    assert contents(run / "policy") == contents(tmp_path / "whole/policy")
    last = f"checkpoints/iter_{3 * kills:06d}"
    assert contents(run / last) == contents(tmp_path / "whole" / last)
    return in_write


def test_killed_runs_end_as_if_they_never_were(tmp_path):
    """SIGKILL three times, once or more during the write of a checkpoint: same metrics, weights and moments."""
    assert kill_and_resume(tmp_path, 3, 0) >= 1


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    """The same with twenty kills."""
    print("kills during a checkpoint's write:", kill_and_resume(tmp_path, 20, 1))


# ---------------------------------------------------------------------------------------------- faults in training

def call_of(monkeypatch, where, name, k, change):
    """Let the k-th call of where.name return change(result), or raise what change raises."""
    real, calls = getattr(where, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        result = real(*args, **kwargs)
        return change(result) if calls[0] == k else result
    monkeypatch.setattr(where, name, wrapped)
    return calls


def poison_gradient(params, accelerator):
    params[0].grad[0] = math.nan


FAULTS = {
    "loss": (starpo, "starpo_loss", lambda r: (r[0] * math.nan, r[1])),
    "infinite loss": (starpo, "starpo_loss", lambda r: (r[0] + math.inf, r[1])),
    "advantage": (starpo, "group_advantages", lambda r: r.fill_(math.nan)),
    "logprob": (model.ActorCritic, "score", lambda r: (r[0] * math.inf, *r[1:])),
}


@pytest.mark.parametrize("kind", [*FAULTS, "gradient"])
def test_what_is_not_finite_skips_the_step(tmp_path, monkeypatch, kind):
    """The step leaves every weight bit-identical and no moments, is counted, and its metrics are null."""
    if kind == "gradient":
        monkeypatch.setattr(train, "reduce_gradients", poison_gradient)
    else:
        call_of(monkeypatch, *FAULTS[kind][:2], 1, FAULTS[kind][2])
    last, _ = run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--eval_every=1", "--eval_tasks=4", "--prompts_per_iter=4")
    assert (last["optimizer_steps"], last["skipped_steps"], last["entropy"], last["grad_norm"]) == (1, 1, None, None)
    before, after = (model.load_model(path)[0].state_dict() for path in ("assets/tiny", str(tmp_path / "run/policy")))
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not (tmp_path / "run/checkpoints/iter_000001/optimizer.safetensors").exists()


def test_metrics_are_those_of_the_steps_taken(tmp_path, monkeypatch):
    """Of two steps the second is poisoned: one step of Adam, one counted as skipped, and finite metrics of the first."""
    call_of(monkeypatch, starpo, "starpo_loss", 2, FAULTS["loss"][2])
    last, lines = run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--eval_every=0", "--prompts_per_iter=4",
                           "--update_batch=16", "--save_every=1")
    assert (last["optimizer_steps"], last["skipped_steps"]) == (2, 1)
    assert all(math.isfinite(last[k]) for k in ("policy_loss", "entropy", "grad_norm")) and 0.05 < last["entropy"] < 1
    taken = checkpoint.load_file(tmp_path / "run/checkpoints/iter_000001/optimizer.safetensors")
    assert {v.item() for k, v in taken.items() if k.endswith(".step")} == {1.0}


def test_too_many_skipped_steps_save_and_stop(tmp_path, monkeypatch, capsys):
    """After max_skipped in a row the run saves, says why, and ends with status 2; the weights are the first ones."""
    monkeypatch.setattr(starpo, "starpo_loss", lambda *a, real=starpo.starpo_loss, **k: (
        real(*a, **k)[0] * math.nan, real(*a, **k)[1]))
    status = train.run(["--config", "configs/tiny_bandit.py", "--max_iters=9", "--eval_every=0", "--prompts_per_iter=2",
                        "--max_skipped=3", f"--out_dir={tmp_path / 'run'}"])
    out, err = capsys.readouterr()
    assert status == 2 and "error: stopped after iteration 3; go on with the same command and --resume: 3 optimizer steps " \
        "in a row were skipped" in err and "SKIPPED 1 STEP(S)" in out
    lines = [json.loads(line) for line in open(tmp_path / "run/metrics.jsonl")]
    assert [m["iter"] for m in lines] == [1, 2, 3] and lines[-1]["entropy"] is None
    before, after = (model.load_model(path)[0].state_dict() for path in (
        "assets/tiny", str(tmp_path / "run/checkpoints/iter_000003/policy")))
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_too_many_skipped_steps_in_the_last_iteration(tmp_path, monkeypatch, capsys):
    """That nothing more was to come doesn't make it a success; the count goes on over a resume."""
    monkeypatch.setattr(starpo, "starpo_loss", lambda *a, real=starpo.starpo_loss, **k: (
        real(*a, **k)[0] * math.nan, real(*a, **k)[1]))
    words = ["--config", "configs/tiny_bandit.py", "--eval_every=0", "--prompts_per_iter=2", "--max_skipped=2",
             f"--out_dir={tmp_path / 'run'}"]
    assert train.run([*words, "--max_iters=1"]) == 0
    assert train.run([*words, "--max_iters=2", "--resume"]) == 2
    assert "2 optimizer steps in a row were skipped" in capsys.readouterr().err


def test_logits_that_are_not_finite_are_sampled_without_a_crash(tmp_path, monkeypatch):
    """A row of nan gives an id of the vocabulary with log-prob nan; the run skips its steps and goes on."""
    token, logp = rollout.draw(torch.tensor([[math.nan] * 5, [0.0, 1, 2, 3, 4]]), torch.tensor([0.5, 0.5]), 1.0)
    assert token.tolist()[0] in range(5) and math.isnan(logp[0]) and math.isfinite(logp[1])
    monkeypatch.setattr(model.ActorCritic, "logits", lambda *a, real=model.ActorCritic.logits: real(*a) * math.nan)
    last, lines = run_tiny(tmp_path, "tiny_bandit", "--max_iters=2", "--eval_every=0", "--prompts_per_iter=2", "--algo=arpo")
    assert last["skipped_steps"] == 1 and len(lines) == 2


MEMORY = ["--max_iters=1", "--eval_every=0", "--prompts_per_iter=4", "--algo=ppo", "--kl_coef=0.01",
          "--updates_per_rollout=2", "--micro_batch_tokens=1000"]


@pytest.fixture(scope="module")
def enough_memory(tmp_path_factory):
    """The metrics of a run that has all the memory that it needs."""
    return run_tiny(tmp_path_factory.mktemp("memory"), "tiny_frozenlake", *MEMORY)[1]


@pytest.mark.parametrize("where, k", [("rollout", 1), ("rollout", 7), ("prepare", 1), ("prepare", 3), ("update", 2), ("backward", 2)])
def test_out_of_memory_changes_no_result(enough_memory, tmp_path, monkeypatch, capsys, where, k):
    """At the k-th pass of a rollout or an update memory runs out: half the rows at once, the same metrics."""
    real = {"rollout": rollout.Rows.feed, "backward": torch.Tensor.backward}.get(where, model.ActorCritic.forward)
    calls = [0]

    def fail(*args, **kwargs):
        counts = {"rollout": True, "prepare": not torch.is_grad_enabled(), "update": torch.is_grad_enabled(), "backward": True}
        calls[0] += counts[where]
        if calls[0] == k and counts[where]:
            if where == "backward":
                real(args[0] * 2, **kwargs)     # it had already left a part of a gradient
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return real(*args, **kwargs)
    owner, name = {"rollout": (rollout.Rows, "feed"), "backward": (torch.Tensor, "backward")}.get(where, (model.ActorCritic, "forward"))
    monkeypatch.setattr(owner, name, fail)
    _, got = run_tiny(tmp_path / "got", "tiny_frozenlake", *MEMORY)
    change = "rollout_batch=16" if where == "rollout" else "micro_batch_tokens=500"
    assert f"note: out of memory; going on with {change}" in capsys.readouterr().err and calls[0] > k
    for one, two in zip(figures(enough_memory), figures(got)):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert two[key] == (pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value), key
    assert json.load(open(tmp_path / "got/run/config.json"))["micro_batch_tokens"] == 1000


def test_one_limit_of_memory_is_met_once(tmp_path, monkeypatch):
    """Every step that was cut before meets the same limit, and doesn't make the micro-batches of later ones smaller still."""
    real, calls = model.ActorCritic.forward, []

    def forward(self, tokens, *args, **kwargs):
        calls.append(len(tokens))
        if tokens.numel() > 300 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, tokens, *args, **kwargs)
    monkeypatch.setattr(model.ActorCritic, "forward", forward)
    cfg, typed, filed = load_config(train.Config, [
        "--config=configs/tiny_bandit.py", f"--out_dir={tmp_path}", "--max_iters=1", "--eval_every=0", "--prompts_per_iter=8",
        "--update_batch=16", "--micro_batch_tokens=512", "--share_prefix=False", "--algo=arpo"])
    last = train.main(cfg)
    assert last["optimizer_steps"] == 4 and cfg.micro_batch_tokens == 256


def test_out_of_memory_with_a_single_row_is_an_error(tmp_path, monkeypatch):
    """Where nothing is left to halve, the user learns what to change."""
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(torch.Tensor, "backward", fail)
    with pytest.raises(UserError, match="a single episode in a forward pass. Lower max_context"):
        run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--eval_every=0", "--prompts_per_iter=2")


def test_halves_of_a_batch_are_the_batch():
    """Every field, and the states under shared prompts, row by row; a batch of one row is not cut."""
    policy, tokenizer = model.load_model("assets/tiny")
    cfg = train.Config(max_turns=3, max_new_tokens=8, think=False, terse=True, max_context=512)
    played = rollout.collect(policy, rollout.Chat(tokenizer, False), lambda: envs.make_env("Sokoban"),
                             rollout.train_episodes(0, 1, range(3), 3), cfg, 1.0)
    b = make_batch(played, [0, 1, 2, 3, 4, 6, 7], "cpu", True)
    b.advantages = torch.arange(b.tokens.numel()).view(b.tokens.shape).float()
    halves = b.halves()
    assert [len(h.tokens) for h in halves] == [4, 3] and [len(h.halves()) for h in halves[1].halves()] == [2, 1]
    assert torch.equal(torch.cat([h.advantages for h in halves]), b.advantages) and halves[0].ref_logprobs is None
    assert torch.cat([h.index for h in halves]).tolist() == [0, 1, 2, 3, 4, 6, 7]
    want = policy(b.tokens, b.loss_mask, prefix=b.prefix)
    for half in (halves, [q for h in halves for q in h.halves()]):
        for name in ("logprobs", "entropy"):
            got = torch.cat([policy(h.tokens, h.loss_mask, prefix=h.prefix)[name] for h in half])
            assert torch.allclose(got, want[name], atol=1e-5), name


class Fragile(envs.Bandit):
    """A Bandit that breaks at reset, in a step, or pays nan, for some of its episodes."""
    breaks = ""

    def reset(self, seed, noise_seed=0):
        self.bad = noise_seed % 8 == 3
        if self.bad and self.breaks == "reset":
            raise KeyError("no such room")
        return super().reset(seed, noise_seed)

    def step(self, action):
        if self.bad and self.breaks == "step":
            raise ZeroDivisionError("the database is gone")
        observation, reward, *rest = super().step(action)
        return observation, math.nan if self.bad and self.breaks == "nan" else reward, *rest


@pytest.mark.parametrize("breaks, message", [("reset", "no such room"), ("step", "the database is gone"),
                                             ("nan", "must be a finite number, got nan")])
def test_an_environment_that_raises(tmp_path, monkeypatch, capsys, breaks, message):
    """Its episode is left out with its traceback on file, the others are as if it had not been there."""
    monkeypatch.setattr(Fragile, "breaks", breaks)
    envs.ENVS["Fragile"] = Fragile
    words = ["--env=Fragile", "--max_iters=1", "--eval_every=1", "--eval_tasks=16", "--prompts_per_iter=8"]
    last, lines = run_tiny(tmp_path, "tiny_bandit", *words, "--max_env_errors=0.5")
    episodes = rollout.train_episodes(0, 1, range(8), 8)
    bad = {(e.group, e.member) for e in episodes if e.noise_seed % 8 == 3}
    errors = [json.loads(line) for line in open(tmp_path / "run/errors.jsonl")]
    assert [(e["iter"], e["group"]) for e in errors if e["iter"] == 0] == [(0, 0), (0, 8)]      # noise seeds 123 and 131
    broken = [(e["group"], e["member"]) for e in errors if e["iter"] == 1][:-2]
    assert len(broken) == last["env_errors"] > 2 and set(broken) <= bad
    assert breaks != "reset" or set(broken) == bad      # the others play nothing where the answer is malformed
    assert all(message in e["error"] and "Traceback" in e["error"] for e in errors)
    out = capsys.readouterr().out
    assert f"{len(broken)} EPISODE(S) ENDED IN AN ERROR" in out and "tracebacks in" in out
    assert lines[0]["eval/Fragile/success"] <= 14 / 16 and (breaks == "nan" or lines[0]["eval/Fragile/random"] is None)
    monkeypatch.setattr(Fragile, "breaks", "")
    whole, _ = run_tiny(tmp_path / "whole", "tiny_bandit", *words)
    assert whole["env_errors"] == 0 and whole["success"] != last["success"]
    monkeypatch.setattr(Fragile, "breaks", breaks)
    with pytest.raises(UserError, match=f"stopped after iteration 0; .*{len(broken)} of 64 episodes ended in an error of the "
                                        f"environment, more than max_env_errors=0.01: .*{message}"):
        run_tiny(tmp_path / "strict", "tiny_bandit", *words, "--max_env_errors=0.01")
    assert os.listdir(tmp_path / "strict/run/checkpoints") == ["iter_000000"]


# ---------------------------------------------------------------------------------------------- soak

@pytest.mark.slow
def test_a_thousand_iterations_stay_flat(tmp_path):
    """Memory and seconds of the last fifth are those of the first fifth after 100 iterations of warm-up."""
    _, lines = run_tiny(tmp_path, "tiny_bandit", "--max_iters=1000", "--eval_every=0", "--save_every=50")
    rest = lines[100:]
    mean = lambda key, part: sum(m[key] for m in part) / len(part)
    fifth = len(rest) // 5
    middle = lambda part: sorted(m["rollout_s"] + m["update_s"] for m in part)[len(part) // 2]
    print("peak memory, GiB:", mean("peak_memory_gb", rest[:fifth]), "->", mean("peak_memory_gb", rest[-fifth:]))
    print("seconds an iteration:", middle(rest[:fifth]), "->", middle(rest[-fifth:]))
    assert mean("peak_memory_gb", rest[-fifth:]) <= 1.05 * mean("peak_memory_gb", rest[:fifth])
    assert middle(rest[-fifth:]) <= 1.25 * middle(rest[:fifth])
