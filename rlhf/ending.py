"""Exiting the process without the aborts that distributed libraries cause at interpreter shutdown."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Exit the process with `code`; everything must have been written and closed.

    A process started by a launcher skips Python's own shutdown: threads of gloo and DeepSpeed may still be running when
    C++ destructors run, which then abort ("terminate called without an active exception", exit code -6), and the
    launcher would report a successful run as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    sys.exit(code)
