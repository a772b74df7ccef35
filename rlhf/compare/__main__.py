"""python -m rlhf.compare <cell folder>: run one cell; how the runner gives each a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from rlhf.compare.cell import run_cell
from rlhf.compare.plan import read_cell
from rlhf.compare.runner import INTERRUPTED
from rlhf.errors import UserError
from rlhf.runtime.ranks import is_main_process, leave


def main(folder: str) -> int:
    """0 when the cell is done, 2 for a mistake of the user's, INTERRUPTED where it was stopped and saved."""
    try:
        return 0 if run_cell(read_cell(Path(folder)), Console(quiet=not is_main_process())) else INTERRUPTED
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        leave()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
