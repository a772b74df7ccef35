"""A child process that grades: it reads batches from its standard input and answers one line per item.

Its parent, `rlhf.verifiers.pool`, kills it if an item takes too long. It ends by itself if its parent is gone, even in
the middle of an item: a thread waits for the end of the input, and a timer of the kernel ends an item that holds the
interpreter.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import TypeAdapter

import rlhf.verifiers as rlhf_verifiers
from rlhf.errors import UserError
from rlhf.plugins import load_plugins
from rlhf.section import OneOf
from rlhf.verifiers.grader import GradeFunction, Grader, checked_grade

assert rlhf_verifiers  # to import the package is to define the graders
MIB = 2**20


def main(answers_fd: int) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    with os.fdopen(answers_fd, "w", encoding="utf-8") as answers:
        setup = messages.get()
        load_plugins({"plugins": setup["plugins"]})
        _limit(setup["memory_mb"])
        graders = Graders()
        while True:
            message = messages.get()
            graders.prepare(message["graders"])
            _write(answers, {"ready": graders.error})
            for key, completion, row in message["items"]:
                _write(answers, graders.grade(key, completion, row, message["timeout_s"]))


class Graders:
    """The graders of this process by their key, each made when it is first needed."""

    def __init__(self) -> None:
        self.functions: dict[str, GradeFunction] = {}
        self.error: str | None = None

    def prepare(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Start the graders that are not started yet; `error` is the reason if one fails."""
        for key, given in settings.items():
            if key in self.functions:
                continue
            try:
                grader: Grader = TypeAdapter(Annotated[Grader, OneOf()]).validate_python(dict(given))
                self.functions[key] = grader.start()
            except Exception as error:  # the parent raises it
                self.error = str(error) if isinstance(error, UserError) else _last_line(error)
                return

    def grade(self, key: str, completion: str, row: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Grade one item: its grade, or the error."""
        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            answer: dict[str, Any] = {"grade": checked_grade(self.functions[key](completion, row))}
        except BaseException as error:  # a mistake of the grader, which the parent counts; also sys.exit
            answer = {"error": _last_line(error)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return answer | {"seconds": time.perf_counter() - started}


def _limit(memory_mb: int) -> None:
    """Limit the memory of this process, in MiB (0: do not), and write no dump if it crashes."""
    import resource

    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * MIB,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(messages: queue.SimpleQueue[Any]) -> None:
    """Put each message of the input into the queue; end the process at the end of the input."""
    while True:
        try:
            messages.put(pickle.load(sys.stdin.buffer))
        except (EOFError, pickle.UnpicklingError):
            os.killpg(os.getpid(), signal.SIGKILL)  # with all that a grader has started


def _write(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _last_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{traceback.format_exception_only(error)[-1].strip()} at {frame.filename}:{frame.lineno}"
