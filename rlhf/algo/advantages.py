"""Credit: from one score a completion to one advantage a token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

GROUP_STD_EPS = 1e-4  # papers do not say; TRL's number, though TRL's standard deviation is the sample's (n - 1)


def token_rewards(
    scores: Float[Tensor, " B"], penalty: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """r_t = -penalty_t, plus the score on the last live token (Ziegler et al. 2019, eq. 2); zero outside the mask.

    A completion without a live token has nowhere to put its score: its row is zero.
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
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16); completions end, so V after the last token is 0.

        A_t = delta_t + gamma * lambda * A_{t+1},   delta_t = r_t + gamma * V_{t+1} - V_t

    Dead tokens inside a row (there are none in a plain rollout) are stepped over: the next live token follows.

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


def rewards_to_go(rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float) -> Float[Tensor, "B T"]:
    """R_t = r_t + gamma * R_{t+1} over live tokens; zero outside the mask."""
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
    return advantages


def less_baseline(
    rewards: Float[Tensor, "B T"], baselines: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """R_t - b over live tokens, with R_t the undiscounted reward-to-go and b one number a row; zero outside the mask.

    With b the score of the prompt's greedy completion: ReMax (Li et al. 2024, alg. 1). b must not depend on the row's
    own completion; then the expected gradient is that without it.
    """
    return torch.where(mask, rewards_to_go(rewards, mask, gamma=1.0) - baselines[:, None], 0.0)


def group_centered(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """score - mean of its group (Dr. GRPO, Liu et al. 2025, eq. 3)."""
    groups = scores.view(-1, group_size)
    return _above(groups, groups.mean(dim=1, keepdim=True)).flatten()


def group_normalized(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """(score - mean) / (std + 1e-4) of its group (GRPO, Shao et al. 2024, sec. 4.1); std is the population's."""
    groups = scores.view(-1, group_size)
    std = groups.std(dim=1, keepdim=True, correction=0)
    return (_above(groups, groups.mean(dim=1, keepdim=True)) / (std + GROUP_STD_EPS)).flatten()


def leave_one_out(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """score - mean of the *others* of its group (RLOO, Ahmadian et al. 2024, eq. 8) = G/(G-1) x group_centered."""
    if group_size < 2:
        raise ValueError("leave_one_out needs groups of at least 2")
    groups = scores.view(-1, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    return _above(groups, others).flatten()


def _above(groups: Float[Tensor, "N G"], baseline: Float[Tensor, "N _"]) -> Float[Tensor, "N G"]:
    """Subtract the baseline; where a group's scores are all alike give exactly 0, which a rounded mean may not."""
    return torch.where((groups == groups[:, :1]).all(dim=1, keepdim=True), 0.0, groups - baseline)


def uniform_groups(scores: Float[Tensor, " B"], group_size: int) -> Bool[Tensor, " B"]:
    """True for the rows of groups whose scores are all alike: nothing to learn (DAPO, Yu et al. 2025, sec. 3.2)."""
    groups = scores.view(-1, group_size)
    same = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    return same.expand_as(groups).flatten()
