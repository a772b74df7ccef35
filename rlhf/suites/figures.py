"""The figures of a suite: proportions, means and pass@k, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from rlhf.data.rows import RowCounts
from rlhf.evaluation.win_rate import bootstrap

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal


def wilson(successes: int | float, total: int) -> tuple[float, float]:
    """Compute the 95 % score interval of a share (Wilson 1927); `successes` may count a tie half.

    (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n
    """
    assert 0 <= successes <= total, (successes, total)
    assert total, "a share of nothing"
    share, z2 = successes / total, Z95**2
    center = share + z2 / (2 * total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    low, high = (center - half) / scale, (center + half) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding may put 1 of 1 above its interval


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples is right (Chen et al. 2021, eq. 1).

        1 - C(n - c, k) / C(n, k)   for c = `correct` of n = `samples`

    Raises:
        ValueError: k is not from 1 to n, or c is not from 0 to n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, and there are {samples}")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} right of {samples} samples")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(verdicts: Sequence[Sequence[bool]], k: int) -> float:
    """Average `pass_at_k` over problems, given which samples of each problem are right."""
    if not verdicts:
        raise ValueError("pass@k of no problems")
    return math.fsum(pass_at_k(len(row), sum(map(bool, row)), k) for row in verdicts) / len(verdicts)


def wins(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return 1 where A is above B, 1/2 where they are equal, else 0."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} scores on one side and {len(b)} on the other")
    return [1.0 if x > y else 0.5 if x == y else 0.0 for x, y in zip(a, b, strict=True)]


def mean(values: Sequence[float]) -> float:
    """Compute the mean, with an exact sum."""
    if not values:
        raise ValueError("the mean of nothing")
    return math.fsum(values) / len(values)


Method = Literal["wilson", "bootstrap", "normal", "none"]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over `n` rows; no interval where the method is none."""

    name: str
    value: float
    low: float | None
    high: float | None
    n: int
    interval: Method
    meaning: str
    values: tuple[float, ...] = ()
    """One value per row, whose mean is the figure; empty for a figure that is no mean over rows."""


@dataclass(frozen=True)
class NotMeasured:
    """A measure that the suite left out, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SuiteResult:
    """The result of one suite on one model."""

    figures: tuple[Estimate, ...]
    n: int
    skipped: Mapping[str, int]
    left_out: tuple[NotMeasured, ...] = ()
    notes: tuple[str, ...] = ()
    groups: Mapping[str, tuple[Estimate, ...]] = field(default_factory=dict)
    examples: tuple[Mapping[str, Any], ...] = ()

    @property
    def rows(self) -> dict[str, list[float]]:
        """Return the values of every row, by figure: for paired differences between models."""
        return {figure.name: list(figure.values) for figure in self.figures if figure.values}

    def as_json(self) -> dict[str, Any]:
        """Convert the result to plain data, with the figures by name."""
        return {
            "n": self.n,
            "skipped": dict(self.skipped),
            "figures": _by_name(self.figures),
            "groups": {name: _by_name(figures) for name, figures in self.groups.items()},
            "left_out": [asdict(part) for part in self.left_out],
            "notes": list(self.notes),
            "examples": [dict(example) for example in self.examples],
            "rows": self.rows,
        }


def share_estimate(name: str, values: Sequence[float], meaning: str) -> Estimate:
    """Build the figure of a mean of values in [0, 1], one per independent row, with Wilson's interval."""
    low, high = wilson(sum(values), len(values))
    return Estimate(name, mean(values), low, high, len(values), "wilson", meaning, tuple(values))


def mean_estimate(name: str, values: Sequence[float], meaning: str, *, seed: int) -> Estimate:
    """Build the figure of a mean of any values, one per row, with its bootstrap interval over the rows."""
    interval = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed)
    return Estimate(name, mean(values), interval.low, interval.high, len(values), "bootstrap", meaning, tuple(values))


def ratio_estimate(name: str, verdicts: Sequence[Sequence[bool]], meaning: str, *, seed: int) -> Estimate:
    """Build the figure of the share of positive verdicts, several per row, with its bootstrap interval over the rows.

    The share is a ratio of two sums, R = sum_i met_i / sum_i n_i. Its error is that of the mean of the linearized
    values R + (met_i - R n_i) / mean(n), whose mean is R itself.
    """
    mean_count = sum(map(len, verdicts)) / len(verdicts)
    ratio = sum(map(sum, verdicts)) / (mean_count * len(verdicts))
    values = [ratio + (sum(row) - ratio * len(row)) / mean_count for row in verdicts]
    interval = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed)
    per_row = tuple(sum(row) / mean_count for row in verdicts)
    return Estimate(name, ratio, interval.low, interval.high, len(verdicts), "bootstrap", meaning, per_row)


def skipped_and_notes(skips: RowCounts) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the counts of skipped rows by reason, and a note that summarizes them where there are any."""
    notes = (skips.summary(),) if skips.skipped or skips.notes or skips.cut else ()
    return dict(sorted(skips.counts.items())), notes


def _by_name(figures: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    """Convert figures to plain data, by name."""
    apart = ("name", "values")
    return {
        figure.name: {key: value for key, value in asdict(figure).items() if key not in apart} for figure in figures
    }
