"""The enumerated world has the stated properties, before anything is compared with it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from exact_problem import (
    action_values,
    best_score,
    best_value,
    frontier,
    kl,
    objective_value,
    optimum,
    state_logprobs,
    state_values,
    table_of,
)

from rlhf.exact.world import EOS, enumerate_world, expectation, random_scores, random_table

WORLD = enumerate_world()
OTHER = enumerate_world(prompts=1, vocabulary=4, horizon=2)


def test_the_small_world_by_hand():
    tiny = enumerate_world(prompts=1, vocabulary=3, horizon=2)
    assert tiny.ids.tolist() == [[0, 0], [1, 0], [2, 0], [1, 1], [1, 2], [2, 1], [2, 2]]
    assert tiny.mask.sum(1).tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert tiny.finished.tolist() == [True, True, True, False, False, False, False]
    assert tiny.prefixes == ((), (1,), (2,))
    assert tiny.states.tolist() == [[0, 0], [0, 1], [0, 2], [0, 1], [0, 1], [0, 2], [0, 2]]
    table = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.4, 0.4], [0.1, 0.1, 0.8]]], dtype=torch.float64).log()
    expected = torch.tensor([[0.5, 0.05, 0.025, 0.1, 0.1, 0.025, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(tiny.sequence_logprobs(table).exp(), expected)


@pytest.mark.parametrize("world", [WORLD, OTHER])
def test_probabilities_sum_to_one_and_come_back_as_the_table(world):
    table = random_table(world, 0)
    distribution = world.sequence_logprobs(table)
    torch.testing.assert_close(distribution.exp().sum(1), torch.ones(world.prompts, dtype=torch.float64))
    torch.testing.assert_close(table_of(world, distribution), table)
    assert len({tuple(ids) for ids in world.ids.tolist()}) == len(world.ids)
    ended = (world.ids == EOS) & world.mask
    assert torch.equal(ended.any(1), world.finished)


def test_state_probabilities_and_values_by_backward_induction():
    table = random_table(WORLD, 1)
    rewards = torch.randn(WORLD.rows, WORLD.horizon, dtype=torch.float64) * WORLD.mask.repeat(WORLD.prompts, 1)
    values, actions = state_values(WORLD, table, rewards), action_values(WORLD, table, rewards)
    torch.testing.assert_close(values, (table.exp() * actions).sum(-1))
    visits = state_logprobs(WORLD, table)
    total = expectation(WORLD.sequence_logprobs(table), rewards.sum(1).view(WORLD.prompts, -1))
    torch.testing.assert_close(values[:, 0].mean(), total)
    lengths = WORLD.mask.sum(1).double().expand(WORLD.prompts, -1)
    torch.testing.assert_close(visits.exp().sum(1).mean(), expectation(WORLD.sequence_logprobs(table), lengths))


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_nothing_near_the_optimum_is_better(beta):
    reference = WORLD.sequence_logprobs(random_table(WORLD, 2))
    scores = random_scores(WORLD, 3)
    best = optimum(reference, scores, beta)
    torch.testing.assert_close(objective_value(best, reference, scores, beta), best_value(reference, scores, beta))
    logits = best.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective_value(logits.log_softmax(1), reference, scores, beta), logits)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-12, rtol=0)
    for seed in range(20):
        other = (best + 0.3 * random_scores(WORLD, seed)).log_softmax(1)
        gap = best_value(reference, scores, beta) - objective_value(other, reference, scores, beta)
        torch.testing.assert_close(gap, beta * kl(other, best))
        assert gap > 0


def test_the_frontier_rises_and_is_where_bisection_finds_it():
    reference = WORLD.sequence_logprobs(random_table(WORLD, 2))
    scores = random_scores(WORLD, 3)
    points = frontier(reference, scores, [8.0, 2.0, 1.0, 0.5, 0.2])
    assert all(b[0] > a[0] and b[1] > a[1] for a, b in pairwise(points))
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    assert slopes == sorted(slopes, reverse=True)  # concave
    for nats, score in points:
        assert best_score(reference, scores, nats) == pytest.approx(score, abs=1e-9)
    assert best_score(reference, scores, 1e9) == pytest.approx(scores.amax(1).mean().item(), abs=1e-6)
    for seed in range(30):
        other = (reference + random_scores(WORLD, seed, scale=1.5)).log_softmax(1)
        assert expectation(other, scores) <= best_score(reference, scores, kl(other, reference).item()) + 1e-9
