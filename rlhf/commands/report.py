"""rlhf report: the page of a run, once or while it trains, of a comparison, and of several runs together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf.api.checks import check_output_file
from rlhf.api.comparing import rebuild_comparison
from rlhf.comparison.terminal import ComparisonTerminal
from rlhf.errors import UserError
from rlhf.report.page import is_page, write_overlay, write_report
from rlhf.tracking.run_folder import RunFolder, completed_step, is_in_use


def run_report(path: str, console: Console) -> None:
    """Rebuild the report page of a run from its folder."""
    console.print(Text(f"report  {write_report(Path(path))}"), soft_wrap=True)


def run_comparison_report(path: str, console: Console) -> None:
    """Rebuild the results and the page of a comparison from its folder."""
    ComparisonTerminal(console).results(*rebuild_comparison(path))


def run_overlay(paths: Sequence[str], out: Path, console: Console) -> None:
    """Write a page with the curves of several runs laid over each other.

    Raises:
        UserError: `out` is a folder, or a file that is no such page.
    """
    check_output_file("--out", out, is_ours=is_page)
    console.print(Text(f"report  {write_overlay([Path(path) for path in paths], out)}"), soft_wrap=True)


WATCH_EVERY_S = 10


def watch_report(path: str, console: Console) -> None:
    """Rewrite the report page of a run while it trains, until it has ended, its process is gone, or Ctrl-C.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir() or not (folder.config.exists() or is_in_use(folder.path)):
        problem = "no run is in this folder" if folder.path.is_dir() else "no such folder"
        raise UserError(f"{path}: {problem}; start the run first, or give its folder (run.out_dir)")
    console.print(Text(f"report  {folder.report}: rewritten every {WATCH_EVERY_S} s; Ctrl-C ends this"), soft_wrap=True)
    try:
        while not _has_ended(folder) and is_in_use(folder.path):
            if folder.read_metrics():
                write_report(folder.path, refresh_s=WATCH_EVERY_S)
            time.sleep(WATCH_EVERY_S)
        if not _has_ended(folder):
            text = f"no process trains in {path} any more: the run was stopped or has ended early"
            console.print(Text(text), soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped watching; the run itself goes on")
    if folder.read_metrics():
        write_report(folder.path)


def _has_ended(folder: RunFolder) -> bool:
    """Return whether the run has taken the steps that its configuration plans, and exported its model."""
    step = completed_step(folder)
    planned = folder.read_config().get("schedule", {}).get("steps")
    return step is not None and (not isinstance(planned, int) or step >= planned)
