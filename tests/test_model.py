"""Tests of model.py: log-probs by hand, what must not change them, the LoRA roles, saving, refusals.

float32 on a CPU. Two ways to one number differ by less than 1e-6 where only the order of sums differs (padding,
rows, chunks: ATOL), by less than 1e-5 where weights were merged.
"""
import json
import math
import pathlib
import re
import types

import peft
import pytest
import torch
import transformers as hf

from helpers import ARCHITECTURES, SIZES, make_lm, make_policy, make_tokenizer, model, one_pass, play, rollout
from train import micro_batches

ATOL = 1e-6
EPISODES = rollout.train_episodes(2, 1, range(3), 3)
LORA = dict(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")


def assert_close(got, want, atol=ATOL):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def trajectories():
    """Nine ragged episodes, by a random policy of their own."""
    return play(*make_policy("qwen2"), EPISODES)


def score(policy, batch, roles=("policy",), temperature=1.0, prefix=None):
    return policy(batch.tokens, batch.loss_mask, batch.last, temperature=temperature, roles=roles, prefix=prefix)


def stir(policy, seed=1, scale=0.3):
    """Give every trainable weight that starts at 0 (lora_B, the value head) random values."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad and not p.any():
                p.normal_(std=scale)
    return policy


def make_lora(name="qwen2", **kwargs):
    return stir(model.ActorCritic(peft.get_peft_model(make_lm(name), peft.LoraConfig(**LORA)), **kwargs))


@pytest.fixture
def folder(tmp_path):
    """A saved random Qwen2 with its tokenizer."""
    make_lm().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


# Scoring

@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_logprobs_and_entropy_by_hand(name):
    """Both are those of softmax(logits / T) of the whole model, on the mask alone; the entropy is in nats."""
    batch = rollout.make_batch(trajectories(), [0, 4, 8], "cpu")
    policy = model.ActorCritic(make_lm(name))
    out = score(policy, batch, temperature=0.7)
    for i, last in enumerate(batch.last.tolist()):
        table = one_pass(policy.lm, batch.tokens[i, :last + 1].tolist(), 0.7)       # (T, V)
        for t in range(batch.tokens.shape[1]):
            if not batch.loss_mask[i, t]:
                assert out["logprobs"][i, t] == 0 and out["entropy"][i, t] == 0
                continue
            assert_close(out["logprobs"][i, t], table[t - 1, batch.tokens[i, t]], 5e-6)
            assert_close(out["entropy"][i, t], -(table[t - 1].exp() * table[t - 1]).sum(), 5e-6)


def test_uniform_policy():
    """With a head of zeros each of 320 tokens has log-prob -ln 320, and the entropy is ln 320."""
    batch = rollout.make_batch(trajectories(), [0, 1], "cpu")
    lm = make_lm()
    torch.nn.init.zeros_(lm.lm_head.weight)
    out = score(model.ActorCritic(lm), batch)
    assert_close(out["logprobs"], -math.log(320) * batch.loss_mask, 2e-6)
    assert_close(out["entropy"], math.log(320) * batch.loss_mask, 2e-6)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3"])
def test_padding_order_and_micro_batches_change_nothing(name):
    """Row order, padding and the memory knob leave every value alone, or that knob would change the loss."""
    played = trajectories()
    policy = model.ActorCritic(make_lm(name), critic=True)
    torch.nn.init.normal_(policy.value_head.weight, std=0.1)
    roles = ("policy", "critic")
    whole = rollout.make_batch(played, range(9), "cpu")
    want = score(policy, whole, roles)
    parts = micro_batches(played, range(9), 200)
    assert len(parts) > 3 and sorted(sum(parts, [])) == list(range(9))
    for rows in [[4, 0, 8, 2, 1, 7, 3, 6, 5], *parts]:
        batch = rollout.make_batch(played, rows, "cpu")
        width = batch.tokens.shape[1]
        for key, value in score(policy, batch, roles).items():
            assert_close(value, want[key][rows] if key == "bootstrap" else want[key][rows, :width], 5e-6)
    padded = torch.nn.functional.pad(whole.tokens, (0, 30), value=7)
    out = policy(padded, torch.nn.functional.pad(whole.loss_mask, (0, 30)), whole.last, roles=roles)
    for key, value in out.items():
        assert_close(value if key == "bootstrap" else value[:, :-30], want[key], 5e-6)


def test_chunks_change_nothing(monkeypatch):
    """Scoring three tokens at a time gives the values and the gradients of scoring them all at once."""
    batch = rollout.make_batch(trajectories(), range(6), "cpu")
    policy = model.ActorCritic(make_lm("gemma2"))

    def run():
        policy.zero_grad()
        out = score(policy, batch, temperature=0.7)
        (out["logprobs"].sum() + 0.3 * out["entropy"].sum()).backward()
        return out, {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    whole, gradients = run()
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", 3 * 320 + 5)
    chunked, chunked_gradients = run()
    for key in whole:
        assert_close(chunked[key], whole[key])
    assert gradients.keys() == chunked_gradients.keys() and len(gradients) > 20
    for n, g in gradients.items():
        assert_close(chunked_gradients[n], g, 1e-5 * max(1.0, g.abs().max().item()))
    with torch.no_grad():
        assert_close(score(policy, batch, temperature=0.7)["logprobs"], whole["logprobs"].detach())


def gradients(policy, batch, **kwargs):
    """Outputs under every role of the policy, and the gradient of a loss on policy and critic."""
    policy.zero_grad()
    roles = ["policy"] + ["critic"] * (policy.value_head is not None)
    out = policy(batch.tokens, batch.loss_mask, batch.last, temperature=0.7, roles=roles, **kwargs)
    loss = sum((x.where(batch.loss_mask, 0.0) if x.dim() == 2 else x).sum() * k for k, x in enumerate(out.values(), 1))
    loss.backward()
    return out, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("rows", [range(9), [0, 1, 3, 4, 5], [8, 3, 7]], ids=["groups", "uneven", "mixed"])
@pytest.mark.parametrize("make, name", [(model.ActorCritic, n) for n in ARCHITECTURES] + [(None, "qwen2"), (None, "gemma3")])
def test_shared_prefix_is_the_plain_path(make, name, rows):
    """A prompt run once for its rows gives the loss and the gradient (relative 1e-5) of every row run whole: with
    prompts of unequal length, sliding windows, one row without a twin, LoRA, the critic and its bootstrap."""
    batch = rollout.make_batch(trajectories(), rows, "cpu", share_prefix=True)
    assert batch.prefix.ragged and len(batch.prefix.rows) == 2        # two of the three tasks open with the same text
    policy = stir(make(make_lm(name), critic=True)) if make else make_lora(name, critic=True)
    out, gradient = gradients(policy, batch, prefix=batch.prefix)
    plain, plain_gradient = gradients(policy, batch)
    assert out.keys() == plain.keys() and "bootstrap" in out
    for key in plain:
        assert_close(out[key], plain[key], 1e-5)
    assert gradient.shape == plain_gradient.shape
    assert (gradient - plain_gradient).norm() < 1e-5 * plain_gradient.norm()


def test_shared_prefix_runs_each_prompt_once(monkeypatch):
    """What the backbone is fed: two prompts, then nine remainders; so the saving is real."""
    batch = rollout.make_batch(trajectories(), range(9), "cpu", share_prefix=True)
    fed, policy = [], model.ActorCritic(make_lm())
    real = policy.hidden
    policy.hidden = lambda tokens, *args, **kwargs: fed.append(tuple(tokens.shape)) or real(tokens, *args, **kwargs)
    score(policy, batch, prefix=batch.prefix)
    assert fed == [(2, batch.prefix.width), (9, batch.prefix.rest)]


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_changes_nothing(lora):
    """Same outputs and gradients; the layers run again in the backward pass, and the shared prefix, whose cache would
    be lost in that, steps aside."""
    batch = rollout.make_batch(trajectories(), range(9), "cpu", share_prefix=True)
    make = lambda **kw: make_lora(critic=True, **kw) if lora else stir(model.ActorCritic(make_lm(), critic=True, **kw))
    plain, plain_gradient = gradients(make(), batch)
    policy = make(gradient_checkpointing=True)
    calls = []
    policy.causal_lm.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    out, gradient = gradients(policy, batch, prefix=batch.prefix)
    assert len(calls) == (4 if lora else 2)         # forward and again; with LoRA the critic's pass as well
    for key in plain:
        assert_close(out[key], plain[key])
    assert (gradient - plain_gradient).norm() < 1e-5 * plain_gradient.norm()
    before = len(calls)
    with torch.no_grad():
        score(policy, batch, prefix=batch.prefix)   # nothing to recompute: the prefix is shared
    assert len(calls) == before + 2


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2"])
def test_merged_decoding(name):
    """LoRA in the weights: the same states as beside them; afterwards the very tensors from before, bit for bit.
    GPT-2's Conv1D holds its weights the other way round; Gemma ties its head to the embedding."""
    tokens = torch.arange(30)[None] + 5
    policy = make_lora(name)
    with torch.no_grad():
        beside = policy.hidden(tokens)
        bare = {n: (p.data_ptr(), p.clone()) for n, p in policy.named_parameters()}
        for _ in range(20):
            with policy.decoding():
                merged = policy.hidden(tokens)
                assert all(layer.merged for layer in policy.lora_layers)
                assert all(m.weight.stride(0) == 1 for n, m in policy.causal_lm.named_modules()
                           if type(m) is torch.nn.Linear and "lora_" not in n)
        with pytest.raises(ZeroDivisionError), policy.decoding():
            1 / 0                   # nothing stays merged after an error either
        policy.use("reference")
        assert (policy.hidden(tokens) - beside).abs().max() > 0.1       # the adapter matters
        policy.use("policy")
    assert_close(merged, beside, 1e-5)
    for n, p in policy.named_parameters():
        assert p.data_ptr() == bare[n][0] and torch.equal(p, bare[n][1]), n
    assert not any(layer.merged for layer in policy.lora_layers)
    assert_close(policy.hidden(tokens), beside, 0)


@pytest.mark.parametrize("most", [0, 2 ** 22])
@pytest.mark.parametrize("length, masked", [(1, True), (1, False), (7, True), (7, False)])
def test_grouped_attention(monkeypatch, length, masked, most):
    """Heads that share keys, against softmax(q k / sqrt d) v with a key for each head; backward too. most 0: every mask
    is too large for grouping, and transformers' own function takes over."""
    monkeypatch.setattr(model, "GROUPED_MASK", most)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 4, requires_grad=True) for heads, n in ((6, length), (2, 7), (2, 7)))
    mask = torch.rand(2, 1, length, 7) < 0.7 if masked else None
    seen = mask if masked else torch.ones(length, 7, dtype=torch.bool).tril(7 - length)
    if masked:
        mask[..., 0] = True         # no row without any key
    layer = types.SimpleNamespace(num_key_value_groups=3, is_causal=True)
    out, _ = model.grouped_attention(layer, q, k, v, mask, scaling=0.5)
    scores = (q @ k.repeat_interleave(3, 1).transpose(2, 3) * 0.5).masked_fill(~seen, -torch.inf)
    want = (scores.softmax(-1) @ v.repeat_interleave(3, 1)).transpose(1, 2)
    assert_close(out, want)
    for got, plain in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(want.square().sum(), (q, k, v))):
        assert_close(got, plain, 1e-5)


def test_saved_config_names_no_attention_of_ours(folder, tmp_path):
    """Who loads the policy gets the attention of their own library."""
    policy, tokenizer = model.load_model(folder)
    assert policy.config._attn_implementation == "grouped"
    policy.save(tmp_path / "policy", tokenizer)
    assert "grouped" not in (tmp_path / "policy" / "config.json").read_text()


@pytest.mark.parametrize("make", [lambda **kw: model.ActorCritic(make_lm(), **kw), lambda **kw: make_lora(**kw)],
                         ids=["full", "lora"])
def test_values_and_bootstrap(make):
    """Column t holds the value of the state before token t; bootstrap the one after the last; both start at 0."""
    batch = rollout.make_batch(trajectories(), [0, 5], "cpu")
    policy = make(critic=True)
    torch.nn.init.zeros_(policy.value_head.weight)
    torch.nn.init.zeros_(policy.value_head.bias)
    out = score(policy, batch, ("critic",))
    assert not out["values"].any() and not out["bootstrap"].any()
    torch.nn.init.normal_(policy.value_head.weight, std=0.1)
    out = score(policy, batch, ("critic",))
    policy.use("critic")
    for i, last in enumerate(batch.last.tolist()):
        backbone = policy.critic or policy.causal_lm.base_model
        states = policy.value_head(backbone(batch.tokens[i:i + 1, :last + 1]).last_hidden_state)[0, :, 0]
        before = torch.nn.functional.pad(states[:-1], (1, batch.tokens.shape[1] - 1 - last))
        assert_close(out["values"][i], before * batch.loss_mask[i], 5e-6)
        assert_close(out["bootstrap"][i], states[-1], 5e-6)


def test_a_new_critic_is_silent():
    """The value head starts at 0 without any help: a random baseline would be worse than none."""
    for policy in (model.ActorCritic(make_lm(), critic=True),
                   model.ActorCritic(peft.get_peft_model(make_lm(), peft.LoraConfig(**LORA)), critic=True)):
        assert not policy.value_head.weight.any() and not policy.value_head.bias.any()
    assert model.ActorCritic(make_lm()).critic_parameters() == []


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_training_mode_changes_nothing(tmp_path, lora_rank):
    """Dropout of any kind (GPT-2's modules, Llama's number, an adapter's) is off while the loss is taken.

    Else the log-probs of the update are not those of the sampled policy, and the ratio is noise.
    """
    batch = rollout.make_batch(trajectories(), range(3), "cpu")
    make_tokenizer().save_pretrained(tmp_path / "m")
    for name, dropout in (("gpt2", dict(resid_pdrop=0.5, attn_pdrop=0.5)), ("llama", dict(attention_dropout=0.5))):
        make_lm(name, **dropout).save_pretrained(tmp_path / "m")
        policy, _ = model.load_model(str(tmp_path / "m"), lora_rank=lora_rank, critic=True, reference=True)
        roles = ("policy", "critic", "reference")
        want = score(stir(policy).eval(), batch, roles)
        for key, value in score(policy.train(), batch, roles).items():
            assert_close(value, want[key])


def test_adapter_dropout_is_off(folder, tmp_path):
    """A foreign adapter brings its dropout along, and the critic's adapter is made from its settings."""
    batch = rollout.make_batch(trajectories(), range(3), "cpu")
    lm = peft.get_peft_model(hf.AutoModelForCausalLM.from_pretrained(folder),
                             peft.LoraConfig(**LORA, lora_dropout=0.5))
    lm.save_pretrained(tmp_path / "adapter")
    policy, _ = model.load_model(str(tmp_path / "adapter"), lora_rank=4, critic=True)
    want = score(stir(policy).eval(), batch, ("policy", "critic"))
    for key, value in score(policy.train(), batch, ("policy", "critic")).items():
        assert_close(value, want[key])


# Roles

def test_reference_is_the_start(folder):
    """The reference is the policy as loaded and stays so while the policy moves, with LoRA and without."""
    batch = rollout.make_batch(trajectories(), range(3), "cpu")
    base = score(model.ActorCritic(hf.AutoModelForCausalLM.from_pretrained(folder)), batch)["logprobs"]
    for lora_rank in (0, 4):
        policy, _ = model.load_model(folder, lora_rank=lora_rank, reference=True)
        out = score(policy, batch, ("policy", "reference"))
        assert_close(out["logprobs"], base)
        assert_close(out["ref_logprobs"], base)
        with torch.no_grad():
            for p in policy.policy_parameters():
                p += 0.1 * torch.randn_like(p)
        out = score(policy, batch, ("policy", "reference"))
        assert_close(out["ref_logprobs"], base)
        assert (out["logprobs"] - base).abs().max() > 0.1


@pytest.mark.parametrize("make", [lambda **kw: stir(model.ActorCritic(make_lm(), **kw)), make_lora],
                         ids=["full", "lora"])
def test_one_loss_reaches_policy_and_critic(make):
    """In one forward with all roles each role trains its own weights, and nothing else moves.

    peft's set_adapter would switch requires_grad off on the other adapter: a gradient of 0 and no error.
    """
    batch = rollout.make_batch(trajectories(), range(4), "cpu")
    policy = make(critic=True, reference=True)
    mine, critics = policy.policy_parameters(), policy.critic_parameters()
    trainable = {n for n, p in policy.named_parameters() if p.requires_grad}
    out = score(policy, batch, ("policy", "reference", "critic"))
    (out["logprobs"].sum() + out["values"].sum() + out["bootstrap"].sum()).backward()
    for parameters in (mine, critics):
        assert len(parameters) > 20 and sum(p.grad is not None and p.grad.any().item() for p in parameters) > 20
    assert {id(p) for p in mine}.isdisjoint(id(p) for p in critics)
    assert len(mine) + len(critics) == len(trainable) == sum(p.grad is not None for p in policy.parameters())
    # apart, each loss leaves the other's weights without any gradient
    for key, own, other in (("logprobs", mine, critics), ("values", critics, mine)):
        policy.zero_grad()
        score(policy, batch, ("policy", "critic"))[key].sum().backward()
        assert any(p.grad is not None for p in own) and all(p.grad is None for p in other)


def test_use_leaves_training_flags_alone():
    """Changing roles changes outputs, never what is trained; and a forward ends as the policy."""
    batch = rollout.make_batch(trajectories(), range(2), "cpu")
    policy = make_lora(critic=True, reference=True)
    flags = {n: p.requires_grad for n, p in policy.named_parameters()}
    assert all(flag == ("lora_" in n or "value_head" in n) for n, flag in flags.items())
    hidden = {}
    for role in ("policy", "critic", "reference", "policy"):
        policy.use(role)
        assert {n: p.requires_grad for n, p in policy.named_parameters()} == flags
        hidden[role] = policy.hidden(batch.tokens)
    score(policy, batch, ("policy", "reference", "critic"))
    assert torch.equal(policy.hidden(batch.tokens), hidden["policy"])
    for a, b in (("policy", "critic"), ("policy", "reference"), ("critic", "reference")):
        assert (hidden[a] - hidden[b]).abs().max() > 0.1


# Saving and loading

def json_strings(value):
    """Every string in a JSON value, keys included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [s for v in value for s in json_strings(v)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_saved_policy_loads_with_plain_libraries(folder, tmp_path, lora_rank):
    """What is saved is the policy, whole, for transformers or peft alone, and names no path of this machine.

    An adapter of another name lands in a subfolder, and peft then loads one whose lora_B is 0: the base model.
    """
    policy, tokenizer = model.load_model(folder, lora_rank=lora_rank, critic=True, reference=True)
    stir(policy)
    with torch.no_grad():
        policy.policy_parameters()[0].mul_(1.5)
    path = tmp_path / "out" / "policy"
    policy.save(str(path), tokenizer)
    ids = trajectories()[0].tokens
    want = one_pass(policy.lm, ids)
    if lora_rank:
        plain = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(folder), str(path))
        assert all(p.any() for n, p in plain.named_parameters() if "lora_B" in n)
        assert not any("critic" in n for n, _ in plain.named_parameters())
    else:
        plain = hf.AutoModelForCausalLM.from_pretrained(str(path))
    assert_close(one_pass(plain.eval(), ids), want, 1e-6)
    again = hf.AutoTokenizer.from_pretrained(str(path))
    assert again.chat_template == tokenizer.chat_template and again("Up <answer>") == tokenizer("Up <answer>")
    for file in path.iterdir():
        if file.suffix == ".json":
            assert not [s for s in json_strings(json.loads(file.read_text())) if re.match(r"/\w|[A-Z]:\\", s)], file
        if file.suffix in (".json", ".md", ".jinja"):
            assert str(tmp_path) not in file.read_text(), file


def test_saved_adapter_goes_on(folder, tmp_path):
    """A saved adapter starts the next run where it stopped: trained further, or merged into weights that train."""
    first, tokenizer = model.load_model(folder, lora_rank=4)
    stir(first).save(str(tmp_path / "policy"), tokenizer)
    batch = rollout.make_batch(trajectories(), range(3), "cpu")
    want = score(first, batch)["logprobs"]
    further, _ = model.load_model(str(tmp_path / "policy"), lora_rank=4, critic=True)
    assert_close(score(further, batch)["logprobs"], want)
    assert len(further.policy_parameters()) == len(first.policy_parameters()) > 0
    assert all("default" in n for n, p in further.named_parameters()
               if any(p is q for q in further.policy_parameters()))
    merged, _ = model.load_model(str(tmp_path / "policy"), lora_rank=0, critic=True)
    assert not merged.peft
    assert_close(score(merged, batch)["logprobs"], want, 1e-5)
    assert len(merged.policy_parameters()) == len(list(merged.lm.parameters()))      # peft had frozen them
    assert all(p.requires_grad for p in merged.critic_parameters())
    # saved again: the second life's folder is as good as the first's
    further.save(str(tmp_path / "deep" / "er" / "next"), tokenizer)
    again, _ = model.load_model(str(tmp_path / "deep" / "er" / "next"), lora_rank=4)
    assert_close(score(again, batch)["logprobs"], want)


def test_saved_adapter_loads_from_any_working_directory(folder, tmp_path, monkeypatch):
    """The base's relative path must not depend on where the next run is started."""
    policy, tokenizer = model.load_model(folder, lora_rank=4)
    policy.save(str(tmp_path / "policy"), tokenizer)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere" / "deep")
    model.load_model(str(tmp_path / "policy"), lora_rank=4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_lora_on_every_architecture(name):
    """"all-linear" finds layers in each family (GPT-2's are Conv1D), the head and embeddings left out."""
    policy = make_lora(name, critic=True)
    names = [n for n, p in policy.lm.named_parameters() if p.requires_grad]
    assert len(names) >= 2 * 2 * 4 * 3 and not any("lm_head" in n or "embed" in n or "wte" in n for n in names)


def test_trainable_weights_are_float32(folder):
    """bf16 is for compute: at lr 1e-6 a bf16 weight of 0.02 never moves. Scores stay float32 and finite."""
    batch = rollout.make_batch(trajectories(), range(2), "cpu")
    for lora_rank, frozen in ((0, set()), (4, {torch.bfloat16})):
        policy, _ = model.load_model(folder, lora_rank=lora_rank, critic=True, bf16=True)
        assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for n, p in policy.named_parameters() if not p.requires_grad} == frozen
        out = score(policy, batch, ("policy", "critic"))
        assert all(x.dtype == torch.float32 and x.isfinite().all() for x in out.values())


def test_values_are_float32_even_in_bf16(folder):
    """A bf16 value has 8 bits: near 5 it moves in steps of 0.03, a third of the format penalty."""
    batch = rollout.make_batch(trajectories(), [0], "cpu")
    policy, _ = model.load_model(folder, critic=True, bf16=True)
    torch.nn.init.constant_(policy.value_head.bias, 5.001)
    assert_close(score(policy, batch, ("critic",))["bootstrap"], torch.tensor([5.001]))


# Refusals

def refused(path, match, **kwargs):
    with pytest.raises(model.ModelError, match=match):
        model.load_model(str(path), **kwargs)


def test_refuses_what_is_not_there(folder, tmp_path):
    """A wrong path, an empty folder, one without tokenizer: each says what is wrong and what to do."""
    refused(tmp_path / "nowhere", r"nowhere.*no local folder.*tiny_frozenlake")
    refused("no-such/model", r"no-such/model.*hub.*tiny_frozenlake")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty.*config\.json")
    make_lm().save_pretrained(tmp_path / "mute")
    refused(tmp_path / "mute", r"mute.*tokenizer")


def test_refuses_an_adapter_that_does_not_fit(folder, tmp_path):
    """Another rank, or an adapter that isn't LoRA: with the settings that would do."""
    policy, tokenizer = model.load_model(folder, lora_rank=4)
    policy.save(str(tmp_path / "policy"), tokenizer)
    refused(tmp_path / "policy", r"rank 4.*lora_rank=8.*--lora_rank=4.*--lora_rank=0", lora_rank=8)
    ia3 = peft.get_peft_model(make_lm(), peft.IA3Config(task_type="CAUSAL_LM"))
    ia3.save_pretrained(tmp_path / "ia3")
    path = tmp_path / "ia3" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": folder}))
    refused(tmp_path / "ia3", r"IA3.*--lora_rank=0", lora_rank=4)


@pytest.mark.parametrize("config, reason", [
    (hf.T5Config(vocab_size=320, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2), "encoder-decoder"),
    (hf.MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1, state_size=4), "recurrent"),
    (hf.RwkvConfig(vocab_size=320, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16), "recurrent"),
    (hf.Qwen3NextConfig(**SIZES | dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])),
     "recurrent"),
])
def test_refuses_other_architectures(tmp_path, config, reason):
    """Only an attention cache can be re-aligned between turns; any other would be silently wrong."""
    auto = hf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else hf.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    refused(tmp_path, rf"{config.model_type}.*{reason}")


@pytest.mark.parametrize("config", [
    hf.CohereConfig(**SIZES | dict(logit_scale=0.0625)), hf.GraniteConfig(**SIZES, logits_scaling=8.0)])
def test_refuses_a_head_that_it_does_not_know(tmp_path, config):
    """Cohere and Granite scale their logits after the head: without that every log-prob would be wrong."""
    torch.manual_seed(0)
    lm = hf.AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    refused(tmp_path, r"transforms its logits.*model\.head")


def test_weights_belong_to_the_process(folder):
    """Whoever rewrites the model's file during a run must not change the run. The loaded tensors are views of the
    file: a rewrite in place put the old weights back into a trained policy, without any error."""
    policy, _ = model.load_model(folder)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    before = [p.detach().clone() for p in policy.parameters()]
    path = pathlib.Path(folder, "model.safetensors")
    path.write_bytes(path.read_bytes())
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before))
