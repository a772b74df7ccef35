"""Running moments of scores: by hand, and equal to the moments of all values together."""

from __future__ import annotations

import pytest
import torch
from algo_cases import close, table
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algo.moments import Moments
from rlhf.rewards.shaping import ShapingConfig


def test_two_batches_by_hand() -> None:
    """1, 3, then 5, 7: mean 4 and variance 5."""
    first = Moments().with_batch(torch.tensor([1.0, 3.0]))
    assert (first.count, first.mean, first.std) == (2.0, 2.0, 1.0)
    both = first.with_batch(torch.tensor([5.0, 7.0]))
    assert (both.count, both.mean, both.squares) == (4.0, 4.0, 20.0)
    assert both.std == pytest.approx(5.0**0.5)
    assert both.with_batch(torch.tensor([])) == both


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_moments_are_those_of_all_values(batches: list[list[float]]) -> None:
    moments = Moments()
    for batch in batches:
        moments = moments.with_batch(torch.tensor(batch, dtype=torch.float64))
    values = torch.tensor([value for batch in batches for value in batch], dtype=torch.float64)
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(float(values.mean()), abs=1e-9)
    assert moments.std == pytest.approx(float(values.std(correction=0)), abs=1e-6)


def test_scores_on_their_scale_by_hand() -> None:
    moments, scores = Moments(count=4.0, mean=4.0, squares=16.0), table([2.0, 4.0, 8.0])[0]
    close(ShapingConfig(normalize="scale").normalized(scores, moments), [1.0, 2.0, 4.0])
    close(ShapingConfig(normalize="standardize").normalized(scores, moments), [-1.0, 0.0, 2.0])


def test_equal_scores_stay_finite() -> None:
    scores = torch.full((4,), 3.0)
    moments = Moments().with_batch(scores)
    assert ShapingConfig(normalize="standardize").normalized(scores, moments).tolist() == [0.0] * 4
