"""Accuracy and its interval, bins, calibration error, correlation: by hand and against scikit-learn and SciPy."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reward_model.evaluate import accuracy, accuracy_by_margin, calibration, pearson, spearman, subset_accuracy


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def gaps_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_accuracy_counts_ties_half() -> None:
    share = accuracy(gaps_of(1, 2, -1, 0), ["a", "b", "c", "d"], seed=0)
    assert (share.accuracy, share.n) == (2.5 / 4, 4)
    assert 0 <= share.low < share.accuracy < share.high <= 1


def test_the_interval_is_about_the_binomial_one() -> None:
    """400 independent pairs at 70 %: 1.96 · √(0.7 · 0.3 / 400) = 0.045."""
    gaps = torch.cat([torch.ones(280), -torch.ones(120)])
    share = accuracy(gaps, range(400), seed=0)
    assert share.accuracy == pytest.approx(0.7)
    assert share.accuracy - share.low == pytest.approx(0.045, abs=0.006)
    assert share.high - share.accuracy == pytest.approx(0.045, abs=0.006)
    assert accuracy(gaps, range(400), seed=0) == share


def test_pairs_of_one_prompt_are_one_observation() -> None:
    """20 prompts of 20 pairs that go alike carry the information of 20 pairs: 1.96 · √(0.7 · 0.3 / 20) = 0.20."""
    gaps = torch.cat([torch.ones(280), -torch.ones(120)])
    share = accuracy(gaps, [i // 20 for i in range(400)], seed=0)
    assert share.accuracy - share.low == pytest.approx(0.20, abs=0.03)
    few = accuracy(gaps, [i // 100 for i in range(400)], seed=0)  # 4 prompts: too few to resample
    assert few.accuracy - few.low == pytest.approx(0.045, abs=0.006)


def test_all_pairs_right_are_not_certain() -> None:
    """Wilson's interval of n of n is [n / (n + 1.96²), 1], and of none [0, 1.96² / (n + 1.96²)]."""
    gaps = torch.ones(400)
    independent, alike = accuracy(gaps, range(400), seed=0), accuracy(gaps, [i // 20 for i in range(400)], seed=0)
    assert (independent.accuracy, independent.high, alike.high) == (1.0, 1.0, 1.0)
    assert independent.low == pytest.approx(400 / (400 + 1.96**2), abs=1e-5)
    assert alike.low == pytest.approx(20 / (20 + 1.96**2), abs=1e-5)
    assert accuracy(-gaps, range(400), seed=0).high == pytest.approx(1.96**2 / (400 + 1.96**2), abs=1e-5)


def test_a_part_may_be_empty() -> None:
    gaps = gaps_of(1, -1, 3)
    assert subset_accuracy(gaps, torch.tensor([True, True, False])).accuracy == 0.5
    assert subset_accuracy(gaps, gaps > 10) == subset_accuracy(gaps[:0], torch.zeros(0, dtype=torch.bool))
    assert subset_accuracy(gaps, gaps > 10).accuracy is None


def test_margin_bins_by_hand() -> None:
    margins = gaps_of(0.1, -0.2, 0.3, 0.4, 0.5, 0.6)
    gaps = gaps_of(-1, 1, 1, 0, 1, 1)
    low, high = accuracy_by_margin(gaps, margins, bins=2)
    assert (low.low, low.high, low.accuracy, low.n) == (0.1, 0.3, 2 / 3, 3)
    assert (high.low, high.high, high.accuracy, high.n) == (0.4, 0.6, 2.5 / 3, 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=1, max_size=60), st.integers(1, 8))
def test_margin_bins_divide_the_pairs_and_no_value(rows: list[tuple[int, float]], bins: int) -> None:
    margins, gaps = (gaps_of(*column) for column in zip(*rows, strict=True))
    by_margin = accuracy_by_margin(gaps, margins, bins=bins)
    assert 1 <= len(by_margin) <= bins
    assert sum(b.n for b in by_margin) == len(rows)
    assert all(one.high < other.low for one, other in pairwise(by_margin))
    won = sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for _, gap in rows)
    assert sum(b.accuracy * b.n for b in by_margin) == pytest.approx(won)


def test_calibration_error_by_hand() -> None:
    """Two bins of [½, 1]: 4 pairs at 0.6 of which 1 is right, 6 at 0.9 of which all are.

    ECE = 4/10 · |0.6 - 0.25| + 6/10 · |0.9 - 1| = 0.14 + 0.06 = 0.2
    """
    gaps = gaps_of(logit(0.6), *[-logit(0.6)] * 3, *[logit(0.9)] * 6)
    error, bins = calibration(gaps, bins=2)
    assert error == pytest.approx(0.2)
    assert [(b.n, b.observed) for b in bins] == [(4, 0.25), (6, 1.0)]
    assert [b.predicted for b in bins] == pytest.approx([0.6, 0.9])


def test_both_orders_of_every_pair_give_the_same_error() -> None:
    """The same figure from P(first preferred) over all of [0, 1], each pair in both orders."""
    torch.manual_seed(0)
    gaps = torch.randn(200, dtype=torch.float64) + 0.3
    predicted = torch.cat([gaps, -gaps]).sigmoid()
    first_won = torch.cat([torch.ones(200), torch.zeros(200)]).double()
    numbers = (predicted * 20).long().clamp(max=19)
    error = sum(
        inside.double().mean() * (predicted[inside].mean() - first_won[inside].mean()).abs()
        for inside in (numbers == k for k in range(20))
        if inside.any()
    )
    assert calibration(gaps)[0] == pytest.approx(float(error), abs=1e-12)


def test_labels_drawn_from_the_model_are_calibrated_and_others_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(20_000, dtype=torch.float64, generator=generator) * 3
    right = torch.rand(20_000, dtype=torch.float64, generator=generator) < size.sigmoid()
    gaps = torch.where(right, size, -size)
    assert calibration(gaps)[0] < 0.02
    assert calibration(gaps * 3)[0] > 0.1  # overconfident
    assert calibration(gaps / 5)[0] > 0.1  # underconfident


def test_certain_and_undecided_pairs_have_bins() -> None:
    error, bins = calibration(gaps_of(800, 800, 0, 0))
    assert [(b.predicted, b.observed, b.n) for b in bins] == [(0.5, 0.5, 2), (1.0, 1.0, 2)]
    assert error == 0


def test_correlations_by_hand() -> None:
    # Deviations (-1, 0, 1) and (-4, -1, 5) / 3: their product is 3, their lengths are sqrt(2) and sqrt(42) / 3.
    assert pearson(gaps_of(1, 2, 3), gaps_of(1, 2, 4)) == pytest.approx(9 / math.sqrt(84))
    # Ranks (1, 2, 3, 4) and (1, 4, 2.5, 2.5): deviations whose product is 1.5, of lengths sqrt(5) and sqrt(4.5).
    assert spearman(gaps_of(1, 2, 3, 4), gaps_of(10, 30, 20, 20)) == pytest.approx(1.5 / math.sqrt(22.5))


@pytest.mark.parametrize("constant", [(3, 3, 3), (math.nan, 1, 2)])
def test_what_does_not_vary_has_no_correlation(constant: tuple[float, ...]) -> None:
    for correlation in (pearson, spearman):
        assert correlation(gaps_of(*constant), gaps_of(1, 2, 4)) is None
        assert correlation(gaps_of(1, 2, 4), gaps_of(*constant)) is None
        assert correlation(gaps_of(1), gaps_of(2)) is None
