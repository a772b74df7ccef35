"""V-trace by hand, its identities, and its expectation by enumeration."""

from __future__ import annotations

import pytest
import torch
from algo_cases import ALGORITHMS, COEFS, close, online, rollout, table

from rlhf.algo.advantages import gae, vtrace
from rlhf.exact.world import enumerate_world, random_scores, random_table
from rlhf.experience import compute_advantages

SETTINGS = {"gamma": 1.0, "gae_lambda": 1.0, "rho_cap": 1.0, "trace_cap": 1.0}


def test_two_tokens_by_hand() -> None:
    """Ratios 2 and 1/2, both capped at 1.

    t=2: δ = 3 - 1 = 2, ρ = 1/2: v = 1 + 1 = 2, A = 1.      t=1: δ = 0 + 1 - 2 = -1, ρ = c = 1:
    v = 2 - 1 + (2 - 1) = 2, A = -1 + 1 = 0.
    """
    rewards, values = table([0.0, 3.0]), table([2.0, 1.0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    advantages, targets = vtrace(rewards, values, table([2.0, 0.5]), mask, **SETTINGS)
    close(advantages, [[0.0, 1.0]])
    close(targets, [[2.0, 2.0]])


def test_the_two_caps_by_hand() -> None:
    """The same with caps 2 and 1 and λ = 1/2: ρ = 2 and c = 1/2 at t=1."""
    rewards, values = table([0.0, 3.0]), table([2.0, 1.0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    settings = {**SETTINGS, "gae_lambda": 0.5, "rho_cap": 2.0}
    advantages, targets = vtrace(rewards, values, table([4.0, 0.5]), mask, **settings)
    close(advantages, [[2 * (-1 + 0.5), 1.0]])
    close(targets, [[2 + 2 * -1 + 0.5 * 1, 2.0]])


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_on_policy_it_is_gae(gae_lambda: float) -> None:
    batch = rollout(tokens=6)
    rewards, settings = torch.randn(8, 6, dtype=torch.float64), {"gamma": 0.9, "gae_lambda": gae_lambda}
    rewards = torch.where(batch.completion_mask, rewards, 0.0)
    ones = torch.ones_like(rewards)
    ours = vtrace(rewards, batch.values, ones, batch.completion_mask, **settings, rho_cap=1.0, trace_cap=1.0)
    for mine, theirs in zip(ours, gae(rewards, batch.values, batch.completion_mask, **settings), strict=True):
        close(mine, theirs)


def test_without_caps_the_targets_are_the_values_of_the_policy() -> None:
    """E_mu[v_1] = V_pi of the start, for any critic, by enumeration (Espeholt et al. 2018, sec. 4.1)."""
    world = enumerate_world(prompts=1)
    policy, behavior = random_table(world, 1), random_table(world, 2)
    scores, rows = random_scores(world, 3), world.all_rows()
    mask = world.mask[rows]
    last = torch.zeros_like(mask).scatter(1, mask.sum(1, keepdim=True) - 1, True)
    rewards = torch.where(last, scores.flatten()[:, None], 0.0)
    values = torch.randn(1, len(world.prefixes), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ratios = (world.token_logprobs(policy, rows) - world.token_logprobs(behavior, rows)).exp()
    per_token = torch.where(mask, world.per_token(values, rows), 0.0)
    caps = {"rho_cap": 1e9, "trace_cap": 1e9}
    _, targets = vtrace(rewards, per_token, ratios, mask, gamma=1.0, gae_lambda=1.0, **caps)
    drawn = world.sequence_logprobs(behavior).exp().flatten()
    value = (world.sequence_logprobs(policy).exp() * scores).sum()
    assert (drawn * targets[:, 0]).sum().item() == pytest.approx(value.item())
    biased = vtrace(rewards, per_token, torch.ones_like(ratios), mask, gamma=1.0, gae_lambda=1.0, **caps)[1]
    assert (drawn * biased[:, 0]).sum().item() != pytest.approx(value.item(), abs=1e-3)


def test_masked_tokens_are_skipped() -> None:
    rewards, values = table([0.0, 9.0, 3.0]), table([2.0, 9.0, 1.0])
    mask = torch.tensor([[True, False, True]])
    advantages, targets = vtrace(rewards, values, table([2.0, 9.0, 0.5]), mask, **SETTINGS)
    close(advantages, [[0.0, 0.0, 1.0]])
    close(targets, [[2.0, 0.0, 2.0]])


def test_the_step_uses_it_where_it_is_asked() -> None:
    algorithm = online(**{**ALGORITHMS["ppo"], "advantage": {"type": "gae", "whiten": False}})
    batch = rollout(seed=3)
    stale = compute_advantages(batch, algorithm, COEFS, ratio_cap=1.0, trace_cap=1.0)
    plain = compute_advantages(batch, algorithm, COEFS)  # its sampler's log-probabilities are the policy's
    close(stale.advantages, plain.advantages)
    close(stale.returns, plain.returns)
