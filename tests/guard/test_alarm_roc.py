"""The measurement of alarms against the gold's fall, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from alarm_roc import Points, area, excess, falls, first_fall, first_firing, points_of, rates, stopping_gains

from rlhf.guard.alarms.alarm import Above, Alarm, Below, Reading

ROWS = [
    {"step": 0, "eval/score": 1.0, "eval/score_std": 1.0, "x": 0.0},
    {"step": 1, "x": 1.0},
    {"step": 2, "eval/score": 2.0, "eval/score_std": 1.0, "x": 2.0},
    {"step": 3, "eval/score": 1.9, "eval/score_std": 1.0, "x": 3.0},
    {"step": 4, "eval/score": 1.0, "eval/score_std": 1.0, "x": 5.0},
]


class High(Above):
    """Not an alarm of every run: the class has no name."""

    metrics, limit = ("x",), 2.5
    causes = cure = source = ""


class Low(Below):
    """The same from the other side."""

    metrics, limit = ("x",), 2.5


def alarm(patience: int = 1) -> Alarm:
    high = High()
    high.name, high.patience = "x", patience  # type: ignore[misc]
    return high


@pytest.mark.parametrize(
    "reading, expected",
    [
        (Reading(3.0, 2.0, True), 0.5),
        (Reading(1.0, 2.0, False), -0.5),
        (Reading(1.0, 2.0, True), 0.5),  # of an alarm for values that are too low
        (Reading(3.0, 2.0, False), -0.5),
    ],
)
def test_excess_is_positive_on_the_bad_side(reading: Reading, expected: float) -> None:
    assert excess(reading) == expected


def test_excess_agrees_with_the_readings_of_alarms() -> None:
    points = points_of(alarm(), ROWS)
    assert points.excess == [-1.0, pytest.approx(-0.2), pytest.approx(0.2), 1.0]
    assert points.is_bad == [False, False, True, True]
    low = points_of(Low(), ROWS)
    assert low.excess == [-value for value in points.excess]


def test_the_gold_has_fallen_a_fifth_of_its_spread_below_its_best() -> None:
    assert falls(ROWS) == [False, None, False, False, True]
    assert first_fall(ROWS) == 4
    assert first_fall(ROWS[:4]) is None


def test_an_alarm_goes_off_after_its_patience() -> None:
    assert first_firing(alarm(), ROWS) == 3
    assert first_firing(alarm(patience=2), ROWS) == 4
    assert first_firing(alarm(patience=3), ROWS) is None


def test_area_and_rates_are_over_all_runs() -> None:
    runs = [Points([0.1, 0.4], [False, True], [False, True]), Points([0.3, 0.2], [True, False], [False, True])]
    assert area(runs) == 0.75  # of the four pairs of a fallen and a not fallen point three are in order
    assert area(runs[:1]) == 1.0
    assert area([Points([0.1], [False], [True])]) is None
    assert rates(runs) == {
        "fallen": 2,
        "not_fallen": 2,
        "true_positive_rate": 0.5,
        "false_positive_rate": 0.5,
    }


def test_stopping_is_where_the_other_runs_peak() -> None:
    golds = np.array([[0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [0.0, 2.0, 0.0]])
    # the others of run 0 peak at 1 (1.5 against 1), of run 1 at 1 (2.5), of run 2 at 1 (2)
    np.testing.assert_allclose(stopping_gains(golds), [2.0, -1.0, 2.0])
