"""Watch a run while it trains: act on alarms by the configuration, and keep the best checkpoint.

Start and end of alarms are a fold over the lines of metrics.jsonl, which is replayed on resume. The
best checkpoint is chosen by evaluations that are made anyway, never by noise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from rlhf.config.run import BestConfig, GuardConfig
from rlhf.errors import ConfigError
from rlhf.guard.alarms.alarm import Alarm, Reading, all_alarms
from rlhf.guard.alarms.history import HELD_OUT, History, RunFacts
from rlhf.guard.best import Gain, next_best
from rlhf.guard.first_step import flat_reward_note
from rlhf.models.folders import MODEL, find_export_damage
from rlhf.runtime.distributed import Distributed
from rlhf.tracking.checkpoint import CHECKPOINT_NAME, replace_folder, write_manifest
from rlhf.training.session import STATE, Recorder, TrainState


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
        """Return the reading, its first step, the usual causes and the cure."""
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
    """The alarms of a run. Equal lines of metrics give equal firings, so a resumed run replays its own."""

    def __init__(self, facts: RunFacts | None = None, alarms: Sequence[Alarm] | None = None) -> None:
        """Watch for these alarms; None: for all of them."""
        self.alarms = all_alarms() if alarms is None else tuple(alarms)
        self._history = History(facts)
        self._states = {alarm.name: _State() for alarm in self.alarms}

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
        patience = self._patience(alarm)
        if not state.is_on and state.bad >= patience:
            state.is_on = True
            return Firing(alarm=alarm, step=step, since=state.since, reading=reading)
        if state.is_on and state.good >= patience:
            state.is_on = False
            return Firing(alarm=alarm, step=step, since=state.since, reading=reading, is_over=True)
        return None

    def _patience(self, alarm: Alarm) -> int:
        """Return 1 for an alarm on held-out metrics in a run with a single evaluation."""
        is_held_out = alarm.metrics[0].startswith(HELD_OUT)
        return 1 if is_held_out and self._history.facts.evaluates_once else alarm.patience


class HealthMonitor:
    """The alarms of a run and their actions, which change only the state of a checkpoint.

    They watch the content of metrics.jsonl: on resume the lines up to the checkpoint are replayed, so that a
    resumed run gives the same alarms.jsonl, byte for byte.
    """

    def __init__(self, config: GuardConfig, facts: RunFacts, state: TrainState, recorder: Recorder) -> None:
        """Watch for the alarms that `config` does not ignore."""
        self.config, self.facts, self.state, self.recorder = config, facts, state, recorder
        self.watch = Watch(facts, [alarm for alarm in all_alarms() if config.action(alarm.name) != "ignore"])
        self.stop_reason = ""  # why the run is to stop; empty: it is not

    def replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Observe the lines of metrics.jsonl that a resumed run has already, without acting on them."""
        for row in rows:
            self.watch.observe(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def read_first_step(self, metrics: Mapping[str, float]) -> None:
        """Note why nothing can be learned from the scores of the first step, if it is so."""
        if (note := flat_reward_note(metrics, self.facts)) is not None:
            self.recorder.note(f"step 1: {note}")

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Observe a logged step: record alarms that go off or are over, and act."""
        for firing in self.watch.observe(step, metrics):
            action = "none" if firing.is_over else self.config.action(firing.alarm.name)
            text = "" if firing.is_over else self._act(action, firing)
            self.recorder.alarm({**firing.record(), "action": action}, f"step {step}: {firing}{text}")

    def _act(self, action: str, firing: Firing) -> str:
        """Take the action that the configuration has for an alarm; return it in words."""
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


RowValues = Mapping[str, Sequence[float]]
"""The latest evaluation row by row: `score`, `loss` and `accuracy`, as far as they exist."""
_LOWER_IS_BETTER = ("loss",)


class BestKeeper:
    """The best checkpoint so far: a folder `best/step-…` with the exported model, and its rows in the run's state.

    A folder stays until no checkpoint that a restart may continue from names it, so a resumed run has the one that its
    state names, in spite of later ones.
    """

    def __init__(
        self,
        config: BestConfig,
        state: TrainState,
        recorder: Recorder,
        *,
        rows: Callable[[], RowValues],
        write: Callable[[Path], None],
        ranks: Distributed,
    ) -> None:
        """Set how the latest evaluation is read row by row and how the model is written into a folder."""
        self.config, self.state, self.recorder = config, state, recorder
        self._rows, self._write, self._ranks = rows, write, ranks
        self.folder = recorder.folder.path / "best"

    @property
    def patience_is_over(self) -> bool:
        """Return whether as many evaluations in a row as patience allows were no new best."""
        best, patience = self.state.best, self.config.patience
        return patience is not None and best is not None and best.since >= patience

    def observe(self, step: int) -> dict[str, float]:
        """Compare the evaluation of this step with the best so far, keep it if it is better; return the metrics.

        Raises:
            ConfigError: the run does not measure what checkpoint.best.by names.
        """
        name, values = self._values()
        before = self.state.best
        if name == "accuracy" and before is not None and not {*before.values} <= {0.0, 0.5, 1.0, None}:
            before = None  # an earlier version kept KTO's best by another measure
        self.state.best, gain = self._ranks.from_main(next_best(before, values, step, self.config.confidence))
        if self.state.best.step == step and self.state.best.since == 0:
            self._keep(step, name, [value for value in values if value is not None], gain)
        if self.patience_is_over:
            self.recorder.note(
                f"no evaluation has beaten step {self.state.best.step} {self.state.best.since} times in a row "
                "(checkpoint.best.patience): the run ends here"
            )
        changes = {} if gain is None else {"best/gain": gain.mean, "best/gain_low": gain.low}
        return {"best/step": float(self.state.best.step), **changes}

    def _values(self) -> tuple[str, list[float | None]]:
        rows = {name: list(values) for name, values in self._rows().items() if len(values)}
        auto = [name for name in ("score", "loss", "accuracy") if name in rows]
        wanted = auto if self.config.by == "auto" else [self.config.by]
        if not wanted or wanted[0] not in rows:
            raise ConfigError(
                f"checkpoint.best.by is {self.config.by}, but this run measures "
                f"{', '.join(rows) or 'nothing'} of held-out rows: set checkpoint.best.by, or the held-out data"
            )
        sign = -1.0 if wanted[0] in _LOWER_IS_BETTER else 1.0
        is_score = wanted[0] == "score"  # NaN: no verifier applies
        return wanted[0], [None if is_score and isnan(value) else sign * value for value in rows[wanted[0]]]

    def _keep(self, step: int, name: str, values: Sequence[float], gain: Gain | None) -> None:
        target = self.place(step)

        def write(folder: Path) -> None:
            self._write(folder / MODEL)
            self._ranks.on_main(lambda: self._describe(folder, step, name, values, gain))
            self._ranks.on_main(lambda: write_manifest(folder))

        self._ranks.on_main(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        with self.recorder.phase("checkpoint"):
            replace_folder(target, write, self._ranks)
        if gain is not None:
            self.recorder.note(
                f"step {step} is the best so far: {name} better by {gain.mean:.3g} [{gain.low:.3g}, {gain.high:.3g}] "
                f"on {len(values)} held-out rows"
            )

    def _describe(self, folder: Path, step: int, name: str, values: Sequence[float], gain: Gain | None) -> None:
        """Write best.json and a copy of the run's configuration, which makes the folder one that commands can name."""
        sign = -1.0 if name in _LOWER_IS_BETTER else 1.0
        record = {"step": step, "by": name, "mean": sign * sum(values) / len(values), "rows": len(values)}
        interval = {} if gain is None else {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        (folder / "best.json").write_text(json.dumps(record | interval, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(self.recorder.folder.config, folder / "config.yaml")

    def place(self, step: int) -> Path:
        """Return the folder of the best checkpoint that was kept at a step."""
        return self.folder / f"step-{step:06d}"

    def prune(self, checkpoints: Sequence[Path]) -> None:
        """Delete the folders that neither the run nor a checkpoint that it may continue from names."""

        def remove() -> None:
            named = {self.state.best.step if self.state.best is not None else -1, *map(_best_step_of, checkpoints)}
            for path in self.folder.glob("step-*") if self.folder.is_dir() else ():
                match = CHECKPOINT_NAME.fullmatch(path.name)
                if match is not None and int(match[1]) not in named:
                    shutil.rmtree(path)

        self._ranks.on_main(remove)

    def finish(self) -> Path | None:
        """Return the model to export as the run's, if it is the best checkpoint's; prune the others.

        None means the last one: restore is false, or there was no evaluation.
        """
        best = self.state.best
        if best is None or not self.config.restore:
            return None
        folder = self.place(best.step)
        if (damage := self._ranks.from_main(find_export_damage(folder))) is not None:
            self.recorder.note(f"warning: {folder}: {damage}. The last checkpoint is exported instead of the best")
            return None
        self.recorder.note(f"the exported model is the best checkpoint, of step {best.step}")
        return folder / MODEL


def _best_step_of(checkpoint: Path) -> int:
    """Return the step of the best checkpoint that a checkpoint names, -1 for none."""
    try:
        best = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["state"].get("best")
    except (OSError, ValueError, KeyError):
        return -1
    return int(best["step"]) if best else -1
