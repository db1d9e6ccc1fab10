"""What a run would do and need, before it takes a GPU and an hour: settings, a prompt as the model sees it, memory.

    python train.py --config configs/frozenlake.py --dry_run        # loads a config and a tokenizer, no weights
    python dryrun.py                                                # the README's table of GPU sizes

The memory is an estimate, an upper bound in its parts: rows as long as max_context, a micro-batch that is full.
"""

import dataclasses

import torch

import envs
import starpo
from model import CHUNK_ELEMENTS, load_config, load_tokenizer, resolve
from rollout import Chat, train_episodes, user_message

GB = 2 ** 30
CUDA_CONTEXT = 1.0          # GiB that CUDA and its libraries take before the first tensor, about
# hidden, layers, heads, heads of keys and values, MLP, vocabulary, head tied to the embedding
QWEN = {"0.5B": (896, 24, 14, 2, 4864, 151936, True), "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
        "3B": (2048, 36, 16, 2, 11008, 151936, True), "7B": (3584, 28, 28, 4, 18944, 152064, False)}


def skeleton(config):
    """The causal LM of a config on torch's meta device: shapes without memory."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def estimate(cfg, lm, ranks=1, bf16=True):
    """GiB on one of `ranks` devices: {part: GiB}, "rollout" and "update" never at once, and "total".

    lm: the model, on any device. bf16: as on CUDA, else float32 throughout.
    """
    text = lm.config.get_text_config()
    d, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    kv = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or d // heads
    mlp = getattr(text, "intermediate_size", None) or 4 * d
    every, head = sum(p.numel() for p in lm.parameters()), lm.get_output_embeddings()
    backbone = sum(p.numel() for p in lm.base_model.parameters())
    linear = [m for m in lm.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    critic, low = cfg.algo in starpo.CRITICS, 2 if bf16 else 4

    if cfg.lora_rank:       # one frozen base; policy and critic are adapters on it
        trained = sum(cfg.lora_rank * (m.in_features + m.out_features) for m in linear) * (1 + critic)
        weights = every * low + trained * 4
    else:                   # float32; computing in bfloat16 takes a copy of the model at work
        trained = every + backbone * critic
        weights = trained * 4 + every * 4 * (cfg.kl_coef > 0) + every * 2 * bf16
    # gradients, two moments; among ranks DDP's buckets, one flat message, and the copy of it that is summed
    optimizer = trained * (4 + 8) + trained * 12 * (ranks > 1)

    rows = -(-cfg.prompts_per_iter // ranks) * cfg.group_size
    rows = min(rows, cfg.rollout_batch or rows)
    cache = 2 * layers * kv * width * low * rows * cfg.max_context
    draw = rows * text.vocab_size * 20                              # logits, probabilities, their sum in float64
    # kept for the backward pass, per token and layer: norms in float32; queries, keys, values, MLP in the low precision
    layer = 6 * d * 4 + (2 * heads * width + 4 * kv * width + 4 * mlp) * low
    tokens = max(cfg.micro_batch_tokens, cfg.max_context)
    kept = layers * d * low + layer if cfg.gradient_checkpointing else layers * layer
    chunk = min(CHUNK_ELEMENTS, tokens * text.vocab_size) * (3 * 4 + low)
    parts = {"weights": weights, "gradients and Adam": optimizer, "rollout": cache + draw, "update": tokens * kept + chunk}
    parts = {name: x / GB for name, x in parts.items()} | {"CUDA": CUDA_CONTEXT * bf16}
    largest = max(parts["rollout"], parts["update"])
    return parts | {"total": parts["weights"] + parts["gradients and Adam"] + parts["CUDA"] + largest}


def dry_run(cfg, notes, arithmetic, ranks=1):
    """Print what a run with these settings would be. arithmetic: train.batch_arithmetic's sentence."""
    default = dataclasses.asdict(type(cfg)())
    for name, value in dataclasses.asdict(cfg).items():
        print(f"{'*' if value != default[name] else ' '} {name} = {value!r}")
    print("(* = not the default)", *notes, "", arithmetic, sep="\n")

    path, base, _ = resolve(cfg.model)
    config, tokenizer = load_config(base), load_tokenizer(path, base)
    name = cfg.env.split(",")[0].strip()
    env, episode = envs.make_env(name, **cfg.env_args), train_episodes(cfg.seed, 1, [0], 1)[0]
    message = user_message(env, env.reset(episode.task_seed, episode.noise_seed), 0, 0.0, cfg.max_actions, cfg)
    [ids] = Chat(tokenizer, cfg.think).first([message])
    print(f"\nThe first prompt of {name}, {len(ids)} tokens (a response has at most {cfg.max_new_tokens}, an episode "
          f"{cfg.max_context}):\n{'-' * 80}\n{tokenizer.decode(ids)}\n{'-' * 80}")

    cuda = cfg.device != "cpu" and (torch.cuda.is_available() or cfg.device == "cuda")
    parts = estimate(cfg, skeleton(config), ranks, bf16=cuda)
    print(f"\nMemory on each of {ranks} {'GPU' if cuda else 'CPU process'}(s), GiB, estimated (rollout and update take turns):")
    for part, size in parts.items():
        print(f"  {part:20s} {size:7.2f}")


def fits(cfg, lm, gigabytes):
    """The largest (micro_batch_tokens, rollout_batch), from the defaults down by halves, that 90 % of a GPU holds."""
    tokens, rows = cfg.micro_batch_tokens, cfg.rollout_batch
    while True:
        parts = estimate(dataclasses.replace(cfg, micro_batch_tokens=tokens, rollout_batch=rows), lm)
        if parts["total"] <= 0.9 * gigabytes:
            return tokens, rows
        if tokens <= cfg.max_context and rows <= 8:
            return None
        if parts["update"] >= parts["rollout"] and tokens > cfg.max_context or rows <= 8:
            tokens //= 2
        else:
            rows //= 2


def table(cfg, sizes=(24, 48, 80)):
    """The README's table: what fits of Qwen2.5's models with the settings of cfg, estimated."""
    from transformers import Qwen2Config
    print(f"| model | trained | GiB by default | {' | '.join(f'{s} GB' for s in sizes)} |\n|{'---|' * (3 + len(sizes))}")
    for name, (d, layers, heads, kv, mlp, words, tied) in QWEN.items():
        lm = skeleton(Qwen2Config(hidden_size=d, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                                  intermediate_size=mlp, vocab_size=words, tie_word_embeddings=tied))
        for kind, rank, save in (("LoRA", 64, False), ("LoRA, gradient_checkpointing", 64, True), ("all weights", 0, True)):
            c = dataclasses.replace(cfg, lora_rank=rank, gradient_checkpointing=save)
            cells = [fits(c, lm, s) for s in sizes]
            cells = ["no" if x is None else f"{x[0]} / {x[1]}" for x in cells]
            print(f"| Qwen2.5-{name} | {kind}{', gradient_checkpointing' * (not rank)} | {estimate(c, lm)['total']:.0f} | "
                  f"{' | '.join(cells)} |")


if __name__ == "__main__":
    from train import Config
    table(Config(rollout_batch=128))
