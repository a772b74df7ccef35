"""Run one cell in this process: `python -m rlhf.comparison <cell folder>`, like rlhf/comparison/scheduler.py.

The cell stops when standard input ends, because the comparison that started it is then gone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf.process import exit_process, silence_libraries, stop_with_input


def main(folder: Path) -> int:
    """Run the cell in `folder`; return its exit code."""
    silence_libraries()
    stop_with_input()
    from rlhf.comparison.trial import cell_main

    return cell_main(folder)


if __name__ == "__main__":
    exit_process(main(Path(sys.argv[1])))
