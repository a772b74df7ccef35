"""Advantage estimation: from one score per completion to one advantage per token.

`compute_advantages` does what an algorithm's configuration says with the estimators above it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.functions import AdvantageFunction
from rlhf.algo.kl import Coefs, kl_estimate
from rlhf.algo.masked import whiten
from rlhf.algo.policy_loss import truncated_importance
from rlhf.algo.selection import hint_weights, pair_signs, select_best
from rlhf.batching import extend
from rlhf.config.algorithm import (
    Advantage,
    BatchWhiten,
    Best,
    BestAndWorst,
    FunctionAdvantage,
    Gae,
    Greedy,
    Group,
    Online,
)
from rlhf.types import Experience, Rollout

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


def rewards_to_go(rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float) -> Float[Tensor, "B T"]:
    """Compute the discounted reward-to-go of every live token.

    R_t = r_t + gamma * R_{t+1}; zero outside the mask
    """
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
    return advantages


def returns_minus_baseline(
    rewards: Float[Tensor, "B T"], baselines: Float[Tensor, " B"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Subtract one baseline per row from the undiscounted reward-to-go of its live tokens.

        A_t = R_t - b; zero outside the mask

    With b the score of the prompt's greedy completion, this is ReMax (Li et al. 2024, alg. 1). As long as b does not
    depend on the row's own completion, the expected gradient is the same as without it.
    """
    return torch.where(mask, rewards_to_go(rewards, mask, gamma=1.0) - baselines[:, None], 0.0)


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


def compute_advantages(
    rollout: Rollout,
    algorithm: Online,
    coefs: Coefs,
    *,
    ratio_cap: float | None = None,
    function: AdvantageFunction | None = None,
) -> Experience:
    """Compute the rewards, advantages and returns of a whole step, with statistics over all of its rows.

    `function` computes the advantages where advantage.type is function.

    Where `ratio_cap` is given, the completions come from an older policy, and the advantages are weighted by
    policy_loss.truncated_importance with that cap. Those of rows that were sampled with a hint are weighted by
    rescue.hint_weights.
    """
    mask = rollout.completion_mask
    rewards = token_rewards(rollout.scores, _reward_penalty(rollout, algorithm, coefs), mask)
    if isinstance(algorithm.advantage, FunctionAdvantage):
        assert function is not None
        advantages = function(rewards=rewards, mask=mask, group_size=rollout.group_size).detach()
        advantages, returns = torch.where(mask, advantages, 0.0), rewards_to_go(rewards, mask, gamma=1.0)
    else:
        advantages, returns = _advantages(rollout, rewards, algorithm.advantage)
    if ratio_cap is not None:
        advantages = advantages * truncated_importance(rollout.logprobs, rollout.sampler_logprobs, mask, cap=ratio_cap)
    weights = torch.ones_like(rollout.logprobs)
    if algorithm.rescue is not None:
        config = algorithm.rescue.weights
        weights = hint_weights(rollout.logprobs, rollout.sampler_logprobs, mask, rollout.hinted, config)
        advantages = advantages * weights
    loss_mask = mask & _trainable_rows(rollout, advantages, algorithm)[:, None]
    return extend(
        Experience,
        rollout,
        loss_mask=loss_mask,
        rewards=rewards,
        advantages=torch.where(loss_mask, advantages, 0.0),
        returns=returns,
        hint_weights=weights,
    )


def raw_advantages(experience: Experience, config: Advantage) -> Float[Tensor, "B T"]:
    """Compute the advantages before whitening; zero outside the mask.

    gae           returns - values
    batch_whiten  returns
    otherwise     the advantages, which are not whitened
    """
    match config:
        case Gae(whiten=True):
            return torch.where(experience.loss_mask, experience.returns - experience.values, 0.0)
        case BatchWhiten(whiten=True):
            return torch.where(experience.loss_mask, experience.returns, 0.0)
        case _:
            return experience.advantages


def _trainable_rows(rollout: Rollout, advantages: Float[Tensor, "B T"], algorithm: Online) -> Bool[Tensor, " B"]:
    """Flag the rows that enter the loss."""
    eligible = rollout.finished if algorithm.mask_truncated else torch.ones_like(rollout.finished)
    if isinstance(algorithm.advantage, Best | BestAndWorst):
        return eligible & (advantages != 0).any(dim=1)
    if algorithm.drop_uniform_groups:
        return eligible & ~uniform_groups(rollout.scores, rollout.group_size)
    return eligible


def _reward_penalty(rollout: Rollout, algorithm: Online, coefs: Coefs) -> Float[Tensor, "B T"]:
    if algorithm.kl.placement != "reward":
        return torch.zeros_like(rollout.logprobs)
    return coefs.kl * kl_estimate(rollout.logprobs, rollout.ref_logprobs, algorithm.kl.estimator)


def _advantages(
    rollout: Rollout, rewards: Float[Tensor, "B T"], advantage: Gae | BatchWhiten | Greedy | Group | Best | BestAndWorst
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    mask = rollout.completion_mask
    match advantage:
        case Gae() as config:
            if config.whiten_rewards:
                rewards = whiten(rewards, mask, shift_mean=False)
            advantages, returns = gae(rewards, rollout.values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
            return (whiten(advantages, mask) if config.whiten else advantages), returns
        case BatchWhiten() as config:
            returns = rewards_to_go(rewards, mask, gamma=config.gamma)
            return (whiten(returns, mask) if config.whiten else returns), returns
        case Greedy():
            returns = rewards_to_go(rewards, mask, gamma=1.0)
            return returns_minus_baseline(rewards, rollout.baselines, mask), returns
        case Group() as config:
            return _per_row(_group_advantage(rewards.sum(dim=1), rollout.group_size, config), rewards, mask)
        case Best() as config:
            chosen = select_best(rewards.sum(dim=1), rollout.group_size, keep=config.keep, min_score=config.min_score)
            return _per_row(chosen.to(rewards.dtype), rewards, mask)
        case BestAndWorst() as config:
            signs = pair_signs(rollout.scores, rollout.group_size, min_gap=config.min_gap)
            return _per_row(signs, rewards, mask)


def _per_row(
    advantages: Float[Tensor, " B"], rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Spread one advantage per row over its live tokens, and compute the rewards-to-go."""
    return torch.where(mask, advantages[:, None], 0.0), rewards_to_go(rewards, mask, gamma=1.0)


def _group_advantage(totals: Float[Tensor, " B"], group_size: int, config: Group) -> Float[Tensor, " B"]:
    match config.baseline:
        case "normalized":
            return group_normalized(totals, group_size)
        case "centered":
            return group_centered(totals, group_size)
        case "leave_one_out":
            return leave_one_out(totals, group_size)
