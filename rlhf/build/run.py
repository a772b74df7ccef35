"""A training run from its configuration, whichever loop it takes: what `rlhf train` and `rlhf compare` run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from rlhf.build.context import MODEL
from rlhf.build.offline import build_offline
from rlhf.build.online import build_online
from rlhf.config.algorithm import Online
from rlhf.config.sections import TrainConfig
from rlhf.runtime.checkpoint import replace_folder
from rlhf.runtime.session import Session
from rlhf.trainers.offline import OfflineRun, train_offline
from rlhf.trainers.online import OnlineRun, train


@dataclass(frozen=True)
class TrainingRun:
    """A run that is built, and the loop that it takes."""

    run: OnlineRun | OfflineRun
    loop: Callable[[], None]

    @property
    def session(self) -> Session:
        """The run's course."""
        return self.run.session

    def train(self) -> bool:
        """Every step from where the run stands, then the export; False where it was interrupted and saved."""
        with self.session.recorder.progress:
            self.loop()
            if not self.session.interrupted:
                replace_folder(self.session.recorder.folder.path / MODEL, self.run.export, self.session.ranks)
        return not self.session.interrupted


def build_run(config: TrainConfig, console: Console | None = None) -> TrainingRun:
    """Everything that the run needs, from step 0 or from its newest checkpoint.

    Raises:
        UserError: of the kind that fits.
    """
    if isinstance(config.algorithm, Online):
        online = build_online(config, console)
        return TrainingRun(online, partial(train, online))
    offline = build_offline(config, console)
    return TrainingRun(offline, partial(train_offline, offline))
