"""The full-vocabulary KL: by hand, against the sequences' own KL by enumeration, and its variance beside k1's."""

from __future__ import annotations

import math

import pytest
import torch
from exact_problem import kl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algo.kl import kl_estimate, kl_of_distributions
from rlhf.exact.world import World, enumerate_world, expectation, random_table

LOG2 = math.log(2.0)
WORLD = enumerate_world(prompts=2, vocabulary=3, horizon=3)


def full_kl(world: World, policy: Tensor, reference: Tensor) -> Tensor:
    """The KL over the vocabulary at the choice of each token of every completion `[B, T]`, zero after the last."""
    rows = world.all_rows()
    kls = kl_of_distributions(world.per_token(policy, rows), world.per_token(reference, rows))
    return torch.where(world.mask[rows % len(world.ids)], kls, 0.0)


def sequence_sums(world: World, policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both estimates of every completion `[C, N]`: full vocabulary and k1, summed over tokens."""
    rows = world.all_rows()
    sampled = kl_estimate(world.token_logprobs(policy, rows), world.token_logprobs(reference, rows), "k1")
    full = full_kl(world, policy, reference)
    return full.sum(1).view(world.prompts, -1), sampled.sum(1).view(world.prompts, -1)


def variance(distribution: Tensor, values: Tensor) -> Tensor:
    """Of one draw, within each prompt; the mean over prompts."""
    means = (distribution.exp() * values).sum(1, keepdim=True)
    return expectation(distribution, (values - means) ** 2)


def test_three_tokens_by_hand() -> None:
    policy = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    reference = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    kls = kl_of_distributions(torch.stack([policy, reference]).log(), torch.stack([reference, reference]).log())
    # .5 log(.5/.25) + .25 log 1 + .25 log(.25/.5) = .25 log 2; the second position is equal.
    assert kls.tolist() == [pytest.approx(0.25 * LOG2, abs=1e-15), 0.0]


def test_a_token_that_the_policy_never_chooses_adds_nothing() -> None:
    never = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    assert float(kl_of_distributions(never, thirds)) == pytest.approx(math.log(1.5))
    assert float(kl_of_distributions(never, never)) == 0.0
    assert float(kl_of_distributions(thirds, never)) == math.inf


@given(st.integers(0, 2**31 - 1))
def test_its_expectation_is_the_kl_of_the_sequences(seed: int) -> None:
    policy, reference = random_table(WORLD, seed), random_table(WORLD, seed + 1)
    distribution = WORLD.sequence_logprobs(policy)
    full, sampled = sequence_sums(WORLD, policy, reference)
    exact = kl(distribution, WORLD.sequence_logprobs(reference))
    assert float((expectation(distribution, full) - exact).abs()) < 1e-10
    assert float((expectation(distribution, sampled) - exact).abs()) < 1e-10
    assert (full >= 0).all()


def test_its_variance_is_below_that_of_the_sampled_estimate_in_random_worlds() -> None:
    below, shares = 0, []
    for seed in range(200):
        policy = random_table(WORLD, seed)
        reference = (policy + 0.5 * random_table(WORLD, seed + 1000)).log_softmax(-1)
        full, sampled = sequence_sums(WORLD, policy, reference)
        distribution = WORLD.sequence_logprobs(policy)
        shares.append(float(variance(distribution, full) / variance(distribution, sampled)))
        below += shares[-1] <= 1.0
    assert below == 200
    assert sum(shares) / 200 < 0.3


def test_of_one_token_the_variance_is_zero() -> None:
    world = enumerate_world(prompts=1, vocabulary=4, horizon=1)
    policy, reference = random_table(world, 1), random_table(world, 2)
    full, sampled = sequence_sums(world, policy, reference)
    distribution = world.sequence_logprobs(policy)
    assert float(variance(distribution, full)) < 1e-20
    assert float(variance(distribution, sampled)) > 0.1


def test_of_a_sum_it_need_not_be_below() -> None:
    """If a token's log-ratio and the KL of the tokens after it cancel, k1 is constant over sequences; this is not."""
    world = enumerate_world(prompts=1, vocabulary=3, horizon=2)
    ours, theirs = torch.full((2, 1, len(world.prefixes), 3), 1 / 3, dtype=torch.float64).unbind()
    root, after_one = world.prefixes.index(()), world.prefixes.index((1,))
    ours[0, root], theirs[0, root] = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]).double()
    ours[0, after_one], theirs[0, after_one] = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]).double()
    # Ending at once: log(.5/.25) = log 2. Token 1, then the end: log(.5/.75) + log(1/(1/3)) = log 2 as well.
    full = full_kl(world, ours.log(), theirs.log()).sum(1)
    ended, longer = (world.ids.tolist().index(tokens) for tokens in ([0, 0], [1, 0]))
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert full[[ended, longer]].tolist() == pytest.approx([first, first + math.log(3)])
    assert float(full[[ended, longer]].mean()) == pytest.approx(LOG2)  # unbiased: KL is log 2
