"""Shares, their intervals, and pass@k, against values worked by hand and by enumeration."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.comparison.results import SuiteFigure
from rlhf.comparison.trial import SuiteScores, summarize_suites
from rlhf.evaluation.win_rate import Interval, independent_difference, wilson
from rlhf.suites.metrics import compute
from rlhf.suites.metrics.pass_at_k import pass_at_k
from rlhf.suites.metrics.win_rate import wins
from rlhf.suites.questions import Estimate, mean_estimate, ratio_estimate


@pytest.mark.parametrize(
    ("samples", "correct", "k", "value"),
    [
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (5, 3, 3, 1.0),
        (10, 1, 10, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(samples, correct, k) == pytest.approx(value, abs=1e-15)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    row = [True] * correct + [False] * (samples - correct)
    subsets = list(combinations(row, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="needs at least 3 samples"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="3 right of 2"):
        pass_at_k(2, 3, 1)
    assert compute("pass_at_k", predictions=[[True, False], [False, False]], k=[1])["pass@1"] == 0.25


def test_wilson_by_hand() -> None:
    # z = 1.96, n = 10: (p + .19207) / 1.38415 ± ...; the values of Newcombe (1998, table I) and by hand
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_a_difference_of_shares_as_in_the_paper() -> None:
    """Examples (a), (b), (d) and (e) of Newcombe (1998), table II, method 10."""
    expected = {
        (56, 70, 48, 80): (0.0524, 0.3339),
        (9, 10, 3, 10): (0.1705, 0.8090),
        (5, 56, 0, 29): (-0.0381, 0.1926),
        (0, 10, 0, 20): (-0.1611, 0.2775),
    }
    for (wins_a, total_a, wins_b, total_b), ends in expected.items():
        a, b = (
            Interval(wins_a / total_a, *wilson(wins_a, total_a)),
            Interval(wins_b / total_b, *wilson(wins_b, total_b)),
        )
        difference = independent_difference(a, b)
        assert difference.value == pytest.approx(a.value - b.value)
        assert (difference.low, difference.high) == pytest.approx(ends, abs=5e-5)


def suite_scores(share: float, rows: int) -> dict[str, SuiteScores]:
    """The scores of a suite with one figure, alike in all rows."""
    low, high = wilson(share * rows, rows)
    return {"hh": SuiteScores({"accuracy": SuiteFigure(value=share, low=low, high=high)}, {"accuracy": [share] * rows})}


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_gain_that_is_alike_in_all_rows_has_the_width_of_both_sides(seeds: int) -> None:
    arm, start = suite_scores(1.0, 12), suite_scores(0.0, 12)
    gain = summarize_suites([arm] * seeds, [start] * seeds)["hh"]["accuracy"].gain
    assert gain is not None
    low = 1 - math.hypot(1 - wilson(12, 12)[0], wilson(0, 12)[1])
    assert (gain.value, gain.low, gain.high) == pytest.approx((1.0, low, 1.0))
    assert gain.low < 0.7
    equal = summarize_suites([suite_scores(1.0, 12)] * seeds, [arm] * seeds)["hh"]["accuracy"].gain
    assert equal is not None
    assert equal.low < 0 < equal.high, "two models that answer every row alike may differ"


def test_a_model_does_not_differ_from_itself() -> None:
    start = suite_scores(1.0, 12)
    assert summarize_suites([start], [start])["hh"]["accuracy"].gain == Interval(0.0, 0.0, 0.0)


def test_seeds_that_differ_are_resampled() -> None:
    arm, start = ([suite_scores(share, 12) for share in (1.0, 0.0)] for _ in range(2))
    assert summarize_suites(arm, start)["hh"]["accuracy"].gain == Interval(0.0, 0.0, 0.0)


@given(st.integers(1, 200), st.data())
def test_wilson_holds_the_share_and_mirrors(total: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, total))
    low, high = wilson(successes, total)
    assert 0 <= low <= successes / total <= high <= 1
    other_low, other_high = wilson(total - successes, total)
    assert (1 - other_high, 1 - other_low) == pytest.approx((low, high), abs=1e-12)


def test_ties_count_half() -> None:
    assert wins([1.0, 2.0, 3.0], [0.0, 2.0, 4.0]) == [1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="2 scores on one side"):
        wins([1.0, 2.0], [1.0])


def over_seeds(*seeds: Estimate) -> SuiteFigure:
    """The figure of an arm whose seeds have these; the start model has the last one's."""

    def of(estimate: Estimate) -> dict[str, SuiteScores]:
        figure = SuiteFigure(value=estimate.value, low=estimate.low, high=estimate.high)
        return {"s": SuiteScores({"f": figure}, {"f": estimate.values})}

    return summarize_suites([of(seed) for seed in seeds], [of(seeds[-1])] * len(seeds))["s"]["f"]


def test_prompts_with_more_instructions_do_not_widen_the_interval_over_seeds() -> None:
    """A share of instructions is a ratio: of 1 it is 1 in every resample, and no end of its interval is above 1."""
    counts = [1 + row % 3 for row in range(60)]
    nearly = ratio_estimate("f", [[row % 7 > 0] * count for row, count in enumerate(counts)], "", seed=0)
    assert sum(nearly.values) / 60 == pytest.approx(nearly.value)
    two = over_seeds(nearly, nearly)
    assert (two.low, two.high) == pytest.approx((nearly.low, nearly.high), abs=0.02)
    followed = ratio_estimate("f", [[True] * count for count in counts], "", seed=0)
    assert set(followed.values) == {1.0}
    ignored = ratio_estimate("f", [[False] * count for count in counts], "", seed=0)
    gain = over_seeds(followed, ignored).gain
    assert gain is not None
    assert -1 <= gain.low <= gain.value <= gain.high <= 1


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_without_spread_has_wilsons_interval(value: float) -> None:
    """No toxic continuation of 8 for each of 50 openings, or all pairs won: other rows may be different."""
    shares = mean_estimate("f", [value] * 50 + [math.nan], "", seed=0, shares=True)
    assert (shares.low, shares.high) == wilson(50 * value, 50)
    verdicts = ratio_estimate("f", [[bool(value)] * (1 + row % 3) for row in range(50)], "", seed=0)
    assert (verdicts.low, verdicts.high) == wilson(50 * value, 50)
    two = over_seeds(shares, shares)
    assert (two.low, two.high) == (shares.low, shares.high)
    gain = over_seeds(mean_estimate("f", [1 - value] * 51, "", seed=0, shares=True), shares).gain
    assert gain is not None
    assert gain.low < gain.high
    alike = mean_estimate("f", [value] * 50, "", seed=0)  # of lengths, say
    assert alike.low == alike.high == value
