"""The messages of a run while it trains: its headings, notes, progress and results, for a terminal or anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_folder import RunFolder


class View:
    """Receives the messages of a run, and shows nothing; a subclass shows some by overriding methods.

    rlhf.report.terminal.Terminal is the view of the `rlhf` program.
    """

    def heading(self, title: str) -> None:
        """Begin a stage: of the lab, an ensemble, or tuning."""

    def note(self, text: str) -> None:
        """Receive a message as it is."""

    def warning(self, text: str) -> None:
        """Receive a warning, without the word."""

    def begins(self, config: TrainConfig | RewardModelConfig) -> None:
        """Receive a run that begins or continues, before its models are built."""

    def progress(
        self, title: str, total_steps: int, *, start_step: int, targets: Mapping[str, float] | None
    ) -> Progress:
        """Return the object to which the run reports its steps; see `Progress` for the arguments."""
        return Progress(title, total_steps, Console(quiet=True), start_step=start_step, targets=targets)

    def was_complete(self, folder: RunFolder, step: int) -> None:
        """Receive a run that had ended before, so that nothing is left to train."""

    def ended(self, folder: RunFolder) -> None:
        """Receive a run that is complete, its model exported and its report written."""

    def card(self, card: Mapping[str, Any]) -> None:
        """Receive the report card of a reward model, or of an ensemble of separate ones."""
