"""Watch the metrics of a run while it trains, and do about an alarm what the configuration says.

When an alarm goes off and when it is over is a fold over the lines of metrics.jsonl, which is replayed on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config.run import GuardConfig
from rlhf.guard.alarm import Alarm, History, Reading, RunFacts
from rlhf.guard.alarms import ALARMS
from rlhf.training.session import Recorder, TrainState


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
            return f"alarm over: {alarm.name}: {alarm.quantity} is back at {value}"
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
            "reads": self.alarm.quantity,
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


class HealthMonitor:
    """The alarms of a run and their actions, which change only what a checkpoint stores.

    What is watched is what metrics.jsonl holds: on resume the lines up to the checkpoint are replayed, so that a
    resumed run gives the same alarms.jsonl, byte for byte.
    """

    def __init__(self, config: GuardConfig, facts: RunFacts, state: TrainState, recorder: Recorder) -> None:
        """Watch for the alarms that `config` does not ignore."""
        self.config, self.state, self.recorder = config, state, recorder
        self.watch = Watch(facts, [alarm for alarm in ALARMS if config.action(alarm.name) != "ignore"])
        self.stop_reason = ""  # why the run is to stop; empty: it is not

    def replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Observe the lines of metrics.jsonl that a resumed run has already, without acting on them."""
        for row in rows:
            self.watch.observe(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Observe a logged step: record what goes off and what is over, and act."""
        for firing in self.watch.observe(step, metrics):
            action = "none" if firing.is_over else self.config.action(firing.alarm.name)
            text = "" if firing.is_over else self._act(action, firing)
            self.recorder.alarm({**firing.record(), "action": action}, f"step {step}: {firing}{text}")

    def _act(self, action: str, firing: Firing) -> str:
        """Do what the configuration says about an alarm; return what was done, in words."""
        actions: dict[str, Callable[[Firing], str]] = {
            "stop": self._stop,
            "lower_lr": self._lower_lr,
            "raise_kl": self._raise_kl,
        }
        return actions[action](firing) if action in actions else ""

    def _stop(self, firing: Firing) -> str:
        name = firing.alarm.name
        self.stop_reason = f" by the alarm {name} (guard.alarms.{name}=warn only warns)"
        return ". The run stops after this step"

    def _lower_lr(self, firing: Firing) -> str:
        self.state.lr_scale *= self.config.lr_factor
        return f". The learning rates are {self.state.lr_scale:g} of the schedule's from here on"

    def _raise_kl(self, firing: Firing) -> str:
        self.state.kl_coef *= self.config.kl_factor
        return f". The KL coefficient is {self.state.kl_coef:g} from here on"
