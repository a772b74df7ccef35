"""Decoupled GAE: the critic's targets with a λ of their own (Yuan et al. 2025, VC-PPO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algo_cases import close, experience, rollout, table
from algo_cases import online as algorithm

from rlhf.algorithms.gae import Gae


def test_targets_with_a_lambda_of_the_critic_by_hand() -> None:
    """Score 1 at the second of two tokens, values 0.5 and 0.25."""
    two = replace(
        rollout(groups=1, group_size=1, tokens=2),
        completion_mask=torch.ones(1, 2, dtype=torch.bool),
        values=table([0.5, 0.25]),
    )
    rewards = table([0.0, 1.0])
    advantages, returns = Gae(gae_lambda=0.0, whiten=False).compute(two, rewards)
    close(advantages, table([-0.25, 0.75]))
    close(returns, table([0.25, 1.0]))
    advantages, returns = Gae(gae_lambda=0.0, critic_lambda=1.0, whiten=False).compute(two, rewards)
    close(advantages, table([-0.25, 0.75]))
    close(returns, table([1.0, 1.0]))
    close(Gae(gae_lambda=0.0, critic_lambda=0.5, whiten=False).compute(two, rewards)[1], table([0.625, 1.0]))


@pytest.mark.parametrize("critic_lambda", [0.0, 0.6, 1.0])
def test_advantages_are_of_gae_lambda_and_targets_of_critic_lambda(critic_lambda: float) -> None:
    def of(**settings: Any) -> Any:
        return experience(algorithm(advantage={"type": "gae", **settings}, value_loss={}))

    both, policy, critic = (
        of(gae_lambda=0.8, critic_lambda=critic_lambda),
        of(gae_lambda=0.8),
        of(gae_lambda=critic_lambda),
    )
    close(both.advantages, policy.advantages)
    close(both.returns, critic.returns)
    assert (both.returns - policy.returns).abs().max() > 0.01


def test_raw_advantages_are_not_the_targets_less_the_values() -> None:
    settings = {"type": "gae", "gae_lambda": 0.5, "critic_lambda": 1.0}
    whitened = experience(algorithm(advantage=settings, value_loss={}))
    plain = experience(algorithm(advantage={**settings, "whiten": False}, value_loss={}))
    close(algorithm(advantage=settings, value_loss={}).advantage.before_whitening(whitened), plain.advantages)
    assert (plain.returns - plain.values - plain.advantages).abs().max() > 0.01


def test_v_trace_of_the_policy_s_own_samples_has_the_same_targets() -> None:
    own = rollout()
    own = replace(own, sampler_logprobs=own.logprobs)
    settings: dict[str, Any] = {"type": "gae", "gae_lambda": 0.7, "critic_lambda": 0.9, "whiten": False}
    advantage = algorithm(advantage=settings, value_loss={}).advantage
    rewards = torch.where(own.action_mask, torch.linspace(-1, 1, own.values.shape[1], dtype=own.values.dtype), 0.0)
    stale = advantage.compute_stale(own, rewards, rho_cap=1.0, trace_cap=1.0)
    fresh = advantage.compute(own, rewards)
    close(stale[0], fresh[0])
    close(stale[1], fresh[1])
