"""train.py as a user meets it: settings, mistakes, short real runs of the laptop configs, and what they write."""
import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import diagnostics
import envs
import eval as evaluation
import model
import rollout
import sft
import train
from helpers import run_tiny
from rollout import Trajectory
from settings import UserError, load_config
from train import Config, check_config, micro_batches

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILES = ("train", "rollout", "envs", "starpo", "model", "checkpoint", "record", "dryrun", "diagnostics", "settings", "sft", "bench", "study",
         "eval", "report")


# ---------------------------------------------------------------------------------------------- settings

def test_file_then_command_line(tmp_path):
    """The command line wins over the file, in both spellings; int is accepted for float, '=' may stand in a value."""
    path = tmp_path / "c.py"
    path.write_text("import math\nlr = 1\nenv = 'Sokoban'\n_half = 0.5\nfilter_keep = _half\nclass Mine: pass\n")
    cfg, typed, filed = load_config(Config, ["--config", str(path), "--seed=3", "--max_iters", "7", "--think", "false",
                                             "--out_dir=a=b", "--env_args={'observation': 'coord'}"])
    assert (cfg.lr, cfg.env, cfg.filter_keep, cfg.seed, cfg.max_iters) == (1.0, "Sokoban", 0.5, 3, 7)
    assert cfg.think is False and cfg.out_dir == "a=b" and cfg.env_args == {"observation": "coord"}
    assert type(cfg.lr) is float and typed == {"seed", "max_iters", "think", "out_dir", "env_args"}
    assert filed == {"lr", "env", "filter_keep"}


@pytest.mark.parametrize("words, message", [
    (["--learning_rate=1"], "unknown setting 'learning_rate'"),
    (["--clip_hihg=0.3"], "did you mean clip_high"),
    (["--lr=fast"], "lr in the command line must be float, got 'fast'"),
    (["--seed=1.5"], "seed in the command line must be int, got 1.5"),
    (["--think=1"], "think in the command line must be bool"),
    (["lr=1"], "expected --name=value"),
    (["--lr"], "--lr needs a value"),
    (["--config=nowhere.py"], "does not exist. There are: "),
])
def test_bad_settings(words, message):
    """Every slip is named with what was expected and what came."""
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(Config, words)


@pytest.mark.parametrize("text, message", [
    ("learning_rate = 1", "unknown setting 'learning_rate' in "),
    ("lr = '1e-4'", "must be float, got '1e-4' (str)"),
    ("lr = 1 / 0", "raises ZeroDivisionError"),
    ("lr = ", "raises SyntaxError"),
])
def test_bad_files(tmp_path, text, message):
    """A misspelt or ill-typed name in a file is an error too, not only on the command line."""
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(Config, [f"--config={path}"])


@pytest.mark.parametrize("changes, message", [
    (dict(algo="gpro"), "algo must be one of ppo, bi_level_gae, grpo"),
    (dict(env="Sokoban,Sokoban"), "names an environment twice"),
    (dict(filter_by="top_k_abs", filter_keep=1.0, group_size=1), "needs group_size of at least 2"),
    (dict(env="Sokoban,FrozenLake", env_args={"size": 5}), "env_args belong to one environment"),
    (dict(algo="grpo", length_weight=True, loss_divisor="seq-mean-token-mean"), "count lengths twice"),
    (dict(group_size=0), "group_size must be at least 1, got 0"),
    (dict(temperature=0.0), "temperature must be above 0"),
    (dict(filter_keep=0.0), "filter_keep must be above 0"),
    (dict(clip_low=1.0), "clip_low must be between 0 and 1"),
    (dict(kl_kind="k1"), "kl_kind must be k2 or k3"),
    (dict(loss_divisor="mean"), "loss_divisor must be one of token-mean"),
    (dict(algo="grpo", group_size=1, filter_keep=1.0), "group_size must be at least 2"),
    (dict(device="gpu"), "device must be"),
    (dict(max_iters=0, eval_every=0), "nothing would happen"),
])
def test_impossible_settings(changes, message):
    """Sizes and choices that cannot work are refused before anything is loaded."""
    with pytest.raises(UserError, match=re.escape(message)):
        check_config(Config(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_asked_for_and_absent():
    """device='cuda' without CUDA is the user's mistake, not a crash deep in torch."""
    with pytest.raises(UserError, match="sees no CUDA device"):
        check_config(Config(device="cuda"))


def test_settings_that_the_algorithm_does_not_use():
    """A typed setting without effect is an error, from the config file a note; the used ones pass."""
    with pytest.raises(UserError, match="--lam would have no effect: algo='grpo' doesn't use it, but ppo, bi_level_gae"):
        check_config(Config(algo="grpo"), typed={"lam"})
    assert check_config(Config(algo="grpo"), filed={"lam"}) == [
        "note: lam from the config file has no effect: algo='grpo' doesn't use it, but ppo, bi_level_gae"]
    with pytest.raises(UserError, match="--step_coef would have no effect: algo='rloo' doesn't use it, but gigpo"):
        check_config(Config(algo="rloo"), typed={"step_coef"})
    with pytest.raises(UserError, match="think=False leaves no thoughts"):
        check_config(Config(think=False), typed={"template_every"})
    with pytest.raises(UserError, match="gradient_checkpointing runs every row whole"):
        check_config(Config(gradient_checkpointing=True), typed={"share_prefix"})
    with pytest.raises(UserError, match="kl_coef is 0"):
        check_config(Config(algo="grpo"), typed={"kl_kind"})
    assert check_config(Config(algo="grpo", kl_coef=0.1), typed={"kl_kind"}) == []
    assert check_config(Config(), typed={"lam", "gamma", "value_clip", "critic_lr"}) == []


def test_batch_arithmetic():
    """8 x 16 episodes, a quarter kept, batches of 32: one step, so clipping is inert, and it says so."""
    assert "2 of 8 groups kept = 32 episodes; 1 pass(es) in batches of 32 = 1 optimizer step(s): the ratio is " \
        "exactly 1" in train.batch_arithmetic(Config())
    assert "= 8 optimizer step(s): clipping can act" in train.batch_arithmetic(
        Config(filter_keep=1.0, updates_per_rollout=2))
    assert "3 of 8 groups kept = 48 episodes" in train.batch_arithmetic(Config(filter_by="top_k_abs", filter_keep=3.0))
    assert "at most 8 of 8 groups" in train.batch_arithmetic(Config(filter_by="min_p"))
    refilled = train.batch_arithmetic(Config(refill=2))      # a quarter of up to 24 groups
    assert "up to 3 times, until 8 groups have spread" in refilled and "at most 6 of 8 groups kept" in refilled


def test_every_setting_is_read():
    """A setting that no code reads is the quietest bug of all."""
    code = "".join(open(f"{name}.py").read() for name in FILES if name not in ("sft", "bench", "study", "eval"))
    code = code.replace(inspect.getsource(check_config), "")        # to refuse a value is not to use it
    for field in dataclasses.fields(Config):
        reads = re.findall(rf"cfg\.{field.name}\b", code)
        assert reads, f"Config.{field.name} is never read"
    code = open("sft.py").read() + open("rollout.py").read()
    for field in dataclasses.fields(sft.SftConfig):
        assert re.search(rf"cfg\.{field.name}\b", code), f"SftConfig.{field.name} is never read"
    code = open("eval.py").read() + open("rollout.py").read()
    for field in dataclasses.fields(evaluation.EvalConfig):
        assert re.search(rf"\b(cfg|c)\.{field.name}\b", code), f"EvalConfig.{field.name} is never read"


def test_imports_go_one_way():
    """envs, model and starpo import no file of the project, rollout and settings at most envs; nothing but scripts import train."""
    allowed = {"envs": set(), "model": set(), "starpo": set(), "rollout": {"envs"}, "settings": {"envs"},
               "diagnostics": {"rollout"}, "train": {"envs", "model", "starpo", "rollout", "checkpoint", "record", "dryrun", "diagnostics",
                                               "settings"}, "checkpoint": set(), "record": {"model", "rollout", "settings"},
               "dryrun": {"envs", "model", "rollout", "starpo", "train"},
               "bench": {"envs", "model", "rollout", "settings", "train"}, "study": {"starpo", "settings"},
               "report": {"envs", "settings"}, "sft": {"envs", "model", "rollout", "settings", "train"},
               "eval": {"diagnostics", "record", "envs", "model", "rollout", "settings", "starpo", "train"}}
    for name in FILES:
        found = set()
        for node in ast.walk(ast.parse(open(f"{name}.py").read())):
            found |= {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            found |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        assert found & set(FILES) <= allowed[name], name


def test_configs_are_valid():
    """Every config file in the repository passes the checks without a note, and stays short."""
    for name in sorted(os.listdir("configs")):
        if name.endswith(".py"):
            cfg, typed, filed = load_config(Config, [f"--config=configs/{name}"])
            assert check_config(cfg, typed, filed) == [], name
            envs.make_env(cfg.env, **cfg.env_args)
            assert len(open(f"configs/{name}").readlines()) <= 45, name


# ---------------------------------------------------------------------------------------------- mistakes, as processes

@pytest.mark.parametrize("words, message", [
    (["--clip_hihg=0.3"], "did you mean clip_high"),
    (["--config", "configs/tiny_frozenlake.py", "--env=FrozenLak"], "FrozenLake"),
    (["--config", "configs/tiny_frozenlake.py", "--env_args={'siz': 4}"], "siz"),
    (["--config", "configs/tiny_sokoban.py", "--env_args={'boxes': 12}"], "raise size or search_depth"),
    (["--config", "configs/tiny_frozenlake.py", "--model=nowhere/at_all"], "configs/tiny_frozenlake.py"),
    (["--config", "configs/tiny_frozenlake.py", "--max_context=20"], "leaves no room in max_context=20"),
])
def test_mistakes_end_with_status_2_and_no_traceback(tmp_path, words, message):
    """A user's mistake is one readable line on stderr and exit status 2."""
    done = subprocess.run([sys.executable, "train.py", *words, f"--out_dir={tmp_path / 'run'}"], text=True,
                          capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and message in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- real runs

KEYS = {"iter", "time_s", "rollout_s", "update_s", "rollout_tokens_per_s", "success", "traj_return",
        "group_reward_std", "entropy", "response_len", "format_ok", "grad_norm", "policy_loss", "value_loss",
        "approx_kl", "clip_frac_low", "clip_frac_high", "logprob_gap"}


def test_tiny_bandit_learns(tmp_path):
    """Thirty iterations on Bandit lift success on the held-out tasks from chance (0.5, standard error 0.04 of 128
    tasks) to above 0.8; the metrics file holds line k for iteration k and the evaluations."""
    last, lines = run_tiny(tmp_path, "tiny_bandit", "--max_iters=30", "--eval_tasks=128", "--eval_every=30")
    assert [m["iter"] for m in lines] == list(range(31))
    assert set(lines[0]) == {"iter", "time_s"} | {f"eval/Bandit/{k}" for k in ("success", "random", "optimal", "score")}
    assert all(KEYS <= set(m) for m in lines[1:]) and lines[-1] == last
    assert lines[0]["eval/Bandit/success"] <= 0.65 and last["eval/Bandit/success"] >= 0.8
    assert last["eval/Bandit/optimal"] == 1.0 and max(m["logprob_gap"] for m in lines[1:]) < 1e-5


@pytest.mark.parametrize("name", ["tiny_frozenlake", "tiny_sokoban"])
def test_tiny_configs_run(tmp_path, name):
    """Two iterations of the other laptop configs: finite metrics, a sample of episodes, config.json."""
    _, lines = run_tiny(tmp_path, name, "--max_iters=2", "--eval_every=0", "--prompts_per_iter=4",
                        "--log_rollouts_every=2", "--log_rollouts=3")
    assert [m["iter"] for m in lines] == [1, 2] and all(KEYS <= set(m) for m in lines)
    assert all(torch.isfinite(torch.tensor([float(m[k]) for k in KEYS])).all() for m in lines)
    assert lines[0]["format_ok"] > 0.95 and lines[0]["logprob_gap"] < 1e-5
    episodes = [json.loads(line) for line in open(tmp_path / "run/rollouts/iter_000002.jsonl")]
    assert len(episodes) == 3 and {m["role"] for m in episodes[0]["messages"]} == {"user", "assistant"}
    assert sum(episodes[0]["turn_rewards"]) == pytest.approx(episodes[0]["return"])
    assert json.load(open(tmp_path / "run/config.json"))["prompts_per_iter"] == 4
    assert (tmp_path / "run/policy/model.safetensors").exists()         # also without any evaluation


@pytest.mark.parametrize("words", [
    ["--algo=ppo", "--updates_per_rollout=2", "--update_batch=8", "--kl_coef=0.01"],
    ["--algo=ppo", "--lora_rank=4", "--kl_coef=0.01"],
    ["--algo=grpo", "--lora_rank=4", "--kl_coef=0.01", "--kl_kind=k2", "--updates_per_rollout=2"],
    ["--algo=brpo", "--kl_coef=0.01", "--loss_divisor=seq-mean-token-mean"],
    ["--algo=arpo", "--loss_divisor=seq-mean-token-sum-norm"],
    ["--algo=bi_level_gae", "--gamma_turn=0.9", "--lam=0.9", "--dual_clip=3", "--tis_cap=2"],
    ["--algo=dr_grpo", "--spread_weight=True", "--kept_scale=sqrt"],
    ["--algo=rloo", "--whiten=True", "--filter_score=length"],
    ["--algo=reinforce_pp", "--baseline=group", "--filter_by=top_p", "--filter_keep=0.9"],
    ["--algo=gigpo", "--gigpo_std=False", "--adv_clip_low=1", "--adv_clip_high=3", "--length_weight=True"],
    ["--algo=brpo", "--env=FrozenLakeNoSlip,Sokoban", "--refill=1", "--filter_keep=1", "--filter_zero=False"],
])
def test_every_path_trains(tmp_path, words):
    """Each algorithm, with and without LoRA and KL: finite steps, and the saved policy differs from the start."""
    last, _ = run_tiny(tmp_path, "tiny_frozenlake", "--max_iters=1", "--eval_every=1", "--eval_tasks=4",
                       "--prompts_per_iter=4", "--group_size=4", "--lr=1e-3", *words)
    assert last["skipped_steps"] == 0 and last["grad_norm"] > 0
    assert (last["approx_kl"] > 0) == (last["optimizer_steps"] > 1)
    assert ("explained_variance" in last) == bool({"--algo=ppo", "--algo=bi_level_gae"} & set(words))
    if "--kl_coef=0.01" in words:
        assert last["kl_ref"] == pytest.approx(0, abs=1e-6) or last["optimizer_steps"] > 1
    names = ("FrozenLakeNoSlip", "Sokoban") if "--refill=1" in words else ("FrozenLakeNoSlip",)
    assert all(f"eval/{name}/success" in last for name in names) and last["health"] == "ok"
    tokens = torch.arange(40)[None] + 20
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    start, saved = ([model.load_model(path, lora_rank=4 if "--lora_rank=4" in words and path != "assets/tiny" else 0)
                     [0].eval()(tokens, mask)["logprobs"]] for path in ("assets/tiny", str(tmp_path / "run/policy")))
    assert not torch.allclose(start[0], saved[0], atol=1e-5)


def player(group, member, rewards, keys=None, tokens=4, logprob=-0.5):
    """An episode of two sampled tokens a turn."""
    n = 2 * len(rewards)
    return Trajectory(tokens=[5] * (1 + n), loss_mask=[0] + [1] * n, logprobs=[0.0] + [logprob] * n,
                      turn_ids=[0] + [k for k in range(len(rewards)) for _ in (0, 1)], turn_rewards=rewards,
                      state_keys=keys or [7] * len(rewards), group=group, member=member)


def test_keep_groups():
    """By hand, three groups of two: by spread, mean return, length and sampled entropy; the refilled batch is cut."""
    played = [player(0, 0, [0.0]), player(0, 1, [1.0]), player(1, 0, [5.0], logprob=-2), player(1, 1, [5.0], logprob=-2),
              player(2, 0, [0.0, 0.0]), player(2, 1, [0.0, 3.0])]

    def kept(**changes):
        rows = train.keep_groups(played, Config(**{"filter_keep": 0.34, **changes})).tolist()
        assert rows[::2] == rows[1::2]
        return [g for g in range(3) if rows[2 * g]]
    assert kept() == [2] and kept(filter_score="return") == [1]
    assert kept(filter_score="length") == [2] and kept(filter_score="entropy") == [1]
    assert kept(filter_keep=1.0) == [0, 1, 2] and kept(filter_keep=1.0, filter_zero=False) == [0, 2]
    assert kept(filter_keep=1.0, refill=1, prompts_per_iter=1) == [0] == kept(filter_keep=1.0, refill=1, prompts_per_iter=1)
    assert kept(filter_keep=1.0, refill=1, prompts_per_iter=5) == [0, 2]


def test_credit():
    """What whole trajectories are worth, by hand: nothing off the kept groups, each option once, gigpo's steps."""
    played = [player(0, 0, [1.0]), player(0, 1, [3.0, 0.0], keys=[7, 8]), player(1, 0, [9.0]), player(1, 1, [9.0])]
    kept = torch.tensor([True, True, False, False])

    def scores(**changes):
        c = train.assign_credit(played, kept, Config(**changes))
        return [None if x is None else [round(v, 4) for v in x.flatten().tolist()] for x in (c.scores, c.weights)]
    assert scores(algo="ppo") == [None, [1, 1, 1, 1]]
    assert scores(algo="dr_grpo") == [[-1, 1, 0, 0], [1, 1, 1, 1]] == scores(algo="reinforce_pp", baseline="group")
    assert scores(algo="rloo")[0] == [-2, 2, 0, 0] and scores(algo="arpo")[0] == [1, 3, 0, 0]
    assert scores(algo="rloo", adv_clip_low=0.5, adv_clip_high=1.5)[0] == [-0.5, 1.5, 0, 0]
    assert scores(algo="grpo", kept_scale="linear")[1] == [0.5] * 4
    assert scores(algo="grpo", length_weight=True)[1] == [1.5, 0.75, 1, 1]
    # two tasks by turns: group 0 is of the one, group 1 of the other, and brpo compares each with its own
    assert scores(algo="brpo")[0][:2] == [-0.7071, 0.7071]
    both = train.assign_credit(played, torch.ones(4, dtype=torch.bool), Config(algo="brpo", env="Sokoban,FrozenLake")).scores
    assert both.tolist() == pytest.approx([-0.70711, 0.70711, 0, 0], abs=1e-4)
    steps = train.assign_credit(played, kept, Config(algo="gigpo", gigpo_std=False, gamma_turn=0.5, step_coef=2.0))
    assert steps.scores.tolist() == [-1, 1, 0, 0]       # both start in state 7 with 1 and 3 to go
    assert steps.turns.tolist() == [[-2, 0], [2, 0], [0, 0], [0, 0]]


def test_nothing_kept(tmp_path, capsys):
    """Without any group to train on, weights stay as they are, the metrics say null, and the run ends with a reason."""
    last, lines = run_tiny(tmp_path, "tiny_frozenlake", "--max_iters=5", "--eval_every=0", "--prompts_per_iter=2",
                           "--group_size=2", "--max_turns=1", "--filter_zero=False", "--empty_stop=2", "--algo=ppo")
    assert len(lines) == 2 and last["optimizer_steps"] == 0 and last["frac_kept"] == 0
    assert last["entropy"] is None and last["grad_norm"] is None and last["health"] == "ok"
    out = capsys.readouterr().out
    assert "NO GROUP KEPT" in out and "no group was kept for 2 iterations in a row" in out
    before, after = (model.load_model(path)[0].state_dict() for path in ("assets/tiny", str(tmp_path / "run/policy")))
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_collapse_stops_the_run(tmp_path, monkeypatch, capsys):
    """A verdict of the Echo Trap is in the line, in the metrics and at its first time in a sentence; "stop" stops."""
    monkeypatch.setattr(diagnostics.EchoTrap, "update", lambda self, m: (
        self.state["first"].update(warn=2) if m["iter"] == 2 else None,
        self.state["first"].update(collapse=3) if m["iter"] == 3 else None,
        setattr(self, "signs", ["entropy is low"][:m["iter"] - 1]), ("ok", "ok", "warn", "collapse")[m["iter"]])[-1])
    words = ["--max_iters=4", "--eval_every=0", "--prompts_per_iter=2"]
    last, lines = run_tiny(tmp_path, "tiny_bandit", *words, "--on_collapse=stop")
    assert os.path.exists(tmp_path / "run/policy/model.safetensors")
    assert [m["health"] for m in lines] == ["ok", "warn", "collapse"] and lines[1]["health_signs"] == ["entropy is low"]
    out = capsys.readouterr().out
    assert "| WARN: entropy is low |" in out and "Echo Trap: first warn at iteration 2: entropy is low" in out
    assert "stopped at iteration 3: collapse" in out


def test_template_metrics_in_a_run(tmp_path):
    """A run that thinks tests every k-th iteration whether its thoughts depend on their prompts; the cost is logged."""
    last, lines = run_tiny(tmp_path, "tiny_frozenlake", "--max_iters=2", "--eval_every=0", "--prompts_per_iter=3",
                           "--think=True", "--template_every=2", "--max_turns=2")
    assert not any(k.startswith("template") for k in lines[0])
    assert last["template_s"] > 0 and last["template/first/retrieval_chance"] == pytest.approx(1 / 3)
    assert {k.split("/")[2] for k in last if k.startswith("template/all/")} == {
        "conditional_entropy", "mutual_information", "retrieval_accuracy", "retrieval_chance"}


def test_a_run_goes_on_from_a_saved_policy(tmp_path):
    """--model=runs/x/policy starts with that policy's exact success, for full weights and for an adapter."""
    for rank in ("0", "4"):
        last, _ = run_tiny(tmp_path / rank, "tiny_bandit", "--max_iters=3", "--eval_every=3", "--eval_tasks=64",
                           "--lr=1e-3", f"--lora_rank={rank}")
        again, _ = run_tiny(tmp_path / rank / "again", "tiny_bandit", "--max_iters=0", "--eval_tasks=64",
                            f"--model={tmp_path / rank / 'run/policy'}", f"--lora_rank={rank}")
        assert again["eval/Bandit/success"] == last["eval/Bandit/success"]


def test_out_dir_that_holds_a_run(tmp_path):
    """Nothing of an earlier run is overwritten."""
    run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--eval_every=0", "--prompts_per_iter=2")
    with pytest.raises(UserError, match="already holds a run"):
        run_tiny(tmp_path, "tiny_bandit", "--max_iters=1", "--eval_every=0")


def test_same_seed_same_run(tmp_path):
    """On a CPU a run is a function of its settings: the metrics of two runs are equal, another seed's differ."""
    def metrics(name, *words):
        _, lines = run_tiny(tmp_path / name, "tiny_bandit", "--max_iters=2", "--eval_every=0", *words)
        return [{k: v for k, v in m.items() if not k.endswith("_s")} for m in lines]
    first = metrics("a")
    assert first == metrics("b", "--micro_batch_tokens=16384") and first != metrics("c", "--seed=1")


def test_memory_and_speed_settings_change_nothing(tmp_path):
    """They are knobs of memory and speed: same losses and gradient norm to 1e-4."""
    def metrics(name, *words):
        return run_tiny(tmp_path / name, "tiny_frozenlake", "--max_iters=1", "--eval_every=0", "--algo=ppo",
                        "--prompts_per_iter=4", *words)[0]
    want = metrics("a")
    for i, words in enumerate((["--micro_batch_tokens=300", "--rollout_batch=5"], ["--share_prefix=False"],
                               ["--gradient_checkpointing=True"])):
        got = metrics(str(i), *words)
        for key in ("success", "traj_return", "policy_loss", "value_loss", "entropy", "grad_norm"):
            assert want[key] == pytest.approx(got[key], rel=1e-4, abs=1e-6), (words, key)


def test_micro_batches():
    """Every row once, each batch within its budget, a prompt counted once for its rows, and the cheaper of two splits."""
    def episode(prompt, length, rest):
        return Trajectory(tokens=[prompt] * length + [9] * rest, loss_mask=[0] * length + [1] * rest)
    # two prompts of 100; the remainders of a group differ less than those of the whole, or more
    alike = [episode(p, 100, 10 + p) for p in (1, 2, 1, 2, 1, 2)]
    assert micro_batches(alike, range(6), 140, True) == [[0, 2, 4], [1, 3, 5]]      # 100 + 3 x 11, 100 + 3 x 12
    assert micro_batches(alike, range(6), 140, False) == [[0], [2], [4], [1], [3], [5]]
    mixed = [episode(p, 2, rest) for p, rest in ((1, 5), (2, 50), (1, 51), (2, 6))]
    assert micro_batches(mixed, range(4), 110, True) == [[0, 3], [1, 2]]            # by length: 16 + 106
    assert micro_batches(mixed, [1], 10, True) == [[1]]                             # one row may be over the budget
    assert micro_batches(mixed, [], 10, True) == []


# ---------------------------------------------------------------------------------------------- README

def test_readme_environment_trains(tmp_path):
    """The README's own-environment example, word for word, is a config file that trains."""
    text = re.search(r"```python\n(from envs import .*?)```", open("README.md").read(), re.S).group(1)
    path = tmp_path / "guess.py"
    path.write_text(text)
    try:
        cfg, typed, filed = load_config(Config, [f"--config={path}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1",
                                                 "--eval_tasks=8"])
        last = train.main(cfg, check_config(cfg, typed, filed))
        assert last["iter"] == 1 and last["eval/Guess/optimal"] is None and last["eval/Guess/score"] is None
    finally:
        envs.ENVS.pop("Guess", None)


def test_readme_lists_every_metric(tmp_path):
    """Every key of metrics.jsonl stands in the README's table."""
    _, lines = run_tiny(tmp_path, "tiny_frozenlake", "--algo=ppo", "--kl_coef=0.01", "--max_iters=1", "--eval_every=0",
                        "--prompts_per_iter=2")
    table = open("README.md").read()
    assert [k for k in lines[0] if f"`{k}`" not in table and k != "iter"] == []


def test_help_names_every_setting():
    """--help prints each setting with its default and meaning."""
    text = subprocess.run([sys.executable, "train.py", "--help"], text=True, capture_output=True).stdout
    assert all(f"    {f.name}: " in text for f in dataclasses.fields(Config))


# ---------------------------------------------------------------------------------------------- sft.py

def test_supervised_play_masks_the_noise():
    """solver_only: exactly the solver's answers are trained, so no random move is ever a label; else all are."""
    tokenizer = model.load_model("assets/tiny")[1]
    chat = rollout.Chat(tokenizer, think=False)
    for seed in range(20):
        cfg = sft.SftConfig(solver_only=True)
        clean, noisy = sft.play("Sokoban", 0.0, chat, cfg, seed), sft.play("Sokoban", 1.0, chat, cfg, seed)
        assert clean.success and sum(noisy.loss_mask) == 0
        every = sft.play("Sokoban", 1.0, chat, sft.SftConfig(), seed)
        answers = [m["content"] for m in every.messages if m["role"] == "assistant"]
        trained = tokenizer.decode([t for t, m in zip(every.tokens, every.loss_mask) if m])
        assert "".join(a.removeprefix("<answer>") + "<|end|>" for a in answers) == trained


def test_supervised_training_makes_a_model_that_loads(tmp_path):
    """A few steps from nothing: the loss falls, and the folder's tokenizer is the one that was trained with. (In a
    folder of type qwen2, AutoTokenizer would silently cut text in Qwen's way.)"""
    cfg = sft.SftConfig(steps=16, batch=8, lr=1e-2, noise=0.3, solver_only=True, world_coef=0.1, out_dir=str(tmp_path))
    losses = sft.main(cfg)
    assert losses[-1] < 0.6 * losses[0]
    tokenizer = model.load_model(str(tmp_path))[1]
    pieces = [tokenizer.decode([i]) for i in tokenizer("x\n######\n#_O#_#\n#__XP#\n######\n10")["input_ids"]]
    assert pieces == ["x", "\n######\n#", "_", "O", "#", "_", "#\n#", "_", "_", "X", "P", "#\n######", "\n", "10"]
    text = "any text: \u00fc \u221a \u65e5\u672c \U0001f642 \x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_show(capsys):
    """The episode is printed whole, trained tokens in green, fed ones plain."""
    tokenizer = model.load_model("assets/tiny")[1]
    episode = sft.play("Bandit", 0.0, rollout.Chat(tokenizer, think=False), sft.SftConfig(), 1)
    rollout.show(episode, tokenizer)
    out = capsys.readouterr().out
    assert "<answer>\033[32mDragon</answer><|end|>\033[0m" in out and "success True" in out
