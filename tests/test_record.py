"""Trackers get what metrics.jsonl has, and sample episodes as a table: TensorBoard's real event files, wandb offline."""
import glob
import os

import pytest

import train
from helpers import run_tiny
from settings import UserError
from train import Config, check_config

WORDS = ["--max_iters=2", "--eval_every=2", "--eval_tasks=8", "--prompts_per_iter=2", "--log_rollouts=3"]


def test_tensorboard(tmp_path):
    """Every number of every iteration is in the event files under its name; so are the settings and three episodes."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    _, lines = run_tiny(tmp_path, "tiny_bandit", *WORDS, "--track=tensorboard")
    events = EventAccumulator(str(tmp_path / "run/nanoragen"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    got = {k: {e.step: e.value for e in events.Scalars(k)} for k in events.Tags()["scalars"]}
    for m in lines:
        for key, value in m.items():
            if isinstance(value, (int, float)) and key != "iter":
                assert got[key][m["iter"]] == pytest.approx(value, rel=1e-5), key
    texts = [e for e in events.Tensors("episodes/text_summary")]
    assert {e.step for e in texts} == {0, 1, 2}
    text = texts[0].tensor_proto.string_val[0].decode()
    assert text.count("[assistant]") == 3 and text.startswith("env | group | member | success | return | episode")


def test_wandb_offline(tmp_path, monkeypatch):
    """Without a network and an account: the run's file holds the curves and the table of episodes."""
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    run_tiny(tmp_path, "tiny_bandit", *WORDS, "--track=wandb")
    wandb.teardown()        # a run's finish() doesn't wait for the process that writes its file
    [path] = glob.glob(str(tmp_path / "run/wandb/offline-run-*/run-*.wandb"))
    data = open(path, "rb").read()
    assert all(name in data for name in (b"group_reward_std", b"eval/Bandit/success", b"prompts_per_iter"))
    [table] = glob.glob(str(tmp_path / "run/wandb/offline-run-*/files/media/table/episodes_2_*.json"))
    assert "[assistant]" in open(table).read()


def test_a_tracker_that_fails_is_no_end(tmp_path, capsys, monkeypatch):
    """No account, no network, no room: said once, and the run goes on without."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    monkeypatch.setattr(train, "track", lambda *a: 1 / 0)
    _, lines = run_tiny(tmp_path, "tiny_bandit", *WORDS, "--track=tensorboard")
    out = capsys.readouterr().out
    assert len(lines) == 3 and out.count("track='tensorboard' failed, the run goes on without (ZeroDivisionError") == 1


def test_trackers_that_are_not_there(monkeypatch):
    """A misspelt one, and one without its package: what to do, before anything is loaded."""
    with pytest.raises(UserError, match="track must name some of tensorboard, wandb, trackio, with commas, got 'tensorbord'"):
        check_config(Config(track="wandb,tensorbord"))
    monkeypatch.setattr(train.check_trackers.__globals__["importlib"].util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="track='trackio' needs its package: pip install trackio"):
        check_config(Config(track="trackio"))


def test_the_console_says_where_things_lie(tmp_path, capsys):
    """The last words of a run: its folder, and what to do next."""
    run_tiny(tmp_path, "tiny_bandit", *WORDS)
    out = capsys.readouterr().out
    run = os.path.join(str(tmp_path), "run")
    assert f"python report.py {run}" in out and f"python eval.py --policy {run}" in out
