"""Defines the alarms: pure functions of the history of the metrics, with causes and cure."""

from __future__ import annotations

import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from rlhf.guard.alarms.history import History
from rlhf.section import Named


@dataclass(frozen=True)
class Reading:
    """The reading of an alarm in the latest line of metrics: a value, its limit, and whether it is beyond it."""

    value: float
    limit: float
    is_bad: bool


class Alarm(Named, ABC):
    """An alarm, whose docstring is its condition in one sentence.

    It goes off after `patience` bad readings in a row, and is silent until as many good ones. A subclass with a `name`
    is watched for in every run, unless `guard.alarms` ignores it.
    """

    metrics: tuple[str, ...]
    """The metrics that it reads; the first is the one whose curve is marked."""
    reads: str = ""
    """The meaning of a reading's value; empty: the first metric."""
    patience: int
    causes: str
    cure: str
    source: str

    @abstractmethod
    def read(self, history: History) -> Reading | None:
        """Read the latest line; None if it cannot tell: the metric is missing, or too new."""

    @property
    def sees(self) -> str:
        """Return the condition, in words."""
        text = " ".join((inspect.getdoc(type(self)) or "").split()).rstrip(".")
        return text[:1].lower() + text[1:]

    @property
    def quantity(self) -> str:
        """Return the meaning of a reading's value, in words."""
        return self.reads or self.metrics[0]


def all_alarms() -> tuple[Alarm, ...]:
    """Return every alarm that is defined, in this package and in the user's modules."""
    return tuple(alarm() for alarm in Alarm.choices().values())


class Above(Alarm):
    """A metric above a limit, from its `after`-th value on."""

    limit: float
    after: int = 0

    def read(self, history: History) -> Reading | None:
        """Compare the metric with the limit."""
        return read_level(history, self.metrics[0], self.limit, after=self.after, is_bad=operator.gt)


class Below(Alarm):
    """A metric below a limit, from its `after`-th value on."""

    limit: float
    after: int = 0

    def read(self, history: History) -> Reading | None:
        """Compare the metric with the limit."""
        return read_level(history, self.metrics[0], self.limit, after=self.after, is_bad=operator.lt)


def read_level(
    history: History, name: str, limit: float, *, after: int, is_bad: Callable[[float, float], bool]
) -> Reading | None:
    """Read a metric that has more than `after` values, and compare it with its limit."""
    value = history.now(name)
    if value is None or history.count(name) <= after:
        return None
    return Reading(value, limit, is_bad(value, limit))


class Grown(Alarm):
    """A metric above `factor` times its start, plus `plus`."""

    factor: float
    plus: float = 0.0

    def read(self, history: History) -> Reading | None:
        """Compare the metric with its start."""
        return read_growth(history, self.metrics[0], self.factor, plus=self.plus)


def read_growth(history: History, name: str, factor: float, *, plus: float) -> Reading | None:
    """Read a metric, which is bad above `factor` times its start, plus `plus`."""
    value, start = history.now(name), history.start(name)
    if value is None or start is None:
        return None
    limit = factor * abs(start) + plus
    return Reading(value, limit, value > limit)


class Shrunk(Alarm):
    """A metric below `share` of its start, if that was above 0."""

    share: float

    def read(self, history: History) -> Reading | None:
        """Compare the metric with its start."""
        value, start = history.now(self.metrics[0]), history.start(self.metrics[0])
        if value is None or start is None or start <= 0:
            return None
        return Reading(value, self.share * start, value < self.share * start)


class Rose(Alarm):
    """A count that is larger than in the line before, or than 0 in the first."""

    def read(self, history: History) -> Reading | None:
        """Compare the count with the one before."""
        value, before = history.now(self.metrics[0]), history.before(self.metrics[0])
        if value is None:
            return None
        last = before[-1] if before else 0.0
        return Reading(value, last, value > last)


class WorseThanBest(Alarm):
    """A held-out loss above its smallest value so far by more than (factor - 1) times the size of that value."""

    factor: float

    def read(self, history: History) -> Reading | None:
        """Compare the loss with its smallest value."""
        value, before = history.now(self.metrics[0]), history.evaluations(self.metrics[0])
        if value is None or not before:
            return None
        smallest = min(before)[0]  # below 0 under robust_dpo
        limit = smallest + (self.factor - 1) * abs(smallest)
        return Reading(value, limit, value > limit)
