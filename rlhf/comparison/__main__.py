"""Run one cell in this process: `python -m rlhf.comparison <cell folder>`, as rlhf/comparison/scheduler.py does.

The cell stops when standard input ends, which is when the comparison that started it is gone.
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
