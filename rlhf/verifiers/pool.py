"""A small pool of child processes that grade, each of which can be killed.

Graders run programs of others on texts that a policy is trained to exploit: one may loop, leak or crash. In a process
of its own with a deadline per item it costs one grade and no run. A thread per child sends it a batch in one message
and reads an answer per item.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlhf.errors import RewardError

START_S = 120.0  # the longest that a child may take to import the modules of its graders
GRACE_S = 1.0  # beyond an item's time, after which the parent kills the child if its own timer did not
LARGEST_BATCH = 64  # items per message
BATCHES_PER_CHILD = 4  # so that a child which has drawn slow items does not keep the others waiting
State: TypeAlias = Literal["graded", "none", "timeout", "error"]
Item: TypeAlias = tuple[str, str, Mapping[str, Any]]  # the grader's key, the completion, its row

COMMAND = "import sys; sys.path[:0] = {path!r}; from rlhf.verifiers.child import main; main({descriptor})"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an item."""

    state: State
    grade: float | Mapping[str, float] | None  # None unless it is graded
    seconds: float
    message: str = ""  # of an error


class GraderPool:
    """Grades items in child processes.

    Children start when they are first needed, and end with this process, however it ends.
    """

    def __init__(
        self,
        settings: Mapping[str, Mapping[str, Any]],
        *,
        timeout_s: float,
        workers: int,
        memory_mb: int = 0,
        plugins: Sequence[str] = (),
    ) -> None:
        """Describe the pool.

        Args:
            settings: of each grader by its key, as in a configuration file.
            timeout_s: the longest that an item may take, in seconds; then its child is killed.
            workers: children.
            memory_mb: the address space of a child, in MiB; 0: no limit.
            plugins: the files and modules in which graders of the user are defined.
        """
        self.settings = dict(settings)
        self.timeout_s = timeout_s
        setup = {"plugins": list(plugins), "memory_mb": memory_mb}
        self.children = [Child(setup, timeout_s=timeout_s) for _ in range(workers)]
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop_all, self.children)

    def grade(self, items: Sequence[Item], settings: Mapping[str, Mapping[str, Any]] | None = None) -> list[Outcome]:
        """Grade the items, in their order; `settings` are of graders besides the pool's.

        Raises:
            RewardError: a grader cannot be started, or a row cannot be sent.
        """
        known = self.settings | dict(settings or {})
        size = max(1, min(LARGEST_BATCH, len(items) // (len(self.children) * BATCHES_PER_CHILD)))
        batches: queue.SimpleQueue[range] = queue.SimpleQueue()
        for start in range(0, len(items), size):
            batches.put(range(start, min(start + size, len(items))))
        outcomes: dict[int, Outcome] = {}

        def work(child: Child) -> None:
            while True:
                try:
                    batch = batches.get_nowait()
                except queue.Empty:
                    return
                keys = {items[i][0] for i in batch}
                graded = child.grade([items[i] for i in batch], {key: known[key] for key in sorted(keys)})
                outcomes.update(zip(batch, graded, strict=True))

        with self._lock:
            used = self.children[: max(1, -(-len(items) // size))]
            if len(used) == 1:
                work(used[0])
            else:
                with ThreadPoolExecutor(len(used)) as threads:
                    list(threads.map(work, used))
        return [outcomes[i] for i in range(len(items))]

    def close(self) -> None:
        """Kill the children."""
        self._finalizer()


class Child:
    """A process that grades, started when it is needed, and again after it was killed."""

    def __init__(self, setup: Mapping[str, Any], *, timeout_s: float) -> None:
        self.setup = dict(setup)
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.answers = -1  # the file descriptor of its answers
        self.rest = b""

    def grade(self, items: Sequence[Item], graders: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
        """Grade the items; the one at which the child is lost is a timeout or an error, and the others go on.

        Raises:
            RewardError: a grader cannot be started, or a row cannot be sent.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            self._send({"graders": graders, "items": list(items[len(outcomes) :]), "timeout_s": self.timeout_s})
            while len(outcomes) < len(items):
                started = time.monotonic()
                line = self._read_line(self.timeout_s + GRACE_S)
                if line is None:
                    outcomes.append(self._lost(time.monotonic() - started))
                    break
                outcomes.append(_outcome(json.loads(line)))
        return outcomes

    def stop(self) -> int | None:
        """Kill the process and all that it has started; return how it had ended."""
        process, self.process = self.process, None
        if process is None:
            return None
        code = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            code = process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        os.close(self.answers)
        self.rest = b""
        return code

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a batch, to a new process if there is none, and wait until its graders are ready."""
        try:
            data = pickle.dumps(dict(message))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(f"a row's columns cannot be sent to the process of the verifier: {error}") from error
        for attempt in range(2):
            if self.process is None or self.process.poll() is not None:
                self.stop()
                self._start()
            assert self.process is not None
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(data)
                self.process.stdin.flush()
            line = self._read_line(START_S)
            if line is not None:
                break
            code = self.stop()
            if attempt:
                raise RewardError(f"the process of the verifier ends with code {code} before it grades anything")
        assert line is not None
        problem = json.loads(line)["ready"]
        if problem is not None:
            self.stop()
            raise RewardError(f"the verifier cannot start: {problem}")

    def _start(self) -> None:
        self.answers, write = os.pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND.format(path=path, descriptor=write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(write,),
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(write)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(self.setup, self.process.stdin)
            self.process.stdin.flush()

    def _read_line(self, seconds: float) -> bytes | None:
        """Return the next line of the answers; None if the child ended or there was none in this time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                return None
            data = os.read(self.answers, 2**16)
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def _lost(self, seconds: float) -> Outcome:
        """Return the outcome of the item at which the child ended or was silent for too long."""
        process = self.process
        assert process is not None
        ended = None
        if seconds < self.timeout_s + GRACE_S:  # its answers are closed: it ends now
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = process.wait(GRACE_S)
        self.stop()
        if ended is None or ended == -signal.SIGALRM:
            return Outcome("timeout", None, seconds, f"no grade in {self.timeout_s:g} s")
        return Outcome("error", None, seconds, f"its process ended with code {ended}")


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    if "error" in answer:
        return Outcome("error", None, answer["seconds"], answer["error"])
    grade = answer["grade"]
    return Outcome("none" if grade is None else "graded", grade, answer["seconds"])


def _stop_all(children: Sequence[Child]) -> None:
    for child in children:
        child.stop()
