"""python -m rlhf.compare <cell folder>: run one cell in this process."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf.compare.cell import cell_main

if __name__ == "__main__":
    sys.exit(cell_main(Path(sys.argv[1])))
