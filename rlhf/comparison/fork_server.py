"""Preload module of the fork server that cells are forked from; no other process imports it.

It imports everything that a cell needs, and starts no thread.
"""

from __future__ import annotations

import signal

from rlhf.comparison.scheduler import handle_sigterm

signal.signal(signal.SIGTERM, handle_sigterm)
