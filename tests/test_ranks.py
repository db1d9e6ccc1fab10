"""Several ranks compute what one does, and none of them waits for ever. Real gloo processes on the CPU."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import starpo
import train
from checkpoint import damage, load_file
from test_checkpoint import count_lines, figures, wait_for

BASE = ["--max_iters=1", "--eval_every=0", "--save_every=1", "--log_rollouts=999", "--lr=1e-3"]
# Odd numbers throughout: shares, groups and micro-batches differ between ranks.
LAKE = ["--config", "configs/tiny_frozenlake.py", "--prompts_per_iter=3", "--group_size=5", "--filter_keep=0.7",
        "--micro_batch_tokens=400"]
CASES = {algo: [*LAKE, f"--algo={algo}"] for algo in starpo.ALGOS}
CASES["ppo+lora"] = [*LAKE, "--algo=ppo", "--lora_rank=4", "--kl_coef=0.01"]
CASES["grpo+lora"] = [*LAKE, "--algo=grpo", "--lora_rank=4", "--kl_coef=0.01", "--filter_by=top_p", "--filter_keep=0.9"]
CASES["one episode"] = [*LAKE, "--prompts_per_iter=1", "--group_size=1", "--algo=arpo", "--filter_keep=1.0"]
CASES["empty rank"] = [*LAKE, "--prompts_per_iter=1", "--group_size=3", "--algo=ppo", "--filter_keep=1.0", "--rollout_batch=0",
                       "--eval_every=1", "--eval_tasks=1"]
CASES["nothing kept"] = [*LAKE, "--prompts_per_iter=2", "--group_size=2", "--max_turns=1", "--filter_zero=False", "--algo=ppo"]
CASES["refill"] = [*LAKE, "--algo=grpo", "--refill=1", "--filter_zero=False", "--whiten=True", "--env=FrozenLakeNoSlip,Sokoban"]


def launch(ranks, runs, *fault):
    """Start tests/ranks.py on so many ranks."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone",
                             "tests/ranks.py", json.dumps(runs), *fault],
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Every case on two ranks: {name: folder}, and what they printed."""
    root = tmp_path_factory.mktemp("ranks")
    runs = [[*words[:2], *BASE, *words[2:], f"--out_dir={root / name}"] for name, words in CASES.items()]
    process = launch(2, runs)
    out = process.communicate(timeout=900)[0]
    assert process.returncode == 0, out[-5000:]
    return root, out


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(both, tmp_path, name):
    """The same sampled tokens, losses, metrics and gradient of the first update, to 1e-5."""
    root, out = both
    assert out.count("2 process(es) on cpu") == len(CASES)
    assert train.run([*CASES[name][:2], *BASE, *CASES[name][2:], f"--out_dir={tmp_path / 'one'}"]) == 0
    folders = tmp_path / "one", root / name
    episodes = [open(folder / "rollouts/iter_000001.jsonl").read() for folder in folders]
    assert episodes[0] == episodes[1]
    for one, two in zip(*(figures(map(json.loads, open(folder / "metrics.jsonl"))) for folder in folders)):
        # the evaluation after the step may turn rounding into another token
        assert one.keys() == two.keys() and len(one) > 1
        for key in one:
            if not (key.startswith("eval/") and one["iter"]):
                assert two[key] == (pytest.approx(one[key], rel=1e-5, abs=1e-6) if isinstance(one[key], float) else one[key]), key
    paths = [folder / "checkpoints/iter_000001/optimizer.safetensors" for folder in folders]
    assert [p.exists() for p in paths] == [name != "nothing kept"] * 2
    if name == "nothing kept":
        return
    one, two = ({k: x for k, x in load_file(p).items() if k.endswith("exp_avg")} for p in paths)
    assert one.keys() == two.keys()     # after one step Adam's first moment is a tenth of the gradient
    norm = torch.stack([x.norm() for x in one.values()]).norm()
    assert norm > 0 and max((one[k] - two[k]).norm() for k in one) <= 1e-5 * norm


def test_resume_on_another_number_of_ranks(tmp_path):
    """What two ranks began, one goes on with, and plays the same global batch of the next iteration."""
    words = ["--config", "configs/tiny_bandit.py", "--eval_every=0", "--save_every=1", "--prompts_per_iter=3", "--group_size=3",
             "--log_rollouts=99", "--log_rollouts_every=2", "--algo=ppo"]
    process = launch(2, [[*words, "--max_iters=1", f"--out_dir={tmp_path / 'run'}"],
                         [*words, "--max_iters=1", f"--out_dir={tmp_path / 'two'}"],
                         [*words, "--max_iters=2", f"--out_dir={tmp_path / 'two'}", "--resume"]])
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    assert train.run([*words, "--max_iters=2", f"--out_dir={tmp_path / 'run'}", "--resume"]) == 0
    lines = [[json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")] for name in ("run", "two")]
    assert [m["iter"] for m in lines[0]] == [1, 2] == [m["iter"] for m in lines[1]]
    for key in ("success", "traj_return", "entropy", "grad_norm", "policy_loss"):
        assert lines[0][1][key] == pytest.approx(lines[1][1][key], rel=1e-4, abs=1e-6), key
    assert len({open(tmp_path / name / "rollouts/iter_000002.jsonl").read() for name in ("run", "two")}) == 1


def test_the_command_itself_ends(tmp_path):
    """train.py under torchrun, not tests/ranks.py: several runs of two ranks end by themselves with status 0."""
    for n in range(3):
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "train.py",
                               "--config", "configs/tiny_bandit.py", "--max_iters=1", "--eval_every=0", "--prompts_per_iter=2",
                               f"--out_dir={tmp_path / str(n)}"], text=True, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "holds metrics.jsonl" in done.stdout and count_lines(tmp_path / str(n) / "metrics.jsonl") == 1


@pytest.mark.parametrize("fault, message", [
    ("raise", "ArithmeticError: rank 1 is out of luck"),
    # torchrun gives a rank that sleeps half a minute before it kills it
    pytest.param("hang", "kept this one waiting for more than rank_timeout", marks=pytest.mark.slow)])
def test_no_rank_waits_for_ever(tmp_path, fault, message):
    """An exception, or a rank that never comes, ends all of them with a status that isn't 0, and says so once."""
    process = launch(2, [["--config", "configs/tiny_bandit.py", "--max_iters=9", "--eval_every=0", "--prompts_per_iter=2",
                          "--rank_timeout=10", f"--out_dir={tmp_path / 'run'}"]], fault)
    start = time.monotonic()
    out = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and message in out and time.monotonic() - start < 90
    ours = [part for part in out.split("Traceback (most recent call last):")[1:] if "train.py" in part]
    assert len(ours) == (fault == "raise"), out
    assert count_lines(tmp_path / "run/metrics.jsonl") == 1


def test_a_signal_to_two_ranks(tmp_path):
    """torchrun hands SIGTERM to its ranks; they agree on the iteration, and rank 0 saves it."""
    process = launch(2, [["--config", "configs/tiny_bandit.py", "--max_iters=9999", "--eval_every=0", "--prompts_per_iter=3",
                          f"--out_dir={tmp_path / 'run'}"]])
    wait_for(lambda: count_lines(tmp_path / "run/metrics.jsonl") >= 2)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    done = count_lines(tmp_path / "run/metrics.jsonl")
    assert f"stopped by SIGTERM after iteration {done}; go on" in out
    assert f"iter_{done:06d}" in os.listdir(tmp_path / "run/checkpoints")
    assert damage(tmp_path / f"run/checkpoints/iter_{done:06d}") == "" and "train.py\", line" not in out
