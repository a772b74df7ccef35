"""The laws of over-optimization: known coefficients come back, intervals cover, peaks lie at their computed places."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from overoptimization_laws import Law, features, fit_law, fit_with_intervals, peak, predicted_gain

LAWS: tuple[Law, ...] = ("best_of_n", "rl")
DISTANCES = np.array([0.0, 0.5, 1.0, 2.0, 3.0])


def test_the_laws_by_hand() -> None:
    d = np.array([0.0, 1.0, 2.0, math.e])
    assert predicted_gain(d, 3.0, 0.5, "best_of_n").tolist() == pytest.approx(
        [0.0, 2.5, 4.0, math.e * (3 - 0.5 * math.e)]
    )
    assert predicted_gain(d, 3.0, 0.5, "rl").tolist() == pytest.approx(
        [0.0, 3.0, 2 * (3 - 0.5 * math.log(2)), math.e * 2.5]
    )
    assert features(np.array([0.0]), "rl").tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("law", LAWS)
def test_known_coefficients_come_back(law: Law) -> None:
    gain = predicted_gain(DISTANCES, 1.7, 0.4, law)
    assert fit_law(DISTANCES, gain, law) == pytest.approx((1.7, 0.4), abs=1e-9)


@pytest.mark.parametrize("law", LAWS)
def test_the_peak_is_where_no_neighbour_is_higher(law: Law) -> None:
    top = peak(1.2, 0.5, law)
    assert top is not None
    kl, gain = top
    around = predicted_gain(np.sqrt([kl * 0.98, kl, kl * 1.02]), 1.2, 0.5, law)
    assert around[1] == pytest.approx(gain)
    assert around[1] > max(around[0], around[2])
    assert peak(1.2, 0.0, law) is None
    assert peak(1.2, -0.1, law) is None


def test_one_distance_determines_nothing() -> None:
    with pytest.raises(ValueError, match="two distances"):
        fit_law(np.array([0.0, 1.0, 1.0]), np.array([0.0, 1.0, 1.1]), "rl")


@pytest.mark.parametrize("law", LAWS)
def test_intervals_cover_the_truth_about_as_often_as_they_say(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 data sets of 25 noisy curves: 95 % intervals of each coefficient should cover about 57 times."""
    monkeypatch.setattr("overoptimization_laws.RESAMPLES", 200)
    random, alpha, beta = np.random.default_rng(0), 1.5, 0.3
    truth = predicted_gain(DISTANCES, alpha, beta, law)
    covered = {"alpha": 0, "beta": 0}
    for number in range(60):
        level = random.normal(0, 0.5, (25, 1)) * DISTANCES  # the noise that the points of a curve share
        gains = truth + level + random.normal(0, 0.2, (25, len(DISTANCES)))
        fit = fit_with_intervals(np.broadcast_to(DISTANCES, gains.shape), gains, law, seed=number)
        covered["alpha"] += fit.alpha.low <= alpha <= fit.alpha.high
        covered["beta"] += fit.beta.low <= beta <= fit.beta.high
    assert all(48 <= count <= 60 for count in covered.values()), covered


def test_a_single_curve_has_an_interval_from_its_points() -> None:
    gains = predicted_gain(DISTANCES, 1.5, 0.3, "rl") + np.array([0.0, 0.1, -0.1, 0.1, -0.1])
    fit = fit_with_intervals(DISTANCES[None], gains[None], "rl", seed=0)
    assert fit.alpha.low < fit.alpha.value < fit.alpha.high
    assert fit.points == 5
    assert fit.residual > 0
