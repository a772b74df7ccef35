"""The result of a suite: named figures with their confidence intervals, and what was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from rlhf.data.skips import Skips
from rlhf.evaluation.suites.estimates import mean, wilson
from rlhf.evaluation.win_rate import bootstrap

Method = Literal["wilson", "bootstrap", "normal", "none"]


@dataclass(frozen=True)
class Figure:
    """A number with its 95 % interval over `n` rows; no interval where the method is none."""

    name: str
    value: float
    low: float | None
    high: float | None
    n: int
    interval: Method
    meaning: str


@dataclass(frozen=True)
class LeftOut:
    """A measure that the suite left out, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SuiteResult:
    """The result of one suite on one model."""

    figures: tuple[Figure, ...]
    n: int
    skipped: Mapping[str, int]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    groups: Mapping[str, tuple[Figure, ...]] = field(default_factory=dict)
    examples: tuple[Mapping[str, Any], ...] = ()
    rows: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By figure, one value per row, whose mean is the figure: for paired differences between models."""

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
            "rows": {name: list(values) for name, values in self.rows.items()},
        }


def share(name: str, values: Sequence[float], meaning: str) -> Figure:
    """Build the figure of a mean of values in [0, 1], one per independent row, with Wilson's interval."""
    low, high = wilson(sum(values), len(values))
    return Figure(name, mean(values), low, high, len(values), "wilson", meaning)


def average(name: str, values: Sequence[float], meaning: str, *, seed: int) -> Figure:
    """Build the figure of a mean of any values, one per row, with its bootstrap interval over the rows."""
    interval = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed)
    return Figure(name, mean(values), interval.low, interval.high, len(values), "bootstrap", meaning)


def share_of_parts(name: str, verdicts: Sequence[Sequence[bool]], meaning: str, *, seed: int) -> Figure:
    """Build the figure of the share of positive verdicts, several per row, with its bootstrap interval over the rows.

    The share is a ratio of two sums, R = sum_i met_i / sum_i n_i. Its error is that of the mean of the linearized
    values R + (met_i - R n_i) / mean(n), whose mean is R itself.
    """
    mean_count = sum(map(len, verdicts)) / len(verdicts)
    ratio = sum(map(sum, verdicts)) / (mean_count * len(verdicts))
    values = [ratio + (sum(row) - ratio * len(row)) / mean_count for row in verdicts]
    interval = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed)
    return Figure(name, ratio, interval.low, interval.high, len(verdicts), "bootstrap", meaning)


def skipped_and_notes(skips: Skips) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the counts of skipped rows by reason, and a note that summarizes them where there are any."""
    notes = (skips.summary(),) if skips.skipped or skips.notes or skips.cut else ()
    return dict(sorted(skips.counts.items())), notes


def _by_name(figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """Convert figures to plain data, by name."""
    return {figure.name: {key: value for key, value in asdict(figure).items() if key != "name"} for figure in figures}
