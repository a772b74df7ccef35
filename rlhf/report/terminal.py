"""What the terminal shows of a run besides its progress: what trains, what came of it, and what is unsafe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.guard.rule import Violation
from rlhf.tracking.metrics import format_fixed, format_interval, shown_in
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import already_complete

STYLES = {"error": "red", "warning": "yellow"}


def print_folder(config: TrainConfig | RewardModelConfig, console: Console) -> None:
    """Print what trains, and the folder that receives it."""
    what = "reward model" if isinstance(config, RewardModelConfig) else config.algorithm.name
    console.print(Text(f"{what} in {config.run.out_dir}"), soft_wrap=True)


def print_complete(folder: RunFolder, step: int, console: Console) -> None:
    """Print that the run in `folder` has nothing left to train, and where its model is."""
    lines = [already_complete(folder.path, step), f"model   {folder.model}"]
    lines += [f"report  {folder.report}"] if folder.report.is_file() else []
    console.print(Text("\n".join(lines)), soft_wrap=True)


def print_summary(folder: RunFolder, console: Console) -> None:
    """Print the first and last value of the main metrics."""
    rows = folder.read_metrics()
    table = Table("metric", "first", "last", "unit", box=None, pad_edge=False)
    for info, _ in shown_in("summary"):
        values = [row[info.name] for row in rows if row.get(info.name) is not None]
        if values:
            table.add_row(info.name, format_fixed(values[0]), format_fixed(values[-1]), info.unit)
    if table.row_count:
        console.print(table)


def print_card(card: Mapping[str, Any], console: Console) -> None:
    """Print the accuracy of a reward model beside its baselines."""
    table = Table("on held-out pairs", "accuracy", box=None, pad_edge=False)
    low, high = card["accuracy_low"], card["accuracy_high"]
    table.add_row("reward model", format_interval(card["accuracy"], low, high, ".3f"))
    for name, baseline in card["baselines"].items():
        accuracy = format_interval(baseline["accuracy"], baseline["low"], baseline["high"], ".3f")
        table.add_row(name.replace("_", " "), accuracy)
    console.print(table)
    print_ensemble(card, console)


def print_ensemble(card: Mapping[str, Any], console: Console) -> None:
    """Print whether an ensemble's disagreement predicts where it is wrong; nothing for a single model."""
    ensemble = card.get("ensemble")
    if ensemble is None:
        return
    disagreement = format_fixed(ensemble["disagreement"])
    console.print(f"{ensemble['members']} members; mean disagreement on a pair {disagreement}")
    for key, words in (("predicts_error", "disagreement"), ("small_gap_predicts_error", "a small gap")):
        area = ensemble[key]
        if area["auc"] is not None:
            interval = format_interval(area["auc"], area["low"], area["high"], ".3f")
            console.print(f"AUC of {words} for the pairs that the mean gets wrong: {interval}", soft_wrap=True)


def print_violations(violations: Mapping[str, Sequence[Violation]], console: Console) -> None:
    """Print the violations of each run, by its name."""
    for name, broken in violations.items():
        for violation in broken:
            level, where = violation.rule.level, f"{name}: " if name else ""
            console.print(Text(f"{level}: {where}{violation}", style=STYLES[level]), soft_wrap=True)
