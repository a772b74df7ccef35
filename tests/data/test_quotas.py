"""The schedule of a mixture: exact shares of every beginning and every window, without chance."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.mixture import LONGEST_PERIOD, QuotaSchedule, integer_weights

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)


def test_a_schedule_worked_by_hand() -> None:
    """Shares 3/4 and 1/4: before row 3 the second source is not half a row behind, or its deadline is no earlier."""
    schedule = QuotaSchedule((3, 1))
    assert [schedule.source(n) for n in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]
    assert [schedule.count(0, n) for n in range(6)] == [0, 1, 2, 2, 3, 4]
    assert QuotaSchedule((1,)).source(10**12) == 0


@given(WEIGHTS)
def test_no_source_is_ever_as_much_as_one_row_from_its_share(weights: tuple[int, ...]) -> None:
    """Tijdeman's bound 1 − 1/(2k − 2), which no sequence can better for all weights."""
    schedule, total, k = QuotaSchedule(weights), sum(weights), len(weights)
    bound = 1 - Fraction(1, 2 * k - 2) if k > 1 else Fraction(0)
    for rows in range(2 * total + 1):
        for source, weight in enumerate(weights):
            assert abs(schedule.count(source, rows) - Fraction(rows * weight, total)) <= bound
    assert [schedule.count(source, total) for source in range(k)] == list(weights)


@given(WEIGHTS, st.integers(0, 300), st.integers(1, 100))
def test_any_window_has_every_share_but_for_two_rows(weights: tuple[int, ...], start: int, length: int) -> None:
    schedule, total = QuotaSchedule(weights), sum(weights)
    window = [schedule.source(n) for n in range(start, start + length)]
    for source, weight in enumerate(weights):
        count = schedule.count(source, start + length) - schedule.count(source, start)
        assert count == window.count(source)
        assert abs(count - Fraction(length * weight, total)) < 2


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.3], (7, 3)), ([2.0, 1.0], (2, 1)), ([50.0, 25.0, 25.0], (2, 1, 1)), ([1e-1, 1.0], (1, 10))],
)
def test_weights_are_the_decimal_numbers_they_are_written_as(weights: list[float], whole: tuple[int, ...]) -> None:
    assert integer_weights(weights) == whole


def test_weights_without_a_short_period_are_rounded_and_keep_a_row() -> None:
    whole = integer_weights([3.14159265, 2.71828183, 1e-12])
    assert sum(whole) == LONGEST_PERIOD
    assert whole[2] == 1
    assert abs(whole[0] / sum(whole) - 3.14159265 / (3.14159265 + 2.71828183)) < 2 / LONGEST_PERIOD
