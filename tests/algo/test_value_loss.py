"""The critic's loss by hand, points at which its gradient stops, and explained variance."""

from __future__ import annotations

import math

import pytest
import torch
from algo_cases import NAN, close, grids, live, table
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algo.advantages import gae
from rlhf.algo.masked import explained_beyond_position, explained_variance
from rlhf.algorithms.value_loss import ValueLoss


@pytest.mark.parametrize(
    "value, target, loss, gradient",
    [
        (1.0, 2.0, 1.62, 0.0),  # moved enough towards the target: the error at .2 is the larger
        (-1.0, -2.0, 1.62, 0.0),
        (1.0, 0.5, 0.125, 0.5),  # moved past the target: its own error is the larger
        (3.0, 1.0, 2.0, 2.0),
        (0.1, 2.0, 1.805, -1.9),  # within the clip
        (-1.0, 2.0, 4.5, -3.0),  # moved away: pulled back
        (0.2, 2.0, 1.62, -1.8),  # at the edge
    ],
)
def test_the_cases_of_the_value_clip(value, target, loss, gradient):
    variable = table([value]).requires_grad_()
    old, returns = table([0.0]), table([target])
    per_token = ValueLoss(clip_eps=0.2).per_token(variable, old, returns)
    per_token.sum().backward()
    close(per_token, [[loss]])
    # At the edge the two branches are one; autograd splits the gradient between them, and both give it.
    close(variable.grad, [[gradient]])
    assert ValueLoss(clip_eps=0.2).clipped(variable.detach(), old, returns).item() == (gradient == 0.0)


def test_without_a_clip_it_is_half_the_squared_error():
    close(ValueLoss(clip_eps=None).per_token(table([1, 5]), table([0, 0]), table([2, 2])), [[0.5, 4.5]])
    assert not ValueLoss(clip_eps=None).clipped(table([1, 5]), table([0, 0]), table([2, 2])).any()


@given(grids(), st.floats(0.01, 2.0))
def test_the_clip_never_lowers_the_loss_and_says_where_it_stops(grid, eps):
    values = (grid.first + grid.second).requires_grad_()
    returns = grid.first.flip(0)
    loss = ValueLoss(clip_eps=eps).per_token(values, grid.first, returns)
    plain = ValueLoss(clip_eps=None).per_token(values, grid.first, returns)
    assert (loss >= plain).all()
    (slope,) = torch.autograd.grad(loss.sum(), values)
    clipped = ValueLoss(clip_eps=eps).clipped(values.detach(), grid.first, returns)
    close(slope, torch.where(clipped, 0.0, values.detach() - returns))


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1, 2, 3, 4], 1.0),
        ([6, 7, 8, 9], 1.0),  # a constant error is no variance
        ([2.5, 2.5, 2.5, 2.5], 0.0),
        ([1, 2, 3, 3], 0.85),  # error variance 3/16 of 5/4
        ([4, 3, 2, 1], -3.0),
    ],
)
def test_explained_variance_by_hand(values, expected):
    row = table([*values, NAN])
    mask = live([1, 1, 1, 1, 0])
    assert explained_variance(row, table([1, 2, 3, 4, NAN]), mask) == pytest.approx(expected, abs=1e-12)


def test_explained_variance_of_returns_that_are_rounding_is_undefined():
    mask = torch.ones(1, 3, dtype=torch.bool)
    values, returns = torch.tensor([[0.3, -0.2, 0.1]]), torch.tensor([[1e-7, 0.0, -1e-7]])
    assert math.isnan(explained_variance(values, returns, mask))
    assert explained_variance(values, 1e-2 * values, mask) == pytest.approx(1 - 0.99**2 / 0.01**2, rel=1e-4)


def test_explained_variance_of_a_constant_is_undefined():
    mask = live([1, 1, 0])
    assert math.isnan(explained_variance(table([1, 2, 3]), table([5, 5, 7]), mask))
    assert math.isnan(explained_variance(table([1, 2, 3]), table([5, 5, 7]), torch.zeros_like(mask)))


def columns(mask: Tensor) -> Tensor:
    """The number of each live token in its row."""
    return mask.long().cumsum(dim=1) - 1


def test_a_critic_that_counts_tokens_explains_nothing_beyond_the_position():
    """A KL penalty at every token makes returns fall with the position: a third of the variance is only that."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4096, 36, dtype=torch.bool)
    rewards = torch.full((4096, 36), -0.02 * 11.9 / 36)
    rewards[:, -1] += 0.1 * torch.randn(4096, generator=generator)
    _, returns = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, gae_lambda=1.0)
    counting = returns.mean(dim=0, keepdim=True).expand_as(returns)
    assert 0.3 < explained_variance(counting, returns, mask) < 0.35
    assert explained_beyond_position(counting, returns, columns(mask), mask) == pytest.approx(0.0, abs=1e-5)
    assert explained_beyond_position(returns, returns, columns(mask), mask) == 1.0


def test_explained_beyond_position_by_hand():
    """Means at the two positions are 2 and 15; the third row is masked, and the second ends first."""
    returns, mask = table([1, 10], [3, NAN], [NAN, NAN], [2, 20]), torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]]).bool()
    values = table([0, 12], [2, NAN], [NAN, NAN], [4, 19])
    # errors: 1, 1, -2 (mean 0) and -2, 1 (mean -0.5): 6 + 4.5 of 2 + 50
    assert explained_beyond_position(values, returns, columns(mask), mask) == pytest.approx(1 - 10.5 / 52)


def test_explained_beyond_position_is_the_usual_share_if_there_is_one_position():
    values, returns = torch.randn(2, 9, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones_like(values, dtype=torch.bool)
    expected = explained_variance(values, returns, mask)
    assert explained_beyond_position(values, returns, columns(mask), mask) == pytest.approx(expected)


def test_explained_beyond_position_of_equal_returns_is_undefined():
    mask = torch.ones(2, 2, dtype=torch.bool)
    returns = table([5, 7], [5, 7])
    assert math.isnan(explained_beyond_position(table([1, 2], [3, 4]), returns, columns(mask), mask))
    assert math.isnan(explained_beyond_position(returns, returns, columns(mask), torch.zeros_like(mask)))
