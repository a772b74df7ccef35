"""The full-vocabulary KL: by hand, against the sequences' own KL by enumeration, and its variance beside k1's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from world import World, enumerate_world, expectation, kl, random_table

from rlhf.algo.kl import full_vocabulary_kl, kl_estimate

LOG2 = math.log(2.0)
WORLD = enumerate_world(prompts=2, vocabulary=3, horizon=3)


def sequence_sums(world: World, policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both estimates of every completion `[C, N]`: full vocabulary and k1, summed over tokens."""
    rows = world.all_rows()
    mask = world.mask[rows % len(world.ids)]
    full = full_vocabulary_kl(world.per_token(policy, rows), world.per_token(reference, rows), mask)
    sampled = kl_estimate(world.token_logprobs(policy, rows), world.token_logprobs(reference, rows), "k1")
    return full.sum(1).view(world.prompts, -1), sampled.sum(1).view(world.prompts, -1)


def variance(distribution: Tensor, values: Tensor) -> Tensor:
    """Of one draw, within each prompt; the mean over prompts."""
    means = (distribution.exp() * values).sum(1, keepdim=True)
    return expectation(distribution, (values - means) ** 2)


def test_three_tokens_by_hand() -> None:
    policy = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    reference = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    logits = torch.stack([policy.log() + 3.0, reference.log()])[None]  # a shift of the logits changes nothing
    ref_logits = torch.stack([reference.log() - 1.0, reference.log()])[None]
    found = full_vocabulary_kl(logits, ref_logits, torch.tensor([[True, True]]))
    # .5 log(.5/.25) + .25 log 1 + .25 log(.25/.5) = .25 log 2; the second position is equal.
    assert found.tolist() == [[pytest.approx(0.25 * LOG2, abs=1e-15), pytest.approx(0.0, abs=1e-15)]]


def test_the_temperature_divides_both() -> None:
    logits = torch.tensor([[[2 * LOG2, 0.0, 0.0]]], dtype=torch.float64)  # at temperature 2: 1/2, 1/4, 1/4
    ref_logits = torch.tensor([[[0.0, 0.0, 2 * LOG2]]], dtype=torch.float64)  # 1/4, 1/4, 1/2
    found = full_vocabulary_kl(logits, ref_logits, torch.tensor([[True]]), temperature=2.0)
    assert float(found) == pytest.approx(0.25 * LOG2)


def test_a_token_that_the_policy_never_chooses_adds_nothing() -> None:
    never = torch.tensor([[[0.0, 0.0, -torch.inf]]], dtype=torch.float64)
    mask = torch.tensor([[True]])
    assert float(full_vocabulary_kl(never, torch.zeros_like(never), mask)) == pytest.approx(math.log(1.5))
    assert float(full_vocabulary_kl(never, never, mask)) == 0.0
    assert float(full_vocabulary_kl(torch.zeros_like(never), never, mask)) == math.inf


@pytest.mark.parametrize("chunk", [1, 2, 7, 10_000])
def test_the_size_of_a_chunk_does_not_matter_and_the_masked_are_never_read(chunk: int) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 4, 5, 11, generator=draw).unbind()
    mask = torch.arange(5) < torch.tensor([[5], [3], [1], [0]])
    expected = full_vocabulary_kl(logits, ref_logits, mask)
    dirty = torch.where(mask[..., None], logits, torch.nan)
    found = full_vocabulary_kl(dirty, ref_logits, mask, chunk=chunk)
    assert torch.equal(found, expected)
    assert (found[~mask] == 0).all()
    assert (found[mask] > 0).all()


def test_half_precision_is_normalized_in_float32() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 1, 3, 7, generator=draw, dtype=torch.float64).bfloat16().unbind()
    mask = torch.ones(1, 3, dtype=torch.bool)
    found = full_vocabulary_kl(logits, ref_logits, mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), full_vocabulary_kl(logits.double(), ref_logits.double(), mask))


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
    """Where a token's log-ratio and the KL of what follows it cancel, k1 is constant over sequences, this is not."""
    world = enumerate_world(prompts=1, vocabulary=3, horizon=2)
    ours, theirs = torch.full((2, 1, len(world.prefixes), 3), 1 / 3, dtype=torch.float64).unbind()
    root, after_one = world.prefixes.index(()), world.prefixes.index((1,))
    ours[0, root], theirs[0, root] = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]).double()
    ours[0, after_one], theirs[0, after_one] = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]).double()
    # Ending at once: log(.5/.25) = log 2. Token 1, then the end: log(.5/.75) + log(1/(1/3)) = log 2 as well.
    rows = world.all_rows()
    mask = world.mask
    full = full_vocabulary_kl(world.per_token(ours.log(), rows), world.per_token(theirs.log(), rows), mask).sum(1)
    ended, longer = (world.ids.tolist().index(tokens) for tokens in ([0, 0], [1, 0]))
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert full[[ended, longer]].tolist() == pytest.approx([first, first + math.log(3)])
    assert float(full[[ended, longer]].mean()) == pytest.approx(LOG2)  # unbiased: KL is log 2
