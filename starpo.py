"""
StarPO as pure functions: how the rewards of whole trajectories become one loss per token.

In the order of an update:
  normalize_returns, filter_groups   one number per trajectory: compare it with its group, choose groups
  token_rewards, gae, whiten         ppo: credit each token with the help of a critic
  group_advantages                   grpo, brpo, arpo: one number for all tokens of a trajectory
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

ALGOS = ("ppo", "grpo", "brpo", "arpo")

# What a return is compared with where there is no critic. ARPO and BRPO are not in the paper, only named on
# its project's pages. Eq. 5 as printed normalises over the batch, BRPO by the letter; like the released code
# and the field, our GRPO does it inside the group that shares a prompt.
RETURN_NORM = {"arpo": "raw", "brpo": "batch", "grpo": "group"}

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


def normalize_returns(traj_return: Tensor, group: Tensor, how: str) -> Tensor:
    """
    Turn returns into trajectory advantages, (R - mean) / std (Eq. 5).

    traj_return, group (B,)  as in group_stats: all trajectories of the update, over all ranks
    how                      "raw" (R unchanged), "batch" (over all rows) or "group" (over the row's group)
    Returns (B,) float32, 0 for a single sample or no spread. The std has ddof 1 and, unlike in the released
    code, no epsilon beside it.
    """
    if how not in ("raw", "batch", "group"):
        raise ValueError(f'how must be "raw", "batch" or "group", got {how!r}')
    if how == "raw":
        return traj_return.float()
    index, mean, std = group_stats(traj_return, group if how == "group" else torch.zeros_like(group))
    mean, std = mean[index], std[index]                               # (B,)
    return ((traj_return.double() - mean) / std).where(std != 0, 0.0).float()


def filter_groups(traj_return: Tensor, group: Tensor, keep: float) -> Tensor:
    """
    Keep the groups whose outcome is most uncertain, U(s0) = std of R(tau) over the group (Eq. 7).

    traj_return, group (B,)  as in group_stats, before any normalising
    keep                     fraction of the groups, in (0, 1]; StarPO-S 0.25
    Returns (B,) bool, True on the rows of the max(1, floor(keep * G)) groups of largest std (ddof 1; 0 for a
    group of one). Of equal groups the one that appears first wins.

    >>> filter_groups(torch.tensor([0., 1., 2., 2., 0., 3.]), torch.tensor([9, 9, 5, 5, 4, 4]), 0.34).tolist()
    [False, False, False, False, True, True]
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep is a fraction of the groups in (0, 1], got {keep}")
    index, _, std = group_stats(traj_return, group)
    rows = torch.arange(len(index), device=index.device)
    first = torch.full_like(std, len(index), dtype=torch.long).scatter_reduce(0, index, rows, "amin")
    falling = std.argsort(descending=True)
    tier = torch.zeros_like(first)                                    # equal but for rounding = the same tier
    tier[falling[1:]] = (std[falling].diff() < -ROUNDING).cumsum(0)
    place = (tier * (len(index) + 1) + first).argsort().argsort()     # (G,) by tier, then first appearance
    return (place < kept_count(len(std), keep))[index]


def kept_count(num_groups: int, keep: float) -> int:
    """Count the groups that filter_groups keeps: the fraction rounded down, and at least one."""
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
    # Move each row's trained tokens to the left (0 1 0 1 becomes 1 1): the loop runs over the longest count
    # of trained tokens and needs no mask, since a shorter row goes on with zeros.
    num_trained = loss_mask.sum(1)                                    # (B,)
    longest = int(num_trained.max())                                  # L
    order = (~loss_mask).byte().argsort(dim=1, stable=True)[:, :longest]       # (B, L)
    packed = loss_mask.gather(1, order)
    r = rewards.gather(1, order).where(packed, 0.0)
    v = values.gather(1, order).where(packed, 0.0)
    next_v = torch.cat([v, torch.zeros_like(v[:, :1])], dim=1)[:, 1:]
    if bootstrap is not None:
        is_last = torch.arange(longest, device=v.device) == num_trained[:, None] - 1
        next_v = bootstrap[:, None].to(v.dtype).where(is_last, next_v)
    delta = r + gamma * next_v - v                                    # (B, L)
    packed_adv = torch.zeros_like(delta)
    running = torch.zeros_like(values[:, 0])                          # (B,)
    for t in reversed(range(longest)):
        running = delta[:, t] + gamma * lam * running
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
