"""Everything that touches weights: loading, LoRA, the critic, log-probs without a (B, T, V) tensor, saving.

Legend: B rows, T tokens, V vocabulary, D hidden size.
One alignment rule: column t of every (B, T) tensor is about tokens[:, t]. Its log-prob, and the value of the
state before it, come from the hidden state at t - 1; column 0 is never trained.
"""

import contextlib
import copy
import functools
import inspect
import json
import math
import os
import pathlib

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

GROUPED_MASK = 2 ** 22      # elements of the mask that grouped_attention makes at most, for several tokens a row
CHUNK_ELEMENTS = 2 ** 25    # logits held at once (elements): 128 MB in float32, whatever the vocabulary


class ModelError(ValueError):
    """A model that cannot be had or cannot be trained here; the message says what to change."""


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attend like transformers' "sdpa", where heads share keys and values (GQA) without a copy of them for each head.

    query (B, H, T, d), key and value (B, H / n, S, d): the n heads of a group stand below each other as n T rows.
    That pays for single tokens, and on a CPU for a few tokens under a mask, which then has n T rows too.
    """
    b, heads, length, dim = query.shape
    n = heads // key.shape[1]
    many = length > 1 and (attention_mask is None or query.is_cuda or n * attention_mask.numel() > GROUPED_MASK)
    if n == 1 or many or any(kwargs.get(name) is not None for name in ("softcap", "position_bias")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, n, 1)
    out = nn.functional.scaled_dot_product_attention(query.reshape(b, -1, n * length, dim), key, value, mask, scale=scaling)
    return out.reshape(b, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


def hand_out(x, of):
    """x[of], as an embedding: its gradient is summed in one order, an index's in the order in which threads come."""
    return nn.functional.embedding(of, x.flatten(1)).view(-1, *x.shape[1:])


class ActorCritic(nn.Module):
    """The policy, and what the algorithm needs beside it: a critic (ppo), a frozen reference (kl_coef > 0).

    With LoRA there is one frozen base: the policy is its adapter "default", the critic a second adapter
    "critic" with a value head, the reference the base with its adapters off. Full fine-tuning keeps a copy of
    the backbone for the critic and, if asked for, a frozen copy of the policy.

    lm: a Hugging Face causal LM in float32, or a PeftModel around one (whose base may be bfloat16).
    critic, reference: whether to hold them. bf16: compute in bfloat16; trainable weights stay float32.
    gradient_checkpointing: keep no activations of the layers, but compute them again in the backward pass.
    """

    def __init__(self, lm, critic=False, reference=False, bf16=False, gradient_checkpointing=False):
        super().__init__()
        self.peft = hasattr(lm, "peft_config")
        self.lm = lm
        self.bf16 = bf16
        if self.config._attn_implementation == "sdpa":
            self.causal_lm.set_attn_implementation("grouped")       # a model that can't keeps its own
        hidden_size = self.config.get_text_config().hidden_size
        self.critic = self.value_head = self.reference = None
        if critic:
            self.value_head = nn.Linear(hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)      # the first values are exactly 0: no random baseline
            nn.init.zeros_(self.value_head.bias)
            if not self.peft:
                self.critic = copy.deepcopy(lm.base_model)
            elif "critic" not in lm.peft_config:
                lm.add_adapter("critic", lm.peft_config["default"])
        if reference and not self.peft:
            self.reference = copy.deepcopy(lm).requires_grad_(False)
        if self.peft:
            from peft.tuners.tuners_utils import BaseTunerLayer
            self.lora_layers = [m for m in lm.modules() if isinstance(m, BaseTunerLayer)]
            for name, p in lm.named_parameters():
                p.requires_grad_("lora_" in name)       # add_adapter freezes the one that is not active
                if p.requires_grad:
                    p.data = p.data.float()
        self.checkpointed = [m for m in self.modules() if isinstance(m, GradientCheckpointingLayer)
                             ] if gradient_checkpointing else []
        for layer in self.checkpointed:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = self.checkpoint
        self.use("policy")
        self.eval()

    def train(self, mode=True):
        """Stay in evaluation mode: with dropout of any kind the loss distribution isn't the sampling distribution."""
        return super().train(False)

    @property
    def causal_lm(self):
        """The Hugging Face model itself, with the LoRA layers inside where there are any."""
        return self.lm.get_base_model() if self.peft else self.lm

    @property
    def config(self):
        return self.causal_lm.config

    @property
    def device(self):
        return self.causal_lm.get_output_embeddings().weight.device

    @property
    def max_positions(self):
        """Most tokens in an episode. Beyond it a table of positions ends, or rotary angles change with the length."""
        text = self.config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            return rope["original_max_position_embeddings"]
        return getattr(text, "max_position_embeddings", None) or math.inf

    def policy_parameters(self):
        """The policy's trainable weights: the adapter "default", or the whole model."""
        critic = {id(p) for p in self.critic_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in critic]

    def critic_parameters(self):
        """The critic's trainable weights with its value head; empty without a critic."""
        own = list(self.value_head.parameters()) if self.value_head is not None else []
        own += list(self.critic.parameters()) if self.critic is not None else []
        return own + [p for n, p in self.lm.named_parameters() if "critic" in n.split(".")]

    def use(self, role):
        """Point the LoRA layers at a role: "policy", "critic" or "reference" (no adapter).

        peft's own set_adapter would switch requires_grad off on the other adapter, and its gradient would
        silently be 0 inside one forward; so the two attributes that its layers read are set directly.
        """
        self.role = role
        for layer in self.lora_layers if self.peft else ():
            layer._active_adapter = ["critic" if role == "critic" else "default"]
            layer._disable_adapters = role == "reference"

    def checkpoint(self, function, *args):
        """Run a function that is run again in the backward pass: under the role of now, whatever is used then."""
        role = self.role

        def run(*args):
            before = self.role
            self.use(role)
            try:        # a recomputation is broken off as soon as it has what it needs
                return function(*args)
            finally:
                self.use(before)
        return checkpoint(run, *args, use_reentrant=False)

    def autocast(self):
        """bfloat16 compute on request, in this one place."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    @contextlib.contextmanager
    def decoding(self):
        """Set the policy up for many small steps without gradients; what is put back are the tensors from before.

        In float32 LoRA is merged into the weights meanwhile, so that it costs nothing, and nothing drifts. In
        bfloat16 the sum would round the adapter away: there it stays beside the weights. A CPU multiplies a few
        rows with a matrix two to three times as fast if its columns lie in one piece, not its rows. On a GPU the
        outermost autocast keeps its bfloat16 copies of weights for all the steps.
        """
        merged = self.lora_layers if self.peft and not self.bf16 and self.causal_lm.dtype == torch.float32 else []
        turned = {m.weight for name, m in self.causal_lm.named_modules()
                  if isinstance(m, nn.Linear) and "lora_" not in name and self.device.type == "cpu"}
        bases = {p for m in merged for p in m.get_base_layer().parameters()}        # some adapters have biases too
        saved = [(weight, weight.data) for weight in turned | bases]
        try:
            for weight, data in saved:
                weight.data = data.t().contiguous().t() if weight in turned else data.clone()
            for layer in merged:
                layer.merge(adapter_names=["default"])
                layer.forward = layer.get_base_layer().forward      # peft's would ask in every call what is merged
            with self.autocast():
                yield
        finally:
            for weight, data in saved:
                weight.data = data
            for layer in merged:
                layer.merged_adapters.clear()
                vars(layer).pop("forward", None)

    @property
    def can_fix_shapes(self):
        """Whether decode steps of fixed shapes pay and are right: on a GPU, with layers of full attention alone."""
        text = self.config.get_text_config()
        full = set(getattr(text, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        return self.device.type == "cuda" and full and not getattr(text, "sliding_window", None) and \
            self.config._attn_implementation == "grouped" and not getattr(text, "alibi", False)

    def hidden(self, tokens, attn_mask=None, positions=None, cache=None, lm=None):
        """Return the backbone's last hidden states (B, T, D); with a cache, extend it by these tokens.

        attn_mask: (B, past + T), 1 where a token is real; None where no real token follows padding.
        positions: (B, T), default 0 .. T-1. lm: another model of the same shape (default: the policy).
        """
        kwargs = {} if cache is None else {cache_argument(type(self.causal_lm)): cache}
        with self.autocast():
            return (lm or self.causal_lm.base_model)(
                input_ids=tokens, attention_mask=attn_mask, position_ids=positions,
                use_cache=cache is not None, **kwargs).last_hidden_state

    def logits(self, hidden, lm=None):
        """Return float32 logits (..., V) of hidden states (..., D), by the model's own head."""
        with self.autocast():
            return head(lm or self.causal_lm, hidden)

    def states(self, tokens, prefix=None, lm=None):
        """Return last hidden states (B, S, D) and the column of tokens (B, S) that each is the state before.

        Without a prefix these are all columns, 1 .. T. With one, each prompt is run once, its cache is handed to
        the rows that begin with it, and the states are those from the prompt's last token on: the same states
        and the same gradient, for the work of one prompt instead of many.
        """
        recompute = bool(self.checkpointed) and torch.is_grad_enabled()
        if prefix is None or recompute:             # a layer that is run again in the backward pass keeps no cache
            for layer in self.checkpointed:
                layer.training = recompute          # what transformers asks; no dropout hangs on this module's flag
            hidden = self.hidden(tokens, lm=lm)
            for layer in self.checkpointed:
                layer.training = False
            return hidden, torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand_as(tokens)
        at = torch.arange(-prefix.width, 0, device=tokens.device) + prefix.lengths[:, None]     # (G, P)
        real = at >= 0                              # left-padded: what follows a prompt stands right beside it
        at = at.clamp(min=0)
        start = prefix.lengths[prefix.of][:, None]                                              # (B, 1)
        columns = start + torch.arange(prefix.rest + 1, device=tokens.device)                   # (B, 1 + rest)
        fed = columns[:, :-1].clamp(max=tokens.shape[1] - 1)
        cache = DynamicCache()
        prompts = self.hidden(tokens[prefix.rows].gather(1, at), real.long() if prefix.ragged else None, at, cache, lm)
        for layer in cache.layers:
            layer.keys, layer.values = hand_out(layer.keys, prefix.of), hand_out(layer.values, prefix.of)
        mask = torch.cat([real[prefix.of], torch.ones_like(fed, dtype=torch.bool)], 1).long() if prefix.ragged else None
        rest = self.hidden(tokens.gather(1, fed), mask, fed, cache, lm)
        return torch.cat([hand_out(prompts[:, -1:], prefix.of), rest], 1), columns

    def forward(self, tokens, loss_mask, last=None, *, temperature=1.0, roles=("policy",), prefix=None,
                entropy=True):
        """Score sampled tokens under one or more roles in one pass each.

        tokens (B, T) int64, right-padded: causal attention never looks right, so padding needs no mask.
        loss_mask (B, T) bool: the tokens to score; column 0 is False.
        last (B,) int64: index of each row's last token, for `bootstrap`.
        temperature: logits are divided by it, as in sampling: the loss is about the distribution that was
        sampled from.
        roles: of "policy", "reference", "critic".
        prefix: a rollout.Prefix, the prompts that rows share; None runs every row as a whole.
        entropy: whether the policy's is wanted.
        Returns a dict of float32 tensors, 0 off the mask: "logprobs" and "entropy" (B, T) for policy,
        "ref_logprobs" (B, T) for reference, "values" (B, T) and "bootstrap" (B,), the value after the last
        token, for critic.
        """
        out = {}
        padded = nn.functional.pad(loss_mask, (0, 1))                         # no token stands after the last one
        blank = torch.zeros(tokens.shape, device=tokens.device)
        scatter = lambda x: blank.masked_scatter(loss_mask, x)                # (n,) -> (B, T), row by row
        for role in roles:
            self.use(role)
            lm = self.reference if role == "reference" and not self.peft else self.causal_lm
            states, columns = self.states(tokens, prefix, self.critic if role == "critic" else lm.base_model)
            where = padded.gather(1, columns.clamp(max=tokens.shape[1]))      # (B, S): the state before a scored token
            if role == "critic":
                values = self.value_head(states.float()).squeeze(-1)          # (B, S)
                out["values"] = scatter(values[where])
                if last is not None:
                    out["bootstrap"] = values.gather(1, last[:, None] + 1 - columns[:, :1])[:, 0]
                continue
            names = ["ref_logprobs"] if role == "reference" else ["logprobs", "entropy"] if entropy else ["logprobs"]
            scores = self.score(states[where], tokens[loss_mask], temperature, lm, "entropy" in names)
            out |= {name: scatter(x) for name, x in zip(names, scores)}
        self.use("policy")
        return out

    def score(self, hidden, targets, temperature, lm, entropy=True):
        """Return log-probs (n,) of targets (n,) from hidden (n, D), and entropies, a chunk of logits at a time.

        With gradients, every chunk but a lone one is recomputed in the backward pass, so that the memory
        doesn't grow with n x V.
        """
        def chunk(h, y):
            logits = self.logits(h, lm)                                                 # (c, V)
            logp = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
            picked = logp.gather(1, y[:, None])[:, 0]
            return (picked, -(logp.exp() * logp).sum(-1)) if entropy else (picked,)

        size = max(1, CHUNK_ELEMENTS // self.config.get_text_config().vocab_size)
        if len(targets) <= size:
            return chunk(hidden, targets)
        parts = [self.checkpoint(chunk, h, y) if torch.is_grad_enabled() else chunk(h, y)
                 for h, y in zip(hidden.split(size), targets.split(size))]
        return tuple(torch.cat(p) for p in zip(*parts))

    def save(self, folder, tokenizer, card=""):
        """Write the policy as a folder that plain transformers (or, with LoRA, peft) loads.

        card: Markdown for its README.md, the model card, which gets what the hub reads in front of it; "" = none.
        """
        if not self.peft:
            self.lm.save_pretrained(folder)
        else:
            # embeddings are never trained here; asked to find out, peft would ask the hub at every save
            self.lm.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
            path = os.path.join(folder, "adapter_config.json")
            with open(path) as f:
                config = json.load(f)
            config["base_model_name_or_path"] = portable(self.config.name_or_path, folder)
            with open(path, "w") as f:
                json.dump(config, f, indent=2)
            pathlib.Path(folder, "README.md").unlink(missing_ok=True)   # peft's empty card names the base's path
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:      # what a full disk raises inside the tokenizer has no class of its own
            raise OSError(f"{folder}: {error}") from error
        if card:
            base = portable(self.config.name_or_path, folder)
            local = os.path.isdir(self.config.name_or_path)     # the hub refuses a card whose base is a path
            facts = [f"library_name: {'peft' if self.peft else 'transformers'}"] + [f"base_model: {base}"] * (not local)
            pathlib.Path(folder, "README.md").write_text("\n".join(
                ["---", *facts, "---", card.rstrip(), "", f"Base model: `{base}`" + " (from this folder)" * local, ""]),
                encoding="utf-8")

    def load(self, folder):
        """Take the policy's weights from a folder that `save` wrote, bit for bit."""
        if self.peft:
            from peft import load_peft_weights, set_peft_model_state_dict
            set_peft_model_state_dict(self.lm, load_peft_weights(folder, device=str(self.device)))
            return
        saved = load_causal_lm(folder, torch.float32)
        for p, q in zip(self.lm.parameters(), saved.parameters(), strict=True):
            p.data.copy_(q)


def head(lm, hidden):
    """Return the float32 logits (..., V) that a causal LM makes of its last hidden states (..., D)."""
    logits = lm.get_output_embeddings()(hidden).float()
    cap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)     # Gemma-2, Gemma-3
    return cap * torch.tanh(logits / cap) if cap else logits


def portable(base, folder):
    """A local base relative to the saved folder, which so never names a machine's own paths; a hub name as it is."""
    return os.path.relpath(base, folder) if os.path.isdir(base) else base


@functools.cache
def cache_argument(kind):
    """The name of the cache argument of a model class: `cache` in transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def resolve(path):
    """What a name of a model stands for: (folder or hub name, that of its base, adapter_config.json or None)."""
    if os.path.isfile(os.path.join(path, "policy", "config.json")) or os.path.isfile(
            os.path.join(path, "policy", "adapter_config.json")):
        path = os.path.join(path, "policy")         # a run's folder, or a checkpoint
    if not os.path.isfile(os.path.join(path, "adapter_config.json")):
        return path, path, None
    with open(os.path.join(path, "adapter_config.json")) as f:
        adapter = json.load(f)
    base = adapter["base_model_name_or_path"]
    if os.path.isdir(os.path.join(path, base)):         # as `save` wrote it
        base = os.path.normpath(os.path.join(path, base))
    return path, base, adapter


def load_tokenizer(path, base):
    """The tokenizer of a model, or of its base: an adapter's folder may hold none."""
    from transformers import AutoTokenizer
    for folder in (path, base):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            if len(set(tokenizer("a 1 b 2", add_special_tokens=False)["input_ids"])) > 1:
                return tokenizer
            problem = "it has no vocabulary"        # transformers makes an empty one up where a folder has none
        except (OSError, ValueError) as error:
            problem = error
    raise ModelError(f"model={path!r} has no usable tokenizer: {problem}")


def load_model(path, *, lora_rank=0, critic=False, reference=False, bf16=False, gradient_checkpointing=False):
    """Load a policy and its tokenizer.

    path: a local folder or hub name of a causal LM, or a folder with a PEFT adapter (then that policy goes on:
    its adapter is trained further if lora_rank > 0, merged into the weights if lora_rank = 0).
    lora_rank: 0 trains all weights, else the rank (and alpha) of new adapters on all linear layers.
    Returns (ActorCritic, tokenizer). Raises ModelError with what to change.
    """
    from transformers.utils import logging
    logging.disable_progress_bar()
    path, base, adapter = resolve(path)
    lm = load_causal_lm(base, torch.bfloat16 if bf16 and lora_rank else torch.float32)
    tokenizer = load_tokenizer(path, base)
    if adapter:
        from peft import PeftModel
        kind, rank = adapter.get("peft_type"), adapter.get("r")
        if lora_rank and (kind, rank) != ("LORA", lora_rank):
            further = f"--lora_rank={rank} to train it further, or " if kind == "LORA" else ""
            raise ModelError(f"model={path!r} holds a {kind} adapter of rank {rank}, but lora_rank={lora_rank}. Set "
                             f"{further}--lora_rank=0 to merge it and train all weights.")
        lm = PeftModel.from_pretrained(lm, path, is_trainable=True)
        if not lora_rank:
            lm = lm.merge_and_unload().requires_grad_(True)     # peft had frozen the base
    elif lora_rank:
        from peft import LoraConfig, get_peft_model
        lm = get_peft_model(lm, LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules="all-linear",
                                           lora_dropout=0.0, task_type="CAUSAL_LM"))
    policy = ActorCritic(lm, critic, reference, bf16, gradient_checkpointing)
    if gradient_checkpointing and not policy.checkpointed:
        raise ModelError(f"model={path!r} ({lm.config.model_type}) has no layers that transformers can recompute. Set "
                         f"gradient_checkpointing=False, and lower micro_batch_tokens if memory is short.")
    return policy, tokenizer


def load_config(path):
    """The config of a decoder that this code trains exactly; any other is refused with the reason."""
    from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:      # transformers raises OSError, ValueError, and the hub's own kinds
        kind = "is a folder without a readable config.json" if os.path.isdir(path) else \
            "is no local folder, and could not be had from the hub"
        raise ModelError(f"model={path!r} {kind} ({type(error).__name__}). Check the spelling and the network, "
                         f"or start with configs/tiny_frozenlake.py, which needs no download.") from None
    if config.is_encoder_decoder:
        raise ModelError(f"model={path!r} ({config.model_type}) is an encoder-decoder; a decoder-only causal LM "
                         f"is needed.")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or getattr(text, "state_size", None):
        raise ModelError(f"model={path!r} ({config.model_type}) keeps a recurrent state ({sorted(kinds)}): its "
                         f"cache can't be re-aligned between turns. An attention-only decoder is needed.")
    return config


def load_causal_lm(path, dtype):
    """Load a decoder in a dtype."""
    from transformers import AutoModelForCausalLM
    load_config(path)
    try:
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ModelError(f"model={path!r} could not be loaded as a causal LM: {error}") from None
    for p in lm.parameters():
        p.data = p.data.clone()     # they were views of the file: whoever rewrites it would rewrite the weights
    check_head(lm, path)
    return lm


@torch.no_grad()
def check_head(lm, path):
    """Refuse a model whose logits are not head(hidden), or without a cache: its log-probs would be silently wrong."""
    lm.eval()
    ids = torch.arange(1, 9, device=lm.device)[None] % lm.config.get_text_config().vocab_size
    cache = DynamicCache()
    hidden = lm.base_model(input_ids=ids, use_cache=True, **{cache_argument(type(lm)): cache}).last_hidden_state
    if cache.get_seq_length() != ids.shape[1]:      # RWKV and others ignore it, without an error
        raise ModelError(f"model={path!r} ({lm.config.model_type}) keeps no cache of keys and values but a state of "
                         f"its own, recurrent as a rule. An attention-only decoder is needed.")
    want, got = lm(input_ids=ids).logits.float(), head(lm, hidden)
    tolerance = 1e-3 if lm.dtype == torch.float32 else 3e-2         # bfloat16 has 8 bits
    if not torch.allclose(want, got, rtol=tolerance, atol=tolerance * max(1.0, want.abs().max().item())):
        raise ModelError(f"model={path!r} ({lm.config.model_type}) transforms its logits in a way that this code "
                         f"doesn't know; the log-probs would be wrong. Add it to model.head.")
