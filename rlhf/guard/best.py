"""Tell whether an evaluation is better than the best one so far by more than noise: a paired test on the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from scipy.special import stdtrit


@dataclass(frozen=True)
class Gain:
    """The mean paired difference of two evaluations, and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Return whether the whole interval is above 0."""
        return self.low > 0


@dataclass
class BestState:
    """The best checkpoint as checkpoints record it: its step, the values of its rows, and evaluations since."""

    step: int = 0
    values: list[float | None] = field(default_factory=list)  # of each held-out row, higher is better; None: not known
    since: int = 0  # evaluations in a row that were no new best


def paired_gain(new: Sequence[float | None], old: Sequence[float | None], confidence: float) -> Gain:
    """Compute the mean of new - old, row by row, and the two-sided interval of Student's t.

        d_i = new_i - old_i,   mean(d) ± t(n - 1) · s_d / √n

    A row whose value is not known in both (None) is left out. If all differences are equal the interval has no width,
    and with fewer than two rows it is unbounded.

    Raises:
        ValueError: the evaluations are not of the same number of rows.
    """
    if len(new) != len(old):
        raise ValueError(f"{len(new)} rows cannot be paired with {len(old)}")
    differences = [a - b for a, b in zip(new, old, strict=True) if a is not None and b is not None]
    if len(differences) < 2:
        return Gain(math.fsum(differences), -math.inf, math.inf)
    mean = fmean(differences)
    quantile = float(stdtrit(len(differences) - 1, 0.5 + confidence / 2))  # Student's t
    margin = quantile * stdev(differences) / len(differences) ** 0.5
    return Gain(mean, mean - margin, mean + margin)


def next_best(
    best: BestState | None, values: Sequence[float | None], step: int, confidence: float
) -> tuple[BestState, Gain | None]:
    """Return the best checkpoint after an evaluation, and the evaluation's gain over the one before.

    The first evaluation is the best so far. So is one of other rows, if the held-out data were changed in between,
    and any after one with a NaN or infinite value, which itself is never better than another.
    """
    if best is None or len(best.values) != len(values) or not _are_finite(best.values):
        return BestState(step, list(values)), None
    if not _are_finite(values):
        return BestState(best.step, best.values, best.since + 1), None
    gain = paired_gain(values, best.values, confidence)
    if gain.is_certain:
        return BestState(step, list(values)), gain
    return BestState(best.step, best.values, best.since + 1), gain


def _are_finite(values: Sequence[float | None]) -> bool:
    return all(value is None or math.isfinite(value) for value in values)
