"""Watch the metrics of a run while it trains, and do about an alarm what the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.config.guard import GuardConfig
from rlhf.guard.alarms import ALARMS
from rlhf.guard.history import RunFacts
from rlhf.guard.watch import Firing, Watch
from rlhf.training.session import Recorder, TrainState


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
