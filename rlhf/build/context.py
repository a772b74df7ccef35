"""What every run starts with: its folder, the checkpoint it continues from, its engine, and notes for the user."""

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
    """The start of a run, before there are models."""

    config: TrainConfig | RewardModelConfig
    folder: RunFolder
    checkpoints: Checkpoints
    engine: Engine
    resume: Path | None
    state: TrainState
    positions: Mapping[str, int]
    console: Console | None
    release: Callable[[], None]  # lets other processes into the folder
    notes: list[str] = field(default_factory=list)  # printed and kept as the run begins; any part may add a line

    @property
    def seed(self) -> int:
        """The run's one seed."""
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
        """The run's course, with its files opened (and rewound to the checkpoint it continues from)."""
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
        for text in [*self.notes, *_about_resuming(self, changed, total_steps)]:
            recorder.note(text)
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
        changed = self.folder.write_config(resolved)
        for name, settings in self.engine.written.items():
            self.folder.write_deepspeed(name, settings)
        return changed


def open_context(config: TrainConfig | RewardModelConfig, console: Console | None) -> Context:
    """Look at the run folder and decide where to start.

    Raises:
        CheckpointError: resuming is forbidden and there is a checkpoint, none is whole, or another process is there.
    """
    engine = make_engine(config.run, config.sharding)
    ranks = engine.ranks
    folder = RunFolder(config.run.out_dir)
    release = _locked(folder.path, ranks)
    checkpoints = Checkpoints(folder.checkpoints, keep=config.checkpoint.keep, ranks=ranks)
    notes = [f"warning: {text}" for text in unread_sections(config)]
    if ranks.world > 1 and config.sharding.mode == "none":
        notes.append(f"{ranks.world} processes and sharding=none: they share the rows of a step, as with sharding=ddp")

    def newest() -> tuple[Path | None, list[str]]:
        if config.checkpoint.resume == "never" and checkpoints.all():
            raise CheckpointError(
                f"{folder.path} already holds a run and checkpoint.resume is never: choose another run.out_dir"
            )
        said: list[str] = []
        return checkpoints.newest(said.append), said

    resume, damaged = ranks.on_main(newest)
    notes += damaged
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


def _locked(folder: Path, ranks: Ranks) -> Callable[[], None]:
    """Keep other runs out of the folder, in the name of all processes of this one; gives what lets them in."""
    held: list[FolderLock] = []
    ranks.on_main(lambda: held.append(FolderLock(folder)))
    return held[0].release if held else lambda: None


def _about_resuming(context: Context, changed: Sequence[str], total_steps: int) -> list[str]:
    if context.resume is None:
        return []
    notes = [f"continuing from {context.resume} (step {context.state.step} of {total_steps})"]
    settings = [key for key in changed if not key.startswith(("versions.", "git_commit"))]
    versions = [key.removeprefix("versions.") for key in changed if key.startswith("versions.")]
    if versions:
        notes.append(f"warning: other versions than the run began with: {', '.join(versions)}")
    if settings:
        notes.append(f"warning: these settings differ from those the run began with: {', '.join(settings)}")
    return notes


def total_steps(schedule: ScheduleConfig, steps_per_epoch: float) -> int:
    """The length of the run in steps."""
    if schedule.steps is not None:
        return schedule.steps
    assert schedule.epochs is not None
    return max(1, round(schedule.epochs * steps_per_epoch))


def model_folder(path: str) -> str:
    """Where the weights are: `path` itself, or, for a run folder, its model or newest whole checkpoint.

    Raises:
        ModelError: a run folder that has neither.
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
