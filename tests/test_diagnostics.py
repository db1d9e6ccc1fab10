"""
Tests of diagnostics.py: hand-computed values, and curves of runs that should and should not set off an alarm.

The curves' noise is drawn from a fixed seed; a verdict must not hang on one draw, so several are tried.
"""
import doctest
import json
import math
import random

import pytest
import torch

import diagnostics
from helpers import make_policy, one_pass, rollout
from helpers import settings as rollout_settings

NAN = float("nan")


def test_doctests():
    """The worked examples in the docstrings are true; they would rot silently if nothing ran them."""
    failed, tried = doctest.testmod(diagnostics)
    assert failed == 0 and tried >= 6


# Echo Trap

def curve(iterations, seed=0, noise=0.04, success=lambda t: 0.3, **others):
    """Make metrics of a run: functions of the iteration with noise, 1 where nothing is given."""
    rng = random.Random(seed)
    out = []
    for t in range(1, iterations + 1):
        m = {"iter": t, "success": min(1.0, max(0.0, success(t) + rng.gauss(0, noise)))}
        for key, jitter in (("group_reward_std", 0.3), ("entropy", 0.1), ("grad_norm", 0.4)):
            m[key] = others.get(key, lambda t: 1.0)(t) * math.exp(rng.gauss(0, jitter))
        out.append(m)
    return out


def play(metrics, **settings):
    trap = diagnostics.EchoTrap(**settings)
    return trap, [trap.update(m) for m in metrics]


def falling(start, tau):
    return lambda t: 1.0 if t < start else math.exp(-(t - start) / tau)


HEALTHY = {
    "solves its task": dict(success=lambda t: 0.95 - 0.75 * math.exp(-t / 20), entropy=falling(0, 20),
                            group_reward_std=falling(0, 20)),
    "solves it at once": dict(success=lambda t: min(1.0, 0.5 + t / 10), entropy=falling(0, 4),
                              group_reward_std=falling(0, 4), grad_norm=lambda t: 0.01 + math.exp(-t)),
    "learns slowly": dict(success=lambda t: 0.2 + 0.002 * t, entropy=lambda t: 1 - 0.004 * t),
    "stands still, but explores": dict(success=lambda t: 0.2, entropy=lambda t: 0.3),
    "hardly ever succeeds": dict(success=lambda t: 0.05),
    "loses a tenth of its success": dict(success=lambda t: 0.6 if t < 50 else 0.54),
    "has growing gradients": dict(grad_norm=lambda t: math.exp(t / 20)),
    "loses its std while it learns": dict(success=lambda t: min(0.75, 0.2 + 0.01 * t),
                                          group_reward_std=lambda t: 1 - 0.007 * min(t, 70)),
    "has large gradients from the start": dict(grad_norm=lambda t: 40 if t in (3, 30, 60) else 10),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("noise", [0.0, 0.04, 0.08])
def test_no_alarm_on_a_healthy_run(name, noise):
    """Solving a task looks like a collapse in std and entropy; only success tells them apart."""
    for seed in range(5):
        trap, verdicts = play(curve(100, seed, noise, **HEALTHY[name]))
        assert set(verdicts) == {"ok"}, (seed, trap.first, trap.signs)


@pytest.mark.parametrize("sign", ["entropy", "group_reward_std"])
@pytest.mark.parametrize("noise", [0.0, 0.04, 0.1])
def test_warns_when_success_stands_still(sign, noise):
    """Success stops at .4 in iteration 40, the sign falls from 50 on: a warning, its reason, no collapse."""
    def success(t):
        return min(0.4, 0.1 + 0.0075 * t)
    for seed in range(5):
        metrics = curve(110, seed, noise, success, **{sign: lambda t: 7 * falling(50, 10)(t)})
        trap, verdicts = play(metrics)
        assert set(verdicts) == {"ok", "warn"} and verdicts[-1] == "warn"
        assert trap.signs == [f"{sign} is low"]
        assert 50 < trap.first["warn"] == verdicts.index("warn") + 1 < 105
        assert trap.first["collapse"] is None
        optimal, _ = play(metrics, ceiling=0.45)                     # the optimal policy does no better
        assert optimal.first["warn"] is None


def test_gradient_spike_is_a_collapse():
    """A spike counts against the usual size and leaves a record; a second one isn't hidden by the first."""
    metrics = curve(80, grad_norm=lambda t: {50: 60.0, 52: 60.0}.get(t, 1.0))
    trap, verdicts = play(metrics)
    assert [i + 1 for i, v in enumerate(verdicts) if v == "collapse"] == [50, 52]
    assert trap.first == {"warn": None, "collapse": 50} and trap.signs == []
    assert play(metrics, spike=1000)[0].first["collapse"] is None
    small = [m | {"grad_norm": 0.001 if 20 < m["iter"] != 50 else 1.0} for m in curve(80)]
    assert play(small)[0].first["collapse"] is None                  # 1 was usual before there was no spread
    solved = curve(80, success=lambda t: 0.99, grad_norm=lambda t: {50: 60.0}.get(t, 1.0))
    assert play(solved)[0].first["collapse"] is None                 # any failure moves a gradient of nearly nothing


@pytest.mark.parametrize("noise", [0.0, 0.04, 0.1])
def test_lasting_fall_of_success_is_a_collapse(noise):
    """Success falls from .5 to .1 in 20 iterations; a dip of 5 iterations is none."""
    def success(t):
        return 0.5 if t < 50 else max(0.1, 0.5 - (t - 50) / 50)
    for seed in range(5):
        trap, verdicts = play(curve(120, seed, noise, success))
        assert 60 < trap.first["collapse"] < 90 and verdicts[-1] == "collapse"
        assert trap.signs == ["success has fallen"]
        dip, _ = play(curve(120, seed, noise, lambda t: 0.2 if 50 <= t < 55 else 0.5))
        assert dip.first["collapse"] is None


def test_nothing_fires_in_the_warm_up():
    """The early level needs its iterations: before them the wildest metrics mean nothing."""
    wild = [{"iter": t, "success": 0.9 / t, "entropy": 10.0 ** -t, "grad_norm": 100.0 ** t,
             "group_reward_std": 10.0 ** -t} for t in range(1, 11)]
    assert set(play(wild)[1]) == {"ok"}


def test_missing_metrics_say_nothing():
    """NaN, None, inf and absent keys leave the state as it was; so does a batch without any gradient."""
    metrics = curve(60, entropy=falling(30, 5))
    trap, verdicts = play(metrics)
    assert "warn" in verdicts
    holes = []
    for k, m in enumerate(metrics):
        holes.append(m)
        holes.append([{}, dict.fromkeys(m), dict.fromkeys(m, NAN), dict.fromkeys(m, math.inf),
                      {"grad_norm": 0.0}][k % 5])
    other, filled = play(holes)
    assert other.state == trap.state and filled[::2] == verdicts
    assert set(play([{}] * 50)[1]) == {"ok"}
    assert set(play([{"success": 0.2}] * 50)[1]) == {"ok"}


def test_a_resumed_run_gives_the_same_verdicts():
    """The state survives JSON, and is a copy: the first trap going on doesn't touch it."""
    metrics = curve(90, success=lambda t: min(0.3, t / 100), entropy=falling(40, 8),
                    grad_norm=lambda t: 50.0 if t == 70 else 1.0)
    trap, want = play(metrics)
    first, _ = play(metrics[:45])
    state = first.state_dict()
    saved = json.dumps(state)
    for m in metrics[45:]:
        first.update(m)
    assert json.dumps(state) == saved and json.dumps(first.state_dict()) != saved
    second = diagnostics.EchoTrap()
    second.load_state_dict(json.loads(saved))
    assert [second.update(m) for m in metrics[45:]] == want[45:] and second.first == trap.first
    assert trap.first["warn"] and trap.first["collapse"] == 70


# Reasoning health

@pytest.mark.parametrize("response, want", [
    ("<think>a b</think><answer>Up</answer>", "a b"),
    ("a b</think><answer>Up</answer>", "a b"),                       # the prompt ended with the opening tag
    ("<think></think><answer>Up</answer>", ""),
    ("<think>a <answer>Up</answer>", "a"),                           # never closed
    ("<answer><think>a</think></answer>", "a"),
    ("Up", ""), ("", ""),
])
def test_thought(response, want):
    """The thinking part ends at its own tag, at the answer's, or where the response was cut off."""
    assert diagnostics.thought(response) == want


def test_repeated_ngrams_values():
    """4-grams of abcde, abcd, bcde, fgh: abcd, bcde, abcd, bcde and none: 2 of 4 were seen before."""
    assert diagnostics.repeated_ngrams(["abcde", "abcd", "bcde", "fgh"]) == 0.5
    assert diagnostics.repeated_ngrams([[7] * 10], n=4) == pytest.approx(6 / 7)      # in a loop of its own
    assert diagnostics.repeated_ngrams([range(50)]) == 0 == diagnostics.repeated_ngrams([[], [1]])


def test_pass_at_k_values():
    """1 - C(n - c, k) / C(n, k), mean over groups; 1 - (1 - c / n)^k would be biased."""
    # n 4, c 1: k 2: 1 - C(3, 2) / C(4, 2) = 1/2. n 4, c 0: 0. n 2, c 1: 1. The single one is left out
    success = [True, False, False, False] + [False] * 4 + [False, True] + [True]
    group = ["a"] * 4 + ["b"] * 4 + ["c"] * 2 + ["d"]
    assert diagnostics.pass_at_k(success, group, 2) == pytest.approx((0.5 + 0 + 1) / 3)
    assert diagnostics.pass_at_k(success, group, 1) == pytest.approx((0.25 + 0 + 0.5 + 1) / 4)
    assert diagnostics.pass_at_k(success, group, 4) == pytest.approx(0.5)
    assert diagnostics.pass_at_k(success, group, 5) is None
    order = random.Random(0).sample(range(11), 11)
    assert diagnostics.pass_at_k([success[i] for i in order], [group[i] for i in order], 2) == 0.5


def test_reasoning_health_values():
    """Four turns in two groups by hand: each number counts what its name says."""
    responses = ["<think>one two three</think><answer>Up</answer>", "<think></think><answer>Up</answer>",
                 "<think>go up now my friend</think> <answer>Up</answer>"] * 2
    group = [0, 0, 0, 1, 1, 1]
    responses[4] = responses[3]                                      # group 1: two of three are distinct
    got = diagnostics.reasoning_health(responses, group)
    # thoughts of 3, 0, 5, 3, 3, 5 words. Only the two responses of 6 words have 4-grams, the same three
    want = dict(thought_words=19 / 6, thought_frac=5 / 6, distinct_frac=(1 + 2 / 3) / 2, repeat_frac=0.5)
    assert got == pytest.approx(want)
    assert diagnostics.reasoning_health([], []) == {}


# Template collapse

def test_template_collapse_values():
    """Vectors of the formulas: own prompt 2 nats better of 3; no difference at all; and a template."""
    got = diagnostics.template_collapse(torch.tensor([[-1, -3, -3], [-3, -1, -3], [-3, -3, -1]]))
    # MI = ln 3 - ln(1 + 2 e^-2) = 1.0986 - .2395
    want = dict(conditional_entropy=1, mutual_information=0.8591, retrieval_accuracy=1,
                retrieval_chance=1 / 3)
    assert got == pytest.approx(want, abs=5e-5)
    assert got["mutual_information"] < math.log(3)
    got = diagnostics.template_collapse(torch.full((4, 4), -2.0))
    assert got == pytest.approx(dict(conditional_entropy=2.0, mutual_information=0.0, retrieval_accuracy=0.25,
                                     retrieval_chance=0.25))
    # every reasoning fits prompt 0 best: 1 of 3 is found
    got = diagnostics.template_collapse(torch.tensor([[-1, -2, -2], [-1, -2, -2], [-1, -2, -2.0]]))
    assert got["retrieval_accuracy"] == pytest.approx(1 / 3) and got["mutual_information"] < 0
    deep = diagnostics.template_collapse(torch.tensor([[-1e4, -2e4], [-2e4, -1e4]]))
    assert deep["mutual_information"] == pytest.approx(math.log(2))  # no overflow


@pytest.mark.parametrize("budget", [60, 10 ** 6])
def test_cross_score_is_one_pass_per_pair(budget):
    """L[i, j] is thought i under context j by the whole Hugging Face model, one pair at a time; temperature included."""
    policy, _ = make_policy()
    rng = random.Random(0)
    contexts, thoughts = ([[rng.randrange(1, 300) for _ in range(n)] for n in lengths] for lengths in ((9, 4, 30), (5, 1, 12)))
    got = diagnostics.cross_score(policy, contexts, thoughts, 0.7, budget)
    for i, z in enumerate(thoughts):
        for j, x in enumerate(contexts):
            table = one_pass(policy.lm, x + z, 0.7)
            want = sum(table[len(x) + k - 1, z[k]] for k in range(len(z))) / len(z)
            assert got[i, j].item() == pytest.approx(want.item(), abs=1e-5)


def episode(group, prompt, *turns):
    """turns: (response ids, observation ids) each; "3" closes a thought."""
    t = rollout.Trajectory(tokens=list(prompt), loss_mask=[0] * len(prompt), turn_ids=[0] * len(prompt), group=group)
    for k, (response, observation) in enumerate(turns):
        t.tokens += response + observation
        t.loss_mask += [1] * len(response) + [0] * len(observation)
        t.turn_ids += [k] * len(response) + [k + 1] * len(observation)
        t.turn_rewards.append(0.0)
    return t


def test_template_metrics_leave_out_what_has_no_room(monkeypatch):
    """A context near the model's last position can't take another's thought: no index beyond the table of positions."""
    policy, chat = make_policy("gpt2")
    played = [episode(g, [7 + g] * n, ([1, 2, 3], [])) for g, n in enumerate((5, 9, 511))]      # 512 positions
    cfg = rollout_settings(template_pairs=9, micro_batch_tokens=4096)
    got = diagnostics.template_metrics(policy, chat.tokenizer, played, cfg)
    assert got["template/first/retrieval_chance"] == 0.5


def test_thought_pairs():
    """By hand: one episode of each group, each context once, the thought up to its closing tag; without one, all of it."""
    decode = lambda ids: "".join("</think>" if i == 3 else "x" for i in ids)
    played = [episode(0, [7, 8], ([1, 1, 3, 5], [9])), episode(0, [7, 8], ([3, 5], [9])),
              episode(4, [6], ([2, 2], [9, 9]), ([1, 3, 4], [9])), episode(5, [7, 8], ([3], []))]
    assert diagnostics.thought_pairs(played, decode, True, 9) == ([[7, 8], [6]], [[1, 1, 3], [2, 2]])
    assert diagnostics.thought_pairs(played, decode, True, 1) == ([[7, 8]], [[1, 1, 3]])
    # over all turns the second group gives its second turn, under its whole history
    assert diagnostics.thought_pairs(played, decode, False, 9) == ([[7, 8], [6, 2, 2, 9, 9]], [[1, 1, 3], [1, 3]])
