"""Run one cell in this process: `python -m rlhf.comparison <cell folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf.comparison.trial import cell_main
from rlhf.process import exit_process

if __name__ == "__main__":
    exit_process(cell_main(Path(sys.argv[1])))
