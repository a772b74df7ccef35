"""Draw the trials of a tuning from the space of an arm: seeded, the same quantiles for every arm.

No library: this is uniform numbers and three maps of them (docs/decisions/016-own-draws-for-tuning.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.config.compare import Choices, Factor, Range, Scalar
from rlhf.errors import ConfigError

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
