"""Advantage estimation: from one score per completion to one advantage per token.

The advantages of rlhf/algorithms are made of these estimators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GROUP_STD_EPS = 1e-4  # the papers give no value; this is TRL's, whose standard deviation is the sample's (n - 1)


def token_rewards(
    scores: Float[Tensor, " B"],
    penalty: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    turn_rewards: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Combine the penalty, the rewards of turns and the score into token rewards (Ziegler et al. 2019, eq. 2).

        r_t = -penalty_t + turn reward_t, plus on the last live token the score less all turn rewards;
        zero outside the mask

    So the rewards of a row, without the penalty, add up to its score. A completion without a live token has no place
    for its score: its row is zero.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    rewards, rest = torch.where(mask, -penalty, 0.0), scores
    if turn_rewards is not None:
        given = torch.where(mask, turn_rewards, 0.0).to(scores.dtype)
        rewards, rest = rewards + given, scores - given.sum(dim=1)
    return rewards + torch.where(mask & (positions == last), rest[:, None], 0.0)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
    turns: Int[Tensor, "B T"] | None = None,
    turn_lambda: float | None = None,
    final_values: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute generalized advantage estimates and the critic's targets (Schulman et al. 2016, eq. 16).

        A_t = delta_t + gamma * lambda * A_{t+1},   delta_t = r_t + gamma * V_{t+1} - V_t

    Completions end, so V after the last token is 0, unless `final_values` gives it for rows that were cut. Masked
    tokens inside a row (observations of an environment; there are none in a plain rollout) are skipped: V_{t+1} and
    A_{t+1} are then taken at the next live token. If that token is of another turn, lambda is `turn_lambda` (None:
    the same).

    Returns:
        advantages: zero outside the mask.
        returns: advantages + values, the critic's target; zero outside the mask.
    """
    live_values = torch.where(mask, values, 0.0)
    advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(advantage) if final_values is None else final_values.to(rewards.dtype)
    advantages = torch.zeros_like(rewards)
    discount: float | Tensor = gamma * gae_lambda
    next_turn = None if turns is None or turn_lambda is None else turns[:, -1] if turns.shape[1] else turns.new_zeros(0)
    for t in reversed(range(rewards.shape[1])):
        live = mask[:, t]
        if next_turn is not None:
            assert turns is not None
            assert turn_lambda is not None
            discount = torch.where(turns[:, t] == next_turn, gamma * gae_lambda, gamma * turn_lambda).to(rewards.dtype)
            next_turn = torch.where(live, turns[:, t], next_turn)
        delta = rewards[:, t] + gamma * next_value - live_values[:, t]
        advantage = torch.where(live, delta + discount * advantage, advantage)
        next_value = torch.where(live, live_values[:, t], next_value)
        advantages[:, t] = torch.where(live, advantage, 0.0)
    return advantages, torch.where(mask, advantages + live_values, 0.0)


def vtrace(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    ratios: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
    rho_cap: float,
    trace_cap: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute V-trace targets and advantages of tokens drawn by an older policy (Espeholt et al. 2018, eq. 1).

        rho_t = min(rho_cap, ratio_t),   c_t = lambda * min(trace_cap, ratio_t),   delta_t = r_t + gamma V_{t+1} - V_t
        v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1})
        A_t = rho_t (delta_t + gamma * lambda * (v_{t+1} - V_{t+1}))

    rho_cap decides which policy's values v are: the policy's own values without a cap. trace_cap only bounds their
    variance. At lambda = 1 A is the paper's rho_t (r_t + gamma v_{t+1} - V_t); if all ratios are 1, A and v are
    the results of `gae`. Masked tokens inside a row are skipped.

    Args:
        rewards: token rewards.
        values: V of the state in which each token was chosen.
        ratios: pi / mu of each token, mu being the policy that drew it.
        mask: live tokens.
        gamma: discount.
        gae_lambda: lambda.
        rho_cap: rho-bar, at least trace_cap.
        trace_cap: c-bar.

    Returns:
        advantages: zero outside the mask.
        targets: v, the critic's targets; zero outside the mask.
    """
    live_values = torch.where(mask, values, 0.0)
    excess = torch.zeros_like(rewards[:, 0])  # v - V of the next live token
    next_value = torch.zeros_like(excess)
    advantages, targets = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        live, rho, trace = mask[:, t], ratios[:, t].clamp(max=rho_cap), ratios[:, t].clamp(max=trace_cap)
        delta = rewards[:, t] + gamma * next_value - live_values[:, t]
        carried = gamma * gae_lambda * excess
        advantages[:, t] = torch.where(live, rho * (delta + carried), 0.0)
        excess = torch.where(live, rho * delta + trace * carried, excess)
        targets[:, t] = torch.where(live, live_values[:, t] + excess, 0.0)
        next_value = torch.where(live, live_values[:, t], next_value)
    return advantages, targets


def rewards_to_go(rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float) -> Float[Tensor, "B T"]:
    """Compute the discounted reward-to-go of every live token.

    R_t = r_t + gamma * R_{t+1}; zero outside the mask
    """
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
    return advantages


Kept = Bool[Tensor, " B"] | None
"""The rows that count; the others are in no mean and get 0. None: all."""


def group_centered(scores: Float[Tensor, " B"], group_size: int, *, kept: Kept = None) -> Float[Tensor, " B"]:
    """Subtract the mean of its group from every score (Dr. GRPO, Liu et al. 2025, eq. 3)."""
    groups = scores.view(-1, group_size)
    if kept is not None:
        return _of_kept(groups, kept.view_as(groups)).centered.flatten()
    return _subtract_baseline(groups, groups.mean(dim=1, keepdim=True)).flatten()


def group_normalized(scores: Float[Tensor, " B"], group_size: int, *, kept: Kept = None) -> Float[Tensor, " B"]:
    """Standardize every score within its group (GRPO, Shao et al. 2024, sec. 4.1).

    A = (score - mean) / (std + 1e-4), with the population's standard deviation
    """
    groups = scores.view(-1, group_size)
    if kept is not None:
        left = _of_kept(groups, kept.view_as(groups))
        variance = left.centered.square().sum(dim=1, keepdim=True) / left.count.clamp(min=1)
        return (left.centered / (variance.sqrt() + GROUP_STD_EPS)).flatten()
    std = groups.std(dim=1, keepdim=True, correction=0)
    return (_subtract_baseline(groups, groups.mean(dim=1, keepdim=True)) / (std + GROUP_STD_EPS)).flatten()


def leave_one_out(scores: Float[Tensor, " B"], group_size: int, *, kept: Kept = None) -> Float[Tensor, " B"]:
    """Subtract the mean of the *other* scores of its group from every score (RLOO, Ahmadian et al. 2024, eq. 8).

    Equal to G/(G-1) x group_centered in a group of G.

    Raises:
        ValueError: the groups have fewer than 2 scores.
    """
    if group_size < 2:
        raise ValueError("leave_one_out needs groups of at least 2")
    groups = scores.view(-1, group_size)
    if kept is not None:
        left = _of_kept(groups, kept.view_as(groups))
        return (left.centered * left.count / (left.count - 1).clamp(min=1)).flatten()
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return _subtract_baseline(groups, others).flatten()


@dataclass(frozen=True)
class _Left:
    """Groups without the rows that do not count."""

    centered: Float[Tensor, "N G"]  # less the mean of the rows that count; 0 for the others, and if all are equal
    count: Float[Tensor, "N 1"]


def _of_kept(groups: Float[Tensor, "N G"], kept: Bool[Tensor, "N G"]) -> _Left:
    count = kept.sum(dim=1, keepdim=True).to(groups.dtype)
    mean = torch.where(kept, groups, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    first = groups.gather(1, kept.int().argmax(dim=1, keepdim=True))
    same = (torch.where(kept, groups, first) == first).all(dim=1, keepdim=True)
    return _Left(torch.where(kept & ~same, groups - mean, 0.0), count)


def _subtract_baseline(groups: Float[Tensor, "N G"], baseline: Float[Tensor, "N _"]) -> Float[Tensor, "N G"]:
    """Subtract the baseline, giving exactly 0 if a group's scores are all equal: a rounded mean may not."""
    return torch.where((groups == groups[:, :1]).all(dim=1, keepdim=True), 0.0, groups - baseline)


def fill_missing(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Replace NaN by the mean of the other scores of its group, so that it does not move the mean.

    The baseline of the other completions does not change, and the completion itself has the advantage 0 over the mean.
    If all other scores are equal, it gets exactly this score; their mean may be rounded. A group without any score
    stays NaN.
    """
    groups = scores.view(-1, group_size)
    lowest = torch.where(groups.isnan(), torch.inf, groups).amin(dim=1, keepdim=True)
    highest = torch.where(groups.isnan(), -torch.inf, groups).amax(dim=1, keepdim=True)
    means = groups.nanmean(dim=1, keepdim=True).clamp(lowest, highest)
    return torch.where(groups.isnan(), means, groups).flatten()


def uniform_groups(scores: Float[Tensor, " B"], group_size: int) -> Bool[Tensor, " B"]:
    """Flag the rows of groups whose scores are all equal: nothing to learn (DAPO, Yu et al. 2025, sec. 3.2)."""
    groups = scores.view(-1, group_size)
    same = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    return same.expand_as(groups).flatten()


def per_row(
    advantages: Float[Tensor, " B"], rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Spread one advantage per row over its live tokens, and compute the undiscounted rewards-to-go."""
    return torch.where(mask, advantages[:, None], 0.0), rewards_to_go(rewards, mask, gamma=1.0)
