"""Run one cell, from its start or its last checkpoint, until its model is judged."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from rlhf.build.run import build_run
from rlhf.compare.costs import Ledger
from rlhf.compare.draws import run_best_of_n
from rlhf.compare.judge import Judged, judge_model
from rlhf.compare.plan import Cell, read_cell
from rlhf.compare.suites import run_suites
from rlhf.errors import UserError
from rlhf.runtime.ranks import is_main_process, leave

INTERRUPTED = 3  # exit code of a cell that was stopped and has saved its state


def cell_main(folder: Path) -> int:
    """Run the cell in `folder` as the main function of a process, with errors written to standard error.

    Returns:
        The exit code: 0 when the cell is done, 2 for a user error, INTERRUPTED when it was stopped.
    """
    try:
        return 0 if run_cell(read_cell(folder), Console(quiet=not is_main_process())) else INTERRUPTED
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        leave()


def run_cell(cell: Cell, console: Console) -> bool:
    """Train (if the cell trains), judge and write judged.json; return False if it was interrupted and saved.

    Raises:
        UserError: training or judging cannot go on, in the subclass that fits the cause.
    """
    config = cell.config
    if Judged.read(cell.folder) is not None:
        return True
    trained = str(cell.folder) if config.budget is not None else None
    if config.best_of_n is not None:
        judged = run_best_of_n(config, cell.folder)
    elif trained is None:
        judged = judge_model(config, None)
    else:
        if not _train(cell, console):
            return False
        judged = judge_model(config, trained)
    if is_main_process():
        run_suites(config, cell.folder, trained)
        judged.write(cell.folder)
    return True


def _train(cell: Cell, console: Console) -> bool:
    config = cell.config
    assert config.budget is not None
    run = build_run(config.train, console)
    run.session.budget = Ledger(cell.folder, run.run, config.train, config.budget)
    try:
        return run.train()
    finally:
        run.session.recorder.close()
