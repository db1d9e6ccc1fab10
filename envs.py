"""Text worlds for StarPO, and the two baselines that stand beside every result.

Play one in the terminal:    python envs.py FrozenLake --seed 3
Add one of your own:         write a class like TextEnv below, then ENVS["Mine"] = Mine

Two seeds, never one: `seed` makes the task (names, room, map, numbers) and is shared by a group, `noise_seed`
drives chance alone (payouts, slips) and differs per member. With one for both, a group would share its luck,
and an advantage that compares its members could not tell a good choice from a lucky task.
Rules, symbols and rewards are those of arXiv 2504.20073 (§3.2, App. B) unless a comment says otherwise.
"""
import argparse
import difflib
import functools
import json
import operator
import os
import re
import sys
from fractions import Fraction

import numpy as np

TASK, NOISE, POLICY = 0, 1, 2   # stream keys
RETRIES = 1000                  # attempts at one task before its generator gives up with an error


def stream(seed: int, *key: int) -> np.random.Generator:
    """Make a generator from a non-negative int of any size; every key gives an independent stream of it."""
    # spawn_key, not a list [seed, *key]: numpy pads lists with zeros, so [5, 0] would be the stream of [5].
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


class TextEnv:
    """A world that speaks text: write `reset` and `step`, name the actions, register the class in ENVS."""

    instruction: str = ""                    # one paragraph on the task, for the full context
    brief: str = ""                          # a few words instead, for the terse context of small models
    legend: dict[str, str] = {}              # symbol -> meaning; empty if the observation has no symbols
    actions: tuple[str, ...] | None = None   # the valid actions (reset may change them); None: free text
    done: bool = True                        # no episode is running: before reset and after the end

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        """Start an episode, with nothing left of an earlier one, and return its first observation.

        seed: the task; noise_seed: chance alone. Both are non-negative ints.
        """
        raise NotImplementedError

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one action; return (observation, reward, terminated, truncated, info).

        info["success"] (bool): the task is solved. truncated: cut by the world itself; never so in this file,
        where the action budget belongs to the player. Raises what `check` raises.
        """
        raise NotImplementedError

    def random_action(self, rng: np.random.Generator) -> str:
        """Draw an action for the random baseline: uniform over `actions`. Free text needs its own."""
        if self.actions is None:
            raise NotImplementedError(f"{type(self).__name__} takes free text and has no random_action")
        return self.actions[rng.integers(len(self.actions))]

    def optimal_action(self, actions_left: int) -> str | None:
        """Return a best action from here with `actions_left` (≥ 1) to go, None where all is lost; optional."""
        raise NotImplementedError(f"{type(self).__name__} has no optimal policy")

    def state_key(self, observation: str) -> str:
        """Name the state that `observation` shows: actions from equal keys are compared (gigpo). Default: the text."""
        return observation

    def thought(self, action: str) -> str:
        """Word what one may think here before `action`, for supervised play with think=True; optional, "" = nothing."""
        return ""

    def check(self, action: str) -> int:
        """Return the index of a named action, or -1 where text is free.

        Raises RuntimeError if no episode is running, ValueError for an action that is not in `actions`.
        """
        if self.done:
            raise RuntimeError("no episode is running: call reset() before the first step and after the end")
        if self.actions is not None and action not in self.actions:
            raise ValueError(f"unknown action {action!r}: expected one of {', '.join(self.actions)}")
        return self.actions.index(action) if self.actions else -1


# ------------------------------------------------------------------------------------------------------------
# Bandit: one pull, stochastic

PROFESSIONS_TRAIN = (("Teacher", "Engineer"), ("Nurse", "Actor"), ("Clerk", "Inventor"), ("Baker", "Banker"))
PROFESSIONS_TEST = (("Librarian", "Trader"), ("Gardener", "Founder"), ("Postman", "Explorer"))


class Bandit(TextEnv):
    """Two named arms, one pull: the safe arm pays `low`, the risky one 1 with chance `high_prob`, else 0.

    low: 0.15 as in the paper (its code: 0.1). pairs: (safe name, risky name) each; the task picks a pair and
    the order in which it is shown. reversed: the first name is the risky one instead.
    Success: the arm with the larger mean was pulled, whatever it paid.
    """

    brief = "Bandit"
    instruction = (
        "There are two arms, and you pull one of them once. Each arm has its own reward distribution, and "
        "its name hints at it. Work out from the names which arm is likely to pay more on average.")

    def __init__(self, low: float = 0.15, high_prob: float = 0.25, pairs=(("Phoenix", "Dragon"),),
                 reversed: bool = False):
        if not 0 <= high_prob <= 1 or low == high_prob:
            raise ValueError(f"high_prob must lie in [0, 1] and differ from low, or no arm is better; "
                             f"got high_prob={high_prob}, low={low}")
        self.low, self.high_prob, self.pairs, self.reversed = low, high_prob, pairs, reversed

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        task, self.noise = stream(seed, TASK), stream(noise_seed, NOISE)
        pair = tuple(self.pairs[task.integers(len(self.pairs))])
        self.safe, self.risky = pair[::-1] if self.reversed else pair
        self.actions = pair[::-1] if task.integers(2) else pair
        self.done = False
        return "Arms: " + ", ".join(self.actions)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.check(action)
        reward = float(self.noise.random() < self.high_prob) if action == self.risky else float(self.low)
        self.done = True
        return f"{action} paid {reward:g}", reward, True, False, {"success": action == self.optimal_action(1)}

    def optimal_action(self, actions_left: int) -> str:
        return self.risky if self.high_prob > self.low else self.safe


# ------------------------------------------------------------------------------------------------------------
# Grid worlds

class GridEnv(TextEnv):
    """What Sokoban and FrozenLake share: a square of cells 0 … size²-1, row by row, shown in three ways.

    observation: "grid" (symbols, a line per row), "coord" (zero-indexed (row, column) lists) or "grid_coord".
    A subclass gives `symbol(cell)`, the character shown there, and `places()`, label -> cells.
    """

    def __init__(self, size: int, smallest: int, observation: str):
        if size < smallest:
            raise ValueError(f"size must be at least {smallest}; got {size}")
        if observation not in ("grid", "coord", "grid_coord"):
            raise ValueError(f"observation must be 'grid', 'coord' or 'grid_coord'; got {observation!r}")
        self.size, self.observation = size, observation
        if observation != "grid":
            self.instruction += (f" Cells are given as (row, column): rows 0 to {size - 1} from the top, "
                                 f"columns 0 to {size - 1} from the left.")
        if observation == "coord":
            self.legend = {}

    def observe(self) -> str:
        lines = []
        if self.observation != "coord":
            lines += ["".join(self.symbol(row * self.size + col) for col in range(self.size))
                      for row in range(self.size)]
        if self.observation != "grid":
            lines += [f"{label}: " + (", ".join(str(divmod(cell, self.size)) for cell in cells) or "none")
                      for label, cells in self.places().items()]
        return "\n".join(lines)


# Sokoban: multi-turn, deterministic. A set of cells is one int whose bit c stands for cell c: to test, change
# or hash it is one integer operation, which makes search quick in plain Python.

STEP_REWARD = -0.1      # every action, also one that moves nothing
BOX_ON_REWARD = 1.0     # a box enters a target
BOX_OFF_REWARD = -1.0   # a box leaves a target
SOLVED_REWARD = 10.0    # all boxes are on targets; on top of the others
MAX_STATES = 50_000     # bounds the time of reverse play in large rooms
BRUSHES = (             # (row, column) offsets that the walker carves around itself
    ((0, -1), (0, 0), (0, 1)), ((-1, 0), (0, 0), (1, 0)),    # bars
    ((0, -1), (0, 0), (1, 0)), ((0, 1), (0, 0), (1, 0)),     # an L and its mirror image
    ((0, -1), (0, 0), (1, -1), (1, 0)))                      # block


def carve(size: int, rng: np.random.Generator) -> list[int]:
    """Return the floor cells of a random room: a walker carves rock; the border is left alone."""
    steps = int(1.7 * (size + size))
    turns, ways, brushes = rng.random(steps) < 0.35, rng.integers(4, size=steps), rng.integers(5, size=steps)
    (row, col), way, floor = rng.integers(1, size, size=2).tolist(), int(rng.integers(4)), set()
    for turn, new_way, brush in zip(turns.tolist(), ways.tolist(), brushes.tolist()):
        way = new_way if turn else way
        row = min(max(row + (-1, 1, 0, 0)[way], 1), size - 2)
        col = min(max(col + (0, 0, -1, 1)[way], 1), size - 2)
        floor.update((row + r, col + c) for r, c in BRUSHES[brush])
    return sorted(row * size + col for row, col in floor if 0 < row < size - 1 and 0 < col < size - 1)


def reverse_play(size: int, floor: set[int], targets: tuple[int, ...], player: int, depth: int):
    """Walk back from the solved room; return (player, boxes, displacement) of its best state, or None.

    Depth-first over the player's steps, each of which drags along a box that stands behind it; a push redoes
    what a pull undid, so every state met is solvable. A line of play has at most depth - 2 steps: so the
    reference counts. boxes: tuple of cells, boxes[i] starts on targets[i]; displacement: summed Manhattan
    distance of the boxes from there, in cells. Score = displacement × how often another box than the last was
    pulled (the first pull counts), and 0 while a box or the player stands on a target.
    """
    goal = sum(1 << cell for cell in targets)
    best, best_score, seen = None, 0, set()
    stack = [(player, targets, goal, -1, 0, 0)]      # player, boxes, their set, last pulled, changes, steps
    while stack and len(seen) < MAX_STATES:
        player, boxes, mask, last, changes, steps = stack.pop()
        if (player, mask) in seen:
            continue
        seen.add((player, mask))
        if changes and not (mask | 1 << player) & goal:
            away = sum(abs(box // size - target // size) + abs(box % size - target % size)
                       for box, target in zip(boxes, targets))
            if changes * away > best_score:
                best, best_score = (player, boxes, away), changes * away
        if steps >= depth - 2:
            continue
        for move in (1, -1, size, -size):            # popped in the order Up, Down, Left, Right
            to, behind = player + move, player - move
            if to not in floor or mask >> to & 1:
                continue
            if mask >> behind & 1:
                i = boxes.index(behind)
                stack.append((to, boxes[:i] + (player,) + boxes[i + 1:], mask ^ (1 << behind | 1 << player),
                              i, changes + (i != last), steps + 1))
            else:
                stack.append((to, boxes, mask, last, changes, steps + 1))
    return best


@functools.lru_cache(maxsize=4096)                   # pure, and a whole group asks for the same room
def make_room(size: int, boxes: int, depth: int, seed: int) -> tuple[int, int, int, int]:
    """Make the solvable room of a seed: floor, targets and boxes as sets of cells, and the player's cell.

    Raises RuntimeError if RETRIES rooms gave no box that can be pulled off its target.
    """
    for retry in range(RETRIES):
        rng = stream(seed, TASK, retry)              # not hash(): the same room in every process
        cells = carve(size, rng)
        if len(cells) <= boxes + 1:
            continue
        player, *targets = (cells[i] for i in rng.permutation(len(cells))[:boxes + 1])
        found = reverse_play(size, set(cells), tuple(targets), player, depth)
        if found is None:
            continue
        player, placed, away = found
        if rng.random() < (0.8 if away == 1 else 0.5):   # reverse play leaves the player at a box: stroll off
            open_cells = set(cells) - {player, *placed}
            for _ in range((1, 1, 2, 3)[rng.integers(4)]):            # after each step, on with chance 1/2
                free = [player + move for move in (-size, size, -1, 1) if player + move in open_cells]
                if free:
                    player = free[rng.integers(len(free))]
                    open_cells.remove(player)
        return (*(sum(1 << cell for cell in group) for group in (cells, targets, placed)), player)
    raise RuntimeError(f"no room of size {size} with {boxes} boxes found in {RETRIES} tries for seed {seed}: "
                       f"raise size or search_depth, or take fewer boxes")


class Sokoban(GridEnv):
    """Push every box onto a target; boxes cannot be pulled, so that a wrong push may be final.

    size: cells along a side, border walls included, ≥ 5. search_depth: bound of the reverse play that makes
    the room; it sets the difficulty. symbols: one character each for wall, empty, target, box on target, box,
    player, player on target.
    """

    brief = "Sokoban"
    actions = ("Up", "Down", "Left", "Right")
    instruction = (
        "You are solving a Sokoban puzzle: push every box onto a target. You push a box by walking into it, "
        "if the cell behind it is free. You cannot pull, so do not push a box where it gets stuck.")

    def __init__(self, size: int = 6, boxes: int = 1, search_depth: int = 300, symbols: str = "#_O√XPS",
                 observation: str = "grid"):
        if len(symbols) != 7 or len(set(symbols)) != 7:
            raise ValueError(f"symbols must be 7 different characters; got {symbols!r}")
        names = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
        self.legend = dict(zip(symbols, names))
        super().__init__(size, 5, observation)
        if observation != "grid":
            self.instruction += " The outermost rows and columns are walls."
        self.box_count, self.search_depth, self.symbols = boxes, search_depth, symbols
        self.moves = (-size, size, -1, 1)            # in the order of `actions`

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        room = make_room(self.size, self.box_count, self.search_depth, seed)
        self.floor, self.targets, self.boxes, self.player = room
        self.plan, self.done = (), False
        return self.observe()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        index = self.check(action)
        # A plan holds as long as it is followed: a whole optimal game costs one search.
        self.plan = self.plan[1:] if self.plan[:1] == (index,) else ()
        before = (self.boxes & self.targets).bit_count()
        self.player, self.boxes = self.move(self.player, self.boxes, self.moves[index])
        gain = (self.boxes & self.targets).bit_count() - before       # one box moves at most: -1, 0 or 1
        self.done = self.boxes == self.targets
        reward = STEP_REWARD + (0.0, BOX_ON_REWARD, BOX_OFF_REWARD)[gain] + SOLVED_REWARD * self.done
        return self.observe(), reward, self.done, False, {"success": self.done}

    def move(self, player: int, boxes: int, move: int) -> tuple[int, int]:
        """Return (player, boxes) after one move: the same where a wall or a stuck box is in the way."""
        to, beyond = player + move, player + 2 * move
        if self.floor >> to & 1 and not boxes >> to & 1:
            return to, boxes
        if boxes >> to & 1 and self.floor >> beyond & 1 and not boxes >> beyond & 1:
            return to, boxes ^ (1 << to | 1 << beyond)
        return player, boxes

    def solve(self) -> tuple[int, ...] | None:
        """Return a shortest solution from here, as action indices, by breadth-first search; None if lost."""
        queue, seen = [(self.player, self.boxes, ())], {(self.player, self.boxes)}
        for player, boxes, path in queue:            # grows while it is read
            if boxes == self.targets:
                return path
            for index, move in enumerate(self.moves):
                after = self.move(player, boxes, move)
                if after not in seen:
                    seen.add(after)
                    queue.append((*after, path + (index,)))
        return None

    def optimal_action(self, actions_left: int) -> str | None:
        self.plan = self.plan or self.solve() or ()
        return self.actions[self.plan[0]] if self.plan else None

    def symbol(self, cell: int) -> str:
        wall, empty, target, box_on, box, player, player_on = self.symbols
        here = self.targets >> cell & 1
        if cell == self.player:
            return player_on if here else player
        if self.boxes >> cell & 1:
            return box_on if here else box
        return target if here else empty if self.floor >> cell & 1 else wall

    def places(self) -> dict[str, list[int]]:
        inside = [row * self.size + col for row in range(1, self.size - 1) for col in range(1, self.size - 1)]
        return {"Player": [self.player], "Boxes": [cell for cell in inside if self.boxes >> cell & 1],
                "Targets": [cell for cell in inside if self.targets >> cell & 1],
                "Inner walls": [cell for cell in inside if not self.floor >> cell & 1]}


# FrozenLake: multi-turn, stochastic

class FrozenLake(GridEnv):
    """Walk over ice to the goal without falling into a hole; walking off the edge stays on the spot.

    p: probability that a tile other than start and goal is frozen. slip, in [0, 0.5]: probability of each of
    the two directions perpendicular to the intended one, which keeps 1 - 2·slip. At 1/3, as in the paper, all
    three are equally likely; at 0 moves are certain. Reward 1 on the goal, else 0.
    """

    brief = "FrozenLake"
    actions = ("Left", "Down", "Right", "Up")        # 0-3, a cycle: its neighbours are perpendicular
    legend = {"P": "player", "_": "frozen", "O": "hole", "G": "goal",
              "X": "player in hole", "√": "player on goal"}
    instruction = "You are crossing a frozen lake. Reach the goal, and do not step into a hole."

    def __init__(self, size: int = 4, p: float = 0.8, slip: float = 1 / 3, observation: str = "grid"):
        super().__init__(size, 2, observation)
        if not 0 <= p <= 1 or not 0 <= slip <= 0.5:
            raise ValueError(f"p must lie in [0, 1] and slip in [0, 0.5]; got p={p}, slip={slip}")
        if slip:
            self.instruction += (f" The ice is slippery: you move as intended with chance {1 - 2 * slip:.2f} "
                                 f"and to either side of that with chance {slip:.2f} each.")
        self.p, self.slip = p, slip
        row, col = np.divmod(np.arange(size * size), size)
        neighbours = ((row, col - 1), (row + 1, col), (row, col + 1), (row - 1, col))
        self.next = np.stack([r.clip(0, size - 1) * size + c.clip(0, size - 1)         # (4, cells)
                              for r, c in neighbours])

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        task, self.noise = stream(seed, TASK), stream(noise_seed, NOISE)
        for _ in range(RETRIES):
            self.player, self.goal = task.permutation(self.size ** 2)[:2].tolist()
            self.hole = task.random(self.size ** 2) >= self.p         # (cells,) bool
            self.hole[[self.player, self.goal]] = False
            reached = [self.player]
            for cell in reached:                     # grows while it is read
                reached += [to for to in self.next[:, cell].tolist()
                            if not self.hole[to] and to not in reached]
            if self.goal in reached:
                break
        else:
            raise RuntimeError(f"no lake of size {self.size} with a path to the goal in {RETRIES} tries for "
                               f"seed {seed}: raise p, which is {self.p}")
        self.value = np.eye(self.size ** 2)[self.goal]   # (cells,) chance to succeed with len(policies) to go
        self.policies, self.done = [], False
        return self.observe()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        index, luck = self.check(action), self.noise.random()
        if luck < 2 * self.slip:
            index = (index + (1 if luck < self.slip else -1)) % 4
        self.player = int(self.next[index, self.player])
        success = self.player == self.goal
        self.done = success or bool(self.hole[self.player])
        return self.observe(), float(success), self.done, False, {"success": success}

    def optimal_action(self, actions_left: int) -> str:
        # Finite-horizon value iteration, kept for the episode: policies[k] is best with k + 1 actions to go.
        # The discount breaks ties towards fewer steps, and is too small to outweigh a chance of success.
        while len(self.policies) < actions_left:
            straight = self.value[self.next]                          # (4, cells)
            sides = straight[[1, 2, 3, 0]] + straight[[3, 0, 1, 2]]
            value = (1 - 1e-6) * ((1 - 2 * self.slip) * straight + self.slip * sides)
            self.policies.append(value.argmax(0))
            over = self.hole | (np.arange(self.size ** 2) == self.goal)
            self.value = np.where(over, self.value, value.max(0))
        return self.actions[self.policies[actions_left - 1][self.player]]

    def thought(self, action: str) -> str:
        (row, col), (to_row, to_col) = divmod(self.player, self.size), divmod(self.goal, self.size)
        return f"{row} {col} to {to_row} {to_col} {action}"

    def symbol(self, cell: int) -> str:
        if cell == self.player:
            return "X" if self.hole[cell] else "√" if cell == self.goal else "P"
        return "O" if self.hole[cell] else "G" if cell == self.goal else "_"

    def places(self) -> dict[str, list[int]]:
        return {"Player": [self.player], "Goal": [self.goal], "Holes": np.flatnonzero(self.hole).tolist()}


# ------------------------------------------------------------------------------------------------------------
# Countdown: one free-text answer, deterministic

RIGHT_REWARD = 1.0        # the target is hit, with each number used exactly once
WELL_FORMED_REWARD = 0.1  # another value, with each number used exactly once
MAX_ANSWER = 256          # characters; anything longer scores 0 unread
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
RANK = {"(": 0, ")": 1, "+": 2, "-": 2, "*": 3, "/": 3}


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return (exact value, integers used) of an expression of integers, + - * / (or × ÷ −) and parentheses.

    Raises ValueError for anything else, signs, decimals and powers included, and ZeroDivisionError where due.
    Two stacks instead of recursion or Python's parser: linear time, any nesting, and model text never runs.

    >>> evaluate("2 × (3 − 1) / 8")
    (Fraction(1, 2), [2, 3, 1, 8])
    """
    text = text.strip().translate(str.maketrans("×÷−", "*/-"))
    if len(text) > MAX_ANSWER or re.search(r"[^0-9+\-*/() \t\n]", text):
        raise ValueError(f"not arithmetic of at most {MAX_ANSWER} characters")
    values, waiting, used, operand_next = [], [], [], True       # waiting: operators and open parentheses
    for token in ["(", *re.findall(r"[0-9]+|[+\-*/()]", text), ")"]:
        if operand_next != (token == "(" or token.isdigit()):
            raise ValueError(f"{token!r} is out of place")
        if token.isdigit():
            used.append(int(token))
            values.append(Fraction(int(token)))
            operand_next = False
        elif token == "(":
            waiting.append(token)
        else:
            while waiting and RANK[waiting[-1]] >= RANK[token]:  # equal rank too: a - b - c = (a - b) - c
                right, left = values.pop(), values.pop()
                values.append(OPERATORS[waiting.pop()](left, right))
            if token != ")":
                waiting.append(token)
                operand_next = True
            elif not waiting or waiting.pop() != "(":
                raise ValueError("a parenthesis closes that was never opened")
    if waiting:
        raise ValueError("a parenthesis is never closed, or one closes too early")
    return values[0], used


def random_expression(numbers: list[int], rng: np.random.Generator) -> str:
    """Join two or more numbers, each once, in random order by random operators: "(3 + 7) * 2"."""
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        left, right = (parts.pop(rng.integers(len(parts))) for _ in range(2))
        parts.append(f"({left} {'+-*/'[rng.integers(4)]} {right})")
    return parts[0][1:-1]


class Countdown(TextEnv):
    """Reach a target by an expression that uses each given number exactly once.

    numbers: how many, 2 to 6, each from 1 to `largest`. The target is a whole number from 1 to `target_max`
    that a random expression reaches, so every task has a solution. The papers give no sizes; these are ours.
    """

    brief = "Countdown"
    instruction = (
        "Write an arithmetic expression that equals the target. Use each of the given numbers exactly once "
        "and, besides them, only +, -, *, / and parentheses.")

    def __init__(self, numbers: int = 4, largest: int = 20, target_max: int = 100):
        if not 2 <= numbers <= 6 or largest < 1 or target_max < 1:
            raise ValueError(f"numbers must lie in [2, 6], largest and target_max be at least 1; "
                             f"got {numbers}, {largest}, {target_max}")
        self.count, self.largest, self.target_max = numbers, largest, target_max

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        task = stream(seed, TASK)
        for _ in range(RETRIES):
            self.numbers = task.integers(1, self.largest + 1, size=self.count).tolist()
            self.solution = random_expression(self.numbers, task)
            try:
                self.target = evaluate(self.solution)[0]
            except ZeroDivisionError:
                continue
            if self.target.denominator == 1 and 1 <= self.target <= self.target_max:
                break
        else:
            raise RuntimeError(f"no target up to {self.target_max} found in {RETRIES} tries for seed {seed}: "
                               f"raise target_max")
        self.done = False
        return f"Numbers: {', '.join(map(str, self.numbers))}\nTarget: {self.target}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.check(action)
        self.done = True
        try:
            value, used = evaluate(action)
            if sorted(used) != sorted(self.numbers):
                raise ValueError("each number must be used exactly once")
        except (ValueError, ZeroDivisionError) as error:
            return f"Invalid: {error}", 0.0, True, False, {"success": False}
        success = value == self.target
        reward = RIGHT_REWARD if success else WELL_FORMED_REWARD
        return f"Value: {value}", reward, True, False, {"success": success}

    def random_action(self, rng: np.random.Generator) -> str:
        return random_expression(self.numbers, rng)

    def optimal_action(self, actions_left: int) -> str:
        return self.solution


# ------------------------------------------------------------------------------------------------------------
# Questions and answers from a file of your own: one free-text answer, deterministic

TRAINING_SEEDS = 2 ** 63        # training's task seeds begin here (rollout.train_episodes), evaluation's lie below
SAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "questions.jsonl")
NUMBER = re.compile(r"((?<![0-9A-Za-z)])[-−])?\$?"                                              # not the sign of 7-5
                    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"     # 1,234.50
                    r"(?:(?: ([0-9]+))?/([0-9]+))?")                                            # 3/4, 1 1/2


def last_number(text: str) -> Fraction | None:
    r"""Return the last number in a text, exactly, or None. $ and % are passed over: 50% is 50. No exponents.

    >>> [str(last_number(text)) for text in ("She pays $1,234.50.", "3/4", "1 1/2 cups", r"\frac{3}{4}", "7-5")]
    ['2469/2', '3/4', '3/2', '3/4', '5']
    """
    text = re.sub(r"(?<=[0-9])\\(?=[dt]?frac\{)", r" \\", text)                  # 2\frac{1}{2} is a mixed number
    text, found = re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text), None
    for found in NUMBER.finditer(text):
        pass
    if found is None or len(found.group()) > MAX_ANSWER:
        return None
    sign, value, over, under = found.groups()
    value, under = Fraction(value.replace(",", "")), int(under or 1)
    if under == 0:
        return None
    value = value + Fraction(int(over), under) if over else value / under
    return -value if sign else value


def same_number(answer: str, gold: str) -> bool:
    """Whether the last numbers agree: whole ones exactly, others within a millionth of the gold one."""
    number, right = last_number(answer), last_number(gold)
    if number is None or right is None:
        return False
    exact = number.denominator == right.denominator == 1
    return number == right if exact else abs(number - right) <= abs(right) / 10 ** 6


def same_text(answer: str, gold: str) -> bool:
    """Whether the texts agree but for case and white space."""
    return answer.casefold().split() == gold.casefold().split()


MATCHES = {"exact": same_text, "numeric": same_number}


@functools.lru_cache(maxsize=16)                     # every episode has an instance of its own
def read_questions(path: str, question: str, answer: str, mark: str, numeric: bool) -> dict[str, tuple[str, str]]:
    """Read a .jsonl file as {question: (explanation, gold answer)}: what stands before and after the last `mark`.

    A question that comes again keeps its first answer. Raises ValueError that names the line to mend.
    """
    questions, shape = {}, f'a line {{"{question}": "...", "{answer}": "..."}} for each question'
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"path={path!r} can't be read: {error}. Expected UTF-8 text with {shape}") from None
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}: "
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}no JSON ({error}). Expected {shape}") from None
        for field in (question, answer):
            if not isinstance(row, dict) or not isinstance(row.get(field), (str, int, float)):
                raise ValueError(f"{where}no text or number {field!r} in {line.strip()[:60]!r}. Expected {shape}; "
                                 f"question= and answer= name the fields")
        asked, told = str(row[question]).strip(), str(row[answer])
        thought, _, gold = told.rpartition(mark) if mark else ("", "", told)
        if not asked or not gold.strip():
            raise ValueError(f"{where}the question or the answer is empty. Fill it in, or take the line out")
        if numeric and last_number(gold) is None:
            raise ValueError(f"{where}no number in the answer {gold.strip()[:60]!r}. Mend it, or take match='exact'")
        questions.setdefault(asked, (thought.strip(), gold.strip()))
    return questions


@functools.lru_cache(maxsize=16)
def split_questions(held_out: float | str, path: str, *how) -> tuple[tuple, tuple]:
    """Return (training, held-out) tuples of (question, explanation, gold answer), with no question in both."""
    questions = read_questions(path, *how)
    if isinstance(held_out, str):
        held = read_questions(held_out, *how)
    elif 0 < held_out < 1:
        count = max(2, round(held_out * len(questions)))
        names, order = list(questions), np.random.default_rng(0).permutation(len(questions))   # in every run alike
        held = {names[i]: questions[names[i]] for i in order[:count]}
    else:
        raise ValueError(f"held_out must be a share between 0 and 1, or the path of another file; got {held_out!r}")
    parts = tuple(tuple((q, *rest) for q, rest in part.items())
                  for part in ({q: rest for q, rest in questions.items() if q not in held}, held))
    if min(map(len, parts)) < 2:
        raise ValueError(f"path={path!r} with held_out={held_out!r} gives {len(parts[0])} questions to train on and "
                         f"{len(parts[1])} held out: each needs two or more")
    return parts


class QuestionAnswer(TextEnv):
    """Answer a question of a .jsonl file, in one turn (GSM8K's files as they are; MetaMath's with other names).

    path: one {"question": ..., "answer": ...} a line; the working directory's if relative; default: a small sample.
    match: "numeric" (the last numbers agree), "exact" (the texts, but for case and white space), or a function
    of (answer, gold) that returns the reward; from 1 up it is a success. question, answer: names of the fields.
    mark: the gold answer is what follows its last occurrence, the whole text without; "" = always the whole.
    held_out: share of the questions, or another file, for seeds below 2**63, which are evaluation's; the others
    are for training's. A question of the held-out file is left out of training, too.
    """

    brief = "Question"
    instruction = "Answer the question."

    def __init__(self, path: str = SAMPLE, match="numeric", question: str = "question", answer: str = "answer",
                 mark: str = "####", held_out: float | str = 0.1, instruction: str = ""):
        if not callable(match) and match not in MATCHES:
            raise ValueError(f"match must be {' or '.join(map(repr, MATCHES))}, or a function of (answer, gold); "
                             f"got {match!r}")
        self.match = MATCHES.get(match, match)
        self.instruction = instruction or self.instruction
        self.parts = split_questions(held_out, path, question, answer, mark, match == "numeric")

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        if seed < 0:
            raise ValueError(f"seed must be non-negative; got {seed}")
        self.part = self.parts[seed < TRAINING_SEEDS]
        self.at = seed % len(self.part)              # so evaluation's seeds, which follow each other, miss none
        question, self.explanation, self.gold = self.part[self.at]
        self.done = False
        return question

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.check(action)
        reward, self.done = float(self.match(action, self.gold)), True
        return f"Expected: {self.gold}", reward, True, False, {"success": reward >= 1}

    def random_action(self, rng: np.random.Generator) -> str:
        other = self.at + 1 + rng.integers(len(self.part) - 1)       # another question's answer
        return self.part[other % len(self.part)][2]

    def optimal_action(self, actions_left: int) -> str:
        return self.gold

    def thought(self, action: str) -> str:
        return self.explanation if action == self.gold else ""


# ------------------------------------------------------------------------------------------------------------
# Environments of Gymnasium, an optional package

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")    # terminal codes 30-37, 40-47


def name_colours(text: str) -> str:
    r"""Write a terminal's colours as words, since worlds show by colour alone where the player stands.

    >>> name_colours("\x1b[41mS\x1b[0mFF\n|\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m: |").split("\n")
    ['[red:S]FF', '|[blue+yellow:R]: |']
    """
    def words(found: re.Match) -> str:
        codes = [int(code) for code in re.findall(r"[0-9]+", found.group(1))]
        colours = [COLOURS[code % 10] for code in codes if code // 10 in (3, 4, 9, 10) and code % 10 < 8]
        return f"[{'+'.join(colours)}:{found.group(2)}]" if colours else found.group(2)
    text = re.sub(r"((?:\x1b\[[0-9;]*m)+)([^\x1b]+)(?:\x1b\[0?m)+", words, text)
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)            # whatever else steers a terminal


class Gymnasium(TextEnv):
    """An environment of the package behind our interface; `from_gymnasium` says what the arguments are."""

    def __init__(self, id: str, actions=None, instruction: str = "", success=None, **make_kwargs):
        try:
            import gymnasium
        except ImportError:
            raise ValueError(f"{id!r} needs an optional package: pip install gymnasium") from None
        try:
            self.env = gymnasium.make(id, render_mode="ansi", disable_env_checker=True, **make_kwargs)
        except gymnasium.error.Error as error:       # no such name, or a version that is gone
            raise ValueError(f"Gymnasium can't make {id!r}: {error}") from None
        space, modes = self.env.action_space, self.env.metadata.get("render_modes", [])
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id!r} has the actions {space}, which have no names: expected a Discrete space")
        if "ansi" not in modes:
            raise ValueError(f"{id!r} has no text rendering: expected render mode 'ansi', got {', '.join(modes)}. "
                             f"Write a class like TextEnv that words its observations")
        self.first = int(space.start)
        self.actions = tuple(actions or map(str, range(self.first, self.first + int(space.n))))
        if len(self.actions) != space.n or len({name.lower() for name in self.actions}) != space.n:
            raise ValueError(f"actions must be {space.n} different names for {id!r}; got {self.actions}")
        self.brief = self.env.spec.name[:19]
        self.instruction = instruction or f"You are in the world {self.env.spec.name}."
        self.success = success or (lambda reward, terminated, info: terminated and reward > 0)

    def reset(self, seed: int, noise_seed: int = 0) -> str:
        self.env.reset(seed=int(stream(seed, TASK).integers(2 ** 31)))       # some simulators take no larger one
        self.env.unwrapped.np_random = stream(noise_seed, NOISE)
        self.done = False
        return self.observe()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        _, reward, terminated, truncated, info = self.env.step(self.first + self.check(action))
        success = self.success(float(reward), bool(terminated), info)
        self.done = bool(terminated or truncated)
        return (self.observe(), float(reward), bool(terminated), bool(truncated and not terminated),
                {"success": bool(success)})

    def observe(self) -> str:
        text = self.env.render()
        if not isinstance(text, str):
            raise ValueError(f"{self.brief} must render as a text, but gives {type(text).__name__}")
        return name_colours(text).strip("\n")


def from_gymnasium(id: str, actions=None, instruction: str = "", success=None, **make_kwargs):
    """Make an entry for ENVS of a Gymnasium environment with discrete actions and a text rendering.

        ENVS["Taxi"] = from_gymnasium("Taxi-v4", actions=("South", "North", "East", "West", "Pickup", "Dropoff"))

    actions: a name for each, in the order of the numbers; default: the numbers. success: a function of
    (reward, terminated, info), default: the episode terminates with a positive reward. make_kwargs go to
    gymnasium.make. The text is that of render mode "ansi" with colours as words, "[red:S]FFF" (name_colours): say
    in the instruction what they mean. A TimeLimit's end is `truncated`. There is no optimal policy.

    Seeds: reset draws the task from `seed`; then the environment's own generator (np_random) is replaced by one
    of `noise_seed`. So a world that draws its luck elsewhere shares it in the group, one that draws a part of the
    task later than in reset doesn't share that, and what gymnasium.make draws follows neither.
    Raises ValueError for an environment that doesn't fit, or a missing package.
    """
    make = functools.partial(Gymnasium, id, actions=actions, instruction=instruction, success=success, **make_kwargs)
    make().reset(0)                                  # a mistake shows now, not in a run
    return make


# ------------------------------------------------------------------------------------------------------------
# Registry and baselines

ENVS = {
    "Bandit": Bandit,
    "BanditReversed": functools.partial(Bandit, reversed=True),
    "BanditProfessions": functools.partial(Bandit, pairs=PROFESSIONS_TRAIN),
    "BanditProfessionsTest": functools.partial(Bandit, pairs=PROFESSIONS_TEST),
    "BanditSafe": functools.partial(Bandit, low=0.4),      # control: whoever only learnt to gamble fails
    "Sokoban": Sokoban,
    "SokobanNewVocab": functools.partial(Sokoban, search_depth=30, symbols="W.GCBA@"),
    "LargerSokoban": functools.partial(Sokoban, size=8, boxes=2, search_depth=10),
    "FrozenLake": FrozenLake,
    "FrozenLakeNoSlip": functools.partial(FrozenLake, p=0.9, slip=0.0),
    "Countdown": Countdown,
    "QuestionAnswer": QuestionAnswer,      # env_args={"path": "your.jsonl"}
}


def make_env(name: str, **kwargs) -> TextEnv:
    """Make a registered world; kwargs go to its constructor. Raises ValueError for an unknown name."""
    if name not in ENVS:
        known = {key.lower(): key for key in ENVS}
        near = " or ".join(known[key] for key in difflib.get_close_matches(name.lower(), known))
        raise ValueError(f"unknown environment {name!r}{near and f', did you mean {near}?'}; "
                         f"registered are {', '.join(ENVS)}")
    return ENVS[name](**kwargs)


def play(env: TextEnv, policy: str, seed: int, noise_seed: int, max_actions: int) -> tuple[float, bool]:
    """Play an episode of at most max_actions by policy "random" or "optimal"; return (return, success)."""
    if policy not in ("random", "optimal"):
        raise ValueError(f"policy must be 'random' or 'optimal'; got {policy!r}")
    rng = stream(noise_seed, POLICY)
    total, success = 0.0, False
    env.reset(seed, noise_seed)
    for left in range(max_actions, 0, -1):
        action = env.optimal_action(left) if policy == "optimal" else None
        action = env.random_action(rng) if action is None else action
        _, reward, terminated, truncated, info = env.step(action)
        total, success = total + reward, info["success"]
        if terminated or truncated:
            break
    return total, success


def success_rate(make, policy: str, seeds, max_actions: int = 10) -> float:
    """Return the fraction of tasks that a baseline solves; nan for the optimal policy of a world without one.

    make: called without arguments, gives the world; seeds: one or more task seeds, each also the noise seed
    of its episode, so that luck differs between tasks.
    """
    env = make()
    try:
        wins = [play(env, policy, seed, seed, max_actions)[1] for seed in seeds]
    except NotImplementedError:
        return float("nan")
    return sum(wins) / len(wins)


# ------------------------------------------------------------------------------------------------------------
# Play in the terminal

def find_action(word: str, actions: tuple[str, ...]) -> str:
    """Return the action that `word` names or begins, case ignored; ValueError if none or several fit."""
    word = word.strip().lower()
    fits = [name for name in actions if word and name.lower().startswith(word)]
    fits = [name for name in fits if name.lower() == word] or fits
    if len(fits) != 1:
        raise ValueError(f"{word!r} fits {' and '.join(fits) or 'no action'}; there are {', '.join(actions)}")
    return fits[0]


def main(argv: list[str] | None = None) -> None:
    """Let a person play one episode."""
    parser = argparse.ArgumentParser(description="Play an episode; several actions are separated by ||.")
    parser.add_argument("env", help=", ".join(ENVS))
    parser.add_argument("--seed", type=int, default=0, help="the task, 0 or more")
    parser.add_argument("--noise_seed", type=int, default=0, help="chance, 0 or more")
    args = parser.parse_args(argv)
    try:
        env = make_env(args.env)
        state = env.reset(args.seed, args.noise_seed)
    except ValueError as error:
        parser.error(str(error))                     # exits with status 2
    print(env.instruction)
    if env.legend:
        print("Symbols: " + ", ".join(f"{symbol} {meaning}" for symbol, meaning in env.legend.items()))
    print("Actions: " + ", ".join(env.actions or ["free text"]) + f", q to quit\n\n{state}")
    print("> ", end="", flush=True)
    total = 0.0
    for line in sys.stdin:                           # also ends, cleanly, where the input does
        if line.strip().lower() == "q":
            break
        try:
            todo = [find_action(word, env.actions) for word in line.split("||")] if env.actions else [line]
        except ValueError as error:
            print(error)
            todo = []
        for action in todo:
            state, reward, terminated, truncated, info = env.step(action)
            total += reward
            print(f"{action.strip()}: reward {reward:g}\n{state}")
            if terminated or truncated:
                return print(f"{'Solved' if info['success'] else 'Not solved'}, return {total:g}")
        print("> ", end="", flush=True)
    print(f"\nStopped, return {total:g}")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")         # a narrower terminal encoding has no √
    main()
