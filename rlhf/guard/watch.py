"""Decide when an alarm goes off and when it is over: a fold over the lines of metrics.jsonl, replayed on resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf.guard.alarm import Alarm, Reading
from rlhf.guard.alarms import ALARMS
from rlhf.guard.history import History, RunFacts


@dataclass
class _State:
    bad: int = 0  # readings in a row
    good: int = 0
    since: int = 0  # the step of the first of the bad readings
    is_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Firing:
    """An alarm that goes off at a step, or is over."""

    alarm: Alarm
    step: int
    since: int
    reading: Reading
    is_over: bool = False

    def __str__(self) -> str:
        """Return what it saw, since when, what usually causes it and what to try."""
        alarm, value = self.alarm, f"{self.reading.value:.3g} (limit {self.reading.limit:.3g})"
        if self.is_over:
            return f"alarm over: {alarm.name}: {alarm.metrics[0]} is back at {value}"
        return (
            f"ALARM {alarm.name}: {alarm.sees}: {value}, since step {self.since}. "
            f"Usually: {alarm.causes}. Try: {alarm.cure}"
        )

    def record(self) -> dict[str, object]:
        """Return the line of alarms.jsonl."""
        return {
            "step": self.step,
            "alarm": self.alarm.name,
            "event": "over" if self.is_over else "on",
            "since": self.since,
            "metric": self.alarm.metrics[0],
            "value": self.reading.value,
            "limit": self.reading.limit,
            "sees": self.alarm.sees,
            "causes": self.alarm.causes,
            "cure": self.alarm.cure,
        }


class Watch:
    """The alarms of a run. Equal lines of metrics give equal firings, so a resumed run replays those it has."""

    def __init__(self, facts: RunFacts | None = None, alarms: Sequence[Alarm] = ALARMS) -> None:
        self.alarms = tuple(alarms)
        self._history = History(facts)
        self._states = {alarm.name: _State() for alarm in alarms}

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> list[Firing]:
        """Add a logged step; return the alarms that go off or are over at it."""
        self._history.add(metrics)
        firings = [self._advance(alarm, step) for alarm in self.alarms]
        return [firing for firing in firings if firing is not None]

    def _advance(self, alarm: Alarm, step: int) -> Firing | None:
        reading = alarm.read(self._history)
        if reading is None:
            return None
        state = self._states[alarm.name]
        if reading.is_bad:
            state.since = step if state.bad == 0 and not state.is_on else state.since
            state.bad, state.good = state.bad + 1, 0
        else:
            state.bad, state.good = 0, state.good + 1
        if not state.is_on and state.bad >= alarm.patience:
            state.is_on = True
            return Firing(alarm=alarm, step=step, since=state.since, reading=reading)
        if state.is_on and state.good >= alarm.patience:
            state.is_on = False
            return Firing(alarm=alarm, step=step, since=state.since, reading=reading, is_over=True)
        return None
