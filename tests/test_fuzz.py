"""Generated cases (hypothesis) for whatever reads text from a model, a world or a user; and a model of garbage.

Each property is tried on 300 cases, the same at every run, and by `pytest -m slow` on 10,000 new ones. An @example is an
input that once broke it. The slowest case of each is named at the end of the run; none may take ten seconds.
"""
import ast
import dataclasses
import functools
import gc
import itertools
import json
import math
import operator
import os
import re
import reprlib
import tempfile
import time
import unicodedata
from fractions import Fraction

import hypothesis
import pytest
import torch
import transformers
from hypothesis import example, strategies as st

import checkpoint
import envs
import model
import record
import rollout
from helpers import make_tokenizer, settings
from rollout import FORMAT_PENALTY, Chat, Game, parse_response
from settings import UserError, load_config
from test_rollout import EPISODES, TEMPLATES
from train import Config

TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "assets", "tiny")
SIZES = [300, pytest.param(10_000, marks=pytest.mark.slow)]
SECONDS = 10        # of CPU time, for any case: only what grows faster than the text reaches it


def fuzzed(**strategies):
    """Make a property a test that draws its arguments: first its @examples, then 300 cases, or 10,000 as a slow test."""
    def decorate(check):
        @pytest.mark.parametrize("cases", SIZES)
        def test(cases, record_property):
            slowest = (0.0, {})

            @functools.wraps(check)     # its @examples come along
            def timed(**drawn):
                nonlocal slowest
                start = time.process_time()
                check(**drawn)
                seconds = time.process_time() - start
                slowest = max(slowest, (seconds, drawn), key=lambda pair: pair[0])
                assert seconds < SECONDS

            limits = hypothesis.settings(max_examples=cases, derandomize=cases == 300, deadline=None, database=None,
                                         suppress_health_check=list(hypothesis.HealthCheck))
            gc.freeze()         # or a case would be charged for a search of all that is loaded, a quarter of a second
            limits(hypothesis.given(**strategies)(timed))()
            gc.unfreeze()
            seconds, drawn = slowest
            record_property("slowest", f"{seconds * 1000:.1f} ms, {short(drawn)}")      # conftest.py prints it
        test.__doc__ = check.__doc__
        return test
    return decorate


def short(drawn):
    """Word a case in a line that any terminal shows."""
    words = reprlib.Repr()
    words.maxstring = words.maxother = 40
    words.maxlist = words.maxdict = 2
    text = ", ".join(f"{name}={words.repr(value)}" for name, value in drawn.items())
    return text.encode("ascii", "backslashreplace").decode()


junk = st.text(st.characters(), max_size=8)         # any code points: control characters, lone surrogates, emoji


def soup(*words):
    """Texts of the given words and junk in any order."""
    return st.lists(st.sampled_from(words) | junk, max_size=8).map("".join)


# ---------------------------------------------------------------------------------------------- parser

ACTIONS = st.sampled_from([None, ("Up", "Down", "Left", "Right"), ("Phoenix", "Dragon")])
SEPARATORS = st.sampled_from(["||", ";", " | "])
responses = soup("<think>", "</think>", "<answer>", "</answer>", "Up", " down", "DRAGON", "Jump", "||", ";", " | ",
                 "<", ">", " ", "\n", "<|im_end|>")
tagged = st.builds("<think>{}</think>{}<answer>{}</answer>{}".format, *[responses] * 4)


@fuzzed(text=responses | tagged, actions=ACTIONS, limit=st.integers(1, 6), sep=SEPARATORS, think=st.booleans())
def test_parser(text, actions, limit, sep, think):
    """Only valid actions, at most `limit`; format_ok for a well-formed answer of known actions and for nothing else."""
    valid, ok = parse_response(text, actions, limit, sep, think)
    shape = r"\s*<think>.*?</think>.*?<answer>(.*?)</answer>" if think else ".*?<answer>(.*?)</answer>"
    formed = re.match(shape, text, re.DOTALL)
    if actions is None:
        said = formed[1].strip() if formed else ""
        assert ok == bool(said) and len(valid) <= 1 and all(valid) and (not ok or valid == [said])
    else:
        said = [part.strip().lower() for part in formed[1].split(sep)[:limit]] if formed else ["nothing"]
        assert ok == (set(said) <= {a.lower() for a in actions})
        assert set(valid) <= set(actions) and len(valid) <= limit and (not ok or [a.lower() for a in valid] == said)


named = st.tuples(st.sampled_from(["Up", "Down", "Turn left"]), st.sampled_from(["lower", "upper", "title"]),
                  st.text(" \t\r\n\u3000", max_size=3))


@fuzzed(said=st.lists(named, min_size=1, max_size=8),
        limit=st.integers(1, 6), sep=SEPARATORS, thought=responses, between=responses, after=responses)
def test_parser_reads_what_a_correct_model_writes(said, limit, sep, thought, between, after):
    """Any thought, case and blanks, and anything around the answer: its first `limit` actions come back."""
    hypothesis.assume("</think>" not in thought and "<answer>" not in between)
    answer = sep.join(blanks + getattr(name, case)() + blanks for name, case, blanks in said)
    text = f"<think>{thought}</think>{between}<answer>{answer}</answer>{after}"
    actions, first = ("Up", "Down", "Turn left"), [name for name, _, _ in said][:limit]
    assert parse_response(text, actions, limit, sep) == (first, True)
    assert parse_response(text[1:], actions, limit, sep) == (first, False)      # the thought was never opened
    assert parse_response(f"<answer>{answer}</answer>{after}", actions, limit, sep, think=False) == (first, True)


tags = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "||"]), max_size=3).map("".join)


@fuzzed(before=responses, piece=tags | responses, after=responses, actions=ACTIONS, think=st.booleans())
def test_parser_is_linear(before, piece, after, actions, think):
    """Any text, repeated to 200,000 characters, is read in the second that `fuzzed` allows; a quadratic reader fails."""
    text = before + piece * (200_000 // max(1, len(piece))) + after
    assert len(parse_response(text, actions, 5, think=think)[0]) <= 5


# ---------------------------------------------------------------------------------------------- Countdown

ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
integers = st.integers(0, 30).map(str) | st.sampled_from(["007", "00", "9" * 30])
operators = st.sampled_from(["+", " - ", "*", " / ", "×", "÷", "−", "\n+\t"])
chains = st.lists(st.builds("{}{}".format, integers, operators), max_size=5).map("".join)
expressions = st.recursive(integers, lambda e: e.map("({})".format) | st.builds(
    "{}{}{}{}".format, chains, e, operators, e), max_leaves=6)
ODD = ["(", ")", "+", "**", "//", "%", "^", ".", ".0", "e3", "_", ",", "=", "\x00", "\u00a0", "٣", "１", "²", "½", "＋",
       "–", "int", ".real", "lambda:", "__import__('os')", "# ", "\\", "9" * 90]
not_quite = soup("1", "2", " ", "\n", "-", "*", "/", *ODD) | st.builds(
    "{}{}{}".format, expressions, st.sampled_from(ODD), st.sampled_from(["", " ", "+1", "*(2)", "3"]))


def by_python(text):
    """(value, integers used) by Python's own parser, cut down to what envs.evaluate documents; None for the rest."""
    def walk(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value), [node.value]
        if not isinstance(node, ast.BinOp) or type(node.op) not in ARITHMETIC:
            raise SyntaxError("neither a number nor one of four operators")
        (left, some), (right, more) = walk(node.left), walk(node.right)
        return ARITHMETIC[type(node.op)](left, right), some + more

    text = text.strip().translate(str.maketrans("×÷−", "*/-"))
    if len(text) > envs.MAX_ANSWER or set(text) - set("0123456789+-*/() \t\n"):
        return None
    text = re.sub("(?<![0-9])0+(?=[0-9])", "", re.sub(r"\s", " ", text))    # for Python 007 is none, and \n the end
    try:
        return walk(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


@fuzzed(text=expressions | not_quite,
        numbers=st.sampled_from(["right", "one too many", "one missing"]), miss=st.sampled_from([0, 1, Fraction(1, 3)]))
def test_scorer(text, numbers, miss):
    """Value, integers and reward are those of Python's parser and fractions; what evaluate doesn't document scores 0.

    The task's numbers are those in the text, or one more or fewer; its target is the text's value, or beside it.
    """
    want = by_python(text)
    try:
        assert envs.evaluate(text) == want
    except (ValueError, ZeroDivisionError):
        assert want is None
    value, used = want or (Fraction(0), [1, 2])
    env = envs.Countdown()
    env.reset(0)
    env.target = value + miss
    env.numbers = {"right": used[::-1], "one too many": [*used, 1], "one missing": used[1:]}[numbers]
    scores = want is not None and numbers == "right"
    reward = (envs.WELL_FORMED_REWARD if miss else envs.RIGHT_REWARD) if scores else 0.0
    told, *rest = env.step(text)
    assert rest == [reward, True, False, {"success": scores and not miss}]
    assert told.startswith("Value: " if scores else "Invalid: ")


# ---------------------------------------------------------------------------------------------- chat

def make_chat(name, think):
    """The Chat of a template that test_rollout.py spells out, or of the laptop model; padding ends a turn, too."""
    if name == "tiny":
        tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    else:
        tokenizer = make_tokenizer(TEMPLATES[name][0], **TEMPLATES[name][1])
    return Chat(tokenizer, think, [tokenizer.pad_token_id])


CHATS = {(name, think): make_chat(name, think) for name in [*TEMPLATES, "tiny"] for think in (False, True)}
kinds = st.sampled_from([*CHATS])
spoken = soup("<|im_end|>", "<|im_start|>", "<|pad|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<eos>", "</s>",
              "<|end|>", "<|user|>", "<think>", "</think>", "<answer>", "</answer>", "[INST]", "Up", "word ", "\u202e",
              "😀", "\ud83d", "שלום", "e\u0301", " ", "\n", "\r\n", "\x00", "{{ m }}", "{% raw %}")
any_ids = st.lists(st.integers(0, 700), max_size=30)        # beyond the tokenizer's, too: a model may have ids to spare


@fuzzed(kind=kinds, texts=st.lists(spoken, min_size=1, max_size=3), stop=st.integers(0, 2), echo=st.booleans(),
        ids=any_ids)
@example(kind=("tiny", False), texts=["hello"], stop=1, echo=True, ids=[])      # lost the user's first token and our own
@example(kind=("chatml", True), texts=["\ud83d", "\udcff"], stop=0, echo=False, ids=[])     # no tokenizer takes these
def test_chat(kind, texts, stop, echo, ids):
    """What is fed is the template's text around any user text, whole, in ids of the vocabulary; any ids have a text.

    A response's stop token stands in for the template's own, if it is that, and for nothing that the user says.
    """
    chat = CHATS[kind]
    decode, last = chat.tokenizer.decode, chat.stop_ids[stop % len(chat.stop_ids)]
    texts = [decode([last]) * echo + text for text in texts]
    prompts, feeds = chat.first(texts), chat.next(texts, [last] * len(texts))
    assert len(prompts) == len(feeds) == len(texts)
    assert all(type(i) is int and 0 <= i < len(chat.tokenizer) for fed in prompts + feeds for i in fed)
    for text, prompt, fed in zip(texts, prompts, feeds):
        text = text.encode(errors="replace").decode()       # a lone surrogate becomes a question mark
        assert text.strip() in decode(prompt) and decode(prompt).endswith(chat.open + chat.prefill)
        whole, closing = chat.close + text + chat.open + chat.prefill, decode([last])
        assert decode(fed) == (whole.partition(closing)[2] if closing in chat.close else whole)
    said = chat.decode(ids)
    assert said.startswith(chat.given) and said.encode()
    assert ids and ids[-1] in chat.stop_ids or chat.decode(ids + [last]) == said


@fuzzed(kind=kinds, text=spoken, thought=spoken)
def test_chat_reads_its_own_answers(kind, text, thought):
    """What supervised play writes as an answer is read as exactly that, whatever it thought, in every template."""
    text, thought = (t.encode(errors="replace").decode() for t in (text, thought))
    hypothesis.assume(text.strip() and "</answer>" not in text and "</think>" not in thought)
    chat = CHATS[kind]
    said = chat.decode(chat.answer(text, thought))
    assert parse_response(said, None, 1, think=kind[1]) == ([text.strip()], True)


class Says(envs.TextEnv):
    """Says the given texts in turn, pays 0.25 an action, and ends after `length` of them, by a cut or not."""

    brief, instruction, legend = "Says", "Say something.", {"x": "you"}

    def __init__(self, actions, texts, length, cuts):
        self.actions, self.texts, self.length, self.cuts, self.played = actions, itertools.cycle(texts), length, cuts, []

    def reset(self, seed, noise_seed=0):
        return next(self.texts)

    def step(self, action):
        assert self.actions is None or action in self.actions
        self.played.append(action)
        over = len(self.played) == self.length
        return next(self.texts), 0.25, over and not self.cuts, over and self.cuts, {"success": over}


@fuzzed(kind=kinds, actions=ACTIONS, texts=st.lists(spoken, min_size=1, max_size=3), length=st.integers(1, 9),
        cuts=st.booleans(), said=st.lists(st.integers(1, 9) | responses | any_ids, min_size=1, max_size=4),
        stops=st.booleans(), terse=st.booleans(), sizes=st.tuples(*[st.integers(1, 5)] * 3), room=st.integers(1, 400))
@example(kind=("chatml", False), actions=None, texts=["\ud83d"], length=1, cuts=False, said=[""], stops=True,
         terse=False, sizes=(1, 1, 1), room=9)          # a state that had no key
def test_game(kind, actions, texts, length, cuts, said, stops, terse, sizes, room):
    """An episode of any observations and any responses keeps its budgets, its books, and the rewards of its turns.

    A response is a good answer of so many actions, a text, or any ids, up to its stop token, or with one behind it.
    """
    chat, env = CHATS[kind], Says(actions, texts, length, cuts)
    spell = {int: lambda n: chat.answer("||".join([(actions or ["word"])[0]] * n))[:-1],
             str: lambda text: chat.encode([text])[0], list: list}
    cfg = settings(think=kind[1], terse=terse, max_turns=sizes[0], max_actions=sizes[1], max_actions_per_turn=sizes[2],
                   max_new_tokens=60)
    game = Game(env, EPISODES[0], cfg)
    game.feed(chat.first([game.message])[0])
    cfg.max_context = len(game.traj.tokens) + room
    sampled, told, steps = [], [], [0]
    for response in itertools.cycle(said):
        told.append((game.message, game.observation, game.actions_left))
        ids = spell[type(response)](response)
        ids = [*itertools.takewhile(lambda i: i not in chat.stop_ids, ids)] + chat.stop_ids[:1] * stops or [700]
        ids = ids[:min(cfg.max_new_tokens, cfg.max_context - len(game.traj.tokens))]        # as sample_turn does
        game.respond(chat, ids, [-1.0] * len(ids))
        sampled.append(ids)
        steps.append(len(env.played))
        if game.over or not game.take(chat.next([game.message], ids[-1:])[0]):
            break
    t, done = game.traj, [b - a for a, b in zip(steps, steps[1:])]
    assert len(sampled) == len(t.turn_rewards) == len(t.format_ok) == len(t.state_keys) <= cfg.max_turns
    assert max(done) <= cfg.max_actions_per_turn and sum(done) <= min(cfg.max_actions, length)
    assert len(t.tokens) == len(t.loss_mask) == len(t.logprobs) == len(t.turn_ids) <= cfg.max_context
    assert [i for i, m in zip(t.tokens, t.loss_mask) if m] == sum(sampled, [])
    assert t.turn_rewards == [0.25 * n + (0 if ok else FORMAT_PENALTY) for n, ok in zip(done, t.format_ok)]
    assert t.success == (len(env.played) == length) and (not t.success or t.truncated == cuts)
    assert [m["role"] for m in t.messages] == ["user", "assistant"] * len(sampled)
    assert [m["content"] for m in t.messages[::2]] == [message for message, _, _ in told]
    assert all(seen in message and str(left) in message for message, seen, left in told)
    assert json.loads(json.dumps(t.messages)) == t.messages


# ---------------------------------------------------------------------------------------------- settings

FOLDER = tempfile.TemporaryDirectory()      # holds one config file after another
FIELDS = {f.name: f.type for f in dataclasses.fields(Config)}
VALUES = {bool: st.booleans(), int: st.integers(), float: st.floats(allow_nan=False, allow_infinity=False), str: junk,
          dict: st.dictionaries(junk, st.none() | st.booleans() | st.integers() | junk, max_size=3)}
names, no_names = st.sampled_from([*FIELDS]), st.sampled_from(["lrr", "_lr", "Seed", "é", "", "config_"])
atoms = (st.sampled_from(["True", "false", "None", "inf", "nan", "-1", "1e999", "-1e999", "1j", "0x_f", "007", "1_0",
                          "b''", "...", "f'{1}'", "''", "lr", "fast", "\x0c1", "1 # one"])
         | st.integers().map(str) | st.floats().map(repr) | junk.map(repr))
long = st.builds(operator.mul, st.just("9"), st.integers(1, 9000)) | st.integers(1, 9000).map(lambda n: "0x" + "f" * n)
nested = st.recursive(atoms | long, lambda x: st.builds(str.format, st.sampled_from(
    ["[{}]", "({},)", "{{{}}}", "-{}", "{{{}: 1}}", "{{'a': {}}}"]), x), max_leaves=6)
deep = st.builds(lambda opened, n, closed: opened * n + "1" + closed * n, st.sampled_from(
    ["[", "(", "-", "{1:", "not ", "1+", "lambda:"]), st.integers(1, 1500), st.sampled_from(["", "]", ")", "}"]))
literals = atoms | long | nested | deep
options = st.builds("--{}={}".format, names, literals)
words = st.one_of(options.map(lambda o: [o]), options.map(lambda o: o.split("=", 1)), names.map(lambda n: [f"--{n}"]),
                  st.builds("--{}={}".format, no_names, atoms).map(lambda o: [o]), junk.map(lambda j: [j]),
                  junk.map(lambda j: [f"--{j}"]), junk.map(lambda j: [f"--config=nowhere/{j}"]))

# A config file is run, so no generated text that could do anything is: literals, these statements, these scraps.
statements = st.sampled_from([
    "1/0", "import math", "import no_such_module", "from math import pi", "raise KeyError", "raise SystemExit(3)",
    "del lr", "return", "def f(): f()", "class A: lr = 'x'", "__name__ = 1", "__builtins__ = 1", "# coding: utf-7",
    "lr: float = 0.5", "lr = lr", "seed = lr = 1", "(lr := 2)", "seed = 7\ndel seed"])
scraps = st.lists(st.sampled_from([
    "lr", "seed", "=", " ", "\n", "    ", "\t", "(", ")", "[", "]", "{", "}", ":", ",", ";", "'", '"', '"""', "\\", "#",
    "1", "-", "+", ":=", "@", "lambda", "if 1:", "def f():", "é", "\x00", "\ufeff", "\x0c", "async"]), max_size=8
    ).map("".join)
assigned = st.builds("{} = {}".format, names, literals)
lines = (st.lists(assigned | statements, max_size=2) | st.lists(
    scraps | st.builds("{} = {}".format, no_names, atoms) | junk.map(lambda j: f"# {j!r}") | assigned, max_size=4))
contents = st.builds(lambda text, encoding, tail: "\n".join(text).encode(encoding, "replace") + bytes(tail), lines,
                     st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "utf-16"]),
                     st.just([]) | st.lists(st.just(0) | st.integers(128, 255), max_size=4))


def loaded(argv):
    """load_config's result, whose fields have the declared types or their defaults; None for a UserError."""
    try:
        cfg, typed, filed = load_config(Config, argv)
    except UserError as error:
        assert str(error)
        return None
    assert {name: type(getattr(cfg, name)) for name in FIELDS} == FIELDS and typed | filed <= set(FIELDS)
    assert all(getattr(cfg, name) == getattr(Config(), name) for name in set(FIELDS) - typed - filed)
    assert repr(cfg)        # each of them can be written into a message or config.json
    return cfg, typed, filed


def load_file(content, *argv):
    """The same for a config file of these bytes."""
    path = os.path.join(FOLDER.name, "config.py")
    with open(path, "wb") as file:
        file.write(content)
    return loaded([f"--config={path}", *argv])


@fuzzed(argv=st.lists(options, min_size=1, max_size=3) | st.lists(words, max_size=4).map(lambda parts: sum(parts, [])))
@example(argv=["--config="])                        # was no error: the file that was meant was silently left out
@example(argv=["--env_args={[True]}"])              # TypeError: unhashable
@example(argv=["--lr=1" + "0" * 309])               # OverflowError: no float
@example(argv=["--think=0x" + "f" * 4000])          # ValueError: Python writes no number of more than 4,300 digits
def test_command_line(argv):
    """Any words make a Config of the declared types or a UserError, and each name that was given counts as typed."""
    result = loaded(argv)
    if result:
        assert {word[2:].partition("=")[0] for word in argv if word.startswith("--")} == result[1] and not result[2]


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")      # Python's, about such files
@fuzzed(content=contents)
@example(content=b"raise SystemExit(3)")            # ended the process
@example(content=b"lr = 1" + b"0" * 309)            # OverflowError
@example(content=b"env_args = []\nfor _ in range(3000): env_args = [env_args]")         # RecursionError: no repr
def test_config_file(content):
    """Any file makes a Config of the declared types or a UserError, and the command line wins over it."""
    plain, typed = load_file(content), load_file(content, "--lr=0.25")
    assert (plain is None) == (typed is None)
    if plain:
        assert typed == (dataclasses.replace(plain[0], lr=0.25), {"lr"}, plain[2])


@fuzzed(values=st.fixed_dictionaries({}, optional={name: VALUES[kind] for name, kind in FIELDS.items()}))
def test_settings_come_back(values):
    """What has the declared type arrives as it was, typed or from a file, texts with '=', quotes or line ends too."""
    argv = [f"--{name}={value if FIELDS[name] is str else repr(value)}" for name, value in values.items()]
    content = "\n".join(f"{name} = {value!r}" for name, value in values.items()).encode()
    assert loaded(argv) == (Config(**values), set(values), set())
    assert load_file(content) == (Config(**values), set(), set(values))


# ---------------------------------------------------------------------------------------------- a model of garbage

def check_log(trajectories, path, tokenizer):
    """Write the episodes as train.py does: each line is UTF-8 and JSON, and holds an episode's messages."""
    checkpoint.Lines(str(path)).add(*(record.episode_record(t, 1, "Sokoban", tokenizer) for t in trajectories))
    written = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line)["messages"] for line in written] == [t.messages for t in trajectories]


@pytest.fixture(scope="module")
def tiny():
    return model.load_model(TINY)


GARBAGE = {         # whether a token may be sampled, from its text and whether it is a stop token
    "never a stop token": lambda text, stop: not stop,
    "special tokens": lambda text, stop: re.fullmatch(r"<\|\w+\|>", text),
    "invalid UTF-8": lambda text, stop: stop or text == "\ufffd",
    "control characters": lambda text, stop: stop or unicodedata.category(text[0]) == "Cc",
    "tags in tags": lambda text, stop: stop or re.fullmatch("</?(think|answer)>", text),
    "separators": lambda text, stop: stop or text.strip() == "||",
}


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("kind", GARBAGE)
def test_model_of_garbage(tiny, monkeypatch, tmp_path, kind, think):
    """The laptop model with a head that knows nothing but garbage: each turn costs the format penalty, and ends in time.

    A turn ends at max_new_tokens at the latest, an episode at max_turns, and its log can be read.
    """
    policy, tokenizer = tiny
    chat, cfg = Chat(tokenizer, think), settings(think=think, max_turns=3, max_new_tokens=20, max_context=1000)
    may = torch.tensor([bool(GARBAGE[kind](tokenizer.decode([i]), i in chat.stop_ids)) for i in range(len(tokenizer))])
    logits = torch.zeros(len(may)).masked_fill(~may, -math.inf)
    logits[chat.stop_ids] += math.log(may.sum() / 10)       # where it may stop, it does so after some ten tokens
    monkeypatch.setattr(policy, "logits", lambda hidden: logits.expand(len(hidden), -1))
    played = [t for world in ("Sokoban", "Bandit")
              for t in rollout.collect(policy, chat, envs.ENVS[world], EPISODES[:4], cfg, 1.0)]
    for t in played:
        turns = len(t.turn_rewards)
        assert turns <= 3 and t.turn_rewards == [FORMAT_PENALTY] * turns and t.format_ok == [False] * turns
        assert all(sum(m for m, i in zip(t.loss_mask, t.turn_ids) if i == turn) <= 20 for turn in range(turns))
        cut = t.tokens[-1] not in chat.stop_ids
        assert not t.success and (cut or turns == 3) and t.truncated == cut
    assert max(len(t.turn_rewards) for t in played) == (1 if kind == "never a stop token" else 3)
    check_log(played, tmp_path / "rollouts.jsonl", tokenizer)


@pytest.mark.parametrize("text, ok", [
    ("Up||" * 10_000 + "Up</answer>", True),                        # cut at max_actions_per_turn, not punished
    ("Up||" * 10_000, False), ("Jump||" * 10_000 + "</answer>", False), ("||" * 10_000 + "</answer>", False),
    ("<answer>" * 10_000 + "Up" + "</answer>" * 10_000, False), ("<think><answer>Up" * 10_000, False),
    ("</answer>" * 10_000, False), ("\x00\x07\x1b[2J\u202e\u2028\r\n" * 2000 + "</answer>", False),
    ("<|user|><|end|><|pad|>" * 3000 + "</answer>", False), ('"}\n{"messages": [' * 3000, False)],
    ids=["10,000 actions", "10,000 without an end", "10,000 unknown", "separators", "nested answers", "open tags",
         "closing tags", "control characters", "special tokens", "JSON"])
def test_garbage_text(tiny, tmp_path, text, ok):
    """A long response of garbage is read within ten seconds, punished unless it is well-formed, and its log can be read."""
    chat, cfg = Chat(tiny[1], think=False), settings(max_actions=10, max_actions_per_turn=3)
    game = Game(envs.Sokoban(), EPISODES[0], cfg)
    game.feed(chat.first([game.message])[0])
    ids = chat.encode([text])[0] + chat.stop_ids[:1]
    start = time.process_time()
    game.respond(chat, ids, [-1.0] * len(ids))
    assert time.process_time() - start < SECONDS
    assert game.traj.format_ok == [ok] and 10 - game.actions_left == (3 if ok else 0)
    assert ok or game.traj.turn_rewards == [FORMAT_PENALTY]
    assert game.traj.messages[-1]["content"] == "<answer>" + text
    check_log([game.traj], tmp_path / "rollouts.jsonl", tiny[1])
