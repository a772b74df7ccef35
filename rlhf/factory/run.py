"""Building a training run, online or offline, from its configuration, for `rlhf train` and `rlhf compare`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.factory.context import MODEL
from rlhf.factory.exported import note_export
from rlhf.factory.offline import build_offline
from rlhf.factory.online import build_online
from rlhf.tracking.checkpoint import replace_folder
from rlhf.tracking.exported import read_export
from rlhf.training.offline import OfflineRun, train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun
from rlhf.training.session import Session


@dataclass(frozen=True)
class TrainingRun:
    """A run that is ready to start, and its training loop."""

    run: OnlineRun | OfflineRun
    loop: Callable[[], None]

    @property
    def session(self) -> Session:
        """Return the session of the run."""
        return self.run.session

    def train(self) -> bool:
        """Run the remaining training steps and export the model; return False if the run was interrupted and saved."""
        with self.session.recorder.progress:
            self.loop()
            if not self.session.interrupted:
                best = self.session.best.finish() if self.session.best is not None else None
                export = self.run.export if best is None else partial(self._copy, best)
                replace_folder(self.session.recorder.folder.path / MODEL, export, self.session.ranks)
                note_export(self.session)
        return not self.session.interrupted

    def _copy(self, model: Path, folder: Path) -> None:
        """Copy an exported model into the folder, on the main rank, and what is recorded of its weights."""

        def copy() -> None:
            shutil.copytree(model, folder, dirs_exist_ok=True)
            record = read_export(model)
            if record is not None:
                record.write(folder.parent)

        self.session.ranks.on_main(copy)


def build_run(config: TrainConfig, console: Console | None = None) -> TrainingRun:
    """Build the run that `config` describes, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    if isinstance(config, OnlineConfig):
        online = build_online(config, console)
        return TrainingRun(online, partial(train, online))
    offline = build_offline(config, console)
    return TrainingRun(offline, partial(train_offline, offline))
