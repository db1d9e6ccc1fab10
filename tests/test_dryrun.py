"""--dry_run and the estimate of memory: by hand, beside a real run, and the README's table."""
import contextlib
import io
import os

import pytest

import dryrun
import envs
import model
import rollout
import train
from settings import load_config
from train import Config


def test_parts_by_hand():
    """The laptop model, all numbers from its shape: 871,552 weights, 4 layers of 128, 2 heads of keys and values."""
    lm = dryrun.skeleton(model.load_config("assets/tiny"))
    assert sum(p.numel() for p in lm.parameters()) == 871_552
    cfg = Config(lora_rank=0, algo="grpo", prompts_per_iter=2, group_size=4, max_context=100, micro_batch_tokens=1000)
    c = lm.config
    kv, heads, width = c.num_key_value_heads, c.num_attention_heads, c.hidden_size // c.num_attention_heads
    got = {k: v * dryrun.GB for k, v in dryrun.estimate(cfg, lm, bf16=False).items()}
    assert got["weights"] == 871_552 * 4 and got["gradients and Adam"] == 871_552 * 12 and got["CUDA"] == 0
    assert got["rollout"] == 2 * 4 * kv * width * 4 * 8 * 100 + 8 * c.vocab_size * 20
    kept = 6 * 128 * 4 + 4 * (2 * heads * width + 4 * kv * width + 4 * c.intermediate_size)
    assert got["update"] == 1000 * 4 * kept + 1000 * c.vocab_size * 16
    assert got["total"] == got["weights"] + got["gradients and Adam"] + max(got["rollout"], got["update"])
    two = dryrun.estimate(cfg, lm, ranks=2, bf16=False)     # half the rows, and gradients on their way to the other rank
    assert two["rollout"] * dryrun.GB == got["rollout"] / 2 and two["gradients and Adam"] * dryrun.GB == 871_552 * 24


@pytest.mark.parametrize("words, parts", [
    (dict(lora_rank=8, algo="ppo"), ["weights", "gradients and Adam"]),
    (dict(lora_rank=0, algo="ppo"), ["weights", "gradients and Adam"]),
    (dict(lora_rank=0, algo="grpo", kl_coef=0.1), ["weights"]),
])
def test_weights_are_those_that_are_loaded(words, parts):
    """The counts of policy, critic, adapters and reference agree with the loaded ActorCritic's own."""
    cfg = Config(model="assets/tiny", **words)
    policy, _ = model.load_model("assets/tiny", lora_rank=cfg.lora_rank, critic=cfg.algo == "ppo", reference=cfg.kl_coef > 0)
    got = dryrun.estimate(cfg, dryrun.skeleton(model.load_config("assets/tiny")), bf16=False)
    trained = sum(p.numel() for p in policy.policy_parameters() + policy.critic_parameters())
    want = {"weights": sum(p.numel() for p in policy.parameters()) * 4, "gradients and Adam": trained * 12}
    for part in parts:      # the value head is a vector
        assert got[part] * dryrun.GB == pytest.approx(want[part], rel=2e-3), part


def test_dry_run_shows_the_first_prompt(tmp_path, capsys, monkeypatch):
    """It prints the very tokens that the first group of the run will see, loads no weights, and writes nothing."""
    words = ["--config", "configs/tiny_sokoban.py", f"--out_dir={tmp_path / 'run'}", "--dry_run"]
    policy, tokenizer = model.load_model("assets/tiny")
    monkeypatch.setattr(model, "load_causal_lm", None)
    assert train.run(words) == 0
    out = capsys.readouterr().out
    assert not os.path.exists(tmp_path / "run")
    cfg = load_config(Config, words)[0]
    [t] = rollout.collect(policy, rollout.Chat(tokenizer, False), lambda: envs.make_env("Sokoban"),
                          rollout.train_episodes(0, 1, [0], 1), cfg, 1.0)
    prompt = tokenizer.decode(t.tokens[:t.prompt_len])
    assert prompt in out and f"The first prompt of Sokoban, {t.prompt_len} tokens" in out
    assert "* env = 'Sokoban'" in out and "  gamma = 1.0" in out and "32 prompts x 8 = 256 episodes" in out
    assert all(part in out for part in ("weights", "gradients and Adam", "rollout", "update", "total"))


def test_the_readme_has_the_table():
    """Every row of `python dryrun.py` stands in the README."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        dryrun.table(Config(rollout_batch=128))
    rows = out.getvalue().splitlines()
    assert len(rows) == 14
    text = open("README.md").read()
    assert [row for row in rows[2:] if row not in text] == []
