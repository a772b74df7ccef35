"""Start a run (folder, checkpoint to resume, engine, messages), and save and export its models, however sharded.

Every rank calls the functions that save or export, because gathering the weights is collective; only the main rank
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from rlhf.config.load import dump, unread_warnings
from rlhf.config.sections import RewardModelConfig, ScheduleConfig, TrainConfig
from rlhf.errors import CheckpointError, ModelError
from rlhf.models.backbone import CausalLM, merged_copy, save_model
from rlhf.models.export import ExportDtype, export_model, write_tokenizer
from rlhf.models.origin import Origin
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.engine import Engine, TrainableModel, make_engine
from rlhf.tracking.checkpoint import Checkpoints
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_folder import FolderLock, RunFolder
from rlhf.tracking.trackers import open_trackers
from rlhf.training.session import Recorder, Session, TrainState

MODEL = "model"  # the trained model, in a run folder and in each checkpoint
CRITIC = "critic"
TRAINER = "trainer.pt"


@dataclass
class RunContext:
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


def open_context(config: TrainConfig | RewardModelConfig, console: Console | None) -> RunContext:
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
    notes = [f"warning: {warning}" for warning in unread_warnings(config)]
    if ranks.world > 1 and config.sharding.mode == "none":
        notes.append(f"{ranks.world} processes and sharding=none: they share the rows of a step, as with sharding=ddp")

    def newest() -> tuple[Path | None, list[str]]:
        if config.checkpoint.resume == "never" and checkpoints.all():
            raise CheckpointError(
                f"{folder.path} already holds a run and checkpoint.resume is never: choose another run.out_dir"
            )
        warnings: list[str] = []
        return checkpoints.latest_intact(warnings.append), warnings

    resume, checkpoint_warnings = ranks.on_main(newest)
    notes += checkpoint_warnings
    state, positions = TrainState.read(resume) if resume else (TrainState(), {"metrics": 0, "samples": 0})
    return RunContext(
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


def _lock_folder(folder: Path, ranks: Distributed) -> Callable[[], None]:
    """Lock the run folder on the main rank, for all ranks of the run; return the function that releases it."""
    locks: list[FolderLock] = []
    ranks.on_main(lambda: locks.append(FolderLock(folder)))
    return locks[0].release if locks else lambda: None


def _resume_messages(context: RunContext, changed: Sequence[str], total_steps: int) -> list[str]:
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
    newest = Checkpoints(folder / "checkpoints", keep=1).latest_intact(lambda _: None)
    if newest is None:
        raise ModelError(f"{path} is a run folder without a checkpoint: that run has not come far enough")
    return str(newest / MODEL)


TOLERATED_ROUNDING = 0.5  # share of the change by training that rounding may lose without a warning


def save_policy(
    policy: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine, origin: Origin
) -> None:
    """Save the policy with its exact weights, as an adapter if it has one."""
    state = engine.full_state(policy)

    def write() -> None:
        if isinstance(policy, PeftModel):
            save_model(policy, tokenizer, folder, state)
            write_tokenizer(tokenizer, folder, origin)
        else:
            export_model(policy, tokenizer, folder, origin=origin, dtype=None, state=state)

    engine.ranks.on_main(write)


def export_policy(
    policy: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    origin: Origin,
    dtype: ExportDtype,
    warn: Callable[[str], None],
) -> None:
    """Export the policy as an ordinary model, with adapters merged into a copy of the weights."""
    state = engine.full_state(policy)

    def write() -> float:
        if isinstance(policy, PeftModel):
            merged = merged_copy(policy, state)
            return export_model(merged, tokenizer, folder, origin=origin, dtype=dtype)
        return export_model(policy, tokenizer, folder, origin=origin, dtype=dtype, state=state)

    _warn_of_rounding(engine.ranks.on_main(write), "policy", warn)


def save_scalar_head(model: ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine) -> None:
    """Save a critic or a reward model with its exact weights."""
    state = engine.full_state(model.classifier)
    engine.ranks.on_main(lambda: model.save(tokenizer, folder, state))


def export_scalar_head(
    model: ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    origin: Origin,
    dtype: ExportDtype,
    warn: Callable[[str], None],
) -> None:
    """Export a reward model as a folder that AutoModelForSequenceClassification can load."""
    state = engine.full_state(model.classifier)
    loss = engine.ranks.on_main(
        lambda: export_model(model.classifier, tokenizer, folder, origin=origin, dtype=dtype, state=state)
    )
    _warn_of_rounding(loss, "model", warn)


def _warn_of_rounding(loss: float, section: str, warn: Callable[[str], None]) -> None:
    if loss > TOLERATED_ROUNDING:
        warn(
            f"warning: the exported weights are in the checkpoint's dtype, and rounding to it takes away {loss:.0%} of "
            f"what training changed: {section}.export_dtype=float32 keeps it"
        )


def save_trainer_state(
    folder: Path, trained: dict[str, TrainableModel], besides: dict[str, Any], engine: Engine
) -> None:
    """Save optimizer states, keyed by parameter name, and `besides`, unsharded so that any world size can resume."""
    state = {name: model.state() for name, model in trained.items()} | besides
    engine.ranks.on_main(lambda: torch.save(state, folder / TRAINER))


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """Load the state that `save_trainer` wrote, onto the CPU."""
    state: dict[str, Any] = torch.load(folder / TRAINER, weights_only=True, map_location="cpu")
    return state
