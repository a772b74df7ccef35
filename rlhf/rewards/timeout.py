"""A limit on the time of somebody else's code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")

AGAIN_S = 1.0  # code that swallows the interruption is interrupted again


class Elapsed(BaseException):
    """The time is over. Not an Exception: `except Exception` in the code that hangs must not catch it."""


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """What `call` gives, if it does so in time; None: however long it takes.

    In the main thread a signal interrupts it, also while it sleeps, waits for a socket or matches a regular expression;
    a loop inside a compiled extension ends first. In another thread it is left to itself.

    Raises:
        Elapsed: it took longer.
    """
    if seconds is None:
        return call()
    if threading.current_thread() is not threading.main_thread():
        return _in_a_thread(seconds, call)

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise Elapsed

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class _Kept:
    """Keeps what is raised inside, for another thread to raise."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def _in_a_thread(seconds: float, call: Callable[[], T]) -> T:
    done: list[T] = []
    kept = _Kept()

    def work() -> None:
        with kept:
            done.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if kept.error is not None:
        raise kept.error
    if not done:
        raise Elapsed
    return done[0]
