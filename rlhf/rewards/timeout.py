"""A limit on the time of somebody else's code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
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


def _in_a_thread(seconds: float, call: Callable[[], T]) -> T:
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise Elapsed
    return done[0]
