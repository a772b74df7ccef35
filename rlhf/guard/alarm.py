"""What an alarm is: a pure function of the history of the metrics, and what to say when it goes off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf.guard.history import History


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
    read: Read
    patience: int
    sees: str  # the condition, in words
    causes: str
    cure: str
    source: str


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
        value, before = history.now(name), history.before(name)
        if value is None or not before:
            return None
        limit = factor * min(before)
        return Reading(value, limit, value > limit)

    return read
