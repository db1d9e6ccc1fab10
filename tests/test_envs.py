"""Tests of the worlds: what a seed fixes, that tasks can be solved, what is paid, that text stays text."""
import ast
import doctest
import hashlib
import math
import os
import random
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs                                                                                       # noqa: E402
from envs import ENVS, Bandit, Countdown, FrozenLake, Sokoban, TextEnv, evaluate, make_env, play  # noqa: E402
from envs import random_expression, stream, success_rate                                          # noqa: E402


def room(text: str, **kwargs) -> Sokoban:
    """Start Sokoban in a hand-made square room, drawn with the paper's symbols."""
    rows = text.split()
    env = Sokoban(size=len(rows), **kwargs)
    cells = {symbol: [i for i, char in enumerate("".join(rows)) if char == symbol] for symbol in "#_O√XPS"}
    where = lambda symbols: sum(1 << cell for symbol in symbols for cell in cells[symbol])   # noqa: E731
    env.floor, env.targets, env.boxes = where("_O√XPS"), where("O√S"), where("√X")
    (env.player,) = cells["P"] + cells["S"]
    env.plan, env.done = (), False
    return env


def lake(text: str, **kwargs) -> FrozenLake:
    """Start FrozenLake on a hand-made square map, drawn with the paper's symbols."""
    rows = text.split()
    env = FrozenLake(size=len(rows), **kwargs)
    env.reset(0)
    env.player, env.goal = "".join(rows).index("P"), "".join(rows).index("G")
    env.hole = np.array([char == "O" for char in "".join(rows)])
    env.value, env.policies = np.eye(len(rows) ** 2)[env.goal], []
    return env


def transcript(env: TextEnv, seed: int, noise_seed: int) -> list:
    """Everything an episode of random actions shows and pays."""
    rng = np.random.default_rng(7)
    seen, over = [env.reset(seed, noise_seed), env.actions], False
    while not over and len(seen) < 12:
        observation, reward, over, truncated, info = env.step(env.random_action(rng))
        seen.append((observation, reward, over, truncated, info))
    return seen


# ------------------------------------------------------------------------------------------------------------
# Interface

@pytest.mark.parametrize("name", ENVS)
def test_interface(name):
    """Every world keeps the contract that rollouts are written against; a wrong type would show far away."""
    env = make_env(name)
    assert env.instruction and env.brief and len(env.brief) < 20
    first = env.reset(3, 4)
    assert isinstance(first, str) and first
    observation, reward, terminated, truncated, info = env.step(env.random_action(np.random.default_rng(0)))
    assert isinstance(observation, str) and type(reward) is float
    assert type(terminated) is bool and truncated is False and type(info["success"]) is bool
    if env.legend:
        assert set(first + observation) <= {*env.legend, "\n"}      # no symbol is left unexplained


@pytest.mark.parametrize("name", ENVS)
def test_no_episode_no_step(name):
    """A step before reset or after the end is an error; silently going on would corrupt returns."""
    env = make_env(name)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("Left")
    env.reset(0)
    env.done = True
    with pytest.raises(RuntimeError, match="reset"):
        env.step("Left")
    env.reset(1)                                                    # and a reset makes it playable again
    env.step(env.random_action(np.random.default_rng(0)))


@pytest.mark.parametrize("name", [name for name in ENVS if name not in ("Countdown", "QuestionAnswer")])
def test_unknown_action(name):
    """An unknown action is an error, not a silent no-op, and it doesn't end the episode."""
    env = make_env(name)
    env.reset(0)
    with pytest.raises(ValueError, match="'Jump'.*" + env.actions[0]):
        env.step("Jump")
    env.step(env.actions[0])


@pytest.mark.parametrize("name", ENVS)
def test_unknown_keyword_is_an_error(name):
    """A misspelt setting must not be swallowed."""
    with pytest.raises(TypeError):
        make_env(name, no_such_setting=1)


@pytest.mark.parametrize("make", [
    lambda: Sokoban(observation="picture"), lambda: FrozenLake(observation="Grid"), lambda: Sokoban(size=4),
    lambda: Sokoban(symbols="#_O"), lambda: Sokoban(symbols="##O√XPS"), lambda: FrozenLake(size=1),
    lambda: FrozenLake(p=1.2), lambda: FrozenLake(slip=0.6), lambda: Bandit(high_prob=1.5),
    lambda: Bandit(low=0.25), lambda: Countdown(numbers=1), lambda: Countdown(numbers=7)])
def test_impossible_settings(make):
    """Settings that cannot work are refused where they are made; Bandit(low=0.25) has no better arm."""
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize("make", [lambda: Sokoban(size=5, boxes=6), lambda: Sokoban(search_depth=2),
                                  lambda: Sokoban(boxes=0), lambda: FrozenLake(size=12, p=0.0)])
def test_generators_give_up(make, monkeypatch):
    """Settings that leave no task end in a clear error: an endless retry would look like a slow start."""
    monkeypatch.setattr(envs, "RETRIES", 5)         # 12×12 without ice: 3 % of tries put start beside goal
    with pytest.raises(RuntimeError, match="tries for seed 5.*raise"):
        make().reset(5)


def test_make_env_names_the_nearest():
    """A typo is answered with the name that was meant."""
    with pytest.raises(ValueError, match="did you mean FrozenLake.*registered are Bandit, "):
        make_env("frozen_lake")
    with pytest.raises(ValueError, match="unknown environment 'zzz'; registered"):
        make_env("zzz")
    assert make_env("LargerSokoban", boxes=1).box_count == 1        # registered settings can be overridden


def test_registration_by_users():
    """A class of the user's own needs reset, step and actions, and nothing else."""
    class Coin(TextEnv):
        actions = ("Heads", "Tails")

        def reset(self, seed, noise_seed=0):
            self.side = self.actions[stream(seed, 0).integers(2)]
            return "A coin lies under the cup."

        def step(self, action):
            return self.side, float(action == self.side), True, False, {"success": action == self.side}

    ENVS["Coin"] = Coin
    try:
        assert 0.4 < success_rate(lambda: make_env("Coin"), "random", range(400)) < 0.6
        assert math.isnan(success_rate(Coin, "optimal", range(3)))
    finally:
        del ENVS["Coin"]


def test_imports_nothing_of_the_project():
    """envs.py stands alone: standard library and numpy; gymnasium is imported where it is asked for, and only there."""
    def imported(nodes):
        nodes = list(nodes)
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        return names - set(sys.stdlib_module_names)
    tree = ast.parse((ROOT / "envs.py").read_text(encoding="utf-8"))
    assert imported(tree.body) == {"numpy"} and imported(ast.walk(tree)) == {"numpy", "gymnasium"}


def test_docstring_examples():
    """Examples in docstrings rot unless they run."""
    assert doctest.testmod(envs).failed == 0


# ------------------------------------------------------------------------------------------------------------
# Seeds

def test_streams_are_independent():
    """One number under two keys gives unrelated draws; with a list [seed, key], key 0 would repeat the seed.

    The mean product of 10,000 centred uniform pairs has a standard error of 1/1200.
    """
    draws = [stream(5, *key).random(10_000) - 0.5 for key in ((), (0,), (1,), (0, 0), (0, 1))]
    for i, left in enumerate(draws):
        for right in draws[:i]:
            assert abs((left * right).mean()) < 5 / 1200


@pytest.mark.parametrize("name", ENVS)
def test_seeds_of_any_size(name):
    """Seeds come from counters and digests: 0, 2**63 and 2**100 + 1 are tasks, and different ones."""
    env = make_env(name)
    for seed in (0, 2 ** 63 + 1, 2 ** 100 + 1):
        env.reset(seed, seed)
    if name in ("Sokoban", "FrozenLake", "Countdown"):
        assert len({env.reset(seed) for seed in (1, 2 ** 32 + 1, 2 ** 64 + 1, 2 ** 100 + 1)}) == 4
    with pytest.raises(ValueError):
        env.reset(-1)


@pytest.mark.parametrize("name", ENVS)
def test_reset_is_complete(name):
    """An instance that has played other tasks behaves like a new one; nothing of them may remain."""
    used = make_env(name)
    for seed in range(10, 20):
        transcript(used, seed, seed + 1)
        used.reset(seed)
        used.optimal_action(5)                      # leaves a plan or a policy behind
        assert transcript(used, 30 + seed, 1) == transcript(make_env(name), 30 + seed, 1)
        used.reset(seed)
        used.optimal_action(5)
        assert play(used, "optimal", 30 + seed, 1, 10) == play(make_env(name), "optimal", 30 + seed, 1, 10)


def test_no_global_randomness():
    """The worlds neither read nor move the global generators, which the training loop owns."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = [transcript(make_env(name), 5, 6) for name in ENVS]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    random.seed(2)
    np.random.seed(2)
    assert first == [transcript(make_env(name), 5, 6) for name in ENVS]


@pytest.mark.parametrize("name", ["Bandit", "FrozenLake"])
def test_group_shares_its_prompt_not_its_noise(name):
    """Sixteen members of a group see one task and have different luck; seed and noise must not be one number.

    All sixteen alike by chance: 0.75**16 = 1 % for the Bandit's payouts, so 20 groups are pooled.
    """
    env, alike = make_env(name), 0
    for seed in range(20):
        prompts, lucks = set(), set()
        for member in range(16):
            prompts.add((env.reset(seed, member), env.actions))
            if name == "Bandit":
                lucks.add(env.step("Dragon")[1])
            else:
                lucks.add(tuple(env.noise.random(5)))
        assert len(prompts) == 1
        alike += len(lucks) == 1
    assert alike <= 3


def test_task_does_not_follow_the_noise():
    """With seed = noise_seed the payout must not be readable from the order of the arms."""
    env, pays = Bandit(), {True: [], False: []}
    for seed in range(4000):
        env.reset(seed, seed)
        pays[env.actions[0] == "Dragon"].append(env.step("Dragon")[1])
    for values in pays.values():                    # about 2,000 draws each: standard error 0.0097
        assert abs(np.mean(values) - 0.25) < 0.045


def test_same_worlds_in_two_processes():
    """Tasks do not depend on hash(), on the order of sets or on what ran before (300 rooms of each size)."""
    code = ("import hashlib, envs\n"
            "text = [envs.make_env(name).reset(seed, 1) for name in envs.ENVS for seed in range(300)]\n"
            "print(hashlib.sha256('|'.join(text).encode()).hexdigest())")
    outs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": salt}).stdout for salt in ("1", "2")]
    text = [make_env(name).reset(seed, 1) for name in ENVS for seed in range(300)]
    assert outs[0].strip() == outs[1].strip() == hashlib.sha256("|".join(text).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------
# Bandit

def test_bandit_payouts():
    """The safe arm always pays 0.15, the risky one 1 in a quarter of 4,000 pulls (standard error 0.0068)."""
    env, pays = Bandit(), []
    for noise in range(4000):
        env.reset(0, noise)
        pays.append(env.step("Dragon")[1])
        env.reset(0, noise)
        assert env.step("Phoenix") == ("Phoenix paid 0.15", 0.15, True, False, {"success": False})
    assert set(pays) == {0.0, 1.0} and abs(np.mean(pays) - 0.25) < 0.03


def test_bandit_arms_are_shuffled():
    """Each order comes up in about half of the tasks; else "the first one" would be a policy."""
    env = Bandit()
    texts = [env.reset(seed) for seed in range(1000)]
    assert set(texts) == {"Arms: Phoenix, Dragon", "Arms: Dragon, Phoenix"}
    assert 430 < texts.count("Arms: Phoenix, Dragon") < 570         # 500 ± 4.4 standard errors
    assert env.actions == tuple(texts[-1].removeprefix("Arms: ").split(", "))


@pytest.mark.parametrize("name, better", [("Bandit", "Dragon"), ("BanditReversed", "Phoenix"),
                                          ("BanditSafe", "Phoenix")])
def test_bandit_success_is_the_better_arm(name, better):
    """Success follows the means (0.25 against 0.15, or 0.4), never the luck of the pull."""
    env = make_env(name)
    for noise in range(20):
        for arm in ("Phoenix", "Dragon"):
            env.reset(1, noise)
            assert env.step(arm)[4]["success"] == (arm == better)
    assert play(env, "optimal", 1, 1, 1)[1]


def test_profession_split_is_disjoint():
    """The test names are unseen in training; all pairs of a split come up."""
    train, test = ({env.reset(seed) and frozenset(env.actions) for seed in range(200)}
                   for env in (make_env("BanditProfessions"), make_env("BanditProfessionsTest")))
    assert train == set(map(frozenset, envs.PROFESSIONS_TRAIN))
    assert test == set(map(frozenset, envs.PROFESSIONS_TEST))
    assert not frozenset.union(*train) & frozenset.union(*test)
    assert envs.PROFESSIONS_TRAIN[0] == ("Teacher", "Engineer")
    assert envs.PROFESSIONS_TEST[0] == ("Librarian", "Trader")


# ------------------------------------------------------------------------------------------------------------
# Sokoban

def shortest(text: str) -> int | None:
    """Length of a shortest solution of a room given as text: a second, plain solver that shares no code."""
    cells = {(r, c): char for r, row in enumerate(text.split("\n")) for c, char in enumerate(row)}
    targets = frozenset(cell for cell, char in cells.items() if char in "O√S")
    boxes = frozenset(cell for cell, char in cells.items() if char in "X√")
    (player,) = (cell for cell, char in cells.items() if char in "PS")
    layer, seen, length = [(player, boxes)], {(player, boxes)}, 0
    while layer:
        if any(boxes == targets for _, boxes in layer):
            return length
        following = []
        for (r, c), boxes in layer:
            for d_r, d_c in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                to, beyond, after = (r + d_r, c + d_c), (r + 2 * d_r, c + 2 * d_c), boxes
                if to in boxes:
                    if cells[beyond] == "#" or beyond in boxes:
                        continue
                    after = boxes - {to} | {beyond}
                if cells[to] != "#" and (to, after) not in seen:
                    seen.add((to, after))
                    following.append((to, after))
        layer, length = following, length + 1
    return None


@pytest.mark.parametrize("size, boxes, depth, seeds", [(6, 1, 300, 300), (8, 2, 10, 60), (5, 1, 300, 60)])
def test_rooms_are_solvable(size, boxes, depth, seeds):
    """Breadth-first search solves each room, no box starts on a target, and our plan is a shortest one."""
    env = Sokoban(size=size, boxes=boxes, search_depth=depth)
    for seed in range(seeds):
        text = env.reset(seed)
        rows = text.split("\n")
        assert len(rows) == size and all(len(row) == size for row in rows)
        assert set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) == {"#"}
        assert text.count("X") == boxes and "√" not in text and text.count("P") + text.count("S") == 1
        assert text.count("O") + text.count("S") == boxes
        assert len(env.solve()) == shortest(text) > 0, text


def test_rooms_vary():
    """300 seeds give nearly 300 rooms: a generator that repeats itself would train on the held-out set."""
    env = Sokoban()
    assert len({env.reset(seed) for seed in range(300)}) > 290


def test_sokoban_rewards():
    """Scripted play in a hand-made room pays, by hand: -0.1 an action, +1 on, -1 off, +10 solved.

    ######      The first box goes right onto its target: -0.1 + 1 = 0.9, then one further, off again:
    #PXO_#      -0.1 - 1 = -1.1. The wall stops it there: -0.1. The second box needs Down onto its target.
    #____#
    """
    env = room("###### #PXO_# #____# #____# #____# ######")
    assert env.step("Right")[1:] == (pytest.approx(10.9), True, False, {"success": True})   # 0.9 + 10

    env = room("###### #PXO_# #__X_# #__O_# #____# ######", boxes=2)
    steps = [env.step(action) for action in ("Left", "Right", "Right", "Right")]
    assert [step[1] for step in steps] == pytest.approx([-0.1, 0.9, -1.1, -0.1])
    assert steps[1][0] == "######\n#_P√_#\n#__X_#\n#__O_#\n#____#\n######"
    assert steps[2][0] == steps[3][0] == "######\n#__SX#\n#__X_#\n#__O_#\n#____#\n######"
    assert not any(step[2] or step[4]["success"] for step in steps)

    # A push that takes a box from one target straight to the next: off and on cancel.
    env = room("###### #P√O_# #X___# #____# #____# ######", boxes=2)
    assert env.step("Right")[1] == pytest.approx(-0.1)


@pytest.mark.parametrize("text, action, after", [
    ("###### #PX#_# #__O_# #____# #____# ######", "Right", "#PX#_#"),      # a wall behind the box
    ("###### #PXX_# #_OO_# #____# #____# ######", "Right", "#PXX_#"),      # a box behind the box
    ("###### #PX__# #__O_# #____# #____# ######", "Up", "#PX__#"),         # a wall before the player
    ("###### #PX__# #__O_# #____# #____# ######", "Right", "#_PX_#")])
def test_sokoban_pushes(text, action, after):
    """Boxes move if and only if the cell behind them is free."""
    env = room(text)
    assert env.step(action)[0].split("\n")[1] == after


def test_sokoban_symbols():
    """The paper's seven symbols, and the other vocabulary on the same state; player on target has its own."""
    paper, other = "#_O√XPS", "W.GCBA@"
    text = "###### #_XO_# #_√__# #_S__# #____# ######"
    assert room(text).observe() == text.replace(" ", "\n")
    assert room(text, symbols=other).observe() == room(text).observe().translate(str.maketrans(paper, other))
    names = ["wall", "empty", "target", "box on target", "box", "player", "player on target"]
    assert Sokoban().legend == dict(zip(paper, names))
    assert make_env("SokobanNewVocab").legend == dict(zip(other, names))
    assert make_env("SokobanNewVocab").search_depth == 30


def test_optimal_sokoban_searches_once(monkeypatch):
    """A game that follows the plan costs one search; leaving it costs one more and can be made good."""
    calls, solve = [], Sokoban.solve
    monkeypatch.setattr(Sokoban, "solve", lambda env: calls.append(1) or solve(env))
    env = Sokoban()
    seed = next(seed for seed in range(100) if env.reset(seed) and len(solve(env)) >= 5)
    assert play(env, "optimal", seed, 0, 10)[1] and len(calls) == 1
    env.reset(seed)
    first = env.optimal_action(10)
    env.step({"Up": "Down", "Down": "Up", "Left": "Right", "Right": "Left"}[first])
    left = len(solve(env) or ())
    for _ in range(left):
        *_, terminated, _, _ = env.step(env.optimal_action(10))
    assert terminated or not left


def test_optimal_sokoban_in_a_lost_room():
    """With the box in a corner there is no solution: None says so, and a label made of it can't mislead."""
    env = room("###### #XP__# #__O_# #____# #____# ######")
    assert env.solve() is None and env.optimal_action(5) is None


# ------------------------------------------------------------------------------------------------------------
# FrozenLake

def test_lake_actions_are_numbered_as_in_the_paper():
    """0-3 = Left, Down, Right, Up; from the centre of a lake without slips each goes its own way."""
    assert FrozenLake.actions == ("Left", "Down", "Right", "Up")
    after = ("___\nP__\n__G", "___\n___\n_PG", "___\n__P\n__G", "_P_\n___\n__G")
    for action, text in zip(FrozenLake.actions, after):
        env = lake("___ _P_ __G", slip=0.0)
        assert env.step(action)[:3] == (text, 0.0, False)


def test_lake_edges_holes_and_goal():
    """Off the edge stays; a hole ends without success, the goal with reward 1; both show their own symbol."""
    env = lake("PO_ _G_ ___", slip=0.0)
    assert env.step("Left") == env.step("Up") == ("PO_\n_G_\n___", 0.0, False, False, {"success": False})
    assert env.step("Right") == ("_X_\n_G_\n___", 0.0, True, False, {"success": False})
    env = lake("PO_ _G_ ___", slip=0.0)
    env.step("Down")
    assert env.step("Right") == ("_O_\n_√_\n___", 1.0, True, False, {"success": True})


@pytest.mark.parametrize("slip", [1 / 3, 0.1])
def test_slip_frequencies(slip):
    """Each perpendicular direction comes up with probability `slip`, the opposite one never.

    10,000 moves a direction: the standard error is below 0.005, the tolerance 0.02.
    """
    env = lake("_____ _____ __P__ _____ ____G", slip=slip)
    shifts = {"Left": -1, "Down": 5, "Right": 1, "Up": -5}
    for index, action in enumerate(env.actions):
        went = {name: 0 for name in env.actions}
        for _ in range(10_000):
            env.player, env.done = 12, False
            env.step(action)
            went[next(name for name, shift in shifts.items() if env.player == 12 + shift)] += 1
        share = [went[env.actions[(index + turn) % 4]] / 10_000 for turn in range(4)]
        assert share == pytest.approx([1 - 2 * slip, slip, 0, slip], abs=0.02) and share[2] == 0


@pytest.mark.parametrize("name", ["FrozenLake", "FrozenLakeNoSlip"])
def test_lakes_are_solvable(name):
    """Start and goal are joined by ice in each of 300 maps, and lie anywhere."""
    env, starts, goals = make_env(name), set(), set()
    for seed in range(300):
        rows = env.reset(seed).split("\n")
        ice = {(r, c): char for r, row in enumerate(rows) for c, char in enumerate(row) if char != "O"}
        (start,) = (cell for cell, char in ice.items() if char == "P")
        (goal,) = (cell for cell, char in ice.items() if char == "G")
        reached, new = set(), {start}
        while new:
            reached |= new
            new = {(r + a, c + b) for r, c in new for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))} & set(ice)
            new -= reached
        assert goal in reached
        starts.add(start)
        goals.add(goal)
    assert len(starts) == len(goals) == 16


def test_optimal_lake_by_hand():
    """On P G / O _ the best move is Up: it drifts into the goal with 1/3, and otherwise stays on the spot.

    Right and Down reach the goal with 1/3 as well, but fall with 1/3. With n actions left the value is
    1 - (2/3)**n: 0.9827 for n = 10.
    """
    env = lake("PG O_")
    assert [env.optimal_action(left) for left in (10, 5, 2)] == ["Up"] * 3
    assert env.value[0] == pytest.approx(1 - (2 / 3) ** 10, abs=1e-4)


def test_optimal_lake_takes_the_shortest_way():
    """Without slips every way that fits the budget wins, and the shorter one is taken."""
    env = lake("P___ ____ ____ ___G", slip=0.0)
    for left in range(20, 14, -1):
        *_, terminated, _, info = env.step(env.optimal_action(left))
    assert terminated and info["success"]


# ------------------------------------------------------------------------------------------------------------
# Coordinates

def test_sokoban_coordinates():
    """Coordinates alone carry the whole state: player, boxes, targets and the walls inside the border."""
    text, kwargs = "###### #PXO_# ##√__# #____# #___## ######", {"boxes": 2}
    coords = "Player: (1, 1)\nBoxes: (1, 2), (2, 2)\nTargets: (1, 3), (2, 2)\nInner walls: (2, 1), (4, 4)"
    assert room(text, observation="coord", **kwargs).observe() == coords
    assert room(text, observation="grid_coord", **kwargs).observe() == text.replace(" ", "\n") + "\n" + coords
    assert room(text, **kwargs).observe() == text.replace(" ", "\n")


def test_lake_coordinates():
    """Goal, holes and player as (row, column) from the top left; no holes are said to be none."""
    env = lake("_O_ PGO ___", observation="coord", slip=0.0)
    assert env.observe() == "Player: (1, 0)\nGoal: (1, 1)\nHoles: (0, 1), (1, 2)"
    assert env.step("Down")[0] == "Player: (2, 0)\nGoal: (1, 1)\nHoles: (0, 1), (1, 2)"
    both = "PG\n__\nPlayer: (0, 0)\nGoal: (0, 1)\nHoles: none"
    assert lake("PG __", observation="grid_coord").observe() == both


@pytest.mark.parametrize("name, last", [("Sokoban", 5), ("LargerSokoban", 7), ("FrozenLake", 3)])
def test_coordinate_ranges(name, last):
    """The instruction tells the ranges of this grid's real size, and explains no symbol that isn't shown."""
    for observation in ("coord", "grid_coord"):
        env = make_env(name, observation=observation)
        assert f"rows 0 to {last} " in env.instruction and f"columns 0 to {last} " in env.instruction
        assert bool(env.legend) == (observation == "grid_coord")
    assert "(row, column)" not in make_env(name).instruction and make_env(name).legend     # nothing leaked


# ------------------------------------------------------------------------------------------------------------
# Countdown

@pytest.mark.parametrize("text, value, used", [
    ("1 + 2 * 3", 7, [1, 2, 3]), ("(1+2)*3", 9, [1, 2, 3]), ("8 - 3 - 2", 3, [8, 3, 2]),
    ("8 / 4 / 2", 1, [8, 4, 2]), ("8 − 6 ÷ 4 × 2", 5, [8, 6, 4, 2]),
    ("1/3 + 1/6", Fraction(1, 2), [1, 3, 1, 6]),
    (" ((7)) \n", 7, [7]), ("2*(3-(4-1))", 0, [2, 3, 4, 1]), ("1 - 2", -1, [1, 2])])
def test_evaluate(text, value, used):
    """Rank, left-to-right order and exact fractions, worked by hand; 1/3 + 1/6 is 1/2 and not 0.4999…"""
    assert evaluate(text) == (value, used)


@pytest.mark.parametrize("text", [
    "", " ", "()", "1 +", "+ 1", "-1", "1 2", "1 + (2", "1 + 2)", "1) + (2", ")1(", "2(3)", "(1)(2)",
    "1 + + 2", "2 ** 3", "2^3", "7 // 2", "7 % 2", "1.0 + 2", "1e3", "0x10", "1_000", "1, 2", "1 = 1",
    "1 < 2", "1 if 1 else 2", "a", "int(7)", "__import__('os').system('x')", "(1).real", "[1]", "1; 2",
    "lambda: 1", "'1'", "# 1", "1 # 2", "٣ + ٤", "１ + ２", "² + 1", "1 ＋ 2", "1 – 2", "1\u00a0+ 2", "1\x00+ 2",
    "½"])
def test_evaluate_rejects_all_but_arithmetic(text):
    """Names, calls, attributes, powers, comparisons, and Unicode that only looks like digits or operators."""
    with pytest.raises(ValueError):
        evaluate(text)


@pytest.mark.parametrize("text", [
    "(" * 10_000 + "1" + ")" * 10_000, "(" * 120 + "1" + ")" * 120 + "+", "9" * 5_000_000,
    "1+" * 3_000_000 + "1", " " * 5_000_000 + "x", "-" * 5_000_000, "9*" * 127 + "9" + "x", "9**9**9**9**9",
    "1/0", "1/(2-2)", "×" * 1_000_000], ids=range(11))
def test_countdown_is_bounded(text):
    """No answer takes long or recurses deeply, and none of these scores."""
    env = Countdown()
    env.reset(0)
    start = time.perf_counter()
    assert env.step(text)[1:] == (0.0, True, False, {"success": False})
    assert time.perf_counter() - start < 1


def test_countdown_at_the_length_bound():
    """The longest answers are still cheap and need no recursion: 127 nested pairs, 128 factors."""
    assert evaluate("(" * 127 + "1" + ")" * 127) == (1, [1])
    assert evaluate("*".join("9" * 128))[0] == 9 ** 128


def test_countdown_scores():
    """1.0 right, 0.1 well-formed but wrong, 0 where a number is missing, repeated, foreign or split."""
    env = Countdown()
    for text, reward in [
            ("(3 + 7) * 2 - 5", 1.0), ("2×(7+3)−5", 1.0), ("3 + 7 + 2 + 5", 0.1), ("3*7-5-1*2", 0.0),
            ("7 / (3 + 2 - 5)", 0.0), ("3 * 5", 0.0), ("15", 0.0), ("3+7+2+5+0", 0.0), ("3*5+7-7", 0.0),
            ("3+3+7+2+5-5", 0.0), ("37 - 25", 0.0), ("(3 + 7) * 2 - 5 = 15", 0.0), ("fifteen", 0.0)]:
        env.reset(0)
        env.numbers, env.target = [3, 7, 2, 5], Fraction(15)
        assert env.step(text)[1:] == (reward, True, False, {"success": reward == 1.0}), text


def test_countdown_tasks():
    """Targets are whole and within bounds, the kept solution scores 1, and random answers are well-formed."""
    env, rng = Countdown(), np.random.default_rng(0)
    for seed in range(300):
        text = env.reset(seed)
        assert text == f"Numbers: {', '.join(map(str, env.numbers))}\nTarget: {env.target}"
        assert len(env.numbers) == 4 and all(1 <= number <= 20 for number in env.numbers)
        assert env.target == int(env.target) and 1 <= env.target <= 100
        assert env.step(env.optimal_action(1))[1] == 1.0
        env.reset(seed)
        random_answer = env.random_action(rng)
        try:
            assert sorted(evaluate(random_answer)[1]) == sorted(env.numbers)
        except ZeroDivisionError:
            pass
    assert len({env.reset(seed) for seed in range(300)}) == 300
    assert len(random_expression([99] * 6, rng)) < envs.MAX_ANSWER


# ------------------------------------------------------------------------------------------------------------
# Baselines

@pytest.mark.parametrize("name, chance, best", [
    ("Sokoban", 0.191, 1.0), ("FrozenLake", 0.219, 0.483), ("FrozenLakeNoSlip", 0.26, 1.0),
    ("Bandit", 0.5, 1.0), ("BanditSafe", 0.5, 1.0)])
def test_baselines_agree_with_the_reference(name, chance, best):
    """2,048 tasks of at most 10 actions, within 4 points; their standard error is about 1 point.

    A generator that is too easy, too hard or slips otherwise than the reference shows here.
    """
    make = ENVS[name]
    assert success_rate(make, "random", range(2048)) == pytest.approx(chance, abs=0.04)
    assert success_rate(make, "optimal", range(2048)) == pytest.approx(best, abs=0.04)


def test_sokoban_difficulty():
    """The reference's rooms take 3.9 moves on average, and 34 % take at most 2.

    Those figures come from 256 tasks, so their standard errors are 0.14 moves and 3 points.
    """
    env, lengths = Sokoban(), []
    for seed in range(2048):
        env.reset(seed)
        lengths.append(len(env.solve()))
    assert np.mean(lengths) == pytest.approx(3.9, abs=0.3)
    assert np.mean(np.array(lengths) <= 2) == pytest.approx(0.34, abs=0.05)


def test_play_counts_actions_and_rewards():
    """The return is the sum of the rewards, the budget is kept, and one call depends on its seeds alone."""
    env = Sokoban()
    env.reset(3)
    length = len(env.solve())
    assert play(env, "optimal", 3, 0, 10) == (pytest.approx(10 + 1 - 0.1 * length), True)
    assert play(env, "optimal", 3, 0, length - 1)[1] is False
    assert play(env, "random", 3, 0, 0) == (0.0, False)
    games = [play(FrozenLake(), "random", 3, noise, 10) for noise in range(30)]
    assert games == [play(FrozenLake(), "random", 3, noise, 10) for noise in range(30)]
    assert len({success for _, success in games}) == 2              # the noise seed moves the policy, too
    with pytest.raises(ValueError, match="'greedy'"):
        play(env, "greedy", 0, 0, 1)


# ------------------------------------------------------------------------------------------------------------
# Terminal

def terminal(*args: str, keys: str = "", **environ: str) -> subprocess.CompletedProcess:
    """Run envs.py as a person would, with keys as the input; give back status and text."""
    return subprocess.run([sys.executable, "envs.py", *args], cwd=ROOT, input=keys, capture_output=True,
                          encoding="utf-8", timeout=60, env={**os.environ, **environ})


def test_terminal_game():
    """A game from typed prefixes, in any case and with ||, shows rewards and outcome and exits with 0."""
    env = Sokoban()
    state = env.reset(3)
    plan = [env.actions[index] for index in env.solve()]
    keys = "sideways\n\n" + plan[0][0].lower() + "\n" + " || ".join(name.upper() for name in plan[1:]) + "\n"
    done = terminal("Sokoban", "--seed", "3", keys=keys, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == ""
    for part in (env.instruction, "# wall", "Actions: Up, Down, Left, Right", state,
                 "'sideways' fits no action", f"{plan[0]}: reward -0.1", f"{plan[-1]}: reward 10.9", "√",
                 f"Solved, return {11 - 0.1 * len(plan):g}"):
        assert part in done.stdout


@pytest.mark.parametrize("keys", ["q\n", "Left\nQ\n", "", "Left"])
def test_terminal_quits(keys):
    """q and the end of the input both end the game cleanly."""
    done = terminal("FrozenLake", "--seed", "3", keys=keys)
    assert done.returncode == 0 and done.stderr == "" and "Stopped, return 0" in done.stdout


def test_terminal_free_text():
    """Countdown takes the line as it is; "||" and prefixes have no meaning there."""
    env = Countdown()
    env.reset(2)
    done = terminal("Countdown", "--seed", "2", keys=env.solution + "\n")
    assert done.returncode == 0 and "reward 1" in done.stdout and "Solved, return 1" in done.stdout


@pytest.mark.parametrize("args, message", [
    (["FrozenLak"], "did you mean FrozenLake"), (["Sokoban", "--seed", "-1"], "non-negative"), ([], "env")])
def test_terminal_mistakes(args, message):
    """A user's mistake is one message and status 2, no traceback."""
    done = terminal(*args)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_ambiguous_prefixes():
    """A prefix that two actions share is refused, a whole name is not, even where it begins another one."""
    assert envs.find_action(" LEFT ", ("Left", "Leftmost")) == "Left"
    for word in ("le", "", "x"):
        with pytest.raises(ValueError, match="fits"):
            envs.find_action(word, ("Left", "Leftmost"))
