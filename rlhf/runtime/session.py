"""The course of a run: steps, evaluation, checkpoints, interruption. Every loop is `for step in session.steps()`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, runtime_checkable

from rlhf.errors import CheckpointError, DivergenceError, NonFiniteScores, RewardError
from rlhf.runtime.checkpoint import Checkpoints
from rlhf.runtime.metrics import Metrics
from rlhf.runtime.ranks import ALONE, Ranks
from rlhf.runtime.recorder import Recorder

STATE = "state.json"


@dataclass
class TrainState:
    """What a checkpoint holds besides weights and optimizers. All else follows from the seed and the step."""

    step: int = 0
    kl_coef: float = 0.0
    penalty_coef: float = 0.0
    completions: int = 0  # sampled since the start
    skipped: int = 0  # optimizer steps not taken because of NaN or Inf
    idle: int = 0  # optimizer steps in which a model did not move: its gradient was exactly zero
    unscored: int = 0  # steps not taken because of a score that is NaN or infinite
    bad_in_a_row: int = 0  # of both, the last ones
    owed: dict[str, float] | None = None  # metrics of `step`, where its evaluation could not be made

    def write(self, folder: Path, positions: Mapping[str, int]) -> None:
        """state.json."""
        (folder / STATE).write_text(json.dumps({"state": asdict(self), "positions": dict(positions)}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> tuple[TrainState, dict[str, int]]:
        """The state and the positions of metrics.jsonl and samples.jsonl.

        Raises:
            CheckpointError: it was written by another version.
        """
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        try:
            return cls(**content["state"]), content["positions"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / STATE} was written by another version of this program: {error}"
            ) from error


class Interruption:
    """Ctrl-C or SIGTERM asks the run to save and stop after the step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@runtime_checkable
class Budget(Protocol):
    """What a run may spend besides its number of steps. It outlives an interruption: it knows what was spent before."""

    @property
    def spent(self) -> bool:
        """Whether the run is to end here."""

    def spend(self, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        """Count a step: its metrics, the tokens of its rows, and the seconds its loop took, evaluation apart."""


@dataclass
class Session:
    """A run's course. `save` fills a checkpoint folder with weights and optimizers; `evaluate` gives eval metrics."""

    state: TrainState
    total_steps: int
    recorder: Recorder
    checkpoints: Checkpoints
    save: Callable[[Path], None]
    evaluate: Callable[[int], dict[str, float]]
    memory_mb: Callable[[], float]
    checkpoint_every: int
    eval_every: int
    log_every: int
    max_bad_steps: int = 10
    resumed: bool = False  # continues from a checkpoint: what came before step 1 is done
    interrupted: bool = False
    budget: Budget | None = None
    ranks: Ranks = ALONE  # every process takes the same course, decided in the main one

    def __post_init__(self) -> None:
        self._pending: dict[str, float] = {}
        self._step_tokens = 0
        self._tokens = 0  # since the last line of metrics
        self._saved_at = self.state.step if self.resumed and self.state.owed is None else None

    def steps(self) -> Iterator[int]:
        """The steps still to do, from 1; around each: metrics, evaluation, checkpoint, and a stop when asked for."""
        with Interruption() as stop:
            if not self.resumed:
                self._record(0, self._evaluated())
            if self.state.owed is not None:
                self._conclude(self.state.owed)
            stopped = self.ranks.any(stop.requested)
            while not self._is_over() and not stopped:
                step, began = self.state.step + 1, time.perf_counter()
                yield step
                self._after(step, time.perf_counter() - began)
                stopped = self.ranks.any(stop.requested)
            if stopped and not self._is_over():
                self.interrupted = True
                self._checkpoint()
                self.recorder.note(f"stopped at step {self.state.step}; the same command continues from there")
                return
        self._checkpoint()

    def report(self, metrics: Mapping[str, float], *, tokens: int) -> None:
        """What the loop's body has to say of its step."""
        self._pending = dict(metrics)
        self._step_tokens = tokens
        self._tokens += tokens

    def watch(self, seen: Metrics) -> None:
        """Count an optimizer step that a NaN or Inf prevented, or that had a gradient of zero; others end a bad row.

        Raises:
            DivergenceError: there were too many in a row.
        """
        if "skipped/nonfinite" in seen:
            self.state.skipped += 1
            self._bad("a NaN or Inf in the loss or a gradient")
        else:
            self.state.bad_in_a_row = 0
            self.state.idle += "skipped/zero_gradient" in seen

    def unscored(self, error: NonFiniteScores) -> None:
        """Leave out a step because of its scores.

        Raises:
            NonFiniteScores: it is the first step: the source is broken, rather than a completion odd.
            DivergenceError: there were too many bad steps in a row.
        """
        if self.state.step == 0:
            raise error
        self.state.unscored += 1
        self._bad(str(error))

    def stopped_by(self, error: RewardError) -> RewardError:
        """Save the run as it was after its last step; the error, with how to go on."""
        if self.state.step == 0:  # there is nothing to lose
            return error
        self._checkpoint()
        return RewardError(
            f"{error}. The run is saved at step {self.state.step}: the same command continues from there"
        )

    def _bad(self, what: str) -> None:
        state = self.state
        state.bad_in_a_row += 1
        if state.bad_in_a_row == 1:
            self.recorder.note(f"step {state.step + 1}: {what}: the step was not taken")
        if state.bad_in_a_row >= self.max_bad_steps:
            whole = self.checkpoints.all()
            raise DivergenceError(
                f"{what}; no step could be taken {state.bad_in_a_row} times in a row (schedule.max_bad_steps), so the "
                f"run stopped in step {state.step + 1}. "
                + (f"The last good checkpoint is {whole[-1]}. " if whole else "There is no checkpoint yet. ")
                + "Try a lower policy.lr or max_grad_norm, and look at the data and the reward; the same command, with "
                "that changed, goes on from there"
            )

    def _is_over(self) -> bool:
        over = self.state.step >= self.total_steps or (self.budget is not None and self.budget.spent)
        return self.ranks.from_main(over)  # a budget may be one of seconds

    def _after(self, step: int, seconds: float) -> None:
        self.state.step = step
        if self.budget is not None:
            self.budget.spend(step, self._pending, tokens=self._step_tokens, seconds=seconds)
        self._conclude(self._pending)

    def _conclude(self, metrics: Mapping[str, float]) -> None:
        """What follows a step: evaluation, its line, a checkpoint; none while bad steps are counted."""
        step = self.state.step
        due = self._is_over() or (self.eval_every and step % self.eval_every == 0)
        found = self._evaluated(metrics) if due else {}
        self.state.owed = None
        if due or step % self.log_every == 0:
            self._record(step, {**metrics, **found})
        if self.checkpoint_every and step % self.checkpoint_every == 0 and not self.state.bad_in_a_row:
            self._checkpoint()

    def _evaluated(self, owed: Mapping[str, float] | None = None) -> dict[str, float]:
        """The evaluation of the step; where the judge fails, the run is saved with what it `owed` its metrics."""
        try:
            with self.recorder.phase("evaluate"):
                return self.evaluate(self.state.step)
        except NonFiniteScores as error:
            if self.state.step == 0:
                raise
            self.recorder.note(f"step {self.state.step} is not evaluated: {error}")
            return {}
        except RewardError as error:
            self.state.owed = dict(owed) if owed is not None else None
            raise self.stopped_by(error) from error

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.recorder.metrics(step, metrics, tokens=self._tokens, memory_mb=self.memory_mb())
            self._tokens = 0

    def _checkpoint(self) -> None:
        if self._saved_at == self.state.step:
            return
        with self.recorder.phase("checkpoint"):

            def write(folder: Path) -> None:
                self.save(folder)
                self.ranks.on_main(lambda: self.state.write(folder, self.recorder.positions()))

            self.checkpoints.save(self.state.step, write)
        self._saved_at = self.state.step
