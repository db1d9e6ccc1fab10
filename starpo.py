"""
StarPO as pure functions: how the rewards of whole trajectories become one loss per token.

In the order of an update:
  filter_groups                      which groups are worth an update
  normalize_returns                  all but ppo, bi_level_gae: compare a trajectory's return with others
  clip_returns, length_weights, spread_weights, kept_scale   options: bound or scale that number
  group_advantages                   give it to all tokens of the trajectory
  turn_returns, step_advantages, spread_turns   gigpo: add what a turn did better than others from its state
  token_rewards, gae, bi_level_gae   ppo, bi_level_gae: credit each token with the help of a critic
  whiten                             ppo, bi_level_gae, reinforce_pp: mean 0, std 1 over the batch's tokens
  loss_weights, starpo_loss          the clipped loss, its divisor and its metrics

B rows (one trajectory each), T tokens, K turns, G groups (trajectories that started from the same prompt).
Alignment: column t of every (B, T) tensor is about tokens[:, t]: its log-prob, its reward, the value of the
state before it. Column 0 has no state before it and is never trained. Masks are bool, True on the tokens that
the policy sampled; what stands off the mask is never used, it may be NaN.

Equation numbers are those of RAGEN, arXiv 2504.20073. StarPO's objective (Eq. 2) is the expected return of
whole trajectories, E[R(tau)], where R(tau) sums the rewards of all turns.
"""
import math
from typing import Callable

import torch
from torch import Tensor

ALGOS = ("ppo", "bi_level_gae", "grpo", "dr_grpo", "brpo", "arpo", "rloo", "reinforce_pp", "gigpo")

# What a return is compared with where there is no critic. ARPO and BRPO are not in the paper, only named on
# its project's pages. Eq. 5 as printed normalises over the batch, BRPO by the letter; like the released code
# and the field, our GRPO does it inside the group that shares a prompt.
RETURN_NORM = {"arpo": "raw", "brpo": "batch", "grpo": "group", "dr_grpo": "group-mean",
               "rloo": "leave-one-out", "reinforce_pp": "raw", "gigpo": "group"}

CRITICS = {"ppo", "bi_level_gae"}                                     # credit each token by a learned value

# These whiten their token advantages. REINFORCE++ (arXiv 2501.03262) is nothing more; its variant with a
# baseline first subtracts the group's mean. Its KL term is in the reward, the variant's in the loss (k2): we
# have it in the loss, as for all algorithms without a critic.
WHITENED = CRITICS | {"reinforce_pp"}
BASELINES = {"none": "raw", "group": "group-mean"}                    # in place of reinforce_pp's RETURN_NORM

FILTERS = ("top_k", "top_k_abs", "top_p", "top_p_softmax", "min_p")

DIVISORS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")

# A spread below this (8 ulp of float32, 1e-6, relative to numbers of size 1 or more) is rounding, no signal:
# ten times -0.1 and 1 sum to 1.1e-16 or 1.4e-16, as they are ordered; normalised, these are -0.7 and 0.7.
ROUNDING = 8 * torch.finfo(torch.float32).eps


def group_stats(traj_return: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Compute mean and standard deviation (ddof 1) of the return in each group, in float64.

    traj_return (B,)  R(tau)
    group (B,) long   any number that names the row's group; groups may be uneven and interleaved
    Returns index (B,), the place of each row's group in the other two, mean (G,) and std (G,). std is exactly
    0 for a group of one and where the returns differ by rounding only.

    >>> index, mean, std = group_stats(torch.tensor([1., 5., 3.]), torch.tensor([7, 2, 7]))
    >>> index.tolist(), mean.tolist(), (std ** 2).round(decimals=6).tolist()
    ([1, 0, 1], [5.0, 2.0], [0.0, 2.0])
    """
    x = traj_return.double()
    ids, index = group.unique(return_inverse=True)                    # (G,), (B,)
    zeros = x.new_zeros(len(ids))
    count = zeros.index_add(0, index, torch.ones_like(x))
    mean = zeros.index_add(0, index, x) / count
    squares = zeros.index_add(0, index, (x - mean[index]) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    size = zeros.scatter_reduce(0, index, x.abs(), "amax").clamp(min=1)
    return index, mean, std.where(~(std <= ROUNDING * size), 0.0)     # a NaN return stays NaN


def normalize_returns(traj_return: Tensor, group: Tensor, how: str, tag: Tensor | None = None) -> Tensor:
    """
    Turn returns into trajectory advantages: compare each with other trajectories of the update.

    traj_return, group (B,)  as in group_stats: all trajectories of the update, over all ranks
    how  "raw"            R
         "batch"          (R - mean) / std over the rows of the same tag (Eq. 5 as printed)
         "group"          (R - mean) / std over the row's group (Eq. 5 in code and field)
         "group-mean"     R - mean of the group (Dr. GRPO, arXiv 2503.20783: dividing by the std would favour
                          prompts that are solved nearly always or nearly never)
         "leave-one-out"  R - mean of the group's other rows = n / (n - 1) (R - mean) (RLOO, arXiv 2402.14740)
    tag (B,) long        environment of the row, so that "batch" compares like with like in a run on several
                         tasks (in the released code the grouping "inductive"); None = one task. The other
                         comparisons stay inside a group, which has one task anyway
    Returns (B,) float32, but for "raw" 0 for a single sample or no spread. The std has ddof 1 and, unlike in
    the released code, no epsilon beside it.
    """
    if how not in ("raw", "batch", "group", "group-mean", "leave-one-out"):
        raise ValueError(f'how must be "raw", "batch", "group", "group-mean" or "leave-one-out", got {how!r}')
    if how == "raw":
        return traj_return.float()
    if how == "batch":
        group = torch.zeros_like(group) if tag is None else tag
    index, mean, std = group_stats(traj_return, group)
    mean, std = mean[index], std[index]                               # (B,)
    advantage = traj_return.double() - mean
    if how in ("batch", "group"):
        advantage = advantage / std
    elif how == "leave-one-out":
        num = index.bincount()[index]                                 # (B,) rows in the group
        advantage = advantage * num / (num - 1)
    return advantage.where(std != 0, 0.0).float()


def clip_returns(normalized: Tensor, low: float, high: float) -> Tensor:
    """
    Bound normalized returns (B,) to low .. high, with low < 0 < high.

    A rare success may weigh more than a failure: the released code ("asym_clip") takes -1 and 3.
    """
    return normalized.clamp(low, high)


def length_weights(lengths: Tensor) -> Tensor:
    """
    Weigh rows by mean length / own length, so that long episodes push no harder than short ones.

    lengths (B,)  trained tokens of each kept row, over all ranks
    Returns (B,) float32, a factor of the advantages; 0 for a row of no tokens. From the released code
    (grpo_advantage_length_weight). With the divisor "token-mean" and one step the policy loss becomes that of
    "seq-mean-token-mean"; with the latter, lengths would count twice.

    >>> length_weights(torch.tensor([1, 3])).tolist()
    [2.0, 0.6666666865348816]
    """
    lengths = lengths.double()
    return (lengths.mean() / lengths).where(lengths > 0, 0.0).float()


def spread_weights(traj_return: Tensor, group: Tensor) -> Tensor:
    """
    Weigh rows by their group's std / the largest group's std: a soft filter (RAGEN-2, arXiv 2604.06268).

    traj_return, group (B,)  as in group_stats, before any normalising
    Returns (B,) float32, a factor of the advantages; 0 where no group has any spread.
    """
    index, _, std = group_stats(traj_return, group)
    return (std / std.max()).where(std != 0, 0.0)[index].float()


def kept_scale(kept: Tensor, how: str) -> float:
    """
    Compute a factor of all advantages for a filtered batch: few kept rows, a small step (RAGEN-2's code).

    kept (B,)  bool, of filter_groups
    how        "none" 1, "linear" the kept fraction of the rows, "sqrt" its root
    """
    powers = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
    if how not in powers:
        raise ValueError(f'how must be "none", "linear" or "sqrt", got {how!r}')
    return kept.double().mean().item() ** powers[how]


def filter_groups(traj_return: Tensor, group: Tensor, keep: float, strategy: str = "top_k",
                  score: str = "std", keep_zero: bool = True) -> Tensor:
    """
    Keep the groups of the highest score, by default the uncertainty U(s0) = std of R(tau) (Eq. 7).

    traj_return, group (B,)  as in group_stats, before any normalising; with score "mean" any number of a row
                             in place of the return, say its mean entropy or its length
    keep, strategy  "top_k"          fraction of the groups, in (0, 1]; StarPO-S 0.25. At least one
                    "top_k_abs"      number of groups, a whole number from 1
                    "top_p"          the fewest groups whose scores sum to keep * total - 0.01, in (0, 1];
                                     RAGEN-2 (arXiv 2604.06268) 0.9. None where there is hardly any score
                    "top_p_softmax"  the fewest whose shares of softmax(scores) sum to keep
                    "min_p"          all with a score of at least keep * the highest
    score           "std" (ddof 1; 0 for a group of one) or "mean" over the group
    keep_zero       whether groups of score 0 can be kept; RAGEN-2 for top_p: no
    Returns (B,) bool, True on the rows of the kept groups; maybe nowhere with top_p, or without keep_zero. Of
    equal groups the one that appears first wins. A score below 0 counts as 0 in top_p and min_p. As in the
    released code, the fraction of top_k is of all groups, also of those that cannot be kept, and keep 1 of
    top_p and top_p_softmax is no filter but for keep_zero.

    >>> filter_groups(torch.tensor([0., 1., 2., 2., 0., 3.]), torch.tensor([9, 9, 5, 5, 4, 4]), 0.34).tolist()
    [False, False, False, False, True, True]
    """
    if strategy not in FILTERS or score not in ("std", "mean"):
        raise ValueError(f"strategy must be one of {', '.join(FILTERS)} and score std or mean, "
                         f"got {strategy!r} and {score!r}")
    if strategy == "top_k_abs" and (keep < 1 or keep != int(keep)):
        raise ValueError(f"keep is a number of groups, 1 or more, for top_k_abs, got {keep}")
    if strategy != "top_k_abs" and not 0 < keep <= 1:
        raise ValueError(f"keep is a fraction in (0, 1] for {strategy}, got {keep}")
    index, mean, std = group_stats(traj_return, group)
    x = std if score == "std" else mean                               # (G,)
    candidate = (x.abs() > ROUNDING) | keep_zero
    x = x.where(candidate, -torch.inf)                                # others go last
    rows = torch.arange(len(index), device=index.device)
    first = torch.full_like(x, len(index), dtype=torch.long).scatter_reduce(0, index, rows, "amin")
    falling = x.argsort(descending=True)
    tier = torch.zeros_like(first)                                    # equal but for rounding = the same tier
    tier[falling[1:]] = (x[falling].diff() < -ROUNDING).cumsum(0)
    order = (tier * (len(index) + 1) + first).argsort()               # (G,) by tier, then first appearance
    ranked = x[order].clamp(min=0)
    if strategy == "top_k":
        num = kept_count(len(x), keep)
    elif strategy == "top_k_abs":
        num = int(keep)
    elif strategy == "min_p":
        num = (ranked >= keep * ranked[0] - ROUNDING).sum()
    elif keep == 1:
        num = len(x)
    else:
        linear = strategy == "top_p"
        mass = ranked if linear else x[order].softmax(0)
        goal = keep * mass.sum() - 0.01 if linear else keep - ROUNDING
        num = (mass.cumsum(0) - mass < goal).sum()                    # what stands before it is not enough
    return ((order.argsort() < num) & candidate)[index]


def kept_count(num_groups: int, keep: float) -> int:
    """Count the groups that top_k of filter_groups keeps: the fraction rounded down, and at least one."""
    return max(1, math.floor(keep * num_groups + 1e-9))               # 0.29 * 100 is 28.999999999999996


def token_rewards(turn_rewards: Tensor, turn_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """
    Put each turn's reward on its last trained token (the released code: the whole return on the last turn's).

    turn_rewards (B, K)   reward of each turn, format penalty included; 0 beyond the end of the episode
    turn_ids (B, T) long  turn of each token, 0 to K - 1; used on the mask only
    loss_mask (B, T)      trained tokens
    Returns (B, T) float32; each row sums to its return. Turn ends come from turn_ids, never from rewards.
    Raises ValueError for a reward whose turn has no trained token (checked on CPU tensors: no sync).

    >>> mask = torch.tensor([[False, True, True, False, True, True]])
    >>> token_rewards(torch.tensor([[-0.5, 2., 0.]]), torch.tensor([[-1, 0, 0, 1, 1, 1]]), mask).tolist()
    [[0.0, 0.0, -0.5, 0.0, 0.0, 2.0]]
    """
    columns = torch.arange(turn_ids.shape[1], device=turn_ids.device).expand_as(turn_ids)
    last = torch.full_like(turn_rewards, -1, dtype=torch.long)        # (B, K), -1 = no trained token
    last = last.scatter_reduce(1, turn_ids.where(loss_mask, 0), columns.where(loss_mask, -1), "amax")
    lost = (turn_rewards != 0) & (last < 0)
    if lost.device.type == "cpu" and lost.any():
        row, turn = lost.nonzero()[0].tolist()
        raise ValueError(f"turn {turn} of row {row} has reward {turn_rewards[row, turn].item():g} but no "
                         "trained token: give the reward to a turn that was sampled")
    rewards = torch.zeros_like(loss_mask, dtype=torch.float32)        # (B, T)
    return rewards.scatter_add(1, last.clamp(min=0), turn_rewards.float().where(last >= 0, 0.0))


def pack(loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """
    Move each row's trained tokens to the left (0 1 0 1 becomes 1 1), L the longest row's number of them.

    Returns order (B, L), the columns to gather (and to scatter to), and packed (B, L), False after a row's
    last. A loop over L needs no mask where a shorter row goes on with zeros.
    """
    longest = int(loss_mask.sum(1).max())
    order = (~loss_mask).byte().argsort(dim=1, stable=True)[:, :longest]
    return order, loss_mask.gather(1, order)


def shift_left(x: Tensor) -> Tensor:
    """Put x[:, t + 1] at column t and 0 (False) at the last."""
    return torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)[:, 1:]


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float,
        bootstrap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """
    Estimate generalized advantages over the trained tokens alone (arXiv 1506.02438, Eq. 16).

    rewards, values (B, T)  reward of each token; the critic's value of the state before it
    loss_mask (B, T)        trained tokens; one follows the other, whatever observation stands between them
    gamma, lam              discount and decay per trained token, in [0, 1]
    bootstrap (B,)          value of the state after the last trained token: the critic's for a truncated
                            episode, 0 for a terminated one; None = all 0
    Returns advantages and value targets (advantages + values), both (B, T), 0 off the mask, without gradient.

    >>> mask = torch.tensor([[False, True, False, True]])            # the value 100 is an observation token's
    >>> gae(torch.tensor([[0., 0., 0., 1.]]), torch.tensor([[0., .5, 100., .5]]), mask, 1.0, 0.5)[0].tolist()
    [[0.0, 0.25, 0.0, 0.5]]
    """
    order, packed = pack(loss_mask)                                   # (B, L)
    r = rewards.gather(1, order).where(packed, 0.0)
    v = values.gather(1, order).where(packed, 0.0)
    next_v = shift_left(v)
    if bootstrap is not None:
        next_v = bootstrap[:, None].to(v.dtype).where(packed & ~shift_left(packed), next_v)
    delta = r + gamma * next_v - v                                    # (B, L)
    packed_adv = torch.zeros_like(delta)
    running = torch.zeros_like(values[:, 0])                          # (B,)
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + gamma * lam * running
        packed_adv[:, t] = running
    advantages = torch.zeros_like(values).scatter(1, order, packed_adv)
    return advantages, (advantages + values).where(loss_mask, 0.0)


@torch.no_grad()
def bi_level_gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, turn_ids: Tensor, gamma: float,
                 lam: float, gamma_turn: float, bootstrap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """
    Estimate advantages over turns, then inside each turn (VAGEN, arXiv 2510.16907, Sec. 4.2 and Alg. 2).

    Over turns, e_k the last trained token of turn k:  A(e_k) = d_k + gamma_turn lam A(e_k+1)
                                                       d_k = r(e_k) + gamma_turn V(e_k+1) - V(e_k)
    Inside turn k, from the token before e_k down:     A(t) = r(t) + gamma V(t+1) - V(t) + gamma lam A(t+1)
    rewards, values, loss_mask, gamma, lam, bootstrap  as in gae; the turn's reward stands at e_k
    turn_ids (B, T) long  turn of each token; used on the mask only
    gamma_turn            discount per turn, in [0, 1]; VAGEN's scripts 0.9 to 0.99
    Returns advantages and value targets (advantages + values) as gae does; gae's own where gamma, lam and
    gamma_turn are 1 and rewards stand at turn ends alone. Others (a KL term) reach their own turn only.
    As released, e_k gets A(e_k) in place of a token's own delta. Unlike there, turns end by turn_ids, never
    by reward != 0, so that a failed episode works, and a truncated one is bootstrapped, with gamma_turn.

    >>> mask, ids = torch.tensor([[False, True, True, False, True]]), torch.tensor([[0, 0, 0, 1, 1]])
    >>> rewards, values = torch.tensor([[0., 0., 0., 0., 1.]]), torch.tensor([[0., .5, .25, 100., .5]])
    >>> bi_level_gae(rewards, values, mask, ids, 1.0, 1.0, 0.5)[0].tolist()   # .25 = .5 * .5 - .25 + .5 * .5
    [[0.0, 0.0, 0.25, 0.0, 0.5]]
    """
    order, packed = pack(loss_mask)                                   # (B, L)
    r = rewards.gather(1, order).where(packed, 0.0)
    v = values.gather(1, order).where(packed, 0.0)
    ids = turn_ids.gather(1, order)
    is_end = packed & ((ids != shift_left(ids)) | ~shift_left(packed))
    inner = r + gamma * shift_left(v) - v                             # (B, L), wrong at the ends
    packed_adv = torch.zeros_like(v)
    running = turn_adv = torch.zeros_like(values[:, 0])               # (B,)
    turn_v = running if bootstrap is None else bootstrap.to(v.dtype)  # of the next turn's end
    for t in reversed(range(v.shape[1])):
        end = is_end[:, t]
        turn_adv = (r[:, t] + gamma_turn * (turn_v + lam * turn_adv) - v[:, t]).where(end, turn_adv)
        turn_v = v[:, t].where(end, turn_v)
        running = turn_adv.where(end, inner[:, t] + gamma * lam * running)
        packed_adv[:, t] = running
    advantages = torch.zeros_like(values).scatter(1, order, packed_adv)
    return advantages, (advantages + values).where(loss_mask, 0.0)


def whiten(advantages: list[Tensor], masks: list[Tensor], all_sum: Callable[[Tensor], Tensor] = lambda x: x,
           device: torch.device | str | None = None) -> list[Tensor]:
    """
    Shift and scale advantages to mean 0 and std 1 (ddof 0) over all trained tokens of the update batch.

    advantages, masks  lists of (b, T), one per micro-batch, of any widths; a rank without rows passes []
    all_sum            sums a float64 tensor (3,) over the ranks; called exactly once, by an empty rank too
    device             where all_sum wants its tensor; default: where the advantages are, for [] the CPU
    Returns a list of (b, T), 0 off the mask, all 0 for a single token or no spread. Not in the paper; the
    released PPO does it.
    """
    device = device or (advantages[0].device if advantages else "cpu")
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for adv, mask in zip(advantages, masks, strict=True):
        x = adv.double().where(mask, 0.0)
        sums += torch.stack([mask.sum(), x.sum(), (x * x).sum()]).to(sums.device)
    num, total, squares = all_sum(sums).unbind()
    num = num.clamp(min=1)
    mean, size = total / num, (squares / num).sqrt().clamp(min=1)
    # One message between ranks means one pass; float64 keeps its cancellation below 1e-7 of the mean.
    std = (squares / num - mean ** 2).clamp(min=0).sqrt()
    scale = (1 / std).where(~(std <= ROUNDING * size), 0.0)
    return [((adv.double() - mean.to(adv.device)) * scale.to(adv.device)).where(mask, 0.0).to(adv.dtype)
            for adv, mask in zip(advantages, masks)]


def group_advantages(normalized: Tensor, loss_mask: Tensor) -> Tensor:
    """Give all trained tokens of a row its normalized return (B,), as (B, T), 0 off the mask (Eq. 5)."""
    return normalized[:, None].where(loss_mask, 0.0)


def turn_returns(turn_rewards: Tensor, gamma: float) -> Tensor:
    """
    Sum the rewards from each turn on, R_k = sum over j >= k of gamma^(j - k) r_j (GiGPO, Eq. 5).

    turn_rewards (B, K)  0 beyond the end of the episode
    gamma                discount per turn, in [0, 1]
    Returns (B, K) float64; with gamma 1 column 0 is the trajectory's return.
    """
    out = turn_rewards.to(torch.float64, copy=True)
    for k in reversed(range(out.shape[1] - 1)):
        out[:, k] += gamma * out[:, k + 1]
    return out


def step_advantages(returns_to_go: Tensor, group: Tensor, state_keys: Tensor, how: str = "group") -> Tensor:
    """
    Compare the turns of a group that start from the identical state (GiGPO, arXiv 2505.10978, Eq. 6 and 7).

    returns_to_go (B, K)     of turn_returns, all trajectories of the update, over all ranks
    group (B,)               as in group_stats
    state_keys (B, K) int64  any number that names the state before the turn, -1 = there was no such turn
    how                      "group" or "group-mean", as in normalize_returns: with and without the std; the
                             paper uses either, on both levels alike
    Returns (B, K) float32, 0 for a state that the group visits once. An episode may meet a state twice; its
    visits are compared as well. Added to the advantage of the episode (Eq. 8, weight 1 in the paper):
    group_advantages(normalized, mask) + step_coef * spread_turns(step, turn_ids, mask).

    >>> keys = torch.tensor([[5, 6], [5, -1]])              # both start in state 5, then one reaches state 6
    >>> step_advantages(torch.tensor([[3., 2.], [1., 0.]]), torch.tensor([0, 0]), keys, "group-mean").tolist()
    [[1.0, 0.0], [-1.0, 0.0]]
    """
    live = state_keys != -1                                           # (B, K)
    pairs = torch.stack([group[:, None].expand_as(state_keys)[live], state_keys[live]], dim=1)
    state = pairs.unique(dim=0, return_inverse=True)[1]
    out = torch.zeros_like(returns_to_go, dtype=torch.float32)
    out[live] = normalize_returns(returns_to_go[live], state, how)
    return out


def spread_turns(turn_advantages: Tensor, turn_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """Give all trained tokens of a turn its number (B, K), as (B, T), 0 off the mask."""
    return turn_advantages.gather(1, turn_ids.where(loss_mask, 0)).where(loss_mask, 0.0)


def loss_weights(loss_mask: Tensor, how: str, num_tokens: int, num_rows: int, max_tokens: int) -> Tensor:
    """
    Weigh each trained token so that the loss of an update batch is a plain sum of weight * token loss.

    loss_mask (B, T)      trained tokens of a micro-batch of whole rows
    how                   "token-mean": 1 / num_tokens, all tokens count the same (DAPO, arXiv 2503.14476)
                          "seq-mean-token-mean": 1 / (num_rows * tokens of the row), all rows do (Eq. 4, 6)
                          "seq-mean-token-sum-norm": 1 / (num_rows * max_tokens) (Dr. GRPO, arXiv 2503.20783)
    num_tokens, num_rows  trained tokens and trajectories of the whole update batch, over all ranks
    max_tokens            the most tokens that a trajectory could sample, a constant of the run
    Returns (B, T), 0 off the mask. The sum runs over micro-batches and ranks, so no split changes it; where
    gradients are averaged over ranks, multiply the loss by their number.
    """
    if how == "token-mean":
        divisor = num_tokens
    elif how == "seq-mean-token-mean":
        divisor = num_rows * loss_mask.sum(1, keepdim=True).clamp(min=1)       # (B, 1)
    elif how == "seq-mean-token-sum-norm":
        divisor = num_rows * max_tokens
    else:
        raise ValueError(f"expected token-mean, seq-mean-token-mean or seq-mean-token-sum-norm, got {how!r}")
    return (loss_mask.float() / divisor).where(loss_mask, 0.0)        # where: 0 / 0 in an empty batch


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float,
                clip_high: float, dual_clip: float = 0.0) -> tuple[Tensor, Tensor]:
    """
    Compute the clipped surrogate of each token (Eq. 4, 6).

    logprobs, old_logprobs (B, T)  in nats, under the policy now and before the update
    advantages (B, T)              constants
    clip_low, clip_high            no gain beyond ratio 1 - clip_low (advantage < 0) or 1 + clip_high
                                   (advantage > 0): 0.2 and 0.2, StarPO-S 0.2 and 0.28
    dual_clip                      c > 1: the loss for advantage < 0 is at most -c * advantage, so that no
                                   large ratio runs away (arXiv 1912.09729). 0 = off, as in the paper's
                                   equations; the released code takes 3
    Returns the loss and the ratio exp(logprobs - old_logprobs), both (B, T).
    """
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"dual_clip is a ratio above 1, or 0 for none, got {dual_clip}")
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if dual_clip:
        loss = torch.min(loss, -dual_clip * advantages).where(advantages < 0, loss)
    return loss, ratio


def importance_weights(old_logprobs: Tensor, sampled_logprobs: Tensor, cap: float) -> Tensor:
    """
    Weigh tokens by min(exp(old - sampled), cap), which corrects for a sampler that differs from the trainer.

    old_logprobs, sampled_logprobs (B, T)  of the trainer before the update and of the sampler (say in bf16)
    cap                                    bounds the variance, >= 1; usual: 2
    Returns (B, T) without gradient, a factor of policy_loss; off the mask it means nothing. Truncated
    importance sampling: IMPALA's rho (arXiv 1802.01561, Eq. 1), for language models by Yao et al. 2025.
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap).detach()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None) -> Tensor:
    """
    Compute half the squared error of the critic, the worse of the plain and the clipped prediction.

    values, old_values (B, T)  predictions now and before the update
    returns (B, T)             value targets, constants
    value_clip                 how far a prediction may usefully move, in units of return; 0 or None = freely
    Returns (B, T). From the PPO implementations, not in the paper.
    """
    error = (values - returns) ** 2
    if value_clip:
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.max(error, (clipped - returns) ** 2)
    return 0.5 * error


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """
    Estimate KL(policy || reference) at each token that the policy sampled.

    logprobs, ref_logprobs (B, T)  in nats, d = logprobs - ref_logprobs
    kind  "k1"  d                  unbiased. As a loss its expected gradient is 0: it belongs in the reward
          "k2"  d^2 / 2            biased. As a loss its expected gradient is that of the KL
          "k3"  exp(-d) - 1 + d    unbiased, >= 0. As a loss its expected gradient is that of the other
                                   direction, KL(reference || policy)
    Returns (B, T) in nats. All this holds at the first optimizer step, while the tokens are this policy's.
    Not in the paper's equations; the released GRPO scripts use k1 as a loss, we k2 or k3.
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d ** 2
    if kind == "k3":
        return torch.expm1(-d) + d                                # exp(-d) - 1 has no digits left at d = 1e-4
    raise ValueError(f'kind must be "k1", "k2" or "k3", got {kind!r}')


def starpo_loss(logprobs: Tensor, entropy: Tensor, old_logprobs: Tensor, advantages: Tensor,
                loss_mask: Tensor, weights: Tensor, *, num_tokens: int, clip_low: float, clip_high: float,
                dual_clip: float = 0.0, entropy_coef: float = 0.0, kl_coef: float = 0.0, kl_kind: str = "k3",
                importance: Tensor | None = None, ref_logprobs: Tensor | None = None,
                values: Tensor | None = None, old_values: Tensor | None = None, returns: Tensor | None = None,
                value_clip: float | None = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Compute a micro-batch's share of an update batch's loss (Eq. 4 with values, else Eq. 6) and metrics.

    logprobs, entropy (B, T)            of the policy now, in nats, with gradient
    old_logprobs, advantages (B, T)     constants; with one step per rollout logprobs.detach(): ratio 1
    loss_mask, weights (B, T)           trained tokens and their loss_weights
    num_tokens                          trained tokens of the whole update batch, over all ranks
    entropy_coef, kl_coef               strength of the entropy bonus and of the penalty kl_kind, >= 0
    importance (B, T)                   of importance_weights, on the policy loss alone; None = 1
    ref_logprobs (B, T)                 of the frozen reference; with kl_coef 0 a metric only
    values, old_values, returns (B, T)  the critic's, all or none; coefficient 1, as its weights are its own
    The other settings are those of policy_loss, value_loss and kl_estimate.
    Returns the loss and a dict of detached scalars: policy_loss and value_loss with the weights, entropy,
    approx_kl, clip_frac_low, clip_frac_high, clip_frac_dual and kl_ref (k3) as sums over tokens / num_tokens.
    So they add up over micro-batches and ranks; ratio_max alone is a maximum.
    """
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs: pass them, or set kl_coef to 0")

    def on_mask(x: Tensor) -> Tensor:                                 # before any arithmetic: 0 * NaN is NaN
        return x.where(loss_mask, 0.0)

    def share(x: Tensor) -> Tensor:
        return on_mask(x.detach()).sum() / max(num_tokens, 1)

    weights, advantages, entropy = on_mask(weights), on_mask(advantages), on_mask(entropy)
    logprobs, old_logprobs = on_mask(logprobs), on_mask(old_logprobs)
    token_loss, ratio = policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip)
    if importance is not None:
        token_loss = token_loss * on_mask(importance)
    loss = (weights * token_loss).sum()
    stats = {
        "policy_loss": loss.detach(),
        "entropy": share(entropy),
        "approx_kl": share(kl_estimate(old_logprobs, logprobs, "k3")),         # old sampled: KL(old || now)
        "clip_frac_low": share((ratio < 1 - clip_low) & (advantages < 0)),     # the tokens without gradient
        "clip_frac_high": share((ratio > 1 + clip_high) & (advantages > 0)),
        "ratio_max": on_mask(ratio.detach()).max(),
    }
    if dual_clip:
        stats["clip_frac_dual"] = share((ratio > dual_clip) & (advantages < 0))
    if entropy_coef:
        loss = loss - entropy_coef * (weights * entropy).sum()
    if ref_logprobs is not None:
        ref_logprobs = on_mask(ref_logprobs)
        stats["kl_ref"] = share(kl_estimate(logprobs, ref_logprobs, "k3"))
        if kl_coef:
            loss = loss + kl_coef * (weights * kl_estimate(logprobs, ref_logprobs, kl_kind)).sum()
    if values is not None:
        error = value_loss(on_mask(values), on_mask(old_values), on_mask(returns), value_clip)
        critic_loss = (weights * error).sum()
        stats["value_loss"] = critic_loss.detach()
        loss = loss + critic_loss
    return loss, stats


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    Measure how much of the returns' spread the critic predicts, 1 - var(returns - values) / var(returns).

    values, returns, mask  one shape, (B, T) or flat; mask: the entries that count, default all
    Returns a scalar: 1 perfect, 0 no better than a constant, negative worse; 0 if the returns have no spread.
    """
    mask = torch.ones_like(returns, dtype=torch.bool) if mask is None else mask
    returns, values = returns.double().where(mask, 0.0), values.double().where(mask, 0.0)
    num, error = mask.sum().clamp(min=1), returns - values
    spread = ((returns - returns.sum() / num) ** 2).where(mask, 0.0).sum() / num
    unexplained = ((error - error.sum() / num) ** 2).where(mask, 0.0).sum() / num
    is_flat = spread.sqrt() <= ROUNDING * returns.abs().max().clamp(min=1)
    return (1 - unexplained / spread).where(~is_flat, 0.0).float().detach()
