"""eval.py as a user meets it: its figures by hand, the same numbers as train.py's, whatever a policy is kept as; and what
a saved policy is worth without this repository's code."""
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import peft
import pytest
import torch
import transformers as hf
from helpers import make_lm, make_tokenizer, one_pass

import envs
import eval as evaluation
import model
import record
import rollout
import train
from eval import EvalConfig
from rollout import Trajectory
from settings import UserError, load_config

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    worlds = dict(envs.ENVS)
    yield
    envs.ENVS.clear()           # a file that brings a world of its own leaves it to no other test
    envs.ENVS.update(worlds)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{"full", "lora": the folder of a short run on the Bandit}; a learning rate that moves what it answers."""
    folders = {}
    for name, words in (("full", ["--lr=1e-3"]), ("lora", ["--lr=1e-2", "--lora_rank=4"])):
        folders[name] = str(tmp_path_factory.mktemp("runs") / name)
        train.main(load_config(train.Config, [
            f"--config={ROOT}/configs/tiny_bandit.py", f"--model={ROOT}/assets/tiny", "--max_iters=2", "--eval_every=2",
            "--eval_tasks=32", "--prompts_per_iter=8", f"--out_dir={folders[name]}", *words])[0])
    return folders


def evaluate(*words):
    cfg, typed, filed = load_config(EvalConfig, list(words))
    return evaluation.main(cfg, typed | filed)


def success(*words, env="Bandit"):
    return evaluate(*words)["policy"]["tasks"][env]["success"]


def last_line(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        return json.loads(f.readlines()[-1])


# ---------------------------------------------------------------------------------------------- figures

def test_interval():
    """By hand. Wilson: 8 of 10, and 0 of 10, where p ± 1.96 s would be a point: z² / (10 + z²) = 0.2775. More samples:
    means 1, 0.5, 0, 0.5 have a std of 0.40825, so 1.96 × 0.40825 / 2 = 0.4001 about 0.5. No spread: Wilson, 4 of 4."""
    got = [evaluation.interval(means, samples) for means, samples in (
        ([1.0] * 8 + [0.0] * 2, 1), ([0.0] * 10, 1), ([1.0, 0.5, 0.0, 0.5], 2), ([1.0] * 4, 2), ([1.0], 2))]
    want = [[0.4902, 0.9433], [0, 0.2775], [0.0999, 0.9001], [0.5101, 1], [0.2065, 1]]
    assert got == [pytest.approx(pair, abs=1e-4) for pair in want]


def test_difference():
    """By hand: pairs 1, 0, 0, 1, their mean 0.5, std 0.57735, so ± 1.96 × 0.57735 / 2 = 0.5658. That a and b are hard on
    the same tasks doesn't widen it; one pair says nothing."""
    got = evaluation.difference([1, 1, 0, 1], [0, 1, 0, 0])
    assert got["success"] == 0.5 and got["interval"] == pytest.approx([-0.0658, 1], abs=1e-4)
    assert evaluation.difference([1, 0, 1, 0], [1, 0, 1, 0]) == {"success": 0, "interval": [0, 0]}
    assert evaluation.difference([1], [0]) == {"success": 1, "interval": [-1, 1]}


def test_figures_of_several_samples():
    """By hand, three tasks of four episodes with 4, 1 and 0 successes: pass@2 of the second 1 - C(3,2)/C(4,2) = 0.5."""
    wins = [1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    played = [Trajectory(group=i // 4, member=i % 4, success=bool(w), turn_rewards=[2.0 * w]) for i, w in enumerate(wins)]
    assert evaluation.task_means(played, 4) == [1, 0.25, 0]
    got = evaluation.figures(played, (0.25, 1.0), 4)
    assert got["success"] == 5 / 12 and got["score"] == pytest.approx((5 / 12 - 0.25) / 0.75)
    assert got["traj_return"] == pytest.approx(10 / 12) and "turns" not in got
    assert got["pass_at_k"] == pytest.approx({1: 5 / 12, 2: 0.5, 4: 2 / 3})
    assert evaluation.figures(played, (0.5, 0.5), 4)["score"] is None
    assert sorted(evaluation.figures(played[:9], (0, 1), 3)["pass_at_k"]) == [1, 2, 3]


def test_validation_episodes_of_several_samples():
    """The first of each task is the one it always was; the others share its task, and neither luck nor noise with any."""
    one, three = rollout.validation_episodes([0, 1]), rollout.validation_episodes([0, 1], 3)
    assert three[::3] == one and [(e.group, e.member) for e in three] == [(k, m) for k in (0, 1) for m in range(3)]
    assert [e.task_seed for e in three] == [123] * 3 + [124] * 3
    assert len({e.noise_seed for e in three}) == 6 and not {e.noise_seed for e in three} & set(range(125, 400))
    noise = rollout.token_noise(three, 1, 4)
    assert len({tuple(x.flatten().tolist()) for x in noise}) == 6
    assert torch.equal(noise[::3], rollout.token_noise(one, 1, 4))


# ---------------------------------------------------------------------------------------------- whatever a policy is

@pytest.mark.parametrize("kind", ["full", "lora"])
def test_equals_the_run(runs, kind, tmp_path):
    """A run's folder, a checkpoint's and the policy's own give the run's last evaluation, to the last bit, without one
    setting typed; a typed one wins."""
    run, want = runs[kind], last_line(runs[kind])
    got = evaluate(f"--policy={run}")
    x = got["policy"]["tasks"]["Bandit"]
    assert {k: x[k] for k in ("success", "random", "optimal", "score")} == {
        k: want[f"eval/Bandit/{k}"] for k in ("success", "random", "optimal", "score")}
    assert x["group_reward_std"] is None and x["turns"] == 1
    assert got["policy"]["settings"]["eval_tasks"] == 32 and got["policy"]["settings"]["terse"] is True
    checkpoint = tmp_path / "checkpoints" / "iter_000002"
    checkpoint.mkdir(parents=True)
    shutil.copy(os.path.join(run, "config.json"), checkpoint)
    if kind == "full":          # an adapter names its base by a path from its own folder
        shutil.copytree(os.path.join(run, "policy"), checkpoint / "policy")
    else:
        policy, tokenizer = model.load_model(os.path.join(run, "policy"), lora_rank=4)
        policy.save(str(checkpoint / "policy"), tokenizer)
    for path in (f"{run}/", f"{run}/policy", str(checkpoint)):
        assert success(f"--policy={path}") == x["success"], path
    some = evaluate(f"--policy={run}", "--eval_tasks=4", "--temperature=0")["policy"]["settings"]
    assert some["eval_tasks"] == 4 and some["temperature"] == 0 and some["max_turns"] == 1


def test_random_and_optimal(runs, capsys):
    """Played as episodes they have exactly the success that stands beside every policy, and no text to count."""
    words = ["--envs=Bandit,FrozenLakeNoSlip", "--eval_tasks=24"]
    for player in ("random", "optimal"):
        for x in evaluate(f"--policy={player}", *words)["policy"]["tasks"].values():
            assert x["success"] == x[player] and "turns" not in x
    assert re.search(r"\| FrozenLakeNoSlip \| optimal +\| 1.000 \(0.862 to 1.000\) .* n/a +\| n/a", capsys.readouterr().out)
    # with more samples the luck of a task's episodes differs, and so do random's moves
    x = evaluate("--policy=random", "--envs=FrozenLakeNoSlip", "--eval_tasks=24", "--samples=4")["policy"]["tasks"]
    assert x["FrozenLakeNoSlip"]["pass_at_k"][4] > x["FrozenLakeNoSlip"]["success"] > 0


def test_comparison_and_files(runs, tmp_path, capsys):
    """Two policies on the same tasks, each asked in its own run's way: the pairs' difference, every episode of both as
    messages, a table whose lines align, and no path of this machine in any file."""
    out = tmp_path / "out"
    shutil.copytree("assets/tiny", tmp_path / "start")
    got = evaluate(f"--policy={runs['lora']}", f"--compare={tmp_path / 'start'}", "--eval_tasks=8", "--samples=2",
                   f"--out_dir={out}", "--envs=Bandit,FrozenLakeNoSlip", "--max_turns=2", "--max_actions=2",
                   "--rollout_batch=6")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1 and len(lines) == 2 + 2 * 3 and "pass@2" in lines[0]
    assert sorted(os.listdir(out)) == ["Bandit.compare.jsonl", "Bandit.jsonl", "FrozenLakeNoSlip.compare.jsonl",
                                       "FrozenLakeNoSlip.jsonl", "results.json"]
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(got))
    assert got["compare"]["settings"]["terse"] is True      # it comes from no run: asked as the other one
    assert not [p for p in out.iterdir() if str(tmp_path) in p.read_text()]
    for name in ("Bandit", "FrozenLakeNoSlip"):
        means = []
        for tag, end in (("policy", ""), ("compare", ".compare")):
            episodes = [json.loads(line) for line in (out / f"{name}{end}.jsonl").read_text().splitlines()]
            assert [(e["env"], e["task"], e["member"]) for e in episodes] == [(name, k, m) for k in range(8) for m in (0, 1)]
            for e in episodes:
                assert [m["role"] for m in e["messages"]] == ["user", "assistant"] * len(e["turn_rewards"])
                assert sum(e["turn_rewards"]) == pytest.approx(e["return"])
            assert len({e["messages"][0]["content"] for e in episodes[:2]}) == 1
            assert sum(e["success"] for e in episodes) / 16 == got[tag]["tasks"][name]["success"]
            means.append([(a["success"] + b["success"]) / 2 for a, b in zip(episodes[::2], episodes[1::2])])
        assert got["difference"][name] == evaluation.difference(*means)
    again = evaluate(f"--policy={runs['full']}", f"--compare={runs['full']}/policy")["difference"]["Bandit"]
    assert again == {"success": 0, "interval": [0, 0]}


def test_settings_come_from_the_run(tmp_path):
    """A run's env_args go with its own task alone; typed ones need a single task."""
    run = {"env": "Sokoban", "env_args": {"size": 7}, "eval_temperature": 0.25, "max_turns": 3, "lr": 1.0}
    cfg = evaluation.fill(EvalConfig(envs="Sokoban,FrozenLake"), run, {"envs"})
    assert (cfg.temperature, cfg.max_turns, cfg.envs) == (0.25, 3, "Sokoban,FrozenLake")
    makers = evaluation.worlds(cfg, "Sokoban")
    assert makers["Sokoban"]().size == 7 and makers["FrozenLake"]().size == 4
    with pytest.raises(UserError, match="env_args belong to one environment"):
        evaluation.check(cfg, {"env_args"})
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="has saved no policy yet"):
        evaluate(f"--policy={tmp_path}")


def test_budgets_that_differ(runs, tmp_path):
    """Two runs that allow different numbers of actions are compared only once the user has chosen one."""
    other = tmp_path / "other"
    shutil.copytree(runs["full"], other)
    config = json.loads((other / "config.json").read_text()) | {"max_actions": 7}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="max_actions is 1 in the run of .* choose with --max_actions"):
        evaluate(f"--policy={runs['full']}", f"--compare={other}")
    assert "difference" in evaluate(f"--policy={runs['full']}", f"--compare={other}", "--max_actions=1", "--eval_tasks=4")


def test_registered_file(tmp_path):
    """A task that a run's own config file registers, with no solver: n/a beside random play; optimal can't play it."""
    path = tmp_path / "guess.py"
    with open("README.md") as f:
        path.write_text(re.search(r"```python\n(from envs import .*?)```", f.read(), re.S).group(1))
    words = ["--envs=Guess", f"--register={path}", "--eval_tasks=16"]
    x = evaluate("--policy=random", *words)["policy"]["tasks"]["Guess"]
    assert x["success"] == x["random"] and x["optimal"] is None and x["score"] is None
    with pytest.raises(UserError, match="Guess has no optimal policy"):
        evaluate("--policy=optimal", *words)


@pytest.mark.parametrize("words, message", [
    ([], "say which policy"),
    (["--policy=assets/tiny"], "is no run's folder, so nothing names its task: check the path, or set --envs"),
    (["--policy=assets/tiny", "--envs=FrozenLak"], "did you mean FrozenLake"),
    (["--policy=nowhere/at_all", "--envs=Bandit"], "'nowhere/at_all' is no local folder"),
    (["--policy=assets/tiny", "--envs=Bandit", "--out_dir=configs"], "out_dir='configs' already holds files"),
    (["--policy=assets/tiny", "--envs=Bandit", "--samples=0"], "samples must be at least 1, got 0"),
    (["--policy=assets/tiny", "--envs=Bandit", "--eval_taks=3"], "did you mean eval_tasks"),
    (["--policy=assets/tiny", "--envs=Bandit", "--terse", "--think=False", "--max_context=20"], "leaves no room"),
    (["--policy=assets/tiny", "--merge=configs"], "merge='configs' already holds files"),
    (["--policy=assets/tiny", "--merge=x", "--envs=Bandit"], "--envs would have no effect"),
    (["--policy=random", "--merge=x"], "has no model to merge"),
])
def test_mistakes(words, message, monkeypatch, capsys):
    """A user's mistake is one readable line on stderr and exit status 2."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("eval.py", run_name="__main__")
    err = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- a saved policy

def test_card(runs, tmp_path):
    """The model card says the task, the score of the last evaluation, and a command that gives the run's settings; the
    base only where the hub knows it as a model, else as a path from the folder."""
    card = open(os.path.join(runs["lora"], "policy", "README.md"), encoding="utf-8").read()
    assert card.startswith("---\nlibrary_name: peft\n---\n# A policy for Bandit\n")
    assert "".join(f" {last_line(runs['lora'])[f'eval/Bandit/{k}']:.3f} |" for k in (
        "success", "random", "optimal", "score")) in card and "iteration 2 of" in card
    base = re.search(r"Base model: `(.+)` \(from this folder\)", card).group(1)
    assert os.path.samefile(os.path.join(runs["lora"], "policy", base), "assets/tiny")
    assert str(tmp_path.parent) not in card and f"={ROOT}" not in card
    words = shlex.split(re.search(r"    accelerate launch (.+)", card).group(1))[1:]
    again, with_args = load_config(train.Config, words)[0], train.Config(
        env_args={"size": 5}, action_sep="; ", lr=1e-7, grad_clip=float("inf"), think=False)
    assert train.dataclasses.asdict(again) | {"out_dir": ""} == json.load(
        open(os.path.join(runs["lora"], "config.json"))) | {"out_dir": "", "model": "assets/tiny"}
    assert load_config(train.Config, shlex.split(record.command(with_args))[3:])[0] == with_args
    policy = model.ActorCritic(make_lm())
    policy.config.name_or_path = "Qwen/Qwen2.5-0.5B-Instruct"
    policy.save(str(tmp_path / "p"), make_tokenizer(), record.model_card(train.Config(), {"iter": 3}))
    card = (tmp_path / "p/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: Qwen/Qwen2.5-0.5B-Instruct\n---\n")
    assert "accelerate launch train.py\n" in card and "held-out" not in card


def test_a_base_model_is_saved_with_its_template(tmp_path):
    """A tokenizer without a chat template is trained with plain headings: whoever loads the policy needs them too."""
    tokenizer = make_tokenizer(template=None)
    rollout.Chat(tokenizer, think=False)
    model.ActorCritic(make_lm()).save(str(tmp_path), tokenizer)
    assert hf.AutoTokenizer.from_pretrained(tmp_path).chat_template == rollout.PLAIN_TEMPLATE


PLAIN = """
import json, sys
import peft, torch, transformers as hf
import envs
for folder, base in zip(sys.argv[1::2], sys.argv[2::2]):
    model = hf.AutoModelForCausalLM.from_pretrained(base or folder)
    if base:
        model = peft.PeftModel.from_pretrained(model, folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    env = envs.make_env("FrozenLakeNoSlip")
    text = f"{env.brief}\\n{env.reset(123, 123)}\\n10"
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for turn in range(10):
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "<answer>"
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        answer = "<answer>" + tokenizer.decode(out[0, ids.shape[1]:]).removesuffix("<|end|>")
        messages.append({"role": "assistant", "content": answer})
        action = answer.removeprefix("<answer>").removesuffix("</answer>")
        observation, reward, terminated, _, info = env.step(action)
        if terminated:
            break
        text = f"{reward:g}\\n{observation}\\n{9 - turn}"
    assert not {"rollout", "model", "train"} & set(sys.modules)
    print(json.dumps(messages[1:]))
"""


def test_plays_without_this_repository(runs):
    """Plain transformers, and with an adapter plain peft, load what a run saved and play the very episode that the
    rollout plays: tokenizer, chat template and stop token are all in the folder."""
    folders = [os.path.join(runs["full"], "policy"), "", os.path.join(runs["lora"], "policy"), "assets/tiny"]
    done = subprocess.run([sys.executable, "-c", PLAIN, *folders], text=True, capture_output=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    plain = [json.loads(line) for line in done.stdout.splitlines()]
    for folder, messages in zip(folders[::2], plain, strict=True):
        cfg = EvalConfig(think=False, terse=True, max_turns=10, max_actions_per_turn=1, max_new_tokens=8, max_context=1024)
        policy, chat = evaluation.load(folder, cfg, "cpu")
        played = rollout.collect(policy, chat, envs.ENVS["FrozenLakeNoSlip"], rollout.validation_episodes([0]), cfg, 0)[0]
        assert played.messages == messages and len(messages) > 2 and played.format_ok[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(tmp_path, dtype):
    """The merged folder is the adapter's policy for plain transformers, summed in float32 and then stored as the base
    is; so too with a stir that bfloat16 would round away if it were added there."""
    torch.manual_seed(0)
    make_lm().to(dtype).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    policy, tokenizer = model.load_model(str(tmp_path / "base"), lora_rank=4)
    with torch.no_grad():
        for n, p in policy.lm.named_parameters():
            p.add_(0.02 * torch.randn_like(p)) if "lora_" in n else None
    policy.save(str(tmp_path / "policy"), tokenizer, "# A card\n")
    evaluate(f"--policy={tmp_path / 'policy'}", f"--merge={tmp_path / 'full'}")
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype="auto").eval()
    assert plain.dtype == dtype and not os.path.exists(tmp_path / "full/adapter_config.json")
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "policy")).eval()
    ids = list(range(5, 45))
    want = one_pass(adapted, ids)
    if dtype == torch.float32:
        torch.testing.assert_close(one_pass(plain, ids), want, atol=1e-5, rtol=0)
        assert not torch.allclose(one_pass(make_lm(), ids), want, atol=1e-2)
    else:
        summed = adapted.merge_and_unload().state_dict()
        assert all(torch.equal(x, summed[name].to(dtype)) for name, x in plain.state_dict().items())
    card = (tmp_path / "full/README.md").read_text()
    assert "# A card" in card and "library_name: transformers" in card and card.count("Base model: `../base`") == 1
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "full").chat_template == tokenizer.chat_template
    assert (tmp_path / "full/generation_config.json").exists()
    assert not [f for f in (tmp_path / "full").iterdir() if f.suffix in (".json", ".md") and str(tmp_path) in f.read_text()]


def test_merge_of_all_weights_is_a_copy(runs, tmp_path):
    """Every weight as it is, beside nothing that stood there."""
    evaluate(f"--policy={runs['full']}", f"--merge={tmp_path / 'full'}")
    a, b = (hf.AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (
        os.path.join(runs["full"], "policy"), tmp_path / "full"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(UserError, match="already holds files"):
        evaluate(f"--policy={runs['full']}", f"--merge={tmp_path / 'full'}")
