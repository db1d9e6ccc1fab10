"""Supervised baseline (arXiv 2504.20073, App. C): imitate a solver's multi-turn chats.

    python sft.py --model=Qwen/Qwen2.5-0.5B-Instruct --tasks=Sokoban --terse=False --lora_rank=64 \
                  --lr=1e-4 --max_context=3600

The laptop model in assets/tiny is made by two runs of this script (the commands stand in its README). The first starts
from nothing and learns the solver's actions, in play where some actions are random, and never learnt: it comes to read
the worlds. The second imitates play that is mostly random, every action of it: it comes to play as badly as that. This
is the start that reinforcement learning needs: something to gain, and a policy that tries everything.
"""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

import envs
from model import ActorCritic, ModelError, load_model
from rollout import SYSTEM, Chat, Episode, Game, make_batch, micro_batches
from settings import UserError, load_config
from train import Config, keep_memory, set_threads


@dataclass
class SftConfig:
    model: str = ""                     # "" = a new model of about 1 M parameters with its own tokenizer
    out_dir: str = "runs/sft"           # the folder the model is saved to
    like: str = ""                      # a config of train.py: its environments are the tasks, its SHARED settings count
    tasks: str = "Sokoban:0.6,FrozenLakeNoSlip:0.35,Bandit:0.05"   # name:share of the episodes[:noise]
    steps: int = 2000                   # optimizer steps
    batch: int = 32                     # episodes per step
    lr: float = 2e-3                    # peak; 100 steps of warm-up, then a cosine to a tenth
    noise: float = 0.0                  # share of uniform random actions in the play, 0 .. 1; the rest is the solver's
    solver_only: bool = False           # learn the solver's actions alone; False = all that were played
    world_coef: float = 0.0             # loss on the observations too: the model learns how the world moves; 0 = off
    lora_rank: int = 0                  # 0 = all weights
    seed: int = 0
    max_turns: int = 10                 # the rest as in train.Config
    max_actions: int = 10
    max_actions_per_turn: int = 1
    max_new_tokens: int = 8
    max_context: int = 1024
    micro_batch_tokens: int = 4096      # padded tokens per forward pass
    action_sep: str = "||"
    think: bool = False
    terse: bool = True


SHARED = ("max_turns", "max_actions", "max_actions_per_turn", "max_new_tokens", "max_context", "action_sep", "think", "terse")


# Pieces that the tokenizer never merges across: words, small numbers, the action separator, single symbols. In a
# grid every cell is a token of its own; only the wall around it, which never changes, costs one token a row.
PIECES = (r"(?<!#)\n#+\n#|#\n#+(?=\n[^#]|\z)|#\n#| ?\|\||-?\d+\.\d+|\d{1,2}| ?[A-Za-z][a-z]+|\n|.")
CHAT_TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
                 "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def new_tokenizer(texts, vocab_size=640):
    """Train a byte-level BPE on texts: any text can be encoded, the words of the tasks are single tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<answer>", "</answer>")])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>",
                                   extra_special_tokens=special[2:], chat_template=CHAT_TEMPLATE)


def new_model(tokenizer):
    """A Qwen2-shaped model of about 1 M parameters with random weights.

    Its class is Llama's with attention biases, the same function but for one bias more: in a folder of type
    qwen2, AutoTokenizer replaces any tokenizer's own way of cutting text by Qwen's, without a word.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True, rms_norm_eps=1e-6,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def read_settings(argv):
    """Make an SftConfig of the command line; what `like` gives counts where nothing else does."""
    cfg, typed, filed = load_config(SftConfig, argv)
    if not cfg.like:
        return cfg
    theirs = load_config(Config, [f"--config={cfg.like}"])[0]      # reading the file registers its environments
    if theirs.env_args:
        raise UserError(f"like={cfg.like!r}: tasks have no env_args. Register the environment under a name of its own, "
                        f"with functools.partial")
    given = {"tasks": theirs.env} | {name: getattr(theirs, name) for name in SHARED}
    return dataclasses.replace(cfg, **{k: v for k, v in given.items() if k not in typed | filed})


def read_tasks(text, noise):
    """Read "Name:share:noise,Name:share" as names, shares that add up to 1, and each task's own noise."""
    parts = [part.strip().split(":") for part in text.split(",")]
    try:
        for part in parts:
            envs.make_env(part[0])
        shares = np.array([float(p[1]) if len(p) > 1 else 1.0 for p in parts])
        noises = [float(p[2]) if len(p) > 2 else noise for p in parts]
    except ValueError as error:
        raise UserError(f"tasks must read Name:share:noise,...: {error}") from None
    return [p[0] for p in parts], shares / shares.sum(), noises


def play(name, noise, chat, cfg, seed):
    """One episode of noisy solver play as a Trajectory; its trained tokens are the answers, or the solver's."""
    rng = np.random.default_rng([seed, 3])
    game = Game(envs.make_env(name), Episode(0, 0, seed, seed, (0, 0)), cfg)
    game.feed(chat.first([game.message])[0])
    while not game.over:
        noisy = rng.random() < noise
        # asked for the whole budget: a label is a step towards the goal, also where the moves left are too few
        best = None if noisy else game.env.optimal_action(cfg.max_actions)
        if best is None and not noisy and cfg.solver_only:
            break       # the solver has given up: nothing more to learn here
        action = game.env.random_action(rng) if best is None else best
        ids = chat.answer(action, game.env.thought(action))
        game.respond(chat, ids, [0.0] * len(ids))
        if best is None and cfg.solver_only:
            game.traj.loss_mask[-len(ids):] = [0] * len(ids)
        if not game.over:
            game.take(chat.next([game.message], ids[-1:])[0])
    if game.traj.error:
        raise RuntimeError(game.traj.error)
    return game.traj


def corpus(cfg, seeds=200):
    """Texts for the tokenizer: chats of every registered world without data files, in full and in terse wording."""
    texts = []
    for name in [name for name in envs.ENVS if name != "QuestionAnswer"]:
        for terse in (True, False):
            c = dataclasses.replace(cfg, terse=terse)
            for seed in range(seeds if terse else 3):
                game = Game(envs.make_env(name), Episode(0, 0, seed, seed, (0, 0)), c)
                rng = np.random.default_rng(seed)
                while not game.over:
                    action = game.env.random_action(rng)
                    texts += [game.message, action]
                    game.play([action], True)
                    game.turn += 1
    return texts + ["Up || Down", SYSTEM] * 500


def train_step(policy, episodes, cfg, device):
    """Add up the gradients of one batch; return the mean losses on played and on observed tokens, in nats."""
    num_played = sum(sum(t.loss_mask) for t in episodes)
    num_world = sum(len(t.tokens) - 1 for t in episodes) - num_played
    totals = torch.zeros(2)
    for rows in micro_batches(episodes, range(len(episodes)), cfg.micro_batch_tokens):
        batch = make_batch(episodes, rows, device)
        real = torch.arange(batch.tokens.shape[1], device=device) <= batch.last[:, None]
        real[:, 0] = False
        scored = real if cfg.world_coef else batch.loss_mask
        logprobs = policy(batch.tokens, scored, entropy=False)["logprobs"]
        played = -logprobs[batch.loss_mask].sum() / num_played
        world = -logprobs[scored & ~batch.loss_mask].sum() / num_world
        (played + cfg.world_coef * world).backward()
        totals += torch.stack([played, world]).detach().cpu()
    return totals.tolist()


def main(cfg):
    """Train and save; return each step's loss on the played tokens, nats."""
    names, shares, noises = read_tasks(cfg.tasks, cfg.noise)
    set_threads()
    keep_memory()
    torch.manual_seed(cfg.seed)
    if not cfg.model:
        tokenizer = new_tokenizer(corpus(cfg))
        ActorCritic(new_model(tokenizer)).save(cfg.out_dir, tokenizer)
    policy, tokenizer = load_model(cfg.model or cfg.out_dir, lora_rank=cfg.lora_rank)   # as any user will load it
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy.to(device)
    chat = Chat(tokenizer, cfg.think)
    params = policy.policy_parameters()
    print(f"{sum(p.numel() for p in params):,} trainable weights, vocabulary {len(tokenizer)}")
    optimizer = torch.optim.AdamW(params, lr=cfg.lr, betas=(0.9, 0.98), weight_decay=0.01)
    rng, start, losses = np.random.default_rng(cfg.seed), time.perf_counter(), []
    for step in range(cfg.steps):
        done = step / cfg.steps
        lr = cfg.lr * min((step + 1) / 100, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        episodes = [play(names[k], noises[k], chat, cfg, int(rng.integers(2 ** 31, 2 ** 32)))
                    for k in rng.choice(len(names), cfg.batch, p=shares)]
        played, world = train_step(policy, episodes, cfg, device)
        losses.append(played)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == cfg.steps - 1:
            print(f"step {step}, loss on play {played:.4f}, on the world {world:.4f}, "
                  f"{time.perf_counter() - start:.0f} s", flush=True)
        if (step % 500 == 499) or step == cfg.steps - 1:
            policy.save(cfg.out_dir, tokenizer)
    return losses


if __name__ == "__main__":
    try:
        main(read_settings(sys.argv[1:]))
    except (UserError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
