"""The paired test of the best checkpoint, by hand and by simulation: noise is no new best."""

from __future__ import annotations

import math
import random

import pytest

from rlhf.guard.best import BestState, Gain, next_best, paired_gain


def test_the_interval_of_a_paired_difference_by_hand() -> None:
    gain = paired_gain([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], 0.95)  # differences 1, 2, 3: mean 2, s 1
    margin = 4.302652729749464 / math.sqrt(3.0)  # t of 2 degrees of freedom, 97.5 %
    assert (gain.mean, gain.low, gain.high) == pytest.approx((2.0, 2.0 - margin, 2.0 + margin))
    assert not gain.is_certain
    assert paired_gain([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], 0.8).is_certain


def test_equal_differences_have_no_width_and_one_row_says_nothing() -> None:
    assert paired_gain([2.0, 3.0], [1.0, 2.0], 0.95) == Gain(1.0, 1.0, 1.0)
    assert not paired_gain([1.0, 2.0], [1.0, 2.0], 0.95).is_certain
    assert paired_gain([5.0], [1.0], 0.95) == Gain(4.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_gain([1.0], [1.0, 2.0], 0.95)


def test_pairing_sees_what_the_spread_between_prompts_would_hide() -> None:
    draw = random.Random(0)
    old = [draw.gauss(0.0, 10.0) for _ in range(64)]
    assert paired_gain([value + 0.5 + draw.gauss(0.0, 0.2) for value in old], old, 0.95).is_certain


def test_noise_is_a_new_best_no_more_often_than_the_confidence_says() -> None:
    draw = random.Random(1)

    def new_best() -> bool:
        old, new = ([draw.gauss(0.0, 1.0) for _ in range(32)] for _ in range(2))
        return paired_gain(new, old, 0.9).is_certain

    share = sum(new_best() for _ in range(2000)) / 2000
    assert 0.03 < share < 0.07  # one side of 10 %


def test_the_best_stays_until_it_is_beaten_and_the_evaluations_since_are_counted() -> None:
    first, gain = next_best(None, [0.0, 0.1, 0.2], 0, 0.95)
    assert (first, gain) == (BestState(0, [0.0, 0.1, 0.2]), None)
    second, gain = next_best(first, [0.1, 0.0, 0.2], 10, 0.95)
    assert second == BestState(0, [0.0, 0.1, 0.2], since=1)
    assert gain is not None and gain.mean == pytest.approx(0.0)  # noqa: PT018
    third, _ = next_best(second, [1.0, 1.1, 1.2], 20, 0.95)
    assert third == BestState(20, [1.0, 1.1, 1.2])
    other, gain = next_best(third, [5.0], 30, 0.95)  # other rows: nothing to compare with
    assert (other, gain) == (BestState(30, [5.0]), None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_evaluation_with_a_value_that_is_not_finite_is_never_better_and_always_beaten(value: float) -> None:
    first, _ = next_best(None, [0.0, 0.1, 0.2], 0, 0.95)
    second, gain = next_best(first, [9.0, value, 9.0], 10, 0.95)
    assert (second, gain) == (BestState(0, [0.0, 0.1, 0.2], since=1), None)
    broken, _ = next_best(None, [value, 0.1, 0.2], 0, 0.95)
    later, gain = next_best(broken, [-5.0, -5.1, -5.2], 10, 0.95)
    assert (later, gain) == (BestState(10, [-5.0, -5.1, -5.2]), None)


def test_rows_that_nobody_judged_do_not_make_a_difference_certain() -> None:
    """A row without a score says nothing: it neither counts as one of n, nor lowers the spread."""
    new, old = [2.0, 4.0, 6.0, None, None, 7.0], [1.0, 2.0, 3.0, None, 5.0, None]
    assert paired_gain(new, old, 0.95) == paired_gain([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], 0.95)
    assert paired_gain([None, 3.0], [1.0, None], 0.95) == Gain(0.0, -math.inf, math.inf)
    best, gain = next_best(BestState(0, [0.0, 0.1, 0.2, None]), [1.0, 1.1, 1.2, None], 10, 0.95)
    assert best == BestState(10, [1.0, 1.1, 1.2, None])
    assert gain is not None
