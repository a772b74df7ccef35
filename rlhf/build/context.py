"""The start of every run: its folder, the checkpoint it resumes from, its engine, and messages for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from rlhf.config.load import dump, unread_sections
from rlhf.config.sections import RewardModelConfig, ScheduleConfig, TrainConfig
from rlhf.errors import CheckpointError, ModelError
from rlhf.runtime.checkpoint import Checkpoints
from rlhf.runtime.engine import Engine, make_engine
from rlhf.runtime.lock import FolderLock
from rlhf.runtime.loggers import open_trackers
from rlhf.runtime.progress import Progress
from rlhf.runtime.ranks import Ranks
from rlhf.runtime.recorder import Recorder
from rlhf.runtime.run_folder import RunFolder
from rlhf.runtime.session import Session, TrainState

MODEL = "model"  # the trained model, in a run folder and in each checkpoint
CRITIC = "critic"
TRAINER = "trainer.pt"


@dataclass
class Context:
    """What a run has before its models are built."""

    config: TrainConfig | RewardModelConfig
    folder: RunFolder
    checkpoints: Checkpoints
    engine: Engine
    resume: Path | None
    state: TrainState
    positions: Mapping[str, int]
    console: Console | None
    release: Callable[[], None]  # releases the run folder's lock
    notes: list[str] = field(default_factory=list)  # logged when the run begins; any part of the setup may append

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.config.run.seed

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
            total_steps: the length of the run in steps.
            save: writes a checkpoint into a folder.
            evaluate: computes the evaluation metrics at a step.
            show: the metrics of the progress display.
            targets: the target values that the progress display shows beside a metric.
        """
        config = self.config
        progress = Progress(config.run.name, total_steps, self.console, start_step=self.state.step, targets=targets)
        resolved = dump(config)
        ranks = self.engine.ranks
        changed = ranks.on_main(lambda: self._write_configs(resolved))
        trackers = open_trackers(
            config.logging.backends if ranks.is_main else [],
            folder=self.folder.path,
            name=config.run.name,
            config=resolved,
            first_step=self.state.step,
        )
        recorder = Recorder(
            self.folder,
            progress,
            trackers,
            show=show,
            writes=ranks.is_main,
            memory=self.engine.memory,
            release=self.release,
        )
        recorder.rewind(self.positions)
        for message in [*self.notes, *_resume_messages(self, changed, total_steps)]:
            recorder.note(message)
        return Session(
            state=self.state,
            total_steps=total_steps,
            recorder=recorder,
            checkpoints=self.checkpoints,
            save=save,
            evaluate=evaluate,
            memory_mb=self.engine.peak_memory_mb,
            checkpoint_every=config.checkpoint.every,
            eval_every=config.eval.every,
            log_every=config.logging.every,
            max_bad_steps=config.schedule.max_bad_steps,
            resumed=self.resume is not None,
            ranks=ranks,
        )

    def _write_configs(self, resolved: Mapping[str, object]) -> list[str]:
        """Write the configuration files into the run folder; return the keys that differ from the previous ones."""
        changed = self.folder.write_config(resolved)
        for name, settings in self.engine.written.items():
            self.folder.write_deepspeed(name, settings)
        return changed


def open_context(config: TrainConfig | RewardModelConfig, console: Console | None) -> Context:
    """Lock the run folder, create the engine, and find the checkpoint to resume from.

    Raises:
        CheckpointError: checkpoint.resume is never and there is a checkpoint, no checkpoint is intact, or another
            process uses the folder.
    """
    engine = make_engine(config.run, config.sharding)
    ranks = engine.ranks
    folder = RunFolder(config.run.out_dir)
    release = _lock_folder(folder.path, ranks)
    checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep, ranks=ranks)
    notes = [f"warning: {warning}" for warning in unread_sections(config)]
    if ranks.world > 1 and config.sharding.mode == "none":
        notes.append(f"{ranks.world} processes and sharding=none: they share the rows of a step, as with sharding=ddp")

    def newest() -> tuple[Path | None, list[str]]:
        if config.checkpoint.resume == "never" and checkpoints.all():
            raise CheckpointError(
                f"{folder.path} already holds a run and checkpoint.resume is never: choose another run.out_dir"
            )
        warnings: list[str] = []
        return checkpoints.newest(warnings.append), warnings

    resume, checkpoint_warnings = ranks.on_main(newest)
    notes += checkpoint_warnings
    state, positions = TrainState.read(resume) if resume else (TrainState(), {"metrics": 0, "samples": 0})
    return Context(
        config=config,
        folder=folder,
        checkpoints=checkpoints,
        engine=engine,
        resume=resume,
        state=state,
        positions=positions,
        console=console,
        release=release,
        notes=notes,
    )


def _lock_folder(folder: Path, ranks: Ranks) -> Callable[[], None]:
    """Lock the run folder on the main rank, for all ranks of the run; return the function that releases it."""
    locks: list[FolderLock] = []
    ranks.on_main(lambda: locks.append(FolderLock(folder)))
    return locks[0].release if locks else lambda: None


def _resume_messages(context: Context, changed: Sequence[str], total_steps: int) -> list[str]:
    if context.resume is None:
        return []
    messages = [f"continuing from {context.resume} (step {context.state.step} of {total_steps})"]
    settings = [key for key in changed if not key.startswith(("versions.", "git_commit"))]
    versions = [key.removeprefix("versions.") for key in changed if key.startswith("versions.")]
    if versions:
        messages.append(f"warning: other versions than the run began with: {', '.join(versions)}")
    if settings:
        messages.append(f"warning: these settings differ from those the run began with: {', '.join(settings)}")
    return messages


def total_steps(schedule: ScheduleConfig, steps_per_epoch: float) -> int:
    """Return the length of the run in steps."""
    if schedule.steps is not None:
        return schedule.steps
    assert schedule.epochs is not None
    return max(1, round(schedule.epochs * steps_per_epoch))


def model_folder(path: str) -> str:
    """Return the folder of the weights: a run folder's model or newest intact checkpoint, or `path` itself.

    Raises:
        ModelError: the run folder has neither.
    """
    folder = Path(path).expanduser()
    if not (folder / "checkpoints").is_dir() and not (folder / "config.yaml").is_file():
        return path
    if (folder / MODEL).is_dir():
        return str(folder / MODEL)
    newest = Checkpoints(folder / "checkpoints", keep=1).newest(lambda _: None)
    if newest is None:
        raise ModelError(f"{path} is a run folder without a checkpoint: that run has not come far enough")
    return str(newest / MODEL)
