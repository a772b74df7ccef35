"""Advantage estimation: from one score per completion to one advantage per token.

The advantages of rlhf/algorithms are made of these estimators.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

GROUP_STD_EPS = 1e-4  # the papers give no value; this is TRL's, whose standard deviation is the sample's (n - 1)


def token_rewards(
    scores: Float[Tensor, " B"], penalty: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Combine the per-token penalty and the score into token rewards (Ziegler et al. 2019, eq. 2).

        r_t = -penalty_t, plus the score on the last live token; zero outside the mask

    A completion without a live token has no place for its score: its row is zero.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(mask, -penalty, 0.0) + torch.where(mask & (positions == last), scores[:, None], 0.0)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute generalized advantage estimates and the critic's targets (Schulman et al. 2016, eq. 16).

        A_t = delta_t + gamma * lambda * A_{t+1},   delta_t = r_t + gamma * V_{t+1} - V_t

    Completions end, so V after the last token is 0. Masked tokens inside a row (there are none in a plain rollout) are
    skipped: V_{t+1} and A_{t+1} are then those of the next live token.

    Returns:
        advantages: zero outside the mask.
        returns: advantages + values, the critic's target; zero outside the mask.
    """
    live_values = torch.where(mask, values, 0.0)
    advantage = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(advantage)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        live = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - live_values[:, t]
        advantage = torch.where(live, delta + gamma * gae_lambda * advantage, advantage)
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

    rho_cap decides which policy's values v are: those of the policy itself without a cap. trace_cap only bounds their
    variance. At lambda = 1 A is the paper's rho_t (r_t + gamma v_{t+1} - V_t); where all ratios are 1, A and v are
    those of `gae`. Masked tokens inside a row are skipped.

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


def group_centered(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Subtract the mean of its group from every score (Dr. GRPO, Liu et al. 2025, eq. 3)."""
    groups = scores.view(-1, group_size)
    return _subtract_baseline(groups, groups.mean(dim=1, keepdim=True)).flatten()


def group_normalized(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Standardize every score within its group (GRPO, Shao et al. 2024, sec. 4.1).

    A = (score - mean) / (std + 1e-4), with the population's standard deviation
    """
    groups = scores.view(-1, group_size)
    std = groups.std(dim=1, keepdim=True, correction=0)
    return (_subtract_baseline(groups, groups.mean(dim=1, keepdim=True)) / (std + GROUP_STD_EPS)).flatten()


def leave_one_out(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Subtract the mean of the *other* scores of its group from every score (RLOO, Ahmadian et al. 2024, eq. 8).

    Equal to G/(G-1) x group_centered in a group of G.

    Raises:
        ValueError: the groups have fewer than 2 scores.
    """
    if group_size < 2:
        raise ValueError("leave_one_out needs groups of at least 2")
    groups = scores.view(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return _subtract_baseline(groups, others).flatten()


def _subtract_baseline(groups: Float[Tensor, "N G"], baseline: Float[Tensor, "N _"]) -> Float[Tensor, "N G"]:
    """Subtract the baseline, giving exactly 0 where a group's scores are all equal: a rounded mean may not."""
    return torch.where((groups == groups[:, :1]).all(dim=1, keepdim=True), 0.0, groups - baseline)


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
