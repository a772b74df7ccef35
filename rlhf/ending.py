"""How a process ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Exit with `code`; everything must have been written and closed.

    In one of several processes Python's own way out is not taken: threads of gloo and DeepSpeed may still be there when
    C++ clears up, which then aborts ("terminate called without an active exception", exit code -6), and the launcher
    reports a run that has succeeded as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    sys.exit(code)
