"""What an alarm is: a pure function of the history of the metrics, and what to say when it goes off.

Of the history of each metric, the start and the recent past are kept; of the evaluations, which are few, all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

KEPT = 40  # recent values of each metric
START = 5  # first values of a metric in training, of which the mean is where it started
HELD_OUT = "eval/"


@dataclass
class Track:
    """One metric: its first values and its recent ones."""

    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0

    def add(self, value: float) -> None:
        """Append a value."""
        if len(self.first) < START:
            self.first.append(value)
        self.recent.append(value)
        self.count += 1


@dataclass(frozen=True)
class RunFacts:
    """What a limit depends on besides the metrics."""

    kl_target: float | None = None  # of an adaptive controller, in nats per sequence
    is_rounded: bool = False  # arithmetic in bfloat16
    is_ahead: bool = False  # completions come from the policy of the step before
    reads_ratio: bool = True  # false: a pair loss with the sampler's log-probabilities, which no loss reads


class History:
    """The metrics of a run, line by line of metrics.jsonl. A value that is not finite is as one that is not there."""

    def __init__(self, facts: RunFacts | None = None) -> None:
        self.facts = facts or RunFacts()
        self._tracks: dict[str, Track] = {}
        self._latest: dict[str, float] = {}
        self._evaluations: list[dict[str, float]] = []  # what is held out, of the lines before the latest

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Append the metrics of a logged step."""
        if held_out := {name: value for name, value in self._latest.items() if name.startswith(HELD_OUT)}:
            self._evaluations.append(held_out)
        self._latest = {
            name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)
        }
        for name, value in self._latest.items():
            self._tracks.setdefault(name, Track()).add(value)

    def now(self, name: str) -> float | None:
        """Return the value in the latest line; None where that has none."""
        return self._latest.get(name)

    def start(self, name: str) -> float | None:
        """Return where the metric started: the mean of its first values, or the first evaluation; None before that."""
        track = self._tracks.get(name)
        if track is None:
            return None
        if name.startswith(HELD_OUT):
            return track.first[0]
        return fmean(track.first) if track.count > START else None

    def count(self, name: str) -> int:
        """Return how often the metric was logged."""
        return self._tracks[name].count if name in self._tracks else 0

    def before(self, name: str) -> list[float]:
        """Return the recent values before the latest line, oldest first."""
        track = self._tracks.get(name)
        if track is None:
            return []
        values = list(track.recent)
        return values[:-1] if name in self._latest else values

    def evaluations(self, *names: str) -> list[tuple[float, ...]]:
        """Return the values of held-out metrics in the evaluations before the latest line that have all of them."""
        return [tuple(line[name] for name in names) for line in self._evaluations if line.keys() >= set(names)]


@dataclass(frozen=True)
class Reading:
    """What an alarm saw in the latest line of metrics: a value, its limit, and whether it is beyond it."""

    value: float
    limit: float
    is_bad: bool


Read = Callable[[History], Reading | None]
"""Reads the latest line; None where it cannot tell: the metric is not there, or has not been for long enough."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A row of the table. It goes off after `patience` bad readings in a row, and is silent until as many good ones."""

    name: str
    metrics: tuple[str, ...]  # the first is the one whose curve is marked
    reads: str = ""  # what the value of a reading is; empty: the first metric
    read: Read
    patience: int
    sees: str  # the condition, in words
    causes: str
    cure: str
    source: str

    @property
    def quantity(self) -> str:
        """Return what the value of a reading is, in words."""
        return self.reads or self.metrics[0]


def above(name: str, limit: float, *, after: int = 0) -> Read:
    """Return a reading of a metric that is bad above the limit, from its `after`-th value on."""

    def read(history: History) -> Reading | None:
        value = history.now(name)
        if value is None or history.count(name) <= after:
            return None
        return Reading(value, limit, value > limit)

    return read


def below(name: str, limit: float, *, after: int = 0) -> Read:
    """Return a reading of a metric that is bad below the limit, from its `after`-th value on."""

    def read(history: History) -> Reading | None:
        value = history.now(name)
        if value is None or history.count(name) <= after:
            return None
        return Reading(value, limit, value < limit)

    return read


def grown(name: str, factor: float, *, plus: float = 0.0) -> Read:
    """Return a reading that is bad above `factor` times where the metric started, plus `plus`."""

    def read(history: History) -> Reading | None:
        value, start = history.now(name), history.start(name)
        if value is None or start is None:
            return None
        limit = factor * abs(start) + plus
        return Reading(value, limit, value > limit)

    return read


def shrunk(name: str, share: float) -> Read:
    """Return a reading that is bad below `share` of where the metric started, if that was above 0."""

    def read(history: History) -> Reading | None:
        value, start = history.now(name), history.start(name)
        if value is None or start is None or start <= 0:
            return None
        return Reading(value, share * start, value < share * start)

    return read


def rose(name: str) -> Read:
    """Return a reading of a count that is bad wherever it is larger than in the line before, or than 0 in the first."""

    def read(history: History) -> Reading | None:
        value, before = history.now(name), history.before(name)
        if value is None:
            return None
        last = before[-1] if before else 0.0
        return Reading(value, last, value > last)

    return read


def worse_than_best(name: str, factor: float) -> Read:
    """Return a reading of a held-out loss that is bad above `factor` times its smallest value so far."""

    def read(history: History) -> Reading | None:
        value, before = history.now(name), history.evaluations(name)
        if value is None or not before:
            return None
        limit = factor * min(before)[0]
        return Reading(value, limit, value > limit)

    return read
