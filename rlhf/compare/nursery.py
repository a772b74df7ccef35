"""Imported by the process that cells are forked from, and by no other: everything a cell needs, and no thread."""

from __future__ import annotations

import signal

from rlhf.compare.processes import remember_to_stop

signal.signal(signal.SIGTERM, remember_to_stop)
