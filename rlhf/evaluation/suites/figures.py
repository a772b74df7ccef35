"""What a suite finds: named figures with their intervals, and what it could not measure."""

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
    """Something the suite can measure and did not, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SuiteResult:
    """What one suite found of one model."""

    figures: tuple[Figure, ...]
    n: int
    skipped: Mapping[str, int]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    groups: Mapping[str, tuple[Figure, ...]] = field(default_factory=dict)
    examples: tuple[Mapping[str, Any], ...] = ()
    rows: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Figure -> a number for each row, whose mean is the figure: for paired differences between models."""

    def as_json(self) -> dict[str, Any]:
        """The result as plain data; figures by their names."""
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
    """The mean of values in [0, 1], each the verdict on one independent row, with Wilson's interval."""
    low, high = wilson(sum(values), len(values))
    return Figure(name, mean(values), low, high, len(values), "wilson", meaning)


def average(name: str, values: Sequence[float], meaning: str, *, seed: int) -> Figure:
    """The mean of any numbers, one a row, with its bootstrap interval over the rows."""
    found = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed)
    return Figure(name, mean(values), found.low, found.high, len(values), "bootstrap", meaning)


def share_of_parts(name: str, verdicts: Sequence[Sequence[bool]], meaning: str, *, seed: int) -> Figure:
    """Return the share of all verdicts, several a row, with its bootstrap interval over the rows.

    The share is a ratio of two sums, sum_i met_i / sum_i n_i = R. Its error is that of the mean of the linearized
    values R + (met_i - R n_i) / mean(n), whose mean is R itself.
    """
    mean_count = sum(map(len, verdicts)) / len(verdicts)
    ratio = sum(map(sum, verdicts)) / (mean_count * len(verdicts))
    values = [ratio + (sum(row) - ratio * len(row)) / mean_count for row in verdicts]
    found = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed)
    return Figure(name, ratio, found.low, found.high, len(verdicts), "bootstrap", meaning)


def skipped_and_notes(skips: Skips) -> tuple[dict[str, int], tuple[str, ...]]:
    """The counts of skipped rows by reason, and the line that shows some of them, where there are any."""
    shown = (skips.summary(),) if skips.skipped or skips.notes or skips.cut else ()
    return dict(sorted(skips.counts.items())), shown


def _by_name(figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    return {figure.name: {key: value for key, value in asdict(figure).items() if key != "name"} for figure in figures}
