"""The loop of a run: steps, evaluation, checkpoints, interruption. A trainer iterates over `session.steps()`."""

from __future__ import annotations

import datetime
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from rlhf.errors import (
    CheckpointError,
    DivergenceError,
    NonFiniteScores,
    RewardError,
    SamplingError,
    UserError,
    how_to_continue,
)
from rlhf.guard.best import BestState
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.memory import MemoryProfiler
from rlhf.tracking.checkpoint import Checkpoints
from rlhf.tracking.metrics import Metrics, describe
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import MEMBERS
from rlhf.tracking.trackers import JsonlLogger, SilentLogger, Trackers
from rlhf.training.feed import StreamFeed

if TYPE_CHECKING:  # which import this module
    from rlhf.training.health import BestKeeper, HealthMonitor

E = TypeVar("E", bound=UserError)  # an error that the run is saved at


class Recorder:
    """Writes the run's files and its display. Metrics and samples are deterministic; timings are kept apart."""

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        trackers: Trackers,
        *,
        show: Sequence[str],
        writes: bool = True,
        memory: MemoryProfiler | None = None,
        usd_per_hour: float | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the files.

        Args:
            show: the metrics for the progress display.
            writes: False on ranks that leave the files to the main rank.
            memory: measures the peak memory of each phase.
            usd_per_hour: price of the machine; None: not known.
            release: called on closing, to unlock the folder.
        """
        self.folder = folder
        self.progress = progress
        self.trackers = trackers
        trackers.warn_by(self.note)
        self.show = tuple(show)
        self._memory = memory
        self._usd_per_second = None if usd_per_hour is None else usd_per_hour / 3600
        self._usd = 0.0 if usd_per_hour is None else sum(row.get("usd") or 0.0 for row in folder.read_timings())
        self._release = release
        self._writes = writes

        def open_logger(path: Path) -> JsonlLogger | SilentLogger:
            return JsonlLogger(path) if writes else SilentLogger()

        self._metrics = open_logger(folder.metrics)
        self._samples = open_logger(folder.samples)
        self._timings = open_logger(folder.timings)
        self._notes = open_logger(folder.notes)
        self._alarms = open_logger(folder.alarms)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time and the peak memory inside the context towards `name`."""
        with self.progress.phase(name), self._memory.phase(name) if self._memory else nullcontext():
            yield

    def note(self, text: str) -> None:
        """Print a message for the user and keep it for the report."""
        self.progress.note(text)
        self._notes.log({"step": self.progress.step, "text": text})

    def metrics(self, step: int, values: Mapping[str, float], *, tokens: int, memory_mb: float) -> None:
        """Write one line of metrics.jsonl and one of timings.jsonl, and update trackers and display."""
        for name in values:
            describe(name)
        seconds = self.progress.take_timings()
        total_seconds = float(sum(seconds.values()))
        self._metrics.log({"step": step, **values})
        self._timings.log(
            {
                "step": step,
                "seconds": seconds,
                "tokens_per_second": tokens / total_seconds if total_seconds else None,
                "peak_memory_mb": memory_mb,
                "peak_memory_mb_by_phase": self._memory.take() if self._memory else {},
                **self._cost(total_seconds),
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
        )
        cost = {} if self._usd_per_second is None else {"cost/usd": self._usd}
        self.trackers.log(step, {**values, **cost})
        self.progress.update(step, values, self.show)

    def _cost(self, seconds: float) -> dict[str, float]:
        """Return the price of a step in USD, and add it to the run's."""
        if self._usd_per_second is None:
            return {}
        usd = seconds * self._usd_per_second
        self._usd += usd
        return {"usd": usd}

    def alarm(self, record: Mapping[str, object], text: str) -> None:
        """Append a line to alarms.jsonl, and print it as a note."""
        self._alarms.log(record)
        self.note(text)

    def samples(self, records: Sequence[Mapping[str, object]]) -> None:
        """Append records to samples.jsonl, and send them to the trackers."""
        for record in records:
            self._samples.log(record)
        if records:
            self.trackers.log_samples(self.progress.step, records)

    def ratios(self, figure: Mapping[str, object]) -> None:
        """Write the ratios of the latest logged step for the report, in place of those before."""
        if self._writes:
            self.folder.write_ratios(figure)

    def positions(self) -> dict[str, int]:
        """Flush the deterministic files to disk and return their lengths in bytes."""
        return {
            "metrics": self._metrics.position(),
            "samples": self._samples.position(),
            "alarms": self._alarms.position(),
        }

    def rewind(self, positions: Mapping[str, int]) -> None:
        """Cut the deterministic files back to the positions stored in a checkpoint."""
        self._metrics.truncate(positions["metrics"])
        self._samples.truncate(positions["samples"])
        self._alarms.truncate(positions["alarms"])

    def close(self) -> None:
        """Close the files and the trackers, and unlock the folder."""
        try:
            self.trackers.close()  # while there are notes to tell of a failure in
        finally:
            for logger in (self._metrics, self._samples, self._timings, self._notes, self._alarms):
                logger.close()
            self._release()


STATE = "state.json"


@dataclass
class TrainState:
    """The values in a checkpoint besides weights and optimizers. Everything else follows from the seed and the step."""

    step: int = 0
    kl_coef: float = 0.0
    penalty_coef: float = 0.0
    multiplier: float = 0.0  # of algorithm.lagrange, learned
    violation: float = 0.0  # of its limit, in the latest step
    score_moments: dict[str, float] = field(default_factory=dict)  # of reward.shaping.normalize
    completions: int = 0  # sampled since the start
    skipped: int = 0  # optimizer steps skipped because of a NaN or Inf
    idle: int = 0  # optimizer steps in which a model was not updated: its gradient was exactly zero
    unscored: int = 0  # steps skipped because a score was NaN or infinite
    bad_in_a_row: int = 0  # consecutive skipped steps up to now, for either reason
    lr_scale: float = 1.0  # product of guard.lr_factor over the alarms that lowered the learning rates
    best: BestState | None = None  # of checkpoint.best
    owed: dict[str, float] | None = None  # metrics of `step` still to be written, if its evaluation failed
    inputs: dict[str, str] = field(default_factory=dict)  # digests of the start weights and of the rows, by setting

    def write(self, folder: Path, positions: Mapping[str, int]) -> None:
        """Write state.json."""
        (folder / STATE).write_text(json.dumps({"state": asdict(self), "positions": dict(positions)}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> tuple[TrainState, dict[str, int]]:
        """Read state.json; return the state and the positions of metrics.jsonl and samples.jsonl.

        Raises:
            CheckpointError: it was written by another version of this program.
        """
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        try:
            best = content["state"].pop("best", None)
            state = cls(**content["state"], best=BestState(**best) if best else None)
            return state, content["positions"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / STATE} was written by another version of this program: {error}"
            ) from error


class Interruption:
    """A context in which Ctrl-C or SIGTERM requests a stop after the current step; a second Ctrl-C stops at once.

    Only the main thread of a process can handle signals: in any other, nothing requests a stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@runtime_checkable
class Budget(Protocol):
    """A limit on a run besides its number of steps. It survives an interruption: it counts earlier costs."""

    @property
    def spent(self) -> bool:
        """Return whether the budget is used up, so that the run must end."""

    def spend(self, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        """Count a step: its metrics, the tokens of its rows, and the seconds it took without evaluation."""


@dataclass
class Session:
    """A run and its loop. `save` writes weights and optimizers to a folder; `evaluate` returns held-out metrics."""

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
    resumed: bool = False  # continues from a checkpoint, so the evaluation before step 1 is done
    exports_again: bool = False  # how the model is exported was changed since the last start
    interrupted: bool = False
    budget: Budget | None = None
    health: HealthMonitor | None = None
    best: BestKeeper | None = None
    feed: StreamFeed | None = None  # mixed or streamed data, which may end, and has metrics of its own
    ranks: Distributed = SINGLE_PROCESS  # decisions of the main rank hold on every rank

    def __post_init__(self) -> None:
        self._step_metrics: dict[str, float] = {}
        self._step_tokens = 0
        self._tokens = 0  # since the last line of metrics
        self._saved_at = self.state.step if self.resumed and self.state.owed is None else None

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 1; after each, evaluate, write metrics, save and stop as due."""
        with Interruption() as stop:
            if not self.resumed:
                evaluation = self._run_evaluation()
                if evaluation and self.best is not None:
                    evaluation |= self.best.observe(0)
                self._record(0, evaluation)
            if self.state.owed is not None:
                self._finish_step(self.state.owed)
            stopped = self._is_stopped(stop)
            while not self._is_over() and not stopped:
                step, start = self.state.step + 1, time.perf_counter()
                yield step
                self._end_step(step, time.perf_counter() - start)
                stopped = self._is_stopped(stop)
            if stopped and not self._is_over():
                self.interrupted = True
                self._checkpoint()
                reason = self.health.stop_reason if self.health is not None else ""
                self.recorder.note(f"stopped at step {self.state.step}{reason}; {self._how_to_continue} from there")
                return
        self._checkpoint()

    @property
    def had_ended(self) -> bool:
        """Return whether the run was over before this start: there is nothing left to train."""
        return self.resumed and self.state.owed is None and self._is_over()

    @property
    def _how_to_continue(self) -> str:
        folder = self.recorder.folder.path
        return how_to_continue(folder.parents[1] if folder.parent.name == MEMBERS else folder)

    def _is_stopped(self, stop: Interruption) -> bool:
        """Return whether a rank was asked to stop, or an alarm stops the run."""
        return self.ranks.any(stop.requested or (self.health is not None and bool(self.health.stop_reason)))

    def report(self, metrics: Mapping[str, float], *, tokens: int) -> None:
        """Report the metrics of the current step and the number of its tokens."""
        self._step_metrics = dict(metrics) | (self.feed.metrics(self.state.step + 1) if self.feed is not None else {})
        self._step_tokens = tokens
        self._tokens += tokens

    def check_update(self, seen: Metrics) -> None:
        """Check the metrics of an optimizer step, and count it if it was skipped or had a zero gradient.

        An optimizer step that was taken resets the count of consecutive skipped ones.

        Raises:
            DivergenceError: too many steps in a row were skipped.
        """
        if "skipped/nonfinite" in seen:
            self.state.skipped += 1
            self._count_bad_step("a NaN or Inf in the loss or a gradient")
        else:
            self.state.bad_in_a_row = 0
            self.state.idle += "skipped/zero_gradient" in seen

    def skip_step(self, error: NonFiniteScores) -> None:
        """Skip a step because a score is NaN or infinite, and count it.

        Raises:
            NonFiniteScores: it is the first step, so the reward source is broken rather than one completion odd.
            DivergenceError: too many steps in a row were skipped.
        """
        if self.state.step == 0:
            raise error
        self.state.unscored += 1
        self._count_bad_step(str(error))

    def save_and_explain(self, error: E) -> E:
        """Save the run as it was after its last step, and return the error with a hint on how to continue."""
        if self.state.step == 0:  # nothing to save
            return error
        self._checkpoint()
        told = str(error).removesuffix(".")
        return type(error)(f"{told}. The run is saved at step {self.state.step}: {self._how_to_continue} from there")

    def explain_update(self, error: E, *, changed: bool) -> E:
        """Return an error within an update with a hint on how to continue, from now or from the newest checkpoint.

        The run is saved if no weight has been `changed` since its last step, and no other process waits for this one.
        """
        if not changed and self.ranks.world == 1:
            return self.save_and_explain(error)
        if not self.checkpoints.all():
            return error
        told = str(error).removesuffix(".")
        return type(error)(f"{told}; {self._how_to_continue} from the newest checkpoint")

    def _count_bad_step(self, reason: str) -> None:
        state = self.state
        state.bad_in_a_row += 1
        if state.bad_in_a_row == 1:
            self.recorder.note(f"step {state.step + 1}: {reason}: the step was not taken")
        if state.bad_in_a_row >= self.max_bad_steps:
            folders = self.checkpoints.all()
            raise DivergenceError(
                f"{reason}; no step could be taken {state.bad_in_a_row} times in a row (schedule.max_bad_steps), so "
                f"the run stopped in step {state.step + 1}. "
                "Look at the data and the reward, or try a lower policy.lr or max_grad_norm. "
                + (
                    f"The last good checkpoint is {folders[-1]}: {self._how_to_continue} from there"
                    if folders
                    else "There is no checkpoint yet: the run begins again"
                )
            )

    def _is_over(self) -> bool:
        is_over = (
            self.state.step >= self.total_steps
            or (self.budget is not None and self.budget.spent)
            or (self.best is not None and self.best.patience_is_over)
            or (self.feed is not None and not self.feed.has_batch(self.state.step + 1))
        )
        return self.ranks.from_main(is_over)  # a budget of seconds may differ between ranks

    def _end_step(self, step: int, seconds: float) -> None:
        self.state.step = step
        if self.budget is not None:
            self.budget.spend(step, self._step_metrics, tokens=self._step_tokens, seconds=seconds)
        self._finish_step(self._step_metrics)

    def _finish_step(self, metrics: Mapping[str, float]) -> None:
        """Evaluate, write metrics and save as due after a step; save nothing after a skipped one."""
        step = self.state.step
        if step == 1 and self.health is not None:
            self.health.read_first_step(metrics)  # logged or not
        due = self._is_over() or (self.eval_every and step % self.eval_every == 0)
        evaluation = self._run_evaluation(metrics) if due else {}
        if due and evaluation and self.best is not None:
            evaluation |= self.best.observe(step)
        self.state.owed = None
        if due or step % self.log_every == 0:
            self._record(step, {**metrics, **evaluation})
        if self.checkpoint_every and step % self.checkpoint_every == 0 and not self.state.bad_in_a_row:
            self._checkpoint()

    def _run_evaluation(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the evaluation of the step; if the judge fails, save the run with the step's unwritten `metrics`."""
        try:
            with self.recorder.phase("evaluate"):
                return self.evaluate(self.state.step)
        except NonFiniteScores as error:
            if self.state.step == 0:
                raise
            self.recorder.note(f"step {self.state.step} is not evaluated: {error}")
            return {}
        except (RewardError, SamplingError) as error:
            self.state.owed = dict(metrics) if metrics is not None else None
            raise self.save_and_explain(error) from error

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.recorder.metrics(step, metrics, tokens=self._tokens, memory_mb=self.memory_mb())
            self._tokens = 0
            if self.health is not None:
                self.health.observe(step, metrics)

    def _checkpoint(self) -> None:
        if self._saved_at == self.state.step:
            return
        with self.recorder.phase("checkpoint"):

            def write(folder: Path) -> None:
                self.save(folder)
                self.ranks.on_main(lambda: self.state.write(folder, self.recorder.positions()))

            self.checkpoints.save(self.state.step, write)
            if self.best is not None:
                self.best.prune(self.checkpoints.all())
        self._saved_at = self.state.step
