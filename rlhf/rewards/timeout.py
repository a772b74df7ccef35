"""Limit the time that user code may take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")

AGAIN_S = 1.0  # seconds after which code that swallows the interruption is interrupted again


class Elapsed(BaseException):
    """The time limit is exceeded. A BaseException, so that `except Exception` in the user code does not catch it."""


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """Return what `call` returns, within a time limit in seconds; None: no limit.

    In the main thread a signal interrupts the call, even while it sleeps, waits for a socket or matches a regular
    expression; a loop inside a compiled extension has to finish first. In any other thread the call is abandoned and
    goes on in the background.

    Raises:
        Elapsed: the call took longer.
    """
    if seconds is None:
        return call()
    if threading.current_thread() is not threading.main_thread():
        return _run_in_thread(seconds, call)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Elapsed

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)


class _CaughtError:
    """Context manager that catches any exception and keeps it for another thread to raise."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def _run_in_thread(seconds: float, call: Callable[[], T]) -> T:
    results: list[T] = []
    caught = _CaughtError()

    def work() -> None:
        with caught:
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if caught.error is not None:
        raise caught.error
    if not results:
        raise Elapsed
    return results[0]
