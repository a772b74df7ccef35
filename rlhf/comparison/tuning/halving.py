"""Successive halving: which share of a tuning budget each trial gets, who goes on to the next round, and who wins.

Karnin et al. 2013, Jamieson & Talwalkar 2016 (algorithm 1); `keep` is the eta of Li et al. 2018. A trial goes on from
where it stopped, and trial 0, the default, is in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

DEFAULT = 0  # the trial that is the arm as it is written


def round_sizes(trials: int, keep: int) -> list[int]:
    """Compute how many trials each round has; the winner is chosen after the last.

        n_1 = trials,   n_{k+1} = ceil(n_k / keep),   and no round after the first with n_k <= keep

    With keep = 2: 8 trials give 8, 4, 2, and 5 give 5, 3, 2.
    """
    sizes = [trials]
    while sizes[-1] > keep:
        sizes.append(-(-sizes[-1] // keep))
    return sizes


def round_limits(sizes: Sequence[int], budget: float) -> list[float]:
    """Compute what a trial may have spent in all at the end of each round, given the budget of all trials together.

    Every round spends the same part of the budget, shared evenly by its trials:

        R_k = sum over j <= k of  B / (K n_j),   K rounds,   and so  sum over k of  n_k (R_k - R_{k-1}) = B
    """
    return [float(Fraction(budget) / len(sizes) * weight) for weight in _cumulative_weights(sizes)]


def full_budget(sizes: Sequence[int], limit: float) -> float:
    """Compute the budget of all trials together with which those of the last round reach the limit of a whole run.

    B = limit K / sum over k of (1 / n_k)
    """
    return float(Fraction(limit) * len(sizes) / _cumulative_weights(sizes)[-1])


def promote(scores: Mapping[int, float | None], places: int) -> list[int]:
    """Return the trials of the next round, in order of their numbers: the default, and the best of the others.

    A trial without a score has failed and goes no further, the default included. Of equal trials the earlier goes on.

    Args:
        scores: trial -> its score after this round.
        places: the size of the next round; fewer go on if more have failed.
    """
    ranked = sorted(_finished(scores), key=lambda trial: (trial != DEFAULT, -_finished(scores)[trial], trial))
    return sorted(ranked[:places])


def choose(scores: Mapping[int, float | None]) -> int:
    """Return the trial with the highest score after the last round; ties go to the default, then to the earlier trial.

    If every trial failed it is the default.
    """
    finished = _finished(scores)
    return min(finished, key=lambda trial: (-finished[trial], trial), default=DEFAULT)


def _finished(scores: Mapping[int, float | None]) -> dict[int, float]:
    return {trial: score for trial, score in scores.items() if score is not None}


def _cumulative_weights(sizes: Sequence[int]) -> list[Fraction]:
    return [sum((Fraction(1, size) for size in sizes[: k + 1]), Fraction(0)) for k in range(len(sizes))]
