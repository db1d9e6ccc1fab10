"""
Tests of starpo.py: hand-computed values first, then what must not change anything (order, padding, splits).

Sums of three or four float32 numbers are exact to 1e-6; where a value is printed to 4 digits the tolerance is
half of the last one.
"""
import doctest
import math
import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import starpo                                                        # noqa: E402

NAN = float("nan")
HOWS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def tensor(x):
    return torch.tensor(x, dtype=torch.float32)


def mask_of(*rows):
    """Build a (B, T) mask from strings such as "0110"."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


def assert_close(got, want, atol=1e-6):
    want = want if torch.is_tensor(want) else torch.tensor(want)
    torch.testing.assert_close(got, want.to(got.dtype), atol=atol, rtol=0)


def test_doctests():
    """The worked examples in the docstrings are true; they would rot silently if nothing ran them."""
    failed, tried = doctest.testmod(starpo)
    assert failed == 0 and tried >= 4


# Returns and groups

def test_group_normalisation_uneven_groups():
    """GRPO compares inside the group; a reshape to (P, N) would mix groups of uneven size."""
    # [1, 3]: mean 2, std (ddof 1) sqrt(2): -1/1.4142, 1/1.4142. [5] has nothing to be compared with.
    got = starpo.normalize_returns(tensor([1, 3, 5]), torch.tensor([0, 0, 1]), "group")
    assert_close(got, [-0.70711, 0.70711, 0.0], atol=5e-6)
    assert got.dtype == torch.float32


def test_group_normalisation_values():
    """The divisor is the std with ddof 1 and no epsilon; ddof 0 would give -.577 and 1.732."""
    # [0,0,0,1]: mean .25, squares 3 * .0625 + .5625 = .75, / 3 = .25, std .5: -.25/.5, .75/.5
    got = starpo.normalize_returns(tensor([0, 0, 0, 1]), torch.zeros(4, dtype=torch.long), "group")
    assert got.tolist() == [-0.5, -0.5, -0.5, 1.5]


@pytest.mark.parametrize("how", ["group", "batch"])
@pytest.mark.parametrize("returns", [[2.0], [1.0] * 4, [0.1] * 16, [-1e4 / 3] * 7])
def test_no_spread_is_exactly_zero(returns, how):
    """One sample or equal returns say nothing; 0/0 gives NaN, and the float mean of sixteen 0.1 isn't 0.1."""
    got = starpo.normalize_returns(tensor(returns), torch.zeros(len(returns), dtype=torch.long), how)
    assert got.tolist() == [0.0] * len(returns)


def test_rounding_is_no_spread():
    """Returns that differ by the order of their sum are equal; normalising 1e-16 would make it 0.7."""
    a, b = sum([-0.1] * 10) + 1, sum([1.0] + [-0.1] * 10)
    assert a != b                                                    # 1.1e-16 and 1.4e-16
    returns, group = torch.tensor([a, b], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    assert starpo.normalize_returns(returns, group, "group").tolist() == [0.0, 0.0]
    # a small but real spread is none: 1 +- 1e-4 is normalised like 1 +- 1
    assert_close(starpo.normalize_returns(tensor([1.0, 1.0002]), group, "group"), [-0.70711, 0.70711], 5e-6)


def test_raw_and_batch_normalisation():
    """ARPO leaves returns alone, BRPO ignores the groups."""
    returns, group = tensor([1, 3, 5]), torch.tensor([0, 0, 1])
    assert starpo.normalize_returns(returns, group, "raw").tolist() == [1, 3, 5]
    # mean 3, squares 4 + 0 + 4, / 2 = 4, std 2
    assert starpo.normalize_returns(returns, group, "batch").tolist() == [-1, 0, 1]
    assert set(starpo.RETURN_NORM) | {"ppo", "bi_level_gae"} == set(starpo.ALGOS)
    with pytest.raises(ValueError, match="how must be"):
        starpo.normalize_returns(returns, group, "mean")


def test_group_mean_and_leave_one_out():
    """Dr. GRPO keeps the size of the spread; RLOO leaves the row out of its own baseline: n / (n - 1)."""
    # [1, 3, 8]: mean 4: -3, -1, 4. others' means 5.5, 4.5, 2: -4.5, -1.5, 6. A group of one: 0. [2, 2]: 0
    returns, group = tensor([1, 7, 3, 2, 8, 2]), torch.tensor([4, 0, 4, 9, 4, 9])
    assert_close(starpo.normalize_returns(returns, group, "group-mean"), [-3.0, 0, -1, 0, 4, 0])
    assert_close(starpo.normalize_returns(returns, group, "leave-one-out"), [-4.5, 0, -1.5, 0, 6, 0])
    for how in ("group-mean", "leave-one-out"):
        got = starpo.normalize_returns(tensor([0.1] * 16), torch.zeros(16, dtype=torch.long), how)
        assert got.tolist() == [0.0] * 16


def test_batch_normalisation_by_tag():
    """A task that pays 100 must not drown one that pays 1: "batch" compares inside a tag."""
    # tag 7: [1, 3], mean 2, std sqrt(2). tag 2: [100, 200, 300], mean 200, std 100
    returns, tag = tensor([1, 100, 3, 200, 300]), torch.tensor([7, 2, 7, 2, 2])
    group = torch.arange(5)
    assert_close(starpo.normalize_returns(returns, group, "batch", tag), [-0.70711, -1, 0.70711, 0, 1], 5e-6)
    want = starpo.normalize_returns(returns, tag, "group")
    assert torch.equal(starpo.normalize_returns(returns, tag, "group", tag=torch.zeros(5).long()), want)


def test_options_of_the_advantage():
    """Bounds are one for each side; the three weights have the value of their formula and survive zeros."""
    assert starpo.clip_returns(tensor([-5, -0.5, 0, 2, 9]), -1, 3).tolist() == [-1, -0.5, 0, 2, 3]
    # lengths 1, 3, 0, 4: mean 2
    assert_close(starpo.length_weights(torch.tensor([1, 3, 0, 4])), [2, 2 / 3, 0, 0.5])
    # group std [0, 4] 2.83, [0, 1] .707, [5, 5] 0: weights 1, 1/4, 0
    group = torch.tensor([3, 1, 1, 3, 2, 2])
    assert_close(starpo.spread_weights(tensor([0, 0, 1, 4, 5, 5]), group), [1, 0.25, 0.25, 1, 0, 0])
    assert starpo.spread_weights(tensor([0.1] * 6), group).tolist() == [0] * 6
    kept = torch.tensor([True, False, False, False])
    assert [starpo.kept_scale(kept, how) for how in ("none", "linear", "sqrt")] == [1, 0.25, 0.5]
    assert starpo.kept_scale(~kept & kept, "sqrt") == 0
    with pytest.raises(ValueError, match="sqrt"):
        starpo.kept_scale(kept, "root")


def test_length_weights_make_the_token_mean_a_mean_of_rows():
    """1 / all tokens times mean / own length is 1 / (rows * own length); both at once count it twice."""
    mask = mask_of("0111", "0001", "0011")
    sizes = dict(num_tokens=6, num_rows=3, max_tokens=4)
    weighed = starpo.loss_weights(mask, "token-mean", **sizes) * starpo.length_weights(mask.sum(1))[:, None]
    assert_close(weighed, starpo.loss_weights(mask, "seq-mean-token-mean", **sizes))


@pytest.mark.parametrize("how", ["raw", "batch", "group", "group-mean", "leave-one-out"])
def test_row_order_changes_no_advantage(how):
    """A row's advantage follows it through any permutation; assuming contiguous groups breaks that."""
    gen = torch.Generator().manual_seed(0)
    returns = torch.randn(40, generator=gen)
    group = torch.randint(0, 9, (40,), generator=gen) * 1000 - 3
    perm = torch.randperm(40, generator=gen)
    got = starpo.normalize_returns(returns, group, how)
    assert_close(starpo.normalize_returns(returns[perm], group[perm], how), got[perm])
    keep = starpo.filter_groups(returns, group, 0.5)
    assert torch.equal(starpo.filter_groups(returns[perm], group[perm], 0.5), keep[perm])
    for g in group.unique():                                         # against the plain definition
        x = returns[group == g].double()
        if how == "group":
            want = (x - x.mean()) / x.std() if len(x) > 1 else x * 0
            assert_close(got[group == g], want)
        if how == "leave-one-out":
            want = [x[i] - torch.cat([x[:i], x[i + 1:]]).mean() for i in range(len(x))] if len(x) > 1 else [0]
            assert_close(got[group == g], torch.tensor(want))


def test_filter_keeps_the_widest_groups():
    """Whole groups are kept, by std and not by mean or range; a group of one scores 0 and goes last."""
    # std: A [1,1] 0, B [0,4] 2.83, C [9] 0 (single), D [0,1,1,0] .58
    returns = tensor([0, 1, 0, 9, 1, 4, 1, 1, 0])
    group = torch.tensor([3, 0, 1, 2, 0, 1, 3, 3, 3])                # rows of A 0, B 1, C 2, D 3 interleaved
    want = {0.25: {1}, 0.5: {1, 3}, 0.75: {0, 1, 3}, 1.0: {0, 1, 2, 3}, 0.01: {1}}
    for keep, groups in want.items():                                # at 0.75 A and C tie, A appears first
        kept = starpo.filter_groups(returns, group, keep)
        assert kept.dtype == torch.bool and kept.tolist() == [g in groups for g in group.tolist()]


def test_filter_ties_go_to_the_first_to_appear():
    """Ties are stable whatever the ids; sorting by id or by float noise would pick others."""
    returns = tensor([1.0, 1.1, 0.0, 0.1, 2.0, 2.1])                 # 1.1 - 1 > .1 > 2.1 - 2 by 1e-7
    group = torch.tensor([8, 8, 5, 5, 6, 6])
    assert starpo.filter_groups(returns, group, 0.4).tolist() == [True] * 2 + [False] * 4
    order = [4, 5, 2, 3, 0, 1]
    assert starpo.filter_groups(returns[order], group[order], 0.7).tolist() == [True] * 4 + [False] * 2
    equal = starpo.filter_groups(tensor([0.1] * 4), torch.tensor([1, 1, 0, 0]), 0.5)
    assert equal.tolist() == [True, True, False, False]


def test_filter_count_and_range():
    """floor(keep * G) is meant in real numbers: 0.29 * 100 is 28.999999999999996 in floats."""
    returns, group = torch.arange(200.0) ** 2, torch.arange(200) // 2
    for keep, num_groups in ((0.29, 29), (0.3, 30), (0.255, 25), (0.001, 1), (1, 100)):
        assert starpo.filter_groups(returns, group, keep).sum() == 2 * num_groups
    for keep in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match="fraction"):
            starpo.filter_groups(returns, group, keep)


def kept_groups(scores, keep, **settings):
    """Run filter_groups on one group per score, the values 0 and score * sqrt(2): std = score."""
    scores = torch.tensor(scores, dtype=torch.float64)
    returns = torch.stack([torch.zeros_like(scores), scores * math.sqrt(2)], 1).flatten()
    kept = starpo.filter_groups(returns, torch.arange(len(scores)).repeat_interleave(2), keep, **settings)
    assert torch.equal(kept[::2], kept[1::2])                        # whole groups
    return set(kept[::2].nonzero()[:, 0].tolist())


STDS = [0, 5, 1, 0, 3, .5, 0, .5]


@pytest.mark.parametrize("keep, strategy, keep_zero, want", [
    (0.9, "top_p", False, {1, 4, 2}),            # 5 + 3 + 1 = 9 >= .9 * 10 - .01
    (0.9, "top_p", True, {1, 4, 2}),             # zeros add nothing
    (0.5, "top_p", False, {1}),                  # 5 >= 5 - .01
    (0.51, "top_p", False, {1, 4}),
    (1.0, "top_p", False, {1, 4, 2, 5, 7}),
    (1.0, "top_p", True, set(range(8))),         # no filter
    (0.9, "top_p_softmax", False, {1, 4}),       # shares .850, .115: .850 < .9 <= .965
    (0.9, "top_p_softmax", True, {1, 4}),
    (0.8, "top_p_softmax", True, {1}),
    (1.0, "top_p_softmax", True, set(range(8))),
    (3, "top_k_abs", True, {1, 4, 2}),
    (4, "top_k_abs", True, {1, 4, 2, 5}),        # of the two .5 the first
    (7, "top_k_abs", False, {1, 4, 2, 5, 7}),    # no more than there are
    (0.75, "top_k", True, {1, 4, 2, 5, 7, 0}),   # 6 of 8, the first of the zeros
    (0.75, "top_k", False, {1, 4, 2, 5, 7}),
    (0.2, "min_p", True, {1, 4, 2}),             # at least .2 * 5
    (0.6, "min_p", True, {1, 4}),                # 3 is .6 * 5, but for rounding
    (1.0, "min_p", True, {1}),
    (0.01, "min_p", False, {1, 4, 2, 5, 7}),
])
def test_filter_strategies(keep, strategy, keep_zero, want):
    """Each strategy cuts the falling scores at its own place, and leaves zeros in or out."""
    assert kept_groups(STDS, keep, strategy=strategy, keep_zero=keep_zero) == want


@pytest.mark.parametrize("strategy", starpo.FILTERS)
def test_filter_without_spread(strategy):
    """A batch where every group agrees: nothing is kept without zeros, and nothing crashes with them."""
    keep = 8 if strategy == "top_k_abs" else 0.9
    assert kept_groups([0] * 8, keep, strategy=strategy, keep_zero=False) == set()
    # .9 * 8 = 7.2 groups: top_k rounds down, softmax up; linear has no sum to reach
    want = {"top_p": set(), "top_k": set(range(7))}.get(strategy, set(range(8)))
    assert kept_groups([0] * 8, keep, strategy=strategy) == want


def test_filter_by_the_mean_of_any_number():
    """Entropy or length stand in place of the return; a group's mean decides, also below 0."""
    x, group = tensor([1, 3, 9, 0, -8, -9]), torch.tensor([5, 5, 2, 2, 3, 3])       # means 2, 4.5, -8.5
    def kept(keep, strategy):
        return starpo.filter_groups(x, group, keep, strategy, "mean").tolist()[::2]
    assert kept(2, "top_k_abs") == [True, True, False]
    assert kept(0.6, "top_p") == [False, True, False]                # 4.5 of 6.5 is more than .6 * 6.5 = 3.9
    assert kept(0.4, "min_p") == [True, True, False]
    without = starpo.filter_groups(x - 2, group, 2, "top_k_abs", "mean", keep_zero=False)
    assert without.tolist() == [False, False] + [True] * 4           # means 0, 2.5, -10.5
    spread = starpo.filter_groups(x, group, 1, "top_k_abs", "std")
    assert spread.tolist() == [False, False, True, True, False, False]


def test_filter_strategies_are_stable():
    """Row order decides between equal groups only, for each strategy; ids and rounding never do."""
    gen = torch.Generator().manual_seed(4)
    returns = torch.randint(0, 3, (60,), generator=gen).float() / 10
    group = torch.randint(0, 15, (60,), generator=gen)
    for strategy in starpo.FILTERS:
        keep = 4 if strategy == "top_k_abs" else 0.6
        kept = starpo.filter_groups(returns, group, keep, strategy)
        assert kept.any() and not kept.all()
        other = torch.randperm(15, generator=gen) * 7 - 20           # new ids
        assert torch.equal(starpo.filter_groups(returns, other[group], keep, strategy), kept)
        assert torch.equal(starpo.filter_groups(returns + 0.7, group, keep, strategy), kept)    # new rounding


def test_filter_bounds_have_slack():
    """A bound that is met but for rounding is met, and linear top_p forgives 0.01."""
    assert kept_groups([8.995, 1.005], 0.9, strategy="top_p") == {0}             # 9 - .01 is enough
    assert kept_groups([0.004, 0.006], 0.9, strategy="top_p") == set()           # hardly any spread
    for n in range(2, 40):
        assert len(kept_groups([1.0] * n, 1 / n * (n - 1), strategy="top_p_softmax")) == n - 1
        assert kept_groups([n, n * 0.7], 0.7, strategy="min_p") == {0, 1}


def test_filter_settings_are_checked():
    """A count is no fraction and a misspelt strategy no default."""
    returns, group = tensor([0, 1]), torch.tensor([0, 0])
    for keep, strategy, score in ((0.5, "top_k_abs", "std"), (0, "top_p", "std"), (2, "min_p", "std"),
                                  (0.5, "top", "std"), (0.5, "top_p", "entropy")):
        with pytest.raises(ValueError, match="keep is a|strategy must"):
            starpo.filter_groups(returns, group, keep, strategy, score)


# Token rewards and advantages

def test_token_rewards_values():
    """A reward lands on its turn's last trained token, and a turn of reward 0 still ends its own turn."""
    #                 prompt | turn 0 | obs | turn 1 | obs (turn 2 was never reached)
    mask = mask_of("0011010", "0100000")
    turn_ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [-1, 0, -1, -1, -1, -1, -1]])
    rewards = tensor([[0.0, 1.5, 0.0], [-0.25, 0.0, 0.0]])
    got = starpo.token_rewards(rewards, turn_ids, mask)
    assert got.tolist() == [[0, 0, 0, 0, 0, 1.5, 0], [0, -0.25, 0, 0, 0, 0, 0]]
    got = starpo.token_rewards(tensor([[2, 0, 0], [0, 0, 0]]), turn_ids, mask)   # failed: last reward 0
    assert got.tolist() == [[0, 0, 0, 2, 0, 0, 0], [0] * 7]


def test_token_rewards_sum_to_the_return():
    """No reward is lost or counted twice, for ragged episodes whose rewards are often 0."""
    gen = torch.Generator().manual_seed(1)
    turn_ids = torch.arange(30).expand(6, 30) // 6                   # 5 turns of 6 columns
    mask = (torch.arange(30) % 6 >= 2).expand(6, 30).clone()
    rewards = torch.randn(6, 5, generator=gen) * torch.randint(0, 2, (6, 5), generator=gen)
    for row in range(6):                                             # row i has i turns, the first has none
        mask[row, 6 * row:] = False
        rewards[row, row:] = 0
    got = starpo.token_rewards(rewards.double(), turn_ids, mask)     # float64, as Python's floats arrive
    assert got.dtype == torch.float32
    assert_close(got.sum(1), rewards.sum(1))
    assert not got[~mask].any() and got.isfinite().all()


def test_reward_without_token_is_an_error():
    """An episode cut at the context limit must not keep a reward for tokens that are gone."""
    with pytest.raises(ValueError, match="turn 1 of row 0"):
        starpo.token_rewards(tensor([[0, 1]]), torch.tensor([[0, 0, 1]]), mask_of("010"))


@pytest.mark.parametrize("rewards, values, mask, gamma, lam, want", [
    # a2 = 1 - 0 = 1; a1 = 0 + 0 - 0 + .95 * 1. Through the observation a1 would see its value 100.
    ([0, 1, 0], [0, 0, 100], "110", 1, 0.95, [0.95, 1, 0]),
    # d = .08, .07, .06, .6 with the next trained value; a = d + .72 * next a: .6, .492, .42424, .38545
    ([0, 0, 0, 0, 0, 1], [.1, .2, 9, 9, .3, .4], "110011", 0.9, 0.8, [.3855, .4242, 0, 0, .492, .6]),
    # no critic, gamma = lam = 1: the return to go
    ([0, 1, 0, 0, 2], [0, 0, 0, 0, 0], "01101", 1, 1, [0, 3, 2, 0, 2]),
])
def test_gae_values(rewards, values, mask, gamma, lam, want):
    """The recursion steps from trained token to trained token, over observations, and stops at the last."""
    values, mask = tensor([values]), mask_of(mask)
    advantages, returns = starpo.gae(tensor([rewards]), values, mask, gamma, lam)
    assert_close(advantages, [want], atol=5e-5)
    assert_close(returns, (advantages + values) * mask)


def test_gae_bootstraps_truncated_episodes_only():
    """After the last trained token comes bootstrap or 0, never the value of an observation or of padding."""
    rewards, values = torch.zeros(3, 5), tensor([[0, 1, 1, 7, 7]]).repeat(3, 1)
    mask = mask_of("01100", "01100", "00000")
    # row 0: d2 = .5 * 4 - 1 = 1; d1 = .5 * 1 - 1 = -.5; a1 = -.5 + .25 * 1. row 1: a2 = -1; a1 = -.5 - .25
    advantages, returns = starpo.gae(rewards, values, mask, 0.5, 0.5, bootstrap=tensor([4, 0, 9]))
    assert advantages.tolist() == [[0, -0.25, 1, 0, 0], [0, -0.75, -1, 0, 0], [0] * 5]
    assert returns.tolist() == [[0, 0.75, 2, 0, 0], [0, 0.25, 0, 0, 0], [0] * 5]
    assert not starpo.gae(rewards[2:], values[2:], mask[2:], 0.5, 0.5)[0].any()      # no trained token at all


def test_gae_equals_the_plain_loop_and_ignores_padding():
    """Compacting rows only makes it faster; NaN off the mask and more columns change nothing."""
    gen = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 8, 25, generator=gen)
    mask = torch.rand(8, 25, generator=gen) < torch.linspace(0, 1, 8)[:, None]
    mask[:, 0] = False
    boot = torch.randn(8, generator=gen)
    want = torch.zeros(8, 25)
    for b in range(8):
        next_value, running = boot[b], 0.0
        for t in reversed(range(25)):
            if mask[b, t]:
                running = rewards[b, t] + 0.9 * next_value - values[b, t] + 0.9 * 0.8 * running
                next_value, want[b, t] = values[b, t], running
    advantages, returns = starpo.gae(rewards, values, mask, 0.9, 0.8, boot)
    assert_close(advantages, want, atol=1e-5)
    assert_close(returns, (want + values) * mask, atol=1e-5)

    def pad(x, off):                                                 # 3 columns left, 4 right
        return torch.nn.functional.pad(x.where(mask, off), (3, 4), value=off)
    wide_mask = torch.nn.functional.pad(mask, (3, 4))
    wide = starpo.gae(pad(rewards, NAN), pad(values, NAN), wide_mask, 0.9, 0.8, boot)
    assert torch.equal(wide[0][:, 3:-4], advantages) and torch.equal(wide[1][:, 3:-4], returns)


@pytest.mark.parametrize("gamma, lam, gamma_turn, boot, want", [
    # one row: turn 0 has columns 1, 2, turn 1 column 4, turn 2 columns 6, 7; rewards 0 at column 2 (a turn
    # that ends without reward), .5 at 4, 1 at 7; values .1, .2, .4, .3, .6; observations hold 99
    # turns: A7 = 1 - .6; A4 = .5 + .5 * .6 - .4 + .5 * .8 * .4 = .56; A2 = .5 * .4 - .2 + .4 * .56 = .224
    # inside: A6 = .9 * .6 - .3 + .72 * .4 = .528; A1 = .9 * .2 - .1 + .72 * .224 = .24128
    (0.9, 0.8, 0.5, None, [.24128, .224, .56, .528, .4]),
    # truncated with value 2: A7 = 1 + .5 * 2 - .6 = 1.4; A4 = .4 + .4 * 1.4 = .96; A2 = .4 * .96 = .384;
    # A6 = .24 + .72 * 1.4 = 1.248; A1 = .08 + .72 * .384 = .35648
    (0.9, 0.8, 0.5, 2.0, [.35648, .384, .96, 1.248, 1.4]),
    # no discount at all: the return to go minus the value
    (1.0, 1.0, 1.0, None, [1.4, 1.3, 1.1, .7, .4]),
])
def test_bi_level_gae_values(gamma, lam, gamma_turn, boot, want):
    """Turn ends are linked by gamma_turn, tokens inside a turn by gamma, and a turn of reward 0 is a turn."""
    mask, columns = mask_of("01101011"), [1, 2, 4, 6, 7]
    turn_ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    rewards, values = tensor([[NAN] * 8]), tensor([[99] * 8])
    rewards[0, columns], values[0, columns] = tensor([0, 0, .5, 0, 1]), tensor([.1, .2, .4, .3, .6])
    boot = None if boot is None else tensor([boot])
    advantages, returns = starpo.bi_level_gae(rewards, values, mask, turn_ids, gamma, lam, gamma_turn, boot)
    assert_close(advantages[0, columns], want)
    assert_close(returns[0, columns], advantages[0, columns] + values[0, columns])
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_bi_level_gae_equals_the_plain_loops():
    """Two loops over one row, turns and then tokens, give what the packed loop gives; and gae for all 1."""
    e = random_episodes(3)
    at_ends = starpo.token_rewards(e["turn_rewards"], e["turn_ids"], e["loss_mask"])
    rewards = at_ends + 0.1 * e["values"].cos()                      # as with a KL term in the reward
    v, boot, ids = e["values"], e["bootstrap"], e["turn_ids"]
    want = torch.zeros_like(v)
    for b, mask in enumerate(e["loss_mask"]):
        columns = mask.nonzero()[:, 0].tolist()
        ends = [t for t, u in zip(columns, columns[1:] + [None]) if u is None or ids[b, t] != ids[b, u]]
        next_v, a = boot[b], 0.0
        for t in reversed(ends):
            a = rewards[b, t] + 0.7 * next_v - v[b, t] + 0.7 * 0.8 * a
            want[b, t], next_v = a, v[b, t]
        for t, u in reversed(list(zip(columns, columns[1:]))):
            if t not in ends:
                want[b, t] = rewards[b, t] + 0.9 * v[b, u] - v[b, t] + 0.9 * 0.8 * want[b, u]
    got, _ = starpo.bi_level_gae(rewards, v, e["loss_mask"], ids, 0.9, 0.8, 0.7, boot)
    assert_close(got, want, atol=1e-5)
    got, _ = starpo.bi_level_gae(at_ends, v, e["loss_mask"], ids, 1, 1, 1, boot)
    assert_close(got, starpo.gae(at_ends, v, e["loss_mask"], 1, 1, boot)[0], atol=1e-5)


def test_bi_level_gae_of_a_failed_episode():
    """All rewards 0, and a row without a token: the released code raises IndexError on the former."""
    mask, turn_ids = mask_of("0110", "0000"), torch.tensor([[0, 0, 1, 1]] * 2)
    values = tensor([[0, 1, 2, 0]] * 2)
    # A2 = 0 - 2; A1 = .5 * 2 - 1 + .5 * -2, as the two tokens are two turns
    advantages, returns = starpo.bi_level_gae(torch.zeros(2, 4), values, mask, turn_ids, 1.0, 1.0, 0.5)
    assert advantages.tolist() == [[0, -1, -2, 0], [0] * 4]
    assert returns.tolist() == [[0] * 4] * 2
    assert not starpo.bi_level_gae(torch.zeros(1, 4), values[:1], mask[1:], turn_ids[:1], 1, 1, 1)[0].any()


def test_turn_returns_and_step_advantages():
    """Turns from one state of one group are compared, by what they earn from there on; all others get 0."""
    # gamma .5: [1, 2, 4]: 4, 2 + 2 = 4, 1 + 2 = 3. [0, 6, 0]: 0, 6, 3. [8, 0, 0]: 0, 0, 8
    rewards = tensor([[1, 2, 4], [0, 6, 0], [8, 0, 0]])
    returns = starpo.turn_returns(rewards, 0.5)
    assert returns.tolist() == [[3, 4, 4], [3, 6, 0], [8, 0, 0]] and rewards[0].tolist() == [1, 2, 4]
    keys = torch.tensor([[7, -5, 3], [7, 3, -1], [7, -5, -1]])
    group = torch.tensor([0, 0, 1])
    # group 0, state 7: returns 3, 3: 0. state 3: returns 4 (its third turn) and 6 (the second turn): -1, 1.
    # state -5 is met once in each group; group 1's state 7 is not group 0's. A key below 0 is one like others
    got = starpo.step_advantages(returns, group, keys, "group-mean")
    assert torch.equal(starpo.step_advantages(returns, group, keys.where(keys != 3, -2), "group-mean"), got)
    assert got.tolist() == [[0, 0, -1], [0, 1, 0], [0, 0, 0]]
    got = starpo.step_advantages(returns.where(keys != -1, NAN), group, keys)        # std sqrt(2)
    assert_close(got, [[0, 0, -0.70711], [0, 0.70711, 0], [0, 0, 0]], atol=5e-6)
    same = starpo.step_advantages(tensor([[2, 5]]), torch.tensor([0]), torch.tensor([[1, 1]]), "group-mean")
    assert same.tolist() == [[-1.5, 1.5]]                            # one episode, twice in a state


def test_spread_turns():
    """Each trained token gets its own turn's number; ids off the mask may be anything."""
    got = starpo.spread_turns(tensor([[3, -2], [5, NAN]]), torch.tensor([[-1, 0, 0, 1], [0, 0, 99, 1]]),
                              mask_of("0101", "1100"))
    assert got.tolist() == [[0, 3, 0, -2], [5, 5, 0, 0]]


# All algorithms at once

CASES = [(algo, "none") for algo in starpo.ALGOS] + [("reinforce_pp", "group")]
COMPARING = [(algo, baseline) for algo, baseline in CASES if algo in starpo.RETURN_NORM and algo != "arpo"]


def random_episodes(seed=0, rows=10, turns=4, width=24):
    """Make ragged episodes of 1 to `turns` turns, each of six columns and at least one trained token."""
    gen = torch.Generator().manual_seed(seed)
    turn_ids = (torch.arange(width) // (width // turns)).expand(rows, width).clone()
    lived = torch.randint(1, turns + 1, (rows, 1), generator=gen)
    mask = (torch.rand(rows, width, generator=gen) < 0.5) | (torch.arange(width) % (width // turns) == 3)
    mask[:, 0] = False
    alive = torch.arange(turns) < lived                              # (B, K)
    keys = torch.randint(0, 3, (rows, turns), generator=gen)
    rewards = torch.randn(rows, turns, generator=gen, dtype=torch.float64)
    return dict(turn_rewards=rewards.where(alive, 0.0), state_keys=keys.where(alive, -1),
                group=torch.randint(0, 3, (rows,), generator=gen), turn_ids=turn_ids,
                loss_mask=mask & (turn_ids < lived), values=torch.randn(rows, width, generator=gen),
                bootstrap=torch.randn(rows, generator=gen) * torch.randint(0, 2, (rows,), generator=gen))


def token_advantages(algo, baseline, e, split=None):
    """Compute the advantages (B, T) that an update would use, from micro-batches of the rows in split."""
    split = split or [list(range(len(e["group"])))]
    parts = [{k: x[rows] for k, x in e.items()} for rows in split]
    masks = [p["loss_mask"] for p in parts]
    if algo in starpo.RETURN_NORM:
        how = starpo.BASELINES[baseline] if algo == "reinforce_pp" else starpo.RETURN_NORM[algo]
        scores = starpo.normalize_returns(e["turn_rewards"].sum(1), e["group"], how)
        out = [starpo.group_advantages(scores[rows], mask) for rows, mask in zip(split, masks)]
        if algo == "gigpo":
            step = starpo.step_advantages(starpo.turn_returns(e["turn_rewards"], 1.0), e["group"],
                                          e["state_keys"], how)
            out = [x + starpo.spread_turns(step[rows], p["turn_ids"], p["loss_mask"])
                   for x, rows, p in zip(out, split, parts)]
    else:
        out = []
        for p in parts:
            rewards = starpo.token_rewards(p["turn_rewards"], p["turn_ids"], p["loss_mask"])
            if algo == "ppo":
                x, _ = starpo.gae(rewards, p["values"], p["loss_mask"], 0.9, 0.8, p["bootstrap"])
            else:
                x, _ = starpo.bi_level_gae(rewards, p["values"], p["loss_mask"], p["turn_ids"], 0.9, 0.8, 0.7,
                                           p["bootstrap"])
            out.append(x)
    if algo in starpo.WHITENED:
        out = starpo.whiten(out, masks)
    result = torch.zeros(e["loss_mask"].shape)
    for rows, x in zip(split, out):
        result[rows] = x
    return result


@pytest.mark.parametrize("algo, baseline", CASES)
def test_order_padding_and_splits_change_no_advantage(algo, baseline):
    """An advantage belongs to its token, whatever rows, columns and micro-batches stand around it."""
    e = random_episodes()
    want = token_advantages(algo, baseline, e)
    mask = e["loss_mask"]
    assert want.isfinite().all() and not want[~mask].any() and want[mask].std() > 0.1
    assert_close(token_advantages(algo, baseline, e, [[3, 0], [9], [5, 1, 2, 4], [8, 6, 7]]), want, 1e-5)
    perm = torch.tensor([4, 9, 0, 2, 7, 1, 8, 3, 6, 5])
    assert_close(token_advantages(algo, baseline, {k: x[perm] for k, x in e.items()}), want[perm], 1e-5)
    off = dict(values=NAN, turn_ids=99, loss_mask=False)             # off the mask and in new columns
    wide = e | {k: torch.nn.functional.pad(e[k].where(mask, x), (2, 5), value=x) for k, x in off.items()}
    assert_close(token_advantages(algo, baseline, wide)[:, 2:-5], want)


@pytest.mark.parametrize("algo, baseline", CASES)
def test_unit_and_zero_of_the_reward(algo, baseline):
    """What divides by a spread ignores the unit of the reward; what subtracts a mean ignores its zero."""
    e = random_episodes(1)
    want = token_advantages(algo, baseline, e)
    tripled = e | {k: 3 * e[k] for k in ("turn_rewards", "values", "bootstrap")}
    scale = 3 if algo in ("arpo", "dr_grpo", "rloo") else 1
    assert_close(token_advantages(algo, baseline, tripled), scale * want, 2e-5)
    last = (e["state_keys"] != -1).sum(1, keepdim=True) - 1
    shifted = e | {"turn_rewards": e["turn_rewards"].scatter_add(1, last, torch.full((10, 1), 5.0).double())}
    if (algo, baseline) in COMPARING:                                # a critic would have to learn the 5
        assert_close(token_advantages(algo, baseline, shifted), want, 2e-5)
    else:
        assert (token_advantages(algo, baseline, shifted) - want).abs().max() > 0.1


@pytest.mark.parametrize("algo, baseline", COMPARING)
def test_equal_episodes_teach_nothing(algo, baseline):
    """Equal returns give advantages of exactly 0, not the rounding of a mean blown up by its own std."""
    e = random_episodes(2)
    e["turn_rewards"] = torch.zeros_like(e["turn_rewards"])
    last = (e["state_keys"] != -1).sum(1, keepdim=True) - 1
    e["turn_rewards"].scatter_(1, last, 0.1)
    assert not token_advantages(algo, baseline, e).any()


def test_group_advantages():
    """All trained tokens of a row share one advantage; observations and padding get exactly 0."""
    got = starpo.group_advantages(tensor([-0.5, 2]), mask_of("0110", "0001"))
    assert got.tolist() == [[0, -0.5, -0.5, 0], [0, 0, 0, 2]]


def test_whiten_values():
    """Mean and std are those of the masked tokens; NaN off the mask must not reach the sums."""
    # mean 2, variance (ddof 0) 2/3, std .8165: -1/.8165
    advantages, mask = tensor([[1, 2, 3, NAN, 1e30]]), mask_of("11100")
    (got,) = starpo.whiten([advantages], [mask])
    assert_close(got, [[-1.2247, 0, 1.2247, 0, 0]], atol=5e-5)
    got = starpo.whiten([tensor([[1, 0]]), tensor([[2], [3]])], [mask_of("10"), mask_of("1", "1")])
    assert_close(torch.cat([x.flatten() for x in got]), [-1.2247, 0, 0, 1.2247], atol=5e-5)


def test_whiten_over_ranks():
    """Two ranks and an empty third equal one rank; whitening each shard alone would give 0 for the first."""
    shards = [([tensor([[1]])], [mask_of("1")]), ([tensor([[2, NAN, 3]])], [mask_of("101")]), ([], [])]
    sums = []
    for advantages, masks in shards:                                 # first run: what each rank sends
        starpo.whiten(advantages, masks, lambda x: sums.append(x.clone()) or x)
    assert len(sums) == 3 and all(x.dtype == torch.float64 for x in sums)   # once each, else a hang
    got = [starpo.whiten(advantages, masks, lambda x: sum(sums)) for advantages, masks in shards]
    assert_close(got[0][0], [[-1.2247]], atol=5e-5)
    assert_close(got[1][0], [[0, 0, 1.2247]], atol=5e-5)
    assert got[2] == []


@pytest.mark.parametrize("x", [[5.0], [0.1] * 16, [1e4 / 3] * 999, [1.0, 1 + 2 ** -23]])
def test_whiten_without_spread(x):
    """One token or advantages equal but for rounding whiten to exactly 0, not to NaN or to +-1."""
    mask = torch.ones(1, len(x), dtype=torch.bool)
    assert starpo.whiten([tensor([x])], [mask])[0].tolist() == [[0.0] * len(x)]
    assert starpo.whiten([tensor([x])], [~mask])[0].tolist() == [[0.0] * len(x)]


def test_whiten_large_mean():
    """A large common offset doesn't eat the spread: float32 sums of squares at 1e4 have a step of 8."""
    (got,) = starpo.whiten([tensor([[10001, 10002, 10003]])], [mask_of("111")])
    assert_close(got, [[-1.2247, 0, 1.2247]], atol=5e-5)


# Losses

def test_loss_weights_values():
    """Each divisor is the one of its name; a row without trained tokens gets 0 and no NaN."""
    mask = mask_of("0110", "0001", "0000")
    sizes = dict(num_tokens=3, num_rows=3, max_tokens=10)
    third, sixth, thirtieth = 1 / 3, 1 / 6, 1 / 30
    want = {"token-mean": (third, third), "seq-mean-token-mean": (sixth, third),
            "seq-mean-token-sum-norm": (thirtieth, thirtieth)}
    for how, (a, b) in want.items():
        assert_close(starpo.loss_weights(mask, how, **sizes), [[0, a, a, 0], [0, 0, 0, b], [0] * 4])
    empty = starpo.loss_weights(mask[2:], "token-mean", num_tokens=0, num_rows=1, max_tokens=10)
    assert empty.tolist() == [[0.0] * 4]
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        starpo.loss_weights(mask, "mean", **sizes)


@pytest.mark.parametrize("how, want", list(zip(HOWS, (1.75, 1.5, 0.7))))
def test_token_losses_under_any_split(how, want):
    """Token losses [1], [2, 2, 2] give one number however they are split; a mean of means would give 1.5."""
    # token-mean (1 + 6) / 4 = 1.75; mean of the rows' means (1 + 2) / 2 = 1.5; constant 7 / (2 * 5) = .7
    losses, mask = tensor([[0, 1, 0, 0], [0, 2, 2, 2]]), mask_of("0100", "0111")
    for split in ([[0, 1]], [[0], [1]], [[1], [0]]):
        total = sum((starpo.loss_weights(mask[rows], how, num_tokens=4, num_rows=2, max_tokens=5)
                     * losses[rows]).sum() for rows in split)
        assert_close(total, want)


def test_policy_loss_values():
    """The pessimistic one of the two surrogates counts, with its own bound on each side."""
    # ratio   2: A=+1 clipped to 1.28, A=-1 not clipped; ratio .5: A=+1 not clipped, A=-1 clipped to .8
    # ratio 1.25 lies between the two bounds 1.2 and 1.28: not clipped
    ratio = tensor([[2, 2, 0.5, 0.5, 1.25]])
    advantages = tensor([[1, -1, 1, -1, 1]])
    loss, got = starpo.policy_loss(ratio.log(), torch.zeros(1, 5), advantages, 0.2, 0.28)
    assert_close(loss, [[-1.28, 2, -0.5, 0.8, -1.25]])
    assert_close(got, ratio)


def test_dual_clip_values():
    """Only a large ratio with a negative advantage is bounded, and there the gradient stops."""
    # c = 3: ratio 5, A=-2: 10 is cut to 6. ratio 2, A=-2: 4 stays. ratio 5, A=+1: clipped to 1.28 as before
    logprobs = tensor([[5, 2, 5, 0.5]]).log().requires_grad_()
    advantages = tensor([[-2, -2, 1, -1]])
    loss, _ = starpo.policy_loss(logprobs, torch.zeros(1, 4), advantages, 0.2, 0.28, dual_clip=3)
    assert_close(loss.detach(), [[6, 4, -1.28, 0.8]])
    loss.sum().backward()
    assert_close(logprobs.grad, [[0, 4, 0, 0]])
    for bad in (1, 0.5, -1):
        with pytest.raises(ValueError, match="dual_clip"):
            starpo.policy_loss(logprobs, logprobs, logprobs, 0.2, 0.2, dual_clip=bad)


def test_importance_weights_values():
    """Weights are trainer / sampler, cut above, without a gradient; they scale the policy loss alone."""
    old, sampled = tensor([[9, -1, -1, -3]]).requires_grad_(), tensor([[NAN, -1, -3, -1]])
    got = starpo.importance_weights(old, sampled, cap=2.0)
    assert_close(got[:, 1:], [[1, 2, math.exp(-2)]])                 # exp(0), exp(2) cut to 2, exp(-2)
    assert not got.requires_grad
    logprobs = old.detach().clone().requires_grad_()
    zeros, mask = torch.zeros(1, 4), mask_of("0111")
    loss, stats = starpo.starpo_loss(
        logprobs, zeros, old.detach(), zeros + 1, mask, mask.float(), num_tokens=3, clip_low=0.2,
        clip_high=0.2, importance=got, kl_coef=1.0, ref_logprobs=old.detach())
    loss.backward()
    assert_close(logprobs.grad, [[0, -1, -2, -math.exp(-2)]])
    assert_close(stats["policy_loss"], -3 - math.exp(-2))


def test_policy_gradient_at_ratio_one():
    """With detached old log-probs the ratio is 1 and the gradient -advantage: plain REINFORCE."""
    logprobs = tensor([[-1, -2]]).requires_grad_()
    loss, ratio = starpo.policy_loss(logprobs, logprobs.detach(), tensor([[3, -2]]), 0.2, 0.28)
    loss.sum().backward()
    assert ratio.tolist() == [[1, 1]] and logprobs.grad.tolist() == [[-3, 2]]


def test_value_loss_values():
    """Clipping takes the worse of the two errors, so that leaving the interval gains nothing."""
    # target 2, old 0. new .25: inside +-.5, .5 * 1.75^2 = 1.53125. new 2: clipped to .5, .5 * 1.5^2 = 1.125.
    # new -1: clipped to -.5 with error 2.5, but -1 is worse: .5 * 9 = 4.5
    values, old, returns = tensor([[0.25, 2, -1]]), torch.zeros(1, 3), tensor([[2, 2, 2]])
    assert starpo.value_loss(values, old, returns, 0.5).tolist() == [[1.53125, 1.125, 4.5]]
    for off in (0, None):
        assert starpo.value_loss(values, old, returns, off).tolist() == [[1.53125, 0, 4.5]]


def test_kl_estimate_values():
    """The three estimators at one difference, exact near 0, and 0 while policy and reference are equal."""
    # d = ln 2: k1 .6931, k2 .2402, k3 = 1/2 - 1 + .6931 = .1931
    ratio = tensor([math.log(2)])
    for kind, want in (("k1", .693147), ("k2", .240227), ("k3", .193147)):
        assert_close(starpo.kl_estimate(ratio, torch.zeros(1), kind), [want])
        assert starpo.kl_estimate(ratio, ratio, kind).tolist() == [0.0]
    small = starpo.kl_estimate(tensor([1e-4]), torch.zeros(1), "k3")     # d^2 / 2 = 5e-9
    assert abs(small.item() / 5e-9 - 1) < 0.01
    with pytest.raises(ValueError, match="kind must be"):
        starpo.kl_estimate(ratio, ratio, "k4")


@pytest.mark.parametrize("kind, want", [("k1", [0, 0, 0]), ("k2", [.2739, -.0244, -.2495]),
                                        ("k3", [.2495, .0172, -.2668])])
def test_kl_expected_gradient(kind, want):
    """As a loss k1 teaches nothing (but looks alive), k2 the KL, k3 the other direction."""
    # exact expectation: one trained column per word of the vocabulary, weighted with its probability
    logits, reference = tensor([0.5, -0.2, 0.1]).requires_grad_(), tensor([0, 0, 1]).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp().detach()
    zeros = torch.zeros(1, 3)
    loss, stats = starpo.starpo_loss(
        logprobs[None], zeros, logprobs.detach()[None], zeros, mask_of("111"), probs[None], num_tokens=3,
        clip_low=0.2, clip_high=0.2, kl_coef=1.0, kl_kind=kind, ref_logprobs=reference[None])
    grad = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert_close(grad, want, atol=5e-5)
    true_kl = (logprobs.exp() * (logprobs - reference)).sum()
    if kind in ("k1", "k3"):                                         # unbiased as a number
        assert_close(loss, true_kl.item())
    if kind == "k2":                                                 # right as a gradient
        assert_close(grad, torch.autograd.grad(true_kl, logits)[0])
    assert stats["policy_loss"] == 0 and stats["approx_kl"] == 0 and stats["kl_ref"] > 0


# starpo_loss as a whole

def random_batch(seed=0, rows=6, width=9):
    """Make every (B, T) input of starpo_loss, with ragged random masks."""
    gen = torch.Generator().manual_seed(seed)
    old, advantages, old_values, returns, ref = torch.randn(5, rows, width, generator=gen)
    mask = torch.rand(rows, width, generator=gen) < torch.linspace(0.2, 1, rows)[:, None]
    mask[:, 0], mask[:, 1] = False, True
    noise = torch.randn(3, rows, width, generator=gen)
    return dict(logprobs=old + 0.3 * noise[0], entropy=noise[1].abs(), old_logprobs=old,
                advantages=advantages, loss_mask=mask, ref_logprobs=old + 0.3 * ref,
                importance=torch.rand(rows, width, generator=gen) + 0.5,
                values=old_values + noise[2], old_values=old_values, returns=returns)


def run_loss(batch, how="token-mean", sizes=None):
    """Run starpo_loss with every term on; return the loss, the stats and the gradient of each leaf."""
    num_tokens, num_rows = sizes or (int(batch["loss_mask"].sum()), len(batch["loss_mask"]))
    weights = starpo.loss_weights(batch["loss_mask"], how, num_tokens, num_rows, max_tokens=20)
    weights = weights.where(batch["loss_mask"], NAN)
    leaves = {k: batch[k].clone().requires_grad_() for k in ("logprobs", "entropy", "values")}
    loss, stats = starpo.starpo_loss(**{**batch, **leaves}, weights=weights, num_tokens=num_tokens,
                                     clip_low=0.1, clip_high=0.2, dual_clip=1.3, entropy_coef=0.01,
                                     kl_coef=0.1, kl_kind="k3", value_clip=0.5)
    loss.backward()
    return loss.detach(), stats, {k: x.grad for k, x in leaves.items()}


def test_starpo_loss_values():
    """Loss and metrics of five tokens by hand: each term has its sign, each clip count its condition."""
    # ratios 2, 1/4, 1, 2, 1/4 with A 1, -1, 2, -1, 1 and clip .2/.28: token losses -1.28, .8, -2, 2, -.25;
    # sum -.73. The first is clipped high, the second low; the last two are outside as well, but not clipped.
    # entropies sum to 3. approx_kl, ratio - 1 - ln ratio: 2 * (1 - ln 2 - .75 + ln 4) = .5 + 2 ln 2
    # reference = old, so d = ln 2, -ln 4, 0, ln 2, -ln 4: k2 2 * (ln2^2 + ln4^2) / 2 = 5 ln2^2,
    # k3 2 * (.5 - 1 + ln 2 + 4 - 1 - ln 4) = 5 - 2 ln 2. value errors: .5 * (0 - 1)^2 once. All / 5.
    ln2 = math.log(2)
    old = tensor([[9, -1, -1, -1, -1, -1]])
    zeros = torch.zeros(1, 6)
    inputs = dict(logprobs=old + ln2 * tensor([[7, 1, -2, 0, 1, -2]]), old_logprobs=old,
                  entropy=tensor([[9, .3, .6, .9, .4, .8]]), advantages=tensor([[7, 1, -1, 2, -1, 1]]),
                  loss_mask=mask_of("011111"),
                  weights=tensor([[0, 1, 1, 1, 1, 1]]) / 5, num_tokens=5, clip_low=0.2, clip_high=0.28)
    loss, stats = starpo.starpo_loss(**inputs)
    assert_close(loss, -0.73 / 5)
    want = dict(policy_loss=-0.73 / 5, entropy=0.6, approx_kl=(0.5 + 2 * ln2) / 5, clip_frac_low=0.2,
                clip_frac_high=0.2, ratio_max=2.0)
    assert set(stats) == set(want)
    for key, value in want.items():
        assert stats[key].ndim == 0 and not stats[key].requires_grad
        assert_close(stats[key], value)
    loss, stats = starpo.starpo_loss(**inputs, dual_clip=1.5)        # the 2 becomes 1.5
    assert_close(loss, (-0.73 - 0.5) / 5)
    assert_close(stats["clip_frac_dual"], 0.2)
    loss, stats = starpo.starpo_loss(**inputs, entropy_coef=0.5, kl_coef=3.0, kl_kind="k2", ref_logprobs=old,
                                     values=zeros, old_values=zeros, returns=tensor([[5, 1, 0, 0, 0, 0]]))
    assert_close(loss, (-0.73 - 0.5 * 3 + 3 * 5 * ln2 ** 2 + 0.5) / 5)
    assert_close(stats["value_loss"], 0.5 / 5)
    assert_close(stats["kl_ref"], (5 - 2 * ln2) / 5)
    below = dict(inputs, logprobs=old - ln2)                         # all ratios 1/2, nowhere a 1
    assert_close(starpo.starpo_loss(**below)[1]["ratio_max"], 0.5)
    with pytest.raises(ValueError, match="ref_logprobs"):
        starpo.starpo_loss(**inputs, kl_coef=0.1)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3], [4, 5]],
                                   [[5, 0], [3, 4, 2], [1]]])
def test_micro_batch_split_changes_nothing(how, split):
    """Loss, gradients and metrics of ragged micro-batches add up: a memory setting is no loss setting."""
    batch = random_batch()
    loss, stats, grads = run_loss(batch, how)
    fracs = [x for k, x in stats.items() if k.startswith("clip_frac")]
    assert len(fracs) == 3 and min(fracs) > 0                        # the interesting branches are taken
    sizes = int(batch["loss_mask"].sum()), 6
    parts = [run_loss({k: x[rows] for k, x in batch.items()}, how, sizes) for rows in split]
    assert_close(sum(p[0] for p in parts), loss)
    for key in stats:
        shares = [p[1][key] for p in parts]
        assert_close(max(shares) if key == "ratio_max" else sum(shares), stats[key])
    order = sum(split, [])
    for key in grads:
        assert_close(torch.cat([p[2][key] for p in parts]), grads[key][order])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf"), 1e30])
def test_off_mask_never_leaks(how, junk):
    """Row order, more padding and junk off the mask leave loss, metrics and gradients alone."""
    batch = random_batch()
    loss, stats, grads = run_loss(batch, how)
    mask = batch["loss_mask"]
    perm = torch.tensor([3, 0, 5, 1, 4, 2])

    def disturb(x):
        x = x.where(mask, junk) if x is not mask else x
        return torch.nn.functional.pad(x[perm], (2, 3), value=False if x.dtype == torch.bool else junk)
    new_loss, new_stats, new_grads = run_loss({k: disturb(x) for k, x in batch.items()}, how)
    assert_close(new_loss, loss)
    for key in stats:
        assert_close(new_stats[key], stats[key])
    for key in grads:
        assert_close(new_grads[key][:, 2:-3], grads[key][perm])
        assert not new_grads[key][:, :2].any() and not grads[key][~mask].any()


def test_non_finite_on_the_mask_is_loud():
    """A NaN log-prob of a trained token must show in the loss, so that the step can be skipped."""
    batch = random_batch()
    row, col = batch["loss_mask"].nonzero()[3].tolist()
    batch["logprobs"][row, col] = NAN
    assert run_loss(batch)[0].isnan()


def test_clipping_acts_from_the_second_step():
    """The ratio leaves 1 after the first step; the clip then stops exactly the tokens beyond it."""
    gen = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, 5, generator=gen).requires_grad_()    # each token has logits of its own
    actions = torch.randint(0, 5, (4, 6, 1), generator=gen)
    advantages = torch.randn(4, 6, generator=gen)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, 0] = False
    weights = starpo.loss_weights(mask, "token-mean", num_tokens=20, num_rows=4, max_tokens=5)
    optimizer = torch.optim.SGD([logits], lr=10.0)
    old, history = None, []
    for _ in range(6):
        logprobs = logits.log_softmax(-1).gather(2, actions)[..., 0]
        old = logprobs.detach() if old is None else old
        loss, stats = starpo.starpo_loss(logprobs, torch.zeros(4, 6), old, advantages, mask, weights,
                                         num_tokens=20, clip_low=0.2, clip_high=0.28)
        optimizer.zero_grad()
        loss.backward()
        ratio = (logprobs.detach() - old).exp()
        low, high = (ratio < 0.8) & (advantages < 0) & mask, (ratio > 1.28) & (advantages > 0) & mask
        still = logits.grad.abs().sum(-1) == 0
        assert torch.equal(still, low | high | ~mask)       # no gradient there, elsewhere some
        assert_close(stats["clip_frac_low"], low.sum() / 20)
        assert_close(stats["clip_frac_high"], high.sum() / 20)
        history.append({k: x.item() for k, x in stats.items()})
        optimizer.step()
    assert history[0]["ratio_max"] == 1 and history[0]["approx_kl"] == 0
    assert history[0]["clip_frac_low"] == history[0]["clip_frac_high"] == 0
    assert history[-1]["ratio_max"] > 1.28 and history[-1]["approx_kl"] > 0
    assert history[-1]["clip_frac_low"] > 0 and history[-1]["clip_frac_high"] > 0
    assert history[-1]["policy_loss"] < history[0]["policy_loss"]


def test_entropy_bonus_raises_entropy():
    """The bonus has the sign of a bonus: descending the loss flattens the policy."""
    logits = tensor([[[0, 0], [2, 0]]]).requires_grad_()
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    zeros, mask = torch.zeros(1, 2), mask_of("01")
    loss, _ = starpo.starpo_loss(zeros, entropy, zeros, zeros, mask, mask.float(), num_tokens=1, clip_low=0.2,
                                 clip_high=0.2, entropy_coef=1.0)
    loss.backward()
    assert logits.grad[0, 1, 0] > 0 > logits.grad[0, 1, 1]           # descent lowers the likely one


def test_explained_variance():
    """1, 0 and negative mean what they say; returns without spread give 0, not NaN or -inf."""
    returns, mask = tensor([[1, 2, 3, NAN]]), mask_of("1110")
    assert starpo.explained_variance(returns + 5, returns, mask) == 1   # an offset is no variance
    assert starpo.explained_variance(torch.zeros(1, 4), returns, mask) == 0
    # values 3, 2, 1: errors -2, 0, 2 with variance 8/3 against 2/3: 1 - 4
    assert_close(starpo.explained_variance(tensor([3, 2, 1]), tensor([1, 2, 3])), -3.0)
    assert starpo.explained_variance(tensor([1, 2, 3]), tensor([0.1] * 3)) == 0
    assert starpo.explained_variance(returns, returns, mask & False) == 0
