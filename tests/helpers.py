"""What the tests share: short real runs, tokenizers, tiny random models, a world of free text, settings."""
import json

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import model
import rollout
from envs import TextEnv
import train
from settings import load_config
from train import Config

CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
WORDS = ["You are a helpful assistant.", "Turn 1: State: Reward: -0.1", "Up || Down || Left || Right", "no word"]


def make_tokenizer(template=CHATML, eos="<|im_end|>", pad="<|pad|>", bos=None,
                   special=("<|im_start|>", "<|im_end|>"), unlisted=()):
    """Train a byte-level BPE with a few merges, so that neighbouring texts could merge; tags are single tokens.

    unlisted: special tokens that no attribute of the tokenizer names.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    names = list(dict.fromkeys(x for x in (pad, eos, bos, *special, *unlisted) if x))
    bpe.train_from_iterator(WORDS * 3, trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    bpe.add_tokens([AddedToken(t, normalized=False) for t in ("<answer>", "</answer>", "</think>")])
    return hf.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, pad_token=pad, bos_token=bos,
                                      chat_template=template, extra_special_tokens=[x for x in special if x != eos])


SIZES = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.12, bos_token_id=None,
             eos_token_id=None, pad_token_id=None)
GEMMA = SIZES | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=6,
                     layer_types=["sliding_attention", "full_attention", "sliding_attention"])
ARCHITECTURES = {
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "gpt2": lambda: hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=512, vocab_size=320,
                                  initializer_range=0.12, bos_token_id=None, eos_token_id=None),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=6),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA),
    "gemma3": lambda: hf.Gemma3TextConfig(**GEMMA),
}


def make_lm(name="qwen2", likely=(), seed=0, **changes):
    """A random causal LM, weights of std 0.12 so that each key's place matters.

    likely: ids that get a bias of 4.5 nats, about one token in five: responses end early and at different
    lengths, which those of a plain random model never do.
    """
    torch.manual_seed(seed)
    config = ARCHITECTURES[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    lm = hf.AutoModelForCausalLM.from_config(config).eval()
    if likely:
        bias = torch.zeros(config.vocab_size)
        bias[list(likely)] = 4.5
        lm.get_output_embeddings().bias = torch.nn.Parameter(bias)
    return lm


class Talk(TextEnv):
    """Free text. What it says is of a length that varies; the task decides after how many actions it ends."""

    brief = "Talk"

    def reset(self, seed, noise_seed=0):
        self.seed, self.steps = seed, 0
        return "no " * (9 * (seed % 3))       # prompts differ by more than a sliding window

    def step(self, action):
        self.steps += 1
        over = self.steps == 1 + self.seed % 3
        return "word " * ((self.seed + 3 * self.steps) % 7), 0.5, over, False, {"success": over}


def settings(**changes):
    """Short episodes of free text without a thought; the rest is train.Config's."""
    return Config(**{**dict(think=False, terse=True, max_turns=4, max_new_tokens=10, max_context=400,
                            rollout_batch=0), **changes})


def make_policy(name="qwen2", tokenizer=None, seed=0, stop="<|im_end|>", **kwargs):
    """(ActorCritic, Chat) of a random model that ends its turns and closes its answers now and then."""
    tokenizer = tokenizer or make_tokenizer()
    likely = tokenizer.convert_tokens_to_ids([stop, "</answer>"])
    return model.ActorCritic(make_lm(name, likely, seed), **kwargs), rollout.Chat(tokenizer, think=False)


def play(policy, chat, episodes, cfg=None, env=Talk):
    cfg = cfg or settings()
    return rollout.collect(policy, chat, env, episodes, cfg, cfg.temperature)


def one_pass(lm, ids, temperature=1.0):
    """(T, V) log-probs by the whole Hugging Face model, one unpadded row, without any of our code."""
    with torch.no_grad():
        return torch.log_softmax(lm(input_ids=torch.tensor([ids])).logits[0].float() / temperature, -1)


def run_tiny(tmp_path, name, *words, signals=None):
    """Run a laptop config in-process; return (its last metrics, all lines of metrics.jsonl)."""
    out = tmp_path / "run"
    cfg, typed, filed = load_config(Config, ["--config", f"configs/{name}.py", f"--out_dir={out}", *words])
    last = train.main(cfg, train.check_config(cfg, typed, filed), signals)
    return last, [json.loads(line) for line in open(out / "metrics.jsonl")]
