"""The arithmetic of tuning: what the trials of an arm try, and by successive halving which of them goes on and wins.

Trials are drawn from the space of an arm, seeded, at the same quantiles for every arm. No library: this is uniform
numbers and three maps of them (docs/decisions/016-own-draws-for-tuning.md). Halving is that of Karnin et al. 2013,
Jamieson & Talwalkar 2016 (algorithm 1); `keep` is the eta of Li et al. 2018. A trial goes on from where it stopped, and
trial 0, the default, is in every round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rlhf.config.compare import Choices, Factor, Range, Scalar
from rlhf.errors import ConfigError

DEFAULT = 0  # the trial that is the arm as it is written
ATTEMPTS = 1000  # draws of a trial that would repeat an earlier one

Dimension = Range | Factor | Choices


def draw_trials(
    space: Mapping[str, Dimension], defaults: Mapping[str, Any], trials: int, seed: int
) -> list[dict[str, Scalar]]:
    """Draw the values of each trial; trial 0 is the default, which changes nothing.

    A draw depends on the seed, the trial and the setting alone. So trial 3 of every arm has the same quantile of its
    learning rates, more trials leave the first ones as they are, and so does another setting in the space.

    Args:
        space: setting -> its values.
        defaults: setting -> the arm's own value.
        trials: the number of trials, the default included.
        seed: the seed of the draws.

    Raises:
        ConfigError: the space has fewer configurations than there are trials, or no values around a default.
    """
    drawn: list[dict[str, Scalar]] = []
    seen = [dict(defaults)]
    for trial in range(1, trials):
        values = next((v for v in _attempts(space, defaults, trial, seed) if v not in seen), None)
        if values is None:
            raise ConfigError(
                f"tune.trials is {trials}, but the space ({', '.join(space)}) has only {len(seen)} configurations, the "
                "arm's own included: give it more values, or lower tune.trials"
            )
        seen.append(values)
        drawn.append(values)
    return [{}, *drawn]


def value_at(dimension: Dimension, default: Any, u: float) -> Scalar:
    """Map a number in [0, 1) to a value of the dimension.

        log      low (high / low)^u            around a default   default factor^(2u - 1)
        linear   low + u (high - low)          choices            the one at floor(u n)

    Numbers are rounded to four digits, or to whole ones if the default is whole.
    """
    match dimension:
        case Choices(choices=choices):
            return choices[int(u * len(choices))]
        case Factor(factor=factor):
            smallest = 1.0 if isinstance(default, int) else 0.0  # a count does not round to nothing
            return _rounded(max(smallest, default * factor ** (2 * u - 1)), default)
        case Range(low=low, high=high, scale="linear"):
            return _rounded(low + u * (high - low), default)
        case Range(low=low, high=high):
            return _rounded(low * math.exp(u * math.log(high / low)), default)


def check_default(key: str, dimension: Dimension, default: Any) -> None:
    """Check that there are values around the arm's own, if the dimension is a factor.

    Raises:
        ConfigError: the arm's own value is no number above 0.
    """
    if isinstance(dimension, Factor) and (isinstance(default, bool | str) or not default or default < 0):
        raise ConfigError(
            f"tune.space: {key} is {default!r} in this arm, so there are no values within a factor of it: give its "
            "ends instead, {low: …, high: …}, or a list"
        )


def _attempts(
    space: Mapping[str, Dimension], defaults: Mapping[str, Any], trial: int, seed: int
) -> Iterator[dict[str, Scalar]]:
    streams = {key: random.Random(f"{seed}/{trial}/{key}") for key in space}
    for _ in range(ATTEMPTS):
        yield {key: value_at(space[key], defaults[key], stream.random()) for key, stream in streams.items()}


def _rounded(value: float, default: Any) -> int | float:
    if isinstance(default, int) and not isinstance(default, bool):
        return round(value)
    return float(f"{value:.4g}")


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
