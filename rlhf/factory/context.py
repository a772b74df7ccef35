"""Start a run: its folder, the checkpoint to resume, its engine, and its messages at the start."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from rlhf.config.load import dump, unread_warnings
from rlhf.config.run import ScheduleConfig
from rlhf.config.sections import OnlineConfig, OptimizerConfig, RewardModelConfig, TrainConfig
from rlhf.data.mixture import MixedStream
from rlhf.data.rows import RowCounts
from rlhf.errors import ConfigError, UserError
from rlhf.factory.exported import rounded_inputs
from rlhf.guard.alarms.history import RunFacts
from rlhf.guard.lint import check_settings
from rlhf.models.dither import dither_matrices
from rlhf.models.folders import digest_of_calibration, digest_of_model
from rlhf.planning.plan import Machine
from rlhf.planning.text import larger_passes, refusal
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.engine import Engine, TrainableModel, make_engine
from rlhf.tracking.checkpoint import Checkpoints
from rlhf.tracking.progress import Progress
from rlhf.tracking.redact import redact
from rlhf.tracking.run_folder import FolderLock, RunFolder, discard_if_empty
from rlhf.tracking.same_run import (
    EXPORT,
    Change,
    another_run,
    changes,
    check_same_run,
    functions_of,
    holds_run,
    list_changes,
    matches,
    move_aside,
    remove_leftovers,
)
from rlhf.tracking.trackers import open_trackers
from rlhf.tracking.view import View
from rlhf.training.feed import StreamFeed
from rlhf.training.health import BestKeeper, HealthMonitor, RowValues
from rlhf.training.session import Recorder, Session, TrainState

POSITIONS = "data.json"  # in a checkpoint: where the streamed sources are


@dataclass
class RunContext:
    """The parts of a run that exist before its models."""

    config: TrainConfig | RewardModelConfig
    folder: RunFolder
    checkpoints: Checkpoints
    engine: Engine
    resume: Path | None
    state: TrainState
    positions: Mapping[str, int]
    view: View
    release: Callable[[], None]  # releases the run folder's lock
    changed: Sequence[Change] = ()  # settings that differ from those the run began with
    precedes_settings: bool = False  # the checkpoint is older than the settings of config.yaml
    recorded: Mapping[str, str] = field(default_factory=dict)  # digests of the inputs, as the checkpoint has them
    notes: list[str] = field(default_factory=list)  # logged when the run begins; any part of the setup may append
    streams: dict[str, MixedStream[Any, Any]] = field(default_factory=dict)  # mixed and streamed data, by section
    repeats_prompts: bool = False  # the data has fewer prompts than a step takes
    leaves_out_template: bool = False  # the model has a chat template that data.chat_template=none does not use
    log: Callable[[str], None] | None = None  # of the recorder, once the notes are logged

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.config.run.seed

    def announce(self, text: str) -> None:
        """Print a message at once, before the run begins."""
        self.view.note(text)

    def note(self, text: str) -> None:
        """Log a message once: when the run begins, or at once if it has begun, as when the first rollout is sampled."""
        if text in self.notes:
            return
        self.notes.append(text)
        if self.log is not None:
            self.log(text)

    @property
    def is_other_run(self) -> bool:
        """Return whether checkpoint.resume=always continues the weights of a run with other settings.

        It is so until a checkpoint of the new settings is saved, however often the run is started.
        """
        return self.precedes_settings or any(not change.is_allowed for change in self.changed)

    @property
    def goes_on_in_dtype(self) -> bool:
        """Return whether the checkpoint to resume from was trained in the dtype of the run, so that it stays as it is.

        Checkpoints of earlier versions, which have no dtype, count as trained in it.
        """
        return self.resume is not None and self.is_recorded(DTYPE)

    @property
    def exports_again(self) -> bool:
        """Return whether a setting of the export has changed since the run began."""
        return any(matches(change.key, EXPORT) for change in self.changed)

    def train(
        self, name: str, module: nn.Module, section: OptimizerConfig, *, dtype: str, terms: Sequence[str]
    ) -> TrainableModel:
        """Create what trains a module; a run that begins in bfloat16 dithers the weights before."""
        if dtype == "bfloat16" and not self.goes_on_in_dtype:
            dither_matrices(module, self.engine)
        return self.engine.train(name, module, section, terms=terms)

    def rows_read(self, name: str, rows: RowCounts) -> None:
        """Report how many rows of the data set data.NAME are used, and record and check them."""
        text, share = rows.summary(), self.config.data.holdout
        section = getattr(self.config.data, name, None)
        if share is not None and name.startswith("eval_") and section is not None and section.part == (0.0, share):
            text += f". Held out for evaluation and not trained on (data.holdout={share:g})"
        self.notes.append(text)
        self.identify(f"data.{name}", rows.digest)

    def total_steps(self, steps_per_epoch: float) -> int:
        """Return the length of the run in steps, and note the rows that its epochs, in whole steps, treat unequally."""
        schedule, size = self.config.schedule, self.config.batch.prompts_per_step
        steps = total_steps(schedule, steps_per_epoch)
        if schedule.epochs is not None and not self.streams:
            uneven = uneven_epochs(schedule.epochs, steps, size, rows=round(steps_per_epoch * size))
            self.notes += [uneven] if uneven else []
        return steps

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Release the folder if the setup of the run fails, and remove it if there is nothing else in it."""
        try:
            yield
        except BaseException:
            if self.engine.ranks.is_main:
                discard_if_empty(self.folder.path)
            self.release()
            raise

    def identify(self, key: str, digest: str | None, *, may_change: bool = False) -> None:
        """Record the content of an input in the run's state, and check that it is the same as at the run's beginning.

        Every rank calls this, and all must have read the same content.

        Args:
            key: the setting that names the input, such as policy.model or data.prompts.
            digest: a digest of its content; None if it cannot be read here, which keeps the recorded one.
            may_change: a change is a warning even if checkpoint.resume is not always.

        Raises:
            CheckpointError: it has changed, and checkpoint.resume is not always.
            ConfigError: another rank has read other content.
        """
        before = self.recorded.get(key)
        digest = self._common(key, digest) or before
        if digest is None:
            return
        if before is not None and before != digest:
            what = f"{key}: the content differs from what the run began with"
            if not may_change and self.config.checkpoint.resume != "always":
                raise another_run(self.config, what)
            self.notes.append(f"warning: {what}")
        self.state.inputs[key] = digest

    def is_recorded(self, key: str) -> bool:
        """Return whether the content of an input is the one that the checkpoint records."""
        return key in self.recorded and self.recorded[key] == self.state.inputs.get(key)

    def identify_model(self, key: str, path: str) -> None:
        """Record and check weights and calibration of the model at `path`, named by the setting `key`; see `identify`.

        One rank of those that read the same folder reads the files.
        """
        ranks = self.engine.ranks
        places = ranks.gather((socket.gethostname(), str(Path(path).expanduser().resolve())))
        reads = places.index(places[ranks.rank]) == ranks.rank
        self.identify(key, ranks.all_succeed(lambda: digest_of_model(path) if reads else None))
        calibration = ranks.all_succeed(lambda: digest_of_calibration(path) if reads else None)
        self.identify(f"calibration of {key}", calibration)

    def _common(self, key: str, digest: str | None) -> str | None:
        """Return the digest that the ranks share; None if none of them can read the content."""
        digests = {rank: other for rank, other in enumerate(self.engine.ranks.gather(digest)) if other is not None}
        first = min(digests, default=0)
        for rank, other in digests.items():
            if other != digests[first]:
                raise ConfigError(
                    f"{key}: process {rank} has read other content than process {first}: give all machines the same "
                    "files, code too"
                )
        return digests.get(first)

    def session(
        self,
        *,
        total_steps: int,
        save: Callable[[Path], None],
        evaluate: Callable[[int], dict[str, float]],
        show: Sequence[str],
        targets: Mapping[str, float] | None = None,
    ) -> Session:
        """Open the files of the run, rewound to the checkpoint if it resumes, and return its session.

        Args:
            save: writes a checkpoint into a folder.
            evaluate: computes the evaluation metrics at a step.
            show: the metrics of the progress display.
            targets: the target values that the progress display shows beside a metric.
        """
        config = self.config
        recorder, health = self._open_reports(total_steps, show, targets)
        return Session(
            state=self.state,
            total_steps=total_steps,
            recorder=recorder,
            checkpoints=self.checkpoints,
            save=self._save_with_positions(save),
            evaluate=evaluate,
            memory_mb=self.engine.peak_memory_mb,
            checkpoint_every=config.checkpoint.every,
            eval_every=config.eval.every,
            log_every=config.logging.every,
            max_bad_steps=config.schedule.max_bad_steps,
            resumed=self.resume is not None,
            exports_again=self.exports_again,
            health=health,
            feed=StreamFeed(self.streams, recorder.note) if self.streams else None,
            ranks=self.engine.ranks,
        )

    def _open_reports(
        self, total_steps: int, show: Sequence[str], targets: Mapping[str, float] | None
    ) -> tuple[Recorder, HealthMonitor]:
        """Open the display, the files and the alarms, and report what happened until now."""
        versions = self._record_settings(total_steps)
        progress = self.view.progress(self.config.run.name, total_steps, start_step=self.state.step, targets=targets)
        recorder = self._open_recorder(progress, show)
        health = self._open_health(recorder)
        self._note_warm_up(total_steps)
        self._report_to(recorder, _resume_messages(self, versions, total_steps))
        return recorder, health

    def _note_warm_up(self, total_steps: int) -> None:
        """Note a warm-up that covers the run, if only the rows tell how many steps its epochs are."""
        schedule = self.config.schedule
        if schedule.steps is None and schedule.warmup_steps >= total_steps:
            self.note(
                f"the run has {total_steps:,} steps, and the learning rate rises over schedule.warmup_steps="
                f"{schedule.warmup_steps}: it never reaches its peak. Lower it, or batch.prompts_per_step"
            )

    def _open_recorder(self, progress: Progress, show: Sequence[str]) -> Recorder:
        """Open the files and the trackers of the run, rewound to the checkpoint."""
        config, is_main = self.config, self.engine.ranks.is_main
        trackers = open_trackers(
            config.logging.backends if is_main else [],
            folder=self.folder.path,
            name=config.run.name,
            config=redact(dump(config)),
            first_step=self._first_logged_step(),
        )
        recorder = Recorder(
            self.folder,
            progress,
            trackers,
            show=show,
            writes=is_main,
            memory=self.engine.memory,
            usd_per_hour=config.cost.per_hour,
            release=self.release,
        )
        recorder.rewind(self.positions)
        return recorder

    def _report_to(self, recorder: Recorder, messages: Sequence[str]) -> None:
        """Note the messages of the setup, and let the streams note later ones."""
        for stream in self.streams.values():
            stream.report_to(recorder.note)
        for message in [*self.notes, *self.engine.notes, *messages]:
            recorder.note(message)
        self.log = recorder.note

    def _open_health(self, recorder: Recorder) -> HealthMonitor:
        repeats, leaves_out = self.repeats_prompts, self.leaves_out_template
        facts = run_facts(self.config, repeats_prompts=repeats, leaves_out_template=leaves_out)
        health = HealthMonitor(self.config.guard, facts, self.state, recorder)
        if self.resume is not None:
            health.replay(self.engine.ranks.on_main(self.folder.read_metrics))
        return health

    def _first_logged_step(self) -> int:
        """Return the first step whose metrics are still to be logged: of a resumed run the one after its checkpoint."""
        return self.state.step + (self.resume is not None and self.state.owed is None)

    def _save_with_positions(self, save: Callable[[Path], None]) -> Callable[[Path], None]:
        """Make `save` also write where the streamed sources are."""

        def save_all(folder: Path) -> None:
            save(folder)
            positions = {section: stream.state(self.state.step) for section, stream in self.streams.items()}
            if any(positions.values()):
                text = json.dumps(positions)
                self.engine.ranks.on_main(lambda: (folder / POSITIONS).write_text(text, encoding="utf-8"))

        return save_all

    def saved_positions(self, section: str) -> Mapping[str, Any]:
        """Return where the streamed sources of a section were at the checkpoint to resume from; empty without any.

        With other settings other rows may be usable, so that they are counted again.
        """
        file = None if self.resume is None or self.is_other_run else self.resume / POSITIONS
        if file is None or not file.is_file():
            return {}
        positions: dict[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return positions.get(section, {})

    def _record_settings(self, total_steps: int) -> list[str]:
        """Write the configuration files into the run folder, unless nothing will use these settings.

        Returns:
            The packages of another version than before.
        """
        is_over = self.resume is not None and self.state.step >= total_steps
        if is_over and (self.is_other_run or not self.exports_again):
            return []

        def write() -> list[str]:
            if self.changed:
                self.folder.complete.unlink(missing_ok=True)  # first, so that a kill leaves no unfinished run complete
            changed = self.folder.write_config(
                dump(self.config),
                is_new=self.resume is None,
                functions=functions_of(self.config),
                since=self.state.step if self.is_other_run else None,
            )
            for name, settings in self.engine.written.items():
                self.folder.write_deepspeed(name, settings)
            return changed

        return self.engine.ranks.on_main(write)


def open_context(config: TrainConfig | RewardModelConfig, view: View | None, notes: Sequence[str]) -> RunContext:
    """Lock the run folder, create the engine, and find the checkpoint to resume from.

    The `notes` are told at the start, after warnings about the configuration. Without a view nothing is shown.

    Raises:
        ConfigError: the run cannot fit into the memory of the device, or the ranks have different settings.
        CheckpointError: the folder holds another run, no checkpoint is intact, or another process uses the folder.
    """
    engine = make_engine(config.run, config.sharding)
    _check_same_settings(config, engine.ranks)
    memory_notes = _check_memory(config, engine)
    ranks = engine.ranks
    folder = RunFolder(config.run.out_dir)
    release = _lock_folder(folder.path, ranks)
    checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep, ranks=ranks)
    notes = [*_warnings(config), *notes, *_sharing_notes(config, ranks), *memory_notes]
    try:
        resume, changed, messages = ranks.on_main(lambda: _find_newest(config, folder, checkpoints))
    except UserError:
        release()
        raise
    state, positions = TrainState.read(resume) if resume else (TrainState(), {"metrics": 0, "samples": 0, "alarms": 0})
    dtype = {DTYPE: dtype_of(config)}
    recorded, state.inputs = dtype | state.inputs, dtype
    since = ranks.on_main(lambda: folder.read_config().get("settings_since") if resume else None)
    return RunContext(
        config=config,
        folder=folder,
        checkpoints=checkpoints,
        engine=engine,
        resume=resume,
        state=state,
        positions=positions,
        view=view or View(),
        release=release,
        changed=changed,
        precedes_settings=since is not None and state.step <= since,
        recorded=recorded,
        notes=[*notes, *messages],
    )


DTYPE = "dtype"  # among the inputs that a checkpoint records


def dtype_of(config: TrainConfig | RewardModelConfig) -> str:
    """Return the dtype of the arithmetic of the trained model."""
    return config.model.dtype if isinstance(config, RewardModelConfig) else config.policy.dtype


OF_ONE_MACHINE = (
    *("run.device", "run.keep_memory", "run.out_dir", "environment.workers"),
    *("*cache_dir", "*.workers", "*.memory_mb", "*_env"),
)


def _check_same_settings(config: TrainConfig | RewardModelConfig, ranks: Distributed) -> None:
    """Check that all ranks were started with the same settings, except those in OF_ONE_MACHINE.

    Raises:
        ConfigError: a rank has another value of a setting.
    """
    trees = ranks.gather(dump(config))

    def check() -> None:
        for rank, tree in enumerate(trees):
            differing = [change for change in changes(trees[0], tree) if not matches(change.key, OF_ONE_MACHINE)]
            if differing:
                raise ConfigError(
                    f"process {rank} has other settings than process 0 ({list_changes(differing)}): start all "
                    "processes with the same command, configuration and version"
                )

    ranks.on_main(check)  # which also compares paths, by the files of one machine


def _warnings(config: TrainConfig | RewardModelConfig) -> list[str]:
    """List the warnings about the configuration and the models that it names.

    Raises:
        ConfigError: a setting is unsafe, and the configuration does not allow it.
    """
    warnings = [*unread_warnings(config), *check_settings(config), *rounded_inputs(config)]
    return [f"warning: {warning}" for warning in warnings]


def _sharing_notes(config: TrainConfig | RewardModelConfig, ranks: Distributed) -> list[str]:
    """Say that several processes share a step, if the configuration does not ask for it."""
    if ranks.world == 1 or config.sharding.mode != "none":
        return []
    return [f"{ranks.world} processes and sharding=none: they share the rows of a step, as with sharding=ddp"]


def _check_memory(config: TrainConfig | RewardModelConfig, engine: Engine) -> list[str]:
    """Check that the device has the memory that the run needs in any case; a run that is resumed has run before.

    Returns:
        A note of the larger passes that the memory would allow, if any.

    Raises:
        ConfigError: it has less; the message is the plan, and the settings to change.
    """
    memory = engine.total_memory()
    if memory is None or (Path(config.run.out_dir) / "checkpoints").is_dir():
        return []
    machine = Machine(
        device="cuda" if engine.device.type == "cuda" else "cpu", memory=memory, processes=engine.ranks.world
    )
    message = refusal(config, machine)
    if message is not None:
        raise ConfigError(message)
    note = larger_passes(config, machine)
    return [] if note is None else [note]


def _find_newest(
    config: TrainConfig | RewardModelConfig, folder: RunFolder, checkpoints: Checkpoints
) -> tuple[Path | None, list[Change], list[str]]:
    """Return the checkpoint to resume from, the settings that differ, and messages.

    Raises:
        CheckpointError: the folder holds another run, or no checkpoint to continue from.
    """
    messages: list[str] = []
    remove_leftovers(folder)
    if config.checkpoint.resume == "never" and holds_run(folder):
        messages.append(
            f"checkpoint.resume=never: the run that was in {folder.path} is now in {move_aside(folder.path)}"
        )
    changed = check_same_run(config)
    checkpoint = checkpoints.latest_intact(messages.append)
    if checkpoint is None and holds_run(folder):
        raise another_run(config, "it has a model but no checkpoint to continue from", always=False)
    return checkpoint, changed, messages


def run_facts(
    config: TrainConfig | RewardModelConfig, *, repeats_prompts: bool = False, leaves_out_template: bool = False
) -> RunFacts:
    """Return the facts that the limits of alarms depend on besides the metrics."""
    if isinstance(config, RewardModelConfig):
        return RunFacts(
            is_rounded=config.model.dtype == "bfloat16", evaluates_once=_evaluates_once(config), on_data=True
        )
    online = config if isinstance(config, OnlineConfig) else None
    pairs = online is not None and online.algorithm.policy_loss.pair_loss is not None
    return RunFacts(
        kl_target=None if online is None else online.algorithm.kl.controller.goal,
        is_rounded=config.policy.dtype == "bfloat16",
        is_ahead=config.overlap.ahead,
        reads_ratio=not (pairs and config.sampling.old_log_probs == "sampler"),
        updates=1 if online is None else config.batch.epochs * config.batch.minibatches,
        repeats_prompts=repeats_prompts,
        leaves_out_template=leaves_out_template,
        evaluates_once=_evaluates_once(config),
        has_other_signal=online is not None and (online.teacher is not None or online.reward.process is not None),
        on_data=online is None,
    )


def _evaluates_once(config: TrainConfig | RewardModelConfig) -> bool:
    """Return whether the run evaluates only before its first and after its last step; False if its length is open."""
    every, steps = config.eval.every, config.schedule.steps
    return every == 0 or (steps is not None and every >= steps)


def keep_best(
    context: RunContext, session: Session, rows: Callable[[], RowValues], write: Callable[[Path], None]
) -> None:
    """Let the session keep the best checkpoint, if the run asks for it.

    Args:
        rows: the latest evaluation, row by row.
        write: writes the model as it is evaluated into a folder.
    """
    config = context.config.checkpoint.best
    if config is not None:
        session.best = BestKeeper(
            config, context.state, session.recorder, rows=rows, write=write, ranks=context.engine.ranks
        )


def _lock_folder(folder: Path, ranks: Distributed) -> Callable[[], None]:
    """Lock the run folder on the main rank, for all ranks of the run; return the function that releases it."""
    locks: list[FolderLock] = []
    ranks.on_main(lambda: locks.append(FolderLock(folder)))
    return locks[0].release if locks else lambda: None


def _resume_messages(context: RunContext, versions: Sequence[str], total_steps: int) -> list[str]:
    """Describe how a run continues; `versions` are the packages of another version than before."""
    if context.resume is None:
        return []
    step = context.state.step
    messages = [f"continuing from {context.resume} (step {step} of {total_steps})"] if step <= total_steps else []
    other = [change for change in context.changed if not change.is_allowed]
    allowed = [change for change in context.changed if change.is_allowed]
    if context.is_other_run:
        messages.append(
            f"warning, by checkpoint.resume=always: from step {step + 1} on other settings train the weights of this "
            f"checkpoint: {list_changes(other) or 'they changed after it was saved'}. Weights, optimizer moments and "
            "step count are kept; the KL coefficient, the best checkpoint and completions sampled ahead begin again"
        )
    if allowed:
        messages.append(f"changed since the last start: {list_changes(allowed)}")
    if versions:
        messages.append(f"warning: other versions than the run began with: {', '.join(versions)}")
    unread = {key for key, digest in functions_of(context.config).items() if not digest}
    unknown = sorted(unread | (context.state.inputs.keys() - context.recorded.keys()))
    if unknown:
        messages.append(
            f"this checkpoint does not record the content of {', '.join(unknown)}, so a change since the run began "
            "could not be noticed"
        )
    return messages


def total_steps(schedule: ScheduleConfig, steps_per_epoch: float) -> int:
    """Return the length of the run in steps.

    Raises:
        ConfigError: it is given in epochs of rows that are streamed.
    """
    if schedule.steps is not None:
        return schedule.steps
    assert schedule.epochs is not None
    if math.isinf(steps_per_epoch):
        raise ConfigError(
            "schedule.epochs: the rows of a stream are not counted before they are read, so the run cannot be so many "
            "epochs long: set schedule.steps, and schedule.epochs=null"
        )
    return max(1, round(schedule.epochs * steps_per_epoch))


def uneven_epochs(epochs: float, steps: int, size: int, *, rows: int) -> str:
    """Describe the rows that `steps` steps of `size` rows leave unread or repeat; empty if the epochs are as long.

    A part of an epoch leaves rows unread by itself.
    """
    read, planned = steps * size, round(epochs * rows) if epochs >= 1 else min(steps * size, rows)
    extra = read - planned
    if extra == 0:
        return ""
    if read < rows:
        effect = f"{rows - read:,} of {rows:,} rows are not read"
    elif abs(extra) < rows:
        effect = f"{abs(extra):,} of {rows:,} rows are read once {'more' if extra > 0 else 'less'}"
    else:
        effect = f"{rows:,} rows are read {read / rows:.1f} times each"
    advice = f"; schedule.steps={steps + 1} reads all" if read < rows else ""
    return f"schedule.epochs={epochs:g} is {steps:,} step{'s' * (steps > 1)} of {size:,} rows: {effect}{advice}"
