"""Tests of rollout.py: which tokens are trained, what they were sampled with, and what must not change them.

float32 on a CPU: two ways to one log-prob differ by less than 5e-6 here, the tolerance is 1e-5.
"""
import dataclasses
import doctest
import itertools
import math
import time

import pytest
import torch

from helpers import (ARCHITECTURES, CHATML, Talk, TextEnv, make_lm, make_policy, make_tokenizer, model, one_pass,
                     play, rollout, settings)

Chat, Game, draw, parse_response = rollout.Chat, rollout.Game, rollout.draw, rollout.parse_response
EPISODES = rollout.train_episodes(1, 1, range(6), 4)


def runs(trajectory):
    """[(trained or not, its ids), ...]: an episode cut where the loss mask changes."""
    pairs = zip(trajectory.loss_mask, trajectory.tokens)
    return [(bool(m), [t for _, t in part]) for m, part in itertools.groupby(pairs, lambda p: p[0])]


def script(chat, cfg, env, answers):
    """Play given responses (text after the prefill; the stop token is added) without a model; return the Game."""
    game = Game(env, EPISODES[0], cfg)
    game.feed(chat.first([game.message])[0])
    for text in answers:
        assert not game.over
        ids = chat.encode([text])[0] + [chat.stop_ids[0]]
        game.respond(chat, ids, [-1.0] * len(ids))
        if not game.over:
            game.take(chat.next([game.message], ids[-1:])[0])
    return game


class Buttons(TextEnv):
    """Up pays 0.25 and goes on, Win ends with success, Cut is truncated by the world; it keeps what was done."""

    brief, instruction = "Buttons", "Press a button."
    actions, legend = ("Up", "Win", "Cut"), {"x": "you"}

    def reset(self, seed, noise_seed=0):
        self.done_actions = []
        return "x"

    def step(self, action):
        self.done_actions.append(action)
        return f"x{len(self.done_actions)}", 0.25, action == "Win", action == "Cut", {"success": action == "Win"}


# Sampled = recomputed

@pytest.mark.parametrize("name, temperature", [(n, 1.0) for n in ARCHITECTURES] + [("qwen2", 0.7), ("gemma2", 0.7)])
def test_sampled_logprobs_are_one_pass_logprobs(name, temperature):
    """Cache, padding, re-alignment, positions, sliding windows and temperature leave no trace in the log-probs.

    Any of them wrong, the ratio of the first update is not 1, and nothing crashes.
    """
    policy, chat = make_policy(name)
    played = play(policy, chat, EPISODES, settings(temperature=temperature))
    batch = rollout.make_batch(played, range(len(played)), "cpu")
    with torch.no_grad():
        ours = policy(batch.tokens, batch.loss_mask, temperature=temperature)["logprobs"]
    assert (ours - batch.logprobs).abs().max() < 1e-5
    for t in played:
        table = one_pass(policy.lm, t.tokens, temperature)
        at = [i for i, m in enumerate(t.loss_mask) if m]
        want = torch.stack([table[i - 1, t.tokens[i]] for i in at])
        torch.testing.assert_close(torch.tensor([t.logprobs[i] for i in at]), want, atol=1e-5, rtol=0)
    # the episodes are as ragged as the property needs
    prompts = [len(runs(t)[0][1]) for t in played]
    responses = {len(ids) for t in played for sampled, ids in runs(t) if sampled}
    assert max(prompts) - min(prompts) > 6 and len(responses) > 3       # 6 = the sliding windows
    assert max(len(t.turn_rewards) for t in played) > 2 and len({len(t.tokens) for t in played}) > 8


def slow_episode(policy, chat, episode, cfg):
    """What `collect` does, one episode and one token at a time, without a cache."""
    game = Game(Talk(), episode, cfg)
    game.feed(chat.first([game.message])[0])
    noise = rollout.token_noise([episode], cfg.max_turns, cfg.max_new_tokens)[0]
    while not game.over:
        ids, logprobs = [], []
        while not ids or ids[-1] not in chat.stop_ids and len(ids) < cfg.max_new_tokens:
            logits = policy.lm(input_ids=torch.tensor([game.traj.tokens + ids])).logits[:, -1]
            token, logprob = draw(logits, noise[game.turn, len(ids)][None], cfg.temperature)
            ids, logprobs = ids + token.tolist(), logprobs + logprob.tolist()
        game.respond(chat, ids, logprobs)
        if not game.over:
            game.take(chat.next([game.message], ids[-1:])[0])
    return game.traj


@torch.no_grad()
def test_fast_decoding_is_slow_decoding(monkeypatch):
    """Batched decoding samples the same ids as a loop without cache; ROOM 3 makes the cache's buffer grow often."""
    monkeypatch.setattr(rollout.RoomyLayer, "ROOM", 3)
    policy, chat = make_policy("mistral")
    for fast, episode in zip(play(policy, chat, EPISODES[::3]), EPISODES[::3]):
        slow = slow_episode(policy, chat, episode, settings())
        torch.testing.assert_close(torch.tensor(fast.logprobs), torch.tensor(slow.logprobs), atol=1e-5, rtol=0)
        assert dataclasses.replace(fast, logprobs=slow.logprobs) == slow


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_set_aside_come_back(monkeypatch, name):
    """Rows that have finished leave the batch within the turn and return for the next: the same episodes."""
    policy, chat = make_policy(name)
    monkeypatch.setattr(rollout, "PATIENCE", 1000)
    whole, joined = play(policy, chat, EPISODES), []
    monkeypatch.setattr(rollout, "PATIENCE", 0.3)
    real = rollout.Rows.join
    monkeypatch.setattr(rollout.Rows, "join", lambda self, parts, order: joined.append(len(parts)) or real(self, parts, order))
    apart = play(policy, chat, EPISODES)
    assert len(joined) > 1 and max(joined) > 2
    for a, b in zip(whole, apart):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)
        assert dataclasses.replace(a, logprobs=b.logprobs) == b


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_steps_of_fixed_shapes(monkeypatch, name):
    """FixedStep, which a GPU replays as one graph, samples the same episodes; here its steps run one by one."""
    policy, chat = make_policy(name)
    whole, steps = play(policy, chat, EPISODES), []
    monkeypatch.setattr(model.ActorCritic, "can_fix_shapes", True)
    real = rollout.FixedStep.step
    monkeypatch.setattr(rollout.FixedStep, "step", lambda self: steps.append(self.mask.shape[3]) or real(self))
    fixed = play(policy, chat, EPISODES)
    assert len(steps) > 20 and len(set(steps)) < 5      # few widths
    for a, b in zip(whole, fixed):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)
        assert dataclasses.replace(a, logprobs=b.logprobs) == b


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: there the decode step is a CUDA graph")
@pytest.mark.parametrize("capture", [True, False])
def test_captured_decoding_on_cuda(monkeypatch, capsys, capture):
    """The captured step samples what the uncaptured one does, in float32; where it can't be captured, a note says so."""
    policy, chat = make_policy("qwen2")
    policy.to("cuda")
    assert policy.can_fix_shapes
    replays = []
    if capture:
        real = torch.cuda.CUDAGraph.replay
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: replays.append(1) or real(self))
    else:
        def fail(*args, **kwargs):
            raise RuntimeError("no graphs today")
        monkeypatch.setattr(torch.cuda, "graph", fail)
    monkeypatch.setattr(rollout.FixedStep, "WARM_UP", 3)
    fixed = play(policy, chat, EPISODES)
    assert bool(replays) == capture and ("no graphs today" in capsys.readouterr().err) != capture
    monkeypatch.setattr(model.ActorCritic, "can_fix_shapes", False)
    for a, b in zip(fixed, play(policy, chat, EPISODES)):
        assert a.tokens == b.tokens


# Chat templates. Each row: template, tokenizer, first prompt and what lies between two responses ({} = the
# user's text, without the prefill), the token that closes a turn.

CHATML_USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHATML_FIRST = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + CHATML_USER
IMPLICIT = ("{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
            + CHATML)
LLAMA = ("{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
         "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
         "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
LLAMA_USER = ("<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n")
GEMMA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
         "{% endif %}{% for m in messages %}<start_of_turn>"
         "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
         "{% endfor %}"
         "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
GEMMA_USER = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
MISTRAL = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
           "{% set system = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
           "{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
           "{% if loop.last and system is defined %}{{ system }}{% endif %}{{ m['content'] }}[/INST]"
           "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}")
FORGETS = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
           "{{ m['content'].split('</think>')[-1].lstrip() }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
           "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
LLAMA_TOKENS = dict(eos="<|eot_id|>", bos="<|begin|>", special=("<|start_header_id|>", "<|end_header_id|>"))
GEMMA_TOKENS = dict(eos="<eos>", bos="<bos>")
TEMPLATES = {
    "chatml": (CHATML, {}, CHATML_FIRST, "\n" + CHATML_USER, "<|im_end|>"),
    "implicit system": (IMPLICIT, {}, CHATML_FIRST, "\n" + CHATML_USER, "<|im_end|>"),
    "llama": (LLAMA, LLAMA_TOKENS, "<|begin|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful "
              "assistant.<|eot_id|>" + LLAMA_USER, LLAMA_USER, "<|eot_id|>"),
    "gemma": (GEMMA, GEMMA_TOKENS | dict(special=("<start_of_turn>", "<end_of_turn>")),
              "<bos>" + GEMMA_USER.format("You are a helpful assistant.\n\n{}"), "\n" + GEMMA_USER,
              "<end_of_turn>"),
    "gemma, unlisted": (GEMMA, GEMMA_TOKENS | dict(special=("<start_of_turn>",), unlisted=("<end_of_turn>",)),
                        "<bos>" + GEMMA_USER.format("You are a helpful assistant.\n\n{}"), "\n" + GEMMA_USER,
                        "<end_of_turn>"),
    "mistral": (MISTRAL, dict(eos="</s>", bos="<s>", special=("[INST]", "[/INST]")),
                "<s>[INST] You are a helpful assistant.\n\n{}[/INST]", "[INST] {}[/INST]", "</s>"),
    "forgets thoughts": (FORGETS, {}, CHATML_FIRST, "\n" + CHATML_USER, "<|im_end|>"),
    "opens a thought": (OPENS, {}, CHATML_FIRST + "<think>\n", "\n" + CHATML_USER + "<think>\n", "<|im_end|>"),
    "pad is eos": (CHATML, dict(pad="<|im_end|>"), CHATML_FIRST, "\n" + CHATML_USER, "<|im_end|>"),
    "none": (None, dict(eos="<|endoftext|>", special=()),
             "### system\nYou are a helpful assistant.<|endoftext|>\n### user\n{}<|endoftext|>\n### assistant\n",
             "\n### user\n{}<|endoftext|>\n### assistant\n", "<|endoftext|>"),
}


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_tokens_are_the_sampled_tokens(name, think):
    """What isn't sampled is exactly the template's own text, and every sampled id is trained, stop token included.

    Masks made from ids, padding or special tokens lose the stop token or train the template. The stop token
    takes the place of the template's own, so the first position trained follows the prompt's last token.
    """
    template, kwargs, first, between, stop = TEMPLATES[name]
    tokenizer = make_tokenizer(template, **kwargs)
    policy, _ = make_policy("qwen2", tokenizer, stop=stop)
    chat = Chat(tokenizer, think)
    stop_id = tokenizer.convert_tokens_to_ids(stop)
    prefill = "<think>" if think else "<answer>"
    if name == "opens a thought":
        prefill = "" if think else "\n</think>\n\n<answer>"
    played = play(policy, chat, EPISODES[:8], settings(think=think))
    assert max(len(t.turn_rewards) for t in played) > 1
    for t in played:
        parts = runs(t)
        assert [m for m, _ in parts] == [False, True] * len(t.turn_rewards)
        said = [m["content"] for m in t.messages if m["role"] == "user"]
        for k, (_, ids) in enumerate(parts[::2]):
            text = (between if k else first).format(said[k]) + prefill
            if k and parts[2 * k - 1][1][-1] != stop_id:        # ended by another eos: the template's own follows
                text = stop + text
            assert tokenizer.decode(ids) == text and ids == chat.encode([text])[0]
        for k, (_, ids) in enumerate(parts[1::2]):
            ended = ids[-1] in chat.stop_ids
            assert not set(ids[:-1]) & {stop_id, tokenizer.eos_token_id}
            assert ended or len(ids) == 10 and k + 1 == len(t.turn_rewards)
            assert t.messages[2 * k + 1]["content"] == chat.given + tokenizer.decode(ids[:len(ids) - ended])
        assert t.turn_ids == [i // 2 for i, (_, ids) in enumerate(parts) for _ in ids]
        assert all((lp != 0) == m for lp, m in zip(t.logprobs, t.loss_mask))
    assert any(ids[-1] == stop_id for t in played for m, ids in runs(t) if m)


@pytest.mark.parametrize("name", set(TEMPLATES) - {"mistral", "forgets thoughts", "opens a thought"})
def test_wellformed_episode_follows_the_template(name):
    """Where a template doesn't rewrite history, our tokens are those of the whole rendered chat.

    (The three left out move the system text, drop thoughts, or open them: there we go on token by token.)
    """
    tokenizer = make_tokenizer(TEMPLATES[name][0], **TEMPLATES[name][1])
    chat = Chat(tokenizer, think=True)
    cfg = settings(think=True, max_turns=3, terse=False, max_context=2000)
    game = script(chat, cfg, Buttons(), [
        "go</think> <answer>Up</answer>", " or</think><answer>Up || Up</answer>", "</think><answer>Win</answer>"])
    tokens, messages = game.traj.tokens, game.traj.messages
    if chat.has_system:
        messages = [{"role": "system", "content": rollout.SYSTEM}] + messages
    else:
        messages[0]["content"] = f"{rollout.SYSTEM}\n\n{messages[0]['content']}"
    text = tokenizer.apply_chat_template(messages, chat_template=chat.template, tokenize=False)
    want = chat.encode([text])[0]
    assert game.traj.success and want[:len(tokens)] == tokens
    assert len(want) - len(tokens) <= 1             # a template may end with a newline after the stop token


def test_stop_tokens():
    """The token that the template closes a turn with, the tokenizer's eos and the caller's: any ends a response.

    Supervised play ends with the template's own; the lowest id would be the eos, which closes no turn there.
    """
    template, kwargs, *_ = TEMPLATES["gemma"]
    tokenizer = make_tokenizer(template, **kwargs)
    eos, close, dot = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>", "."])
    chat = Chat(tokenizer, think=False, extra_stops=[dot, eos, None])
    assert eos < close and set(chat.stop_ids) == {eos, close, dot}
    assert chat.answer("Up") == chat.encode(["Up</answer>"])[0] + [close]
    assert chat.next(["x"], [close])[0] == chat.encode(["\n" + GEMMA_USER.format("x") + "<answer>"])[0]
    # another stop token doesn't close the turn: the template's own follows it
    assert chat.next(["x"], [dot])[0] == [close] + chat.next(["x"], [close])[0]


def test_tokenizer_without_a_stop_is_refused():
    """A turn that nothing can end would always be cut at max_new_tokens."""
    with pytest.raises(ValueError, match="Set tokenizer.eos_token"):
        Chat(make_tokenizer("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", eos=None, special=()))


def test_several_named_templates():
    """Some tokenizers hold a dict of templates; "default" is the one for chats."""
    chat = Chat(make_tokenizer({"default": CHATML, "tool_use": "no"}))
    assert chat.close == "<|im_end|>\n<|im_start|>user\n" and chat.open == "<|im_end|>\n<|im_start|>assistant\n"


# Words

def test_messages():
    """The whole context: task, legend, actions, budget, then each turn's reward (without penalty) and state."""
    chat = Chat(make_tokenizer())
    cfg = settings(think=True, terse=False, max_context=2000, max_actions=7)
    game = script(chat, cfg, Buttons(), ["</think><answer>Up||no</answer>"])
    assert [m["content"] for m in game.traj.messages if m["role"] == "user"] == [
        "Press a button.\n\n"
        "The meaning of each symbol is: x: you\n\n"
        "Your available actions are: Up, Win, Cut\n\n"
        "You have at most 4 turns and 7 actions in all, at most 5 in a turn, separated by \"||\".\n\n"
        "Turn 1:\nState:\nx\nYou have 7 actions left. Always output: <think> [your thoughts] </think> <answer> "
        "[your answer] </answer> with no extra text. Strictly follow this format. Max response length: 10 tokens.",
        "Reward: 0.25\n\n"
        "Turn 2:\nState:\nx1\nYou have 6 actions left. Always output: <think> [your thoughts] </think> <answer> "
        "[your answer] </answer> with no extra text. Strictly follow this format. Max response length: 10 tokens."]
    assert game.traj.turn_rewards == [pytest.approx(0.15)] and game.traj.format_ok == [False]
    game = script(Chat(make_tokenizer(), think=False), settings(), Buttons(), ["Up</answer>"])
    assert [m["content"] for m in game.traj.messages] == ["Buttons\nx\n10", "<answer>Up</answer>", "0.25\nx1\n9"]


T = "<think>go</think>"


@pytest.mark.parametrize("text, actions, ok", [
    (T + "<answer>Up || Down</answer>", ["Up", "Down"], True),
    (T + "\n <answer> uP||\nDOWN </answer> bye", ["Up", "Down"], True),
    (T + "<answer>Up || Jump || Down || Fly</answer>", ["Up", "Down"], False),       # unknown: once, valid ones run
    (T + "<answer>Up||Up||Up||Up</answer>", ["Up"] * 3, True),                      # too many: cut, not punished
    (T + "<answer>Up||Up||Up||Jump</answer>", ["Up"] * 3, True),                    # nobody reads past the limit
    (T + "<answer>Up ||</answer>", ["Up"], False),
    (T + "<answer></answer>", [], False),
    (T + "<answer>Up", [], False),
    (T + "Up", [], False),
    (T + "</answer>Up<answer>", [], False),
    ("go</think><answer>Up</answer>", ["Up"], False),                               # no opening tag
    ("<think>go<answer>Up</answer>", ["Up"], False),                                # the thought never closes
    ("<think><answer>Down</answer></think><answer>Up</answer>", ["Up"], True),      # a thought about an answer
    ("<think><think></think></think><answer>Up</answer>", ["Up"], True),
    (T + "<answer><answer>Up</answer></answer>", [], False),
    (T + "<answer>Up</answer><answer>Down</answer>", ["Up"], True),                 # the first answer counts
    ("", [], False),
])
def test_parse_response(text, actions, ok):
    """What a response means, up to three actions; a wrong reading pays or punishes the wrong tokens."""
    assert parse_response(text, ("Up", "Down"), 3) == (actions, ok)


def test_parse_response_without_thought_and_free_text():
    """Without thinking no <think> is asked for; free text is one action, separators and case included."""
    assert parse_response("<answer>up</answer>", ("Up",), 5, think=False) == (["Up"], True)
    assert parse_response("<answer>Up ; Up</answer>", ("Up",), 5, sep=";", think=False) == (["Up", "Up"], True)
    assert parse_response("\n</think>\n\n<answer>up</answer>", ("Up",), 5, think=False) == (["Up"], True)
    assert parse_response(T + "<answer> (1 || 2)\nA </answer>", None, 1) == (["(1 || 2)\nA"], True)
    assert parse_response(T + "<answer> \n </answer>", None, 1) == ([], False)
    assert parse_response("<answer>x</answer>", None, 1) == (["x"], False)


@pytest.mark.parametrize("text", [
    T + "<answer>" + "Up||" * 10_000 + "</answer>", T + "<answer>" + " |" * 500_000, "|" * 1_000_000,
    "<answer>" * 125_000, "<think>" * 140_000 + "</answer>" * 10, T + "<answer>" + " " * 1_000_000 + "</answer>"],
    ids=["10,000 actions", "no end", "separators", "answers", "thoughts", "blanks"])
def test_parse_response_is_linear(text):
    """Model text is any text: a quadratic reader would need minutes for a megabyte, this one milliseconds."""
    start = time.perf_counter()
    actions, _ = parse_response(text, ("Up",), 5)
    assert len(actions) in (0, 5) and time.perf_counter() - start < 1


def test_doctests():
    """The worked example in the docstring is true; it would rot silently if nothing ran it."""
    failed, tried = doctest.testmod(rollout)
    assert failed == 0 and tried >= 1


# Actions, rewards, ends

def test_cut_answer_trains_what_was_sampled():
    """Three actions sampled, two allowed: the world plays two, the trained ids stay as they were sampled."""
    chat, env = Chat(make_tokenizer(), think=False), Buttons()
    game = script(chat, settings(max_actions_per_turn=2), env, ["Up || Up || Up</answer>"])
    sampled = chat.encode(["Up || Up || Up</answer>"])[0] + [chat.stop_ids[0]]
    assert env.done_actions == ["Up", "Up"] and game.traj.format_ok == [True]
    assert [ids for m, ids in runs(game.traj) if m] == [sampled]


def test_budget_and_penalty():
    """The budget of actions runs over turns; a turn's penalty is -0.1 once; the budget's end is a real end."""
    chat, env = Chat(make_tokenizer(), think=False), Buttons()
    game = script(chat, settings(max_actions=3, max_actions_per_turn=2), env,
                  ["no || nor</answer>", "Up || Up</answer>", "Up || Up</answer>"])
    t = game.traj
    assert env.done_actions == ["Up"] * 3 and game.over and not t.truncated and not t.success
    assert t.turn_rewards == [-0.1, 0.5, 0.25] and t.format_ok == [False, True, True]
    assert t.traj_return == pytest.approx(0.65) and "\n1" in t.messages[4]["content"]


@pytest.mark.parametrize("answers, over, success, truncated", [
    (["Up</answer>"] * 2, False, False, False),
    (["Up</answer>"] * 3, True, False, False),              # max_turns, told in the prompt: an end, not a cut
    (["Up || Win || Up</answer>"], True, True, False),
    (["Cut || Up</answer>"], True, False, True),            # by the world
])
def test_ends(answers, over, success, truncated):
    """How an episode ends; `truncated` decides whether the critic bootstraps."""
    game = script(Chat(make_tokenizer(), think=False), settings(max_turns=3), Buttons(), answers)
    assert (game.over, game.traj.success, game.traj.truncated) == (over, success, truncated)


@pytest.mark.parametrize("actions, truncated, rewards", [
    (["Up"], True, [0.25]), (["Win"], False, [0.25]), (["Up", "Up", "Up"], False, [0.75])])
def test_response_cut_after_its_answer(actions, truncated, rewards):
    """A cut response ends the episode; truncated unless world or budget had ended it, for no value lies beyond."""
    game = Game(Buttons(), EPISODES[0], settings(max_actions=3))
    game.play(actions, True, cut=True)
    assert game.over and game.traj.truncated == truncated and game.traj.turn_rewards == rewards


def test_max_new_tokens():
    """A response without a stop token ends as truncated, with the penalty for its missing answer."""
    policy, chat = make_policy()
    cut = [t for t in play(policy, chat, EPISODES, settings(max_new_tokens=3)) if t.truncated]
    assert cut
    for t in cut:
        assert sum(i == t.turn_ids[-1] for i, m in zip(t.turn_ids, t.loss_mask) if m) == 3
        assert not set(t.tokens[-3:]) & set(chat.stop_ids)
        assert "</answer>" in t.messages[-1]["content"] or t.turn_rewards[-1] == -0.1


def test_max_context():
    """A smaller context cuts the very same episode: a prefix of it, truncated, one reward for each response.

    Off by one, a token too many is fed or a reward stands on a token that is gone.
    """
    policy, chat = make_policy("gpt2")
    whole = play(policy, chat, EPISODES)
    for limit in range(max(len(runs(t)[0][1]) for t in whole) + 1, max(len(t.tokens) for t in whole) + 1, 13):
        for t, full in zip(play(policy, chat, EPISODES, settings(max_context=limit)), whole):
            n = len(t.tokens)
            assert n <= limit and t.tokens == full.tokens[:n]
            if n == len(full.tokens):
                assert dataclasses.replace(t, logprobs=full.logprobs) == full
            assert t.truncated or t.success or n == len(full.tokens)        # a cut answer may still have won
            assert len(t.turn_rewards) == len(t.format_ok) == sum(m for m, _ in runs(t))
            assert t.loss_mask[-1] and t.turn_rewards[:-1] == full.turn_rewards[:len(t.turn_rewards) - 1]


def test_context_that_is_too_small():
    """A first prompt that leaves no room is refused with both numbers; with one more token it plays."""
    policy, chat = make_policy()
    longest = max(len(runs(t)[0][1]) for t in play(policy, chat, EPISODES))
    with pytest.raises(ValueError, match=f"{longest} tokens.*max_context={longest}"):
        play(policy, chat, EPISODES, settings(max_context=longest))
    played = play(policy, chat, EPISODES, settings(max_context=longest + 1))
    assert max(len(t.tokens) for t in played) == longest + 1


@pytest.mark.parametrize("name, changes", [
    ("gpt2", {}), ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)))])
def test_context_beyond_the_models_positions(name, changes):
    """max_context above what the model has positions for is refused before anything is played.

    GPT-2's table of positions would be read out of range; rotary angles that depend on the longest row (dynamic,
    longrope) would make sampled and recomputed log-probs differ by tenths of a nat, silently.
    """
    positions = "n_positions" if name == "gpt2" else "max_position_embeddings"
    policy = model.ActorCritic(make_lm(name, **{positions: 64}, **changes))
    with pytest.raises(ValueError, match="400.*64"):
        play(policy, Chat(make_tokenizer(), think=False), EPISODES)


# Independence

def test_an_episode_does_not_depend_on_its_batch():
    """All at once, three by three, alone, in any order, in groups of any size: the same ids for every episode."""
    policy, chat = make_policy("gemma3")
    whole = play(policy, chat, EPISODES)

    def same(a, b):
        assert [(t.tokens, t.turn_rewards, t.group, t.member) for t in a] == [
            (t.tokens, t.turn_rewards, t.group, t.member) for t in b]
    same(play(policy, chat, EPISODES, settings(rollout_batch=3)), whole)
    same([play(policy, chat, [e])[0] for e in EPISODES[:5]], whole[:5])
    order = [7, 2, 15, 0, 8, 1, 3]                      # groups of uneven size, members apart
    same(play(policy, chat, [EPISODES[i] for i in order]), [whole[i] for i in order])
    assert len({tuple(t.tokens) for t in whole}) == len(whole)


def test_a_group_shares_its_prompt():
    """Members of a group start from the same tokens and part ways; groups differ.

    Where a world words its first state by chance (its own mistake), each member still reads its own state.
    """
    policy, chat = make_policy()
    first = [tuple(runs(t)[0][1]) for t in play(policy, chat, EPISODES)]
    assert all(len(set(first[i:i + 4])) == 1 for i in range(0, 24, 4)) and len(set(first)) > 1

    class Moody(Talk):
        def reset(self, seed, noise_seed=0):
            return super().reset(seed) + str(noise_seed % 7)
    for t in play(policy, chat, EPISODES, env=Moody):
        assert t.messages[0]["content"] in chat.tokenizer.decode(t.tokens)


def test_seeds_and_noise():
    """No number repeats over iterations, groups or members; validation is the same for all runs and disjoint."""
    train, fixed = rollout.train_episodes, rollout.validation_episodes(range(256))
    many = [e for run, it in [(0, i) for i in range(1, 21)] + [(1, 1)] for e in train(run, it, range(4), 3)]
    tasks, lucks = {e.task_seed for e in many}, {e.noise_seed for e in many}
    assert len(tasks) == 21 * 4 and len(lucks) == 21 * 4 * 3 and len(tasks | lucks) == 21 * 16
    streams = {(e.noise_key, e.group, e.member) for e in many}
    assert len(streams) == len(many) and streams.isdisjoint((e.noise_key, e.group, e.member) for e in fixed)
    assert [e.task_seed for e in fixed] == list(range(123, 379)) and min(tasks) >= 2 ** 63
    assert train(0, 5, [2], 3) == train(0, 5, range(4), 3)[6:9]             # on any number of ranks
    assert rollout.validation_episodes([7, 9]) == [fixed[7], fixed[9]]
    # the noise itself: no stream repeats or overlaps another, and each is its own whatever stands beside it
    noise = rollout.token_noise(many + fixed[:50], 5, 40)
    flat = noise.flatten()
    assert noise.dtype == torch.float32 and 0 <= flat.min() and flat.max() < 1
    assert torch.equal(rollout.token_noise(many[100:103], 5, 40), noise[100:103])
    assert len(set(flat.tolist())) > 0.99 * len(flat)       # 60,400 draws of 2^24 values: about 109 meet by chance
    assert abs(flat.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(flat))


# Sampling

def test_draw_never_picks_the_impossible():
    """Uniform 0 with leading, and just under 1 with trailing ids of probability 0: rounding must not reach them."""
    never, below = float("-inf"), 1 - 2.0 ** -24
    logits = torch.tensor([[never, never, 0.0, -1.0, never], [-200.0, never, 3.0, 3.0, -200.0], [0.1] * 5])
    for u in (0.0, below):
        token, logp = draw(logits, torch.full((3,), u), 1.0)
        assert token.tolist() == ([2, 2, 0] if u == 0 else [3, 3, 4]) and logp.isfinite().all()
    wide = torch.zeros(2, 151_936)          # a real vocabulary, whose float32 probabilities add up to 1 - 5e-5
    wide[:, ::2], wide[:, -500:] = -0.2, never
    assert draw(wide, torch.tensor([0.0, below]), 1.0)[0].tolist() == [0, 151_936 - 501]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draw_frequencies(temperature):
    """Frequencies are softmax(logits / T): over n equally spaced uniforms each count is right to within 1."""
    logits, n = torch.tensor([0.3, -1.0, 2.0, 0.0, -4.0]), 10_000
    token, logp = draw(logits.expand(n, -1), (torch.arange(n) + 0.5) / n, temperature)
    want = torch.softmax(logits / temperature, 0)
    assert (token.bincount(minlength=5) - n * want).abs().max() <= 1.01
    torch.testing.assert_close(logp, want.log()[token], atol=1e-6, rtol=0)


def test_draw_temperature_zero():
    """Temperature 0 is the most likely token, whatever the noise, with its log-prob at temperature 1."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    token, logp = draw(logits, torch.tensor([0.999, 0.999]), 0)
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(logp, torch.log_softmax(logits, -1).amax(-1), atol=1e-6, rtol=0)


# Batches

def test_shared_prefix():
    """By hand: rows 0 and 2 begin with [5, 6], row 1 with [5]; the trained tokens never belong to a prompt."""
    def episode(*tokens, prompt):
        return rollout.Trajectory(tokens=list(tokens), loss_mask=[0] * prompt + [1] * (len(tokens) - prompt))
    rows = [episode(5, 6, 7, prompt=2), episode(5, 6, 7, 8, prompt=1), episode(5, 6, 6, prompt=2)]
    prefix = rollout.shared_prefix(rows, "cpu")
    assert (prefix.rows.tolist(), prefix.of.tolist(), prefix.lengths.tolist()) == ([0, 1], [0, 1, 0], [2, 1])
    assert (prefix.width, prefix.rest, prefix.ragged) == (2, 3, True)
    assert rollout.shared_prefix(rows[:2], "cpu") is None       # nobody shares: nothing to gain


def test_make_batch():
    """Every field by hand for two episodes of unequal length and turns; padding is known from lengths alone."""
    a = rollout.Trajectory(tokens=[5, 6, 7, 0], loss_mask=[0, 1, 0, 1], logprobs=[0, -1.5, 0, -2],
                           turn_ids=[0, 0, 1, 1], turn_rewards=[0.5, -0.1], truncated=True)
    b = rollout.Trajectory(tokens=[8, 9], loss_mask=[0, 1], logprobs=[0, -3], turn_ids=[0, 0], turn_rewards=[1])
    batch = rollout.make_batch([b, a, b], [1, 2], "cpu")
    assert batch.tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]] and batch.tokens.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert batch.logprobs.tolist() == [[0, -1.5, 0, -2], [0, -3, 0, 0]] and batch.logprobs.dtype == torch.float32
    assert batch.turn_ids.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert batch.last.tolist() == [3, 1] and batch.index.tolist() == [1, 2]
    torch.testing.assert_close(batch.turn_rewards, torch.tensor([[0.5, -0.1], [1, 0]]))
    assert batch.truncated.tolist() == [True, False] and batch.advantages is None
