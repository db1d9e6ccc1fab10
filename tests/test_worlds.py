"""Tests of the worlds that users bring: question files, and Gymnasium's environments."""
import json
import os
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

import envs
import settings
from envs import ENVS, QuestionAnswer, from_gymnasium, last_number, make_env, same_number, same_text

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = 2 ** 63         # training's first task seed


@pytest.fixture(autouse=True)
def no_world_is_left(monkeypatch):
    monkeypatch.chdir(ROOT)
    worlds = dict(ENVS)
    yield
    ENVS.clear()
    ENVS.update(worlds)


def questions(path, count, **extra):
    """Write a file of questions 'q0', 'q1', ... whose answers are their numbers; give back its path."""
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"so it is\n#### {i}"} | extra) + "\n"
                            for i in range(count)))
    return str(path)


# ------------------------------------------------------------------------------------------------------------
# Matching

@pytest.mark.parametrize("text, value", [
    ("42", "42"), ("The answer is 42.", "42"), ("48/2 = 24 in May.\n48+24 = 72\n#### 72", "72"),     # GSM8K's lines
    ("#### 1,234", "1234"), ("$1,234.50 a year", "1234.5"), ("12,345,678", "12345678"), ("1,2", "2"), ("12,34", "34"),
    ("1,2345", "2345"), ("50%", "50"), ("-5", "-5"), ("−5", "-5"), ("$-5", "-5"), ("-$5", "-5"), ("x=-3.", "-3"),
    ("10-5", "5"), ("10 - 5", "5"), ("(10)-5", "5"), (".5", "1/2"), ("3.", "3"), ("0.50", "1/2"), ("3/4", "3/4"),
    ("1 1/2 cups", "3/2"), ("-1 1/2", "-3/2"), ("of 7, 1/2", "1/2"), (r"\frac{3}{4}", "3/4"), (r"$-\dfrac{3}{4}$", "-3/4"),
    (r"2\frac{1}{2}", "5/2"), (r"\boxed{17}", "17"), ("42km", "42"), ("007", "7"), ("0", "0")])
def test_last_number(text, value):
    """Read by hand; a sign belongs to a number only where nothing stands before it that it would subtract from."""
    assert last_number(text) == Fraction(value)


@pytest.mark.parametrize("text", ["", "none", "four", "1/0", "1 1/0", "٣", "²", "½", "-", "$", "%", ",", "9" * 300])
def test_no_number(text):
    """No digits, no value, other scripts' digits, or a number too long to be one: None, never an error."""
    assert last_number(text) is None


def test_matching_is_linear():
    """No answer takes long to read: a quadratic pattern would take hours on these, so a process of its own reads them."""
    parts = ["9", "9,", "1,234", "- ", "1 ", "1/", r"\frac{1}{", "1.1", "$", "1 1/"]
    code = f"import envs\nfor part in {parts}: envs.last_number(part * 300_000)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.parametrize("answer, gold, same", [
    ("42", "42", True), ("about $42.00", "42", True), ("42%", "42", True), ("42", "41", False), ("-42", "42", False),
    ("", "42", False), ("forty-two", "42", False), ("1/3", "0.3333333", True), ("0.333", "1/3", False),
    ("0.75", "3/4", True), ("12345679", "12345678", False),         # a millionth, but whole numbers are exact
    ("3.1415926", "3.1415927", True), ("0", "0.0", True), ("0.0000001", "0", False)])
def test_same_number(answer, gold, same):
    assert same_number(answer, gold) is same


def test_same_text():
    """White space and case don't count, anything else does."""
    assert same_text(" New\n  york ", "new York") and same_text("STRASSE", "straße")
    assert not same_text("New York.", "New York") and not same_text("NewYork", "New York") and not same_text("", "a")


# ------------------------------------------------------------------------------------------------------------
# Question files

def test_question_episode(tmp_path):
    """One turn: the question, then 1 or 0; the gold answer is what follows the mark, the explanation what precedes."""
    env = QuestionAnswer(questions(tmp_path / "a.jsonl", 40))
    asked = env.reset(TRAIN + 5)
    gold = asked[1:]
    assert env.actions is None and env.optimal_action(1) == gold and env.thought(gold) == "so it is"
    assert env.thought("another") == ""
    assert env.step(f"It is {gold}.") == (f"Expected: {gold}", 1.0, True, False, {"success": True})
    env.reset(TRAIN + 5)
    assert env.step("It is 99")[1:] == (0.0, True, False, {"success": False})
    env.reset(TRAIN + 5)
    rng = np.random.default_rng(0)
    assert not {env.random_action(rng) for _ in range(300)} & {gold}


def test_split_is_disjoint(tmp_path):
    """Evaluation's 256 seeds meet every held-out question and no other, training's all the others and none of them."""
    env = QuestionAnswer(questions(tmp_path / "a.jsonl", 200), held_out=0.2)
    held = {env.reset(123 + k) for k in range(256)}
    rng = np.random.default_rng(0)
    trained = {env.reset(int(seed) | TRAIN) for seed in rng.integers(0, TRAIN, 5000, dtype=np.uint64)}
    assert len(held) == 40 and len(trained) == 160 and not held & trained
    again = QuestionAnswer(str(tmp_path / "a.jsonl"), held_out=0.2)
    assert {again.reset(123 + k) for k in range(256)} == held                       # the split is fixed
    assert held != {f"q{i}" for i in range(160, 200)}                               # and shuffled


def test_held_out_file(tmp_path):
    """A file of its own is the held-out part, and its questions are taken out of training."""
    env = QuestionAnswer(questions(tmp_path / "a.jsonl", 20), held_out=questions(tmp_path / "b.jsonl", 5))
    assert {env.reset(k) for k in range(9)} == {f"q{i}" for i in range(5)}
    assert {env.reset(TRAIN + k) for k in range(99)} == {f"q{i}" for i in range(5, 20)}


def test_repeated_questions_count_once(tmp_path):
    """A question that stands twice in the file would else be in both parts."""
    path = tmp_path / "a.jsonl"
    questions(path, 10)
    path.write_text(path.read_text() * 5)
    env = QuestionAnswer(str(path), held_out=0.5)
    assert sorted(len(part) for part in env.parts) == [5, 5]


def test_names_of_fields_and_mark(tmp_path):
    """MetaMath's names and mark; numbers as JSON numbers; a byte-order mark, blank lines and CRLF do no harm."""
    path = tmp_path / "m.jsonl"
    rows = [{"query": f"What is {i} + 1?", "response": f"Add 1. The answer is: {i + 1}"} for i in range(9)]
    rows.append({"query": "What is 9 + 1?", "response": 10})
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, rows)).encode())
    env = QuestionAnswer(str(path), question="query", answer="response", mark="The answer is:", match="exact")
    assert env.reset(TRAIN) .startswith("What is") and env.optimal_action(1).isdigit()
    env = QuestionAnswer(str(path), question="query", answer="response", mark="")
    env.reset(TRAIN)
    assert env.step(env.optimal_action(1))[1] == 1.0


def test_match_by_a_function(tmp_path):
    """The function's number is the reward, success begins at 1; True and False will do."""
    path = questions(tmp_path / "a.jsonl", 10)
    for result, reward, success in ((0.25, 0.25, False), (1, 1.0, True), (True, 1.0, True), (False, 0.0, False)):
        env = make_env("QuestionAnswer", path=path, match=lambda answer, gold: result)      # noqa: B023
        env.reset(0)
        assert env.step("x")[1:] == (reward, True, False, {"success": success})


def test_match_in_a_config_file(tmp_path):
    """A config file may hold the function, in env_args or in a registered world."""
    path = tmp_path / "c.py"
    path.write_text("import functools\nfrom envs import ENVS, QuestionAnswer\ndef near(answer, gold): return 0.5\n"
                    "ENVS['Near'] = functools.partial(QuestionAnswer, match=near)\n"
                    "env, env_args = 'QuestionAnswer', {'match': near}\n")
    names = settings.read_file(str(path))
    for env in (make_env(names["env"], **names["env_args"]), make_env("Near")):
        env.reset(0)
        assert env.step("x")[1] == 0.5


@pytest.mark.parametrize("text, kwargs, message", [
    (None, {}, r"can't be read.*Expected UTF-8 text with a line \{\"question\""),
    ("", {}, "0 questions to train on and 0 held out"),
    ('{"question": "a", "answer": 1}\n', {}, "two or more"),
    ('{"question": "a", "answer": 1}\n\n{"question": "b"}\n', {}, "line 3: no text or number 'answer' in"),
    ('{"question": "a", "answer": 1}\n{"question": b}\n', {}, "line 2: no JSON"),
    ('["a", 1]\n', {}, "line 1: no text or number 'question'"),
    ('{"question": "a", "answer": null}\n', {}, "line 1: no text or number 'answer'"),
    ('{"question": " ", "answer": 1}\n', {}, "line 1: the question or the answer is empty"),
    ('{"question": "a", "answer": "because ####"}\n', {}, "line 1: the question or the answer is empty"),
    ('{"question": "a", "answer": "red"}\n', {}, "line 1: no number in the answer 'red'.*match='exact'"),
    ('{"question": "a", "answer": 1}\n', {"question": "query"}, "no text or number 'query'"),
    ("\udcff", {}, "can't be read"),
    ("", {"match": "fuzzy"}, "match must be 'exact' or 'numeric', or a function.*'fuzzy'"),
    ("", {"held_out": 1.5}, "held_out must be a share between 0 and 1.*1.5"),
    ("", {"held_out": "nowhere.jsonl"}, "'nowhere.jsonl' can't be read")])
def test_mistakes_in_question_files(tmp_path, text, kwargs, message):
    """What is wrong, where, and what to change; at once, not in the middle of a run."""
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        QuestionAnswer(str(path), **kwargs)


def test_a_file_is_read_once(tmp_path):
    """Each of an iteration's 128 episodes makes an environment of its own."""
    path = questions(tmp_path / "a.jsonl", 10)
    QuestionAnswer(path)
    (tmp_path / "a.jsonl").unlink()
    assert QuestionAnswer(path).parts is QuestionAnswer(path).parts


def test_sample_file():
    """The sample is well-formed, and no question's answer is another's by rule: random answers hardly ever fit."""
    assert envs.success_rate(QuestionAnswer, "optimal", range(TRAIN, TRAIN + 100)) == 1.0
    assert envs.success_rate(QuestionAnswer, "random", range(TRAIN, TRAIN + 500)) < 0.1


# ------------------------------------------------------------------------------------------------------------
# Gymnasium

def test_colours_become_words():
    """As Taxi and FrozenLake colour their texts: alone, nested, bold, empty cells; no code survives."""
    for text, words in (("\x1b[41mS\x1b[0mFF", "[red:S]FF"), ("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m:", "[blue+yellow:R]:"),
                        ("|\x1b[43m \x1b[0m|", "|[yellow: ]|"), ("\x1b[1mbold\x1b[0m", "bold"), ("\x1b[2J\x1b[Hplain", "plain"),
                        ("\x1b[91mA\x1b[0m\x1b[102mB\x1b[m", "[red:A][green:B]"), ("[x]", "[x]")):
        assert envs.name_colours(text) == words


def test_without_gymnasium(monkeypatch):
    """The package is optional; without it one line says what to install."""
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match="'Taxi-v4' needs an optional package: pip install gymnasium"):
        from_gymnasium("Taxi-v4")


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason="the optional package gymnasium isn't installed")


@pytest.fixture
def taxi(gymnasium):
    """Taxi's newest version that the installed package has."""
    names = sorted(name for name in gymnasium.registry if re.fullmatch(r"Taxi-v\d+", name))
    return from_gymnasium(names[-1], actions=("South", "North", "East", "West", "Pickup", "Dropoff"))


LAKE = ("Left", "Down", "Right", "Up")


def test_taxi_is_a_task(taxi):
    """The contract that test_envs.py asks of the registered worlds: types, errors, complete resets, settings."""
    ENVS["Taxi"] = taxi
    env = make_env("Taxi")
    assert env.brief == "Taxi" and env.instruction and env.actions[0] == "South"
    with pytest.raises(RuntimeError, match="reset"):
        env.step("South")
    first = env.reset(3, 4)
    assert "yellow" in first and "blue" in first and "\x1b" not in first
    observation, reward, terminated, truncated, info = env.step("South")
    assert isinstance(observation, str) and type(reward) is float and set(info) == {"success"}
    assert (terminated, truncated, info["success"]) == (False, False, False)
    with pytest.raises(ValueError, match="'Jump'.*South"):
        env.step("Jump")
    assert env.reset(3, 4) == first == make_env("Taxi").reset(3, 9) != env.reset(5, 4)
    with pytest.raises(ValueError):
        env.reset(-1)
    with pytest.raises(TypeError):
        make_env("Taxi", no_such_setting=1)
    assert np.isnan(envs.success_rate(taxi, "optimal", range(3)))
    for seed in (0, 2 ** 63 + 1, 2 ** 100 + 1):
        env.reset(seed, seed)


def test_taxi_can_be_solved(taxi):
    """A solver on the environment's own states reaches the goal: success, +20, terminated, and no step after it."""
    env = taxi()
    env.reset(1)
    inner = env.env.unwrapped
    paths, seen = [(inner.s, ())], {inner.s}
    for state, path in paths:                       # grows while it is read: breadth first
        if path and path[-1][1]:
            break
        for action in range(6):
            _, to, reward, over = inner.P[state][action][0]
            if to not in seen or over:
                seen.add(to)
                paths.append((to, (*path, (action, over))))
    results = [env.step(env.actions[action]) for action, _ in path]
    assert results[-1][1:] == (20.0, True, False, {"success": True})
    assert not any(result[4]["success"] for result in results[:-1])
    with pytest.raises(RuntimeError, match="reset"):
        env.step("South")


def test_luck_follows_the_noise_seed(gymnasium):
    """Members of a group slip differently on the same lake, and one with the same seeds repeats itself."""
    env = from_gymnasium("FrozenLake-v1", actions=LAKE)()
    def slips(seed, noise):                                                                         # noqa: E306
        env.reset(seed, noise)
        return tuple(env.step("Up")[0] for _ in range(4))       # from the upper left corner no hole is in reach
    assert len({slips(3, noise) for noise in range(20)}) > 3
    assert len({slips(seed, 3) for seed in range(20)}) == 1
    assert "[red:S]FFF" in env.reset(0)


def test_truncation_and_success(gymnasium):
    """The time limit truncates; a success of one's own is asked at every step; CliffWalking never pays."""
    env = from_gymnasium("FrozenLake-v1", actions=LAKE, is_slippery=False, max_episode_steps=3)()
    env.reset(0)
    assert [env.step("Up")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)] and env.done
    for action in ("Down", "Down", "Right"):
        env.done or env.step(action)
    cliff = from_gymnasium("CliffWalking-v1", success=lambda reward, terminated, info: terminated)()
    cliff.reset(0)
    path = "0" + "1" * 11 + "2"                     # up, along the cliff, down: the default names are numbers
    results = [cliff.step(name) for name in path]
    assert results[-1][1:] == (-1.0, True, False, {"success": True}) and not results[-2][4]["success"]


def test_both_ends_at_once(gymnasium):
    """A goal reached on the last step of the limit is an end, not a cut: nothing is left to bootstrap from."""
    env = from_gymnasium("FrozenLake-v1", actions=LAKE, is_slippery=False, max_episode_steps=6)()
    env.reset(0)
    results = [env.step(name) for name in ("Down", "Down", "Right", "Right", "Down", "Right")]
    assert results[-1][1:] == (1.0, True, False, {"success": True})


@pytest.fixture
def odd(gymnasium):
    """A function that registers a world which Gymnasium's own don't cover, and returns its name."""
    def register(space, words):
        class World(gymnasium.Env):
            metadata = {"render_modes": ["ansi"]}
            observation_space, action_space = gymnasium.spaces.Discrete(1), space

            def __init__(self, render_mode=None):
                self.render_mode = render_mode

            def reset(self, seed=None, options=None):
                super().reset(seed=seed)
                self.played = None
                return 0, {}

            def step(self, action):
                self.played = action
                return 0, 0, True, False, {}

            def render(self):
                return words(self.played)
        gymnasium.register("Odd-v0", World)
        return "Odd-v0"
    yield register
    gymnasium.registry.pop("Odd-v0")


def test_actions_that_start_elsewhere(gymnasium, odd):
    """Discrete(3, start=-1): the names are the numbers, and the number arrives; a reward of int is told as float."""
    name = odd(gymnasium.spaces.Discrete(3, start=-1), lambda played: f"played {played}")
    env = from_gymnasium(name)()
    assert env.actions == ("-1", "0", "1")
    for action in env.actions:
        assert env.reset(0) == "played None"
        assert env.step(action) == (f"played {action}", 0.0, True, False, {"success": False})
    named = from_gymnasium(name, actions=("Back", "Stay", "On"))()
    named.reset(0)
    assert named.step("Back")[0] == "played -1"


@pytest.mark.parametrize("name, kwargs, message", [
    ("CartPole-v1", {}, "no text rendering: expected render mode 'ansi', got human, rgb_array"),
    ("Pendulum-v1", {}, "expected a Discrete space"),
    ("Nowhere-v0", {}, "can't make 'Nowhere-v0'"),
    ("FrozenLake-v1", {"actions": ("a", "b")}, "actions must be 4 different names"),
    ("FrozenLake-v1", {"actions": ("Up", "up", "a", "b")}, "actions must be 4 different names")])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_environments_that_do_not_fit(gymnasium, name, kwargs, message):
    """Refused where they are registered, with what would fit."""
    with pytest.raises(ValueError, match=message):
        from_gymnasium(name, **kwargs)


def test_rendering_that_is_no_text(gymnasium, odd):
    """Some worlds call a list of frames "ansi"."""
    with pytest.raises(ValueError, match="must render as a text, but gives list"):
        from_gymnasium(odd(gymnasium.spaces.Discrete(2), lambda played: ["frame"]))
