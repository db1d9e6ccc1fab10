"""The benchmark measures what it says: its floor and its baseline compute the same numbers, and lengths are fixed."""
import json
from dataclasses import replace

import pytest
import torch

import bench
from settings import UserError

SMALL = bench.Options(device="cpu", vocab=99, prompts=2, members=2, turns=2, prompt=12, new=5, observed=6, repeats=1)


@pytest.fixture(scope="module")
def bed():
    return bench.Bed(SMALL)


def test_lengths_are_fixed(bed):
    """No token ends a response, nothing counts as cut, and a group shares its prompt: 12 + 5 + 6 + 5 tokens."""
    played = bed.rollout(SMALL)
    assert [t.loss_mask for t in played] == [[0] * 12 + [1] * 5 + [0] * 6 + [1] * 5] * 4
    assert not any(t.truncated for t in played) and all(all(t.format_ok) for t in played)
    assert played[0].tokens[:12] == played[1].tokens[:12] != played[2].tokens[:12]
    assert bench.generate_rollout(bed, SMALL).shape == (4, 28)


def test_floor_computes_the_model(bed):
    """The floor's cache in place gives the hidden states of one plain pass, also after rewinding (1e-5, float32)."""
    floor = bench.Floor(bed, SMALL)
    whole = torch.cat([floor.prompts.repeat_interleave(2, 0), floor.fed], 1)
    with torch.no_grad():
        want = bed.policy.causal_lm.base_model(input_ids=whole, use_cache=False).last_hidden_state[:, 12:]
        for _ in range(2):
            floor.run()
            floor.rewind()
            got = [bed.policy.hidden(x, cache=floor.cache) for x in (floor.fed[:, :4], floor.fed[:, 4:5], floor.fed[:, 5:])]
            assert torch.allclose(torch.cat(got, 1), want, atol=1e-5)


def test_variants_score_alike(bed):
    """Full logits give the log-probs of the fast path, column for column (1e-5), so all three are the same update."""
    [step] = bed.steps(bed.rollout(SMALL), SMALL)
    for shared, plain in zip(step.batches, bench.unshared(step).batches):
        full = bench.FullLogits(bed.policy)(plain.tokens, plain.loss_mask)["logprobs"]
        for b in (shared, plain):
            ours = bed.policy(b.tokens, b.loss_mask, prefix=b.prefix)["logprobs"]
            assert torch.allclose(ours, full, atol=1e-5)


def test_memory_of_an_update(bed):
    """At 20,000 words full logits of 4 x 28 positions are 9 MB at least; the measure sees them, and a time."""
    peak, taken = bench.alone(replace(SMALL, vocab=20_000), bed.rollout(SMALL), "full")
    assert peak > 4 * 28 * 20_000 * 4 and taken > 0


def test_json(tmp_path):
    """The file holds ratios, absolute times and what they depend on."""
    bench.main(replace(SMALL, only="rollout,lora", json=str(tmp_path / "b.json")))
    out = json.loads((tmp_path / "b.json").read_text())
    assert {"rollout_vs_generate", "rollout_vs_floor", "lora_decode_vs_base", "rollout_s/ours", "wall_s"} <= set(out)
    assert {"cpu", "threads", "torch", "transformers"} <= set(out["machine"]) and str(tmp_path) not in json.dumps(out)


def test_unknown_bench():
    """A misspelt name is the user's error, told before anything runs."""
    with pytest.raises(UserError, match="rolout"):
        bench.check_options(replace(SMALL, only="rolout"))
