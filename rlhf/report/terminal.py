"""The terminal's display of a run: its model, progress and results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.tracking.metrics import format_fixed, format_interval, shown_in
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import already_complete
from rlhf.tracking.view import View

STYLES = {"error": "red", "warning": "yellow"}


class Terminal(View):
    """Prints the reports of a run, and draws its progress."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def heading(self, title: str) -> None:
        """Draw a rule with the title."""
        self._console.rule(title)

    def note(self, text: str) -> None:
        """Print a message, whose lines are not wrapped."""
        self._console.print(Text(text), soft_wrap=True)

    def warning(self, text: str) -> None:
        """Print a warning in its colour."""
        self._console.print(Text(f"warning: {text}", style=STYLES["warning"]), soft_wrap=True)

    def begins(self, config: TrainConfig | RewardModelConfig) -> None:
        """Print what trains, and the folder that receives it."""
        what = "reward model" if isinstance(config, RewardModelConfig) else config.algorithm.name
        self.note(f"{what} in {config.run.out_dir}")

    def progress(
        self, title: str, total_steps: int, *, start_step: int, targets: Mapping[str, float] | None
    ) -> Progress:
        """Return a display in the terminal."""
        return Progress(title, total_steps, self._console, start_step=start_step, targets=targets)

    def was_complete(self, folder: RunFolder, step: int) -> None:
        """Print that the run in `folder` has nothing left to train, and the place of its model."""
        lines = [already_complete(folder.path, step), f"model   {folder.model}"]
        lines += [f"report  {folder.report}"] if folder.report.is_file() else []
        self.note("\n".join(lines))

    def ended(self, folder: RunFolder) -> None:
        """Print the first and last value of the main metrics, and the places of model and page."""
        rows = folder.read_metrics()
        table = Table("metric", "first", "last", "unit", box=None, pad_edge=False)
        for info, _ in shown_in("summary"):
            values = [row[info.name] for row in rows if row.get(info.name) is not None]
            if values:
                table.add_row(info.name, format_fixed(values[0]), format_fixed(values[-1]), info.unit)
        if table.row_count:
            self._console.print(table)
        self.note(f"model   {folder.model}\nreport  {folder.report}")

    def card(self, card: Mapping[str, Any]) -> None:
        """Print the accuracy of a reward model beside its baselines."""
        table = Table("on held-out pairs", "accuracy", box=None, pad_edge=False)
        low, high = card["accuracy_low"], card["accuracy_high"]
        table.add_row("reward model", format_interval(card["accuracy"], low, high, ".3f"))
        for name, baseline in card.get("baselines", {}).items():
            accuracy = format_interval(baseline["accuracy"], baseline["low"], baseline["high"], ".3f")
            table.add_row(name.replace("_", " "), accuracy)
        self._console.print(table)
        self._ensemble(card)

    def _ensemble(self, card: Mapping[str, Any]) -> None:
        """Print whether an ensemble's disagreement predicts where it is wrong; nothing for a single model."""
        ensemble = card.get("ensemble")
        if ensemble is None:
            return
        disagreement = format_fixed(ensemble["disagreement"])
        self._console.print(f"{ensemble['members']} members; mean disagreement on a pair {disagreement}")
        for key, words in (("predicts_error", "disagreement"), ("small_gap_predicts_error", "a small gap")):
            area = ensemble[key]
            if area["auc"] is not None:
                interval = format_interval(area["auc"], area["low"], area["high"], ".3f")
                self._console.print(
                    f"AUC of {words} for the pairs that the mean gets wrong: {interval}", soft_wrap=True
                )
