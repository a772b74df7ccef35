"""Preload module of the fork server that cells are forked from; no other process imports it.

It imports everything that a cell needs, and starts no thread.
"""

from __future__ import annotations

import signal

from rlhf.process import silence_libraries

silence_libraries()  # before they are imported: the filters of the program that compares do not reach this process

from rlhf.comparison.processes import handle_sigterm  # noqa: E402

signal.signal(signal.SIGTERM, handle_sigterm)
