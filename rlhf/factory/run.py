"""Building a training run, online or offline, from its configuration, for `rlhf train` and `rlhf compare`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from rlhf.config.sections import OnlineConfig, PolicyConfig, TrainConfig
from rlhf.factory.exported import kept_export_note, note_export
from rlhf.factory.offline import build_offline
from rlhf.factory.online import build_online
from rlhf.models.folders import ADAPTER_FOLDER, MODEL
from rlhf.runtime.distributed import detect_lost_ranks
from rlhf.tracking.checkpoint import replace_folder
from rlhf.tracking.exported import read_export
from rlhf.tracking.run_folder import completed_step
from rlhf.tracking.view import View
from rlhf.training.offline import OfflineRun, train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun
from rlhf.training.session import Session


def is_complete(session: Session) -> bool:
    """Return whether a run had ended before this start, with its model exported in the dtype that is asked for."""
    folder, ranks = session.recorder.folder, session.ranks
    is_exported = ranks.on_main(lambda: completed_step(folder) == session.state.step and folder.model.is_dir())
    return session.had_ended and is_exported and not session.exports_again


def mark_complete(session: Session) -> None:
    """Record that the run has ended and its model is exported."""
    session.ranks.on_main(lambda: session.recorder.folder.write_complete(session.state.step))


@dataclass(frozen=True)
class TrainingRun:
    """A run that is ready to start, and its training loop."""

    run: OnlineRun | OfflineRun
    loop: Callable[[], None]
    policy: PolicyConfig

    @property
    def session(self) -> Session:
        """Return the session of the run."""
        return self.run.session

    def train(self) -> bool:
        """Run the remaining training steps and export the model; return False if the run was interrupted and saved.

        If nothing is left to train and the model is exported already in the dtype that is asked for, nothing is done.
        """
        if self.is_complete:
            return True
        # The collectives of DeepSpeed are in every part of a step, and in the export.
        with self.session.recorder.progress, detect_lost_ranks(by_message=True):
            self.loop()
            if not self.session.interrupted:
                best = self.session.best.finish() if self.session.best is not None else None
                export = self.run.export if best is None else partial(self._copy, best)
                replace_folder(self.session.recorder.folder.path / MODEL, export, self.session.ranks)
                note_export(self.session)
                mark_complete(self.session)
        return not self.session.interrupted

    @cached_property
    def is_complete(self) -> bool:
        """Return whether the run had ended before this start, with its model exported."""
        return is_complete(self.session)

    def _copy(self, model: Path, folder: Path) -> None:
        """Copy an exported model into the folder, on the main rank, and the files beside it: adapter and record."""

        def copy() -> None:
            shutil.copytree(model, folder, dirs_exist_ok=True)
            adapter = model.with_name(ADAPTER_FOLDER)
            if adapter.is_dir():
                shutil.copytree(adapter, folder.with_name(ADAPTER_FOLDER), dirs_exist_ok=True)
            record = read_export(model)
            if record is not None:
                record.write(folder.parent)

        self.session.ranks.on_main(copy)
        if note := kept_export_note(model, self.policy):
            self.session.recorder.note(note)


def build_run(config: TrainConfig, view: View | None = None) -> TrainingRun:
    """Build the run that `config` describes, at step 0 or resumed from its newest checkpoint; `view` sees it train.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    if isinstance(config, OnlineConfig):
        online = build_online(config, view)
        return TrainingRun(online, partial(train, online), config.policy)
    offline = build_offline(config, view)
    return TrainingRun(offline, partial(train_offline, offline), config.policy)
