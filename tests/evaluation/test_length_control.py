"""Win rates at equal length: a judge that only likes length is corrected, another one is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from rlhf.evaluation.win_rate import (
    RIDGE,
    Z95,
    bootstrap_crossed,
    fit_logistic,
    length_controlled_win_rate,
    outcomes,
)
from rlhf.factory.evaluation import _length_difference, _Side

COUNT = 400


def lengths(mean: float, seed: int = 0) -> Tensor:
    """Length differences around `mean`, 8 either way."""
    draw = torch.Generator().manual_seed(seed)
    return (8 * torch.randn(1, COUNT, generator=draw, dtype=torch.float64) + mean).round()


def drawn(probability: Tensor, seed: int = 1) -> Tensor:
    return torch.bernoulli(probability, generator=torch.Generator().manual_seed(seed)).double()


def test_a_judge_that_only_prefers_longer_is_seen_through() -> None:
    longer = lengths(13.0)
    rate = length_controlled_win_rate(outcomes(longer, torch.zeros_like(longer)), longer)
    raw = bootstrap_crossed(outcomes(longer, torch.zeros_like(longer)))
    assert raw.value > 0.93
    assert rate.value == pytest.approx(0.5, abs=0.1)
    assert rate.low < 0.55
    assert rate.length_effect > 2
    assert not rate.extrapolated


def test_a_judge_that_leans_to_longer_is_corrected_by_what_it_leans() -> None:
    longer = lengths(8.0)
    chance = torch.sigmoid(0.4 + 2.5 * torch.tanh(longer / longer.std(correction=0)))
    wins = torch.cat([drawn(chance, seed) for seed in range(10)])
    rate = length_controlled_win_rate(wins, longer.expand(10, -1))
    assert float(wins.mean()) > 0.75
    assert rate.value == pytest.approx(float(torch.tensor(0.4).sigmoid()), abs=0.03)
    assert rate.length_effect == pytest.approx(2.5, abs=0.2)


def test_without_a_length_effect_it_is_the_raw_rate() -> None:
    wins = drawn(torch.full((1, COUNT), 0.7))
    rate, raw = length_controlled_win_rate(wins, lengths(0.0)), bootstrap_crossed(wins)
    assert rate.value == pytest.approx(raw.value, abs=0.01)
    assert (rate.low, rate.high) == pytest.approx((raw.low, raw.high), abs=0.02)


def test_of_equal_lengths_it_is_the_raw_rate_ties_at_half() -> None:
    wins = torch.tensor([[1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0]] * 20).view(1, -1)
    rate = length_controlled_win_rate(wins, torch.zeros_like(wins))
    assert rate.value == pytest.approx(0.5)
    assert rate.length_effect == 0.0
    wins = torch.tensor([[1.0, 1.0, 0.5, 0.0]] * 50).view(1, -1)
    assert length_controlled_win_rate(wins, torch.zeros_like(wins)).value == pytest.approx(0.625, abs=1e-4)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.floats(-12, 12))
def test_swapping_the_sides_gives_one_minus_it(seed: int, mean: float) -> None:
    longer = lengths(mean, seed)[:, :60]
    wins = (drawn(torch.sigmoid(longer / 8), seed) + drawn(torch.full_like(longer, 0.5), seed + 1)) / 2
    one, two = length_controlled_win_rate(wins, longer), length_controlled_win_rate(1 - wins, -longer)
    assert one.value + two.value == pytest.approx(1.0, abs=1e-9)
    assert (one.low + two.high, one.high + two.low) == pytest.approx((1.0, 1.0), abs=1e-9)
    assert one.length_effect == pytest.approx(two.length_effect, abs=1e-6)


def test_the_unit_of_length_does_not_matter() -> None:
    longer, wins = lengths(3.0), drawn(torch.full((1, COUNT), 0.6))
    one, two = (length_controlled_win_rate(wins, scale * longer) for scale in (1.0, 4.5))
    assert one.value == pytest.approx(two.value)


def test_where_one_side_is_always_longer_it_is_said_to_be_a_guess() -> None:
    wins = drawn(torch.full((1, COUNT), 0.8))
    for sign in (1, -1):
        assert length_controlled_win_rate(wins, sign * (1 + lengths(0.0).abs())).extrapolated
        constant = length_controlled_win_rate(wins, torch.full_like(wins, 3.0 * sign))
        assert constant.extrapolated
        assert 0.5 < constant.value < 0.8  # half of it is put down to length, whose sign never changes
    assert not length_controlled_win_rate(wins, lengths(0.0).abs()).extrapolated  # some are equal


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_of_wins_or_losses_alone_it_is_the_plain_rate(outcome: float) -> None:
    wins = torch.full((2, 4), outcome)
    longer = torch.tensor([[3.0, -2.0, 1.0, 0.0], [1.0, 4.0, -3.0, 2.0]])
    rate, raw = length_controlled_win_rate(wins, longer), bootstrap_crossed(wins, shares=True)
    assert (rate.value, rate.low, rate.high) == (raw.value, raw.low, raw.high)
    share = Z95**2 / (4 + Z95**2)  # Wilson's farther bound of none of 4 prompts
    expected = (0.0, share) if outcome == 0 else (1 - share, 1.0)
    assert (rate.low, rate.high) == pytest.approx(expected)
    assert rate.length_effect == 0.0
    assert not rate.extrapolated
    assert length_controlled_win_rate(wins, longer.abs() + 1).extrapolated


def test_seeds_that_disagree_widen_the_interval() -> None:
    longer = lengths(0.0).expand(3, -1)
    same = drawn(torch.full((1, COUNT), 0.5)).expand(3, -1)
    apart = torch.cat([drawn(torch.full((1, COUNT), p)) for p in (0.2, 0.5, 0.8)])
    narrow, wide = (length_controlled_win_rate(wins, longer) for wins in (same, apart))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_the_fit_is_scikit_learns() -> None:
    draw = np.random.default_rng(0)
    for scale in (0.5, 5.0, 50.0):
        x = np.tanh(draw.normal(size=80))
        y = (draw.random(80) < 1 / (1 + np.exp(-(0.3 + scale * x)))).astype(float)
        weights = draw.integers(0, 4, 80).astype(float)
        # Its penalty leaves the intercept out: give it as a feature.
        model = LogisticRegression(C=1 / RIDGE, fit_intercept=False, tol=1e-12, max_iter=10_000)
        model.fit(np.stack([np.ones(80), x], axis=1), y, sample_weight=weights)
        coefficients = fit_logistic(*(torch.from_numpy(values) for values in (weights[None], x, y)))
        assert coefficients[0].tolist() == pytest.approx(model.coef_[0].tolist(), rel=1e-4)


def test_a_fit_is_at_the_maximum_even_of_hopeless_data() -> None:
    """Separable, and one great outlier against it."""
    x = torch.tensor([-1.0, -0.9, -1e-3, 1e-3, 0.9, 1.0], dtype=torch.float64)
    y = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    weights = torch.tensor([[1.0] * 6, [0.0, 0.0, 1e6, 1e6, 0.0, 0.0], [1e6, 1.0, 1.0, 1.0, 1.0, 1e-6]]).double()
    coefficients = fit_logistic(weights, x, y)
    p = (coefficients[:, :1] + coefficients[:, 1:] * x).sigmoid()
    gradient = torch.stack([(weights * (y - p)).sum(1), (weights * (y - p) * x).sum(1)], dim=1) - RIDGE * coefficients
    assert float((gradient.abs() / weights.sum(1, keepdim=True)).max()) < 1e-7


def test_what_an_environment_wrote_is_no_length() -> None:
    """As in eval/length, and in the lengths of a comparison."""
    live = torch.ones(2, 5, dtype=torch.bool)
    drew = torch.tensor([[True, False, False, True, True], [True, True, False, False, True]])
    sides = []
    for count in (5, 3):
        rollout = SimpleNamespace(completion_mask=live, action_mask=drew[:, :count])
        side = Mock(spec=_Side)
        side.tokenizer, side.evaluation = SimpleNamespace(get_vocab=dict), SimpleNamespace(rollout=rollout)
        sides.append(side)
    assert _length_difference(sides[0], sides[1]).tolist() == [2.0, 1.0]
