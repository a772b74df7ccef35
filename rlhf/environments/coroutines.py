"""Coroutines of tools, run in one event loop of this process, in a thread of its own: another loop may run here."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable
from functools import cache
from typing import Any


def result_of(value: Any) -> Any:
    """Return what a coroutine returns, after it has run to its end; any other value as it is."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # a worker imports little

    future = asyncio.run_coroutine_threadsafe(_awaited(value), _event_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # after a time limit; a future that is done stays as it is


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@cache
def _event_loop() -> Any:
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines of tools", daemon=True).start()
    return loop
