"""Many environments at once: in this process, or in worker processes that are killed when a step takes too long.

A worker holds the environments of several episodes. If one of them hangs or kills its process, the others are made
again in a new one: from their seed, their row and the actions so far. An environment whose answers then differ is not
a function of these, and its episode is a fault too.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlhf.environments.host import Act, Begin, Cut, End, Host, HostReply, HostRequest
from rlhf.environments.load import load_environment
from rlhf.environments.protocol import Fault, ResetResult, StepResult
from rlhf.environments.worker import Start, receive, send
from rlhf.errors import ResourceError
from rlhf.rewards.function import TimeLimitExceeded, run_with_timeout

START_S = 120.0  # a worker imports the user's module and, with an adapter, a library
CHANGED = (
    "played again after another environment of its worker was killed, it answered differently: an environment has to "
    "be a function of seed, row and actions"
)
ENDED = "the worker process ended: the environment called exit, crashed, or ran out of memory"


class EnvironmentPool:
    """Runs the environments of a rank; every request gets an answer within the time limit, a Fault at worst."""

    def __init__(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        workers: int = 0,
        timeout_s: float | None = None,
        plugins: Sequence[str] = (),
    ) -> None:
        """Check the environment, and take the limits; workers start with the first request.

        Raises:
            ConfigError: there is no such environment.
        """
        self.make = load_environment(target, kwargs)
        self.timeout_s = timeout_s
        self.phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        start = Start(target, dict(kwargs), tuple(plugins), tuple(sys.path))
        self._local = Host(self.make)
        self._dealt: dict[int, int] = {}  # episode -> number of its worker
        self._begun = 0
        self._workers = [_Worker(start, timeout_s) for _ in range(workers)]
        weakref.finalize(self, _stop_all, self._workers)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="environment") if workers else None

    def run(self, requests: Sequence[HostRequest]) -> list[HostReply]:
        """Answer the requests, in their order; requests of one episode always go to the same worker."""
        with self.phase("environment"):
            return self._run_in_workers(requests) if self._workers else [self._run_here(r) for r in requests]

    def stop(self) -> None:
        """End the worker processes; the next request starts them again."""
        for worker in self._workers:
            worker.stop()

    def _worker_of(self, request: HostRequest) -> int:
        """Deal episodes to the workers in turn, and remember which has one."""
        if isinstance(request, End):
            return self._dealt.pop(request.episode, 0)
        if request.episode not in self._dealt:
            self._dealt[request.episode] = self._begun % len(self._workers)
            self._begun += 1
        return self._dealt[request.episode]

    def _run_here(self, request: HostRequest) -> HostReply:
        try:
            return run_with_timeout(self.timeout_s, lambda: self._local.handle(request))
        except TimeLimitExceeded:
            self._local.drop(request.episode)
            return Fault(_overdue(self.timeout_s))

    def _run_in_workers(self, requests: Sequence[HostRequest]) -> list[HostReply]:
        assert self._threads is not None
        dealt: list[list[int]] = [[] for _ in self._workers]
        for number, request in enumerate(requests):
            dealt[self._worker_of(request)].append(number)
        answers: list[HostReply] = [None] * len(requests)

        def serve(worker: _Worker, numbers: Sequence[int]) -> None:
            for number in numbers:
                answers[number] = worker.ask(requests[number])

        futures = [
            self._threads.submit(serve, worker, numbers) for worker, numbers in zip(self._workers, dealt, strict=True)
        ]
        for future in futures:
            future.result()
        return answers


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()


def _overdue(seconds: float | None) -> str:
    return f"no answer in {seconds:g} s (environment.step_timeout_s)"


@dataclass
class _Played:
    """An episode so far, from which it can be played again."""

    begin: Begin
    actions: list[str] = field(default_factory=list)
    answers: list[ResetResult | StepResult] = field(default_factory=list)

    @property
    def requests(self) -> list[HostRequest]:
        return [self.begin, *(Act(self.begin.episode, action) for action in self.actions)]


class _Worker:
    """One worker process, started when it is needed and again after it was killed."""

    def __init__(self, start: Start, timeout_s: float | None) -> None:
        self.start, self.timeout_s = start, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._played: dict[int, _Played] = {}
        self._lost: dict[int, Fault] = {}  # episodes that could not be played again

    def ask(self, request: HostRequest) -> HostReply:
        """Answer a request; a fault ends its episode, and the process too if it hangs or is gone."""
        if isinstance(request, End):
            self._played.pop(request.episode, None)
            self._lost.pop(request.episode, None)
            return None if self._process is None else self._exchange(request)  # one that failed is to be closed too
        if self._process is None:
            self._restart()
        if request.episode in self._lost:
            return self._lost.pop(request.episode)
        answer = self._exchange(request)
        self._record(request, answer)
        return answer

    def stop(self) -> None:
        """Kill the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was still to be written to a dead process
                assert stream is not None
                stream.close()
        self._process = None

    def _record(self, request: Begin | Act | Cut, answer: HostReply) -> None:
        if isinstance(answer, Fault) or answer is None:
            self._played.pop(request.episode, None)
            return
        if isinstance(request, Cut):  # no step
            return
        if isinstance(request, Begin):
            self._played[request.episode] = _Played(request)
        else:
            self._played[request.episode].actions.append(request.action)
        self._played[request.episode].answers.append(answer)

    def _exchange(self, request: HostRequest) -> HostReply:
        """Send a request and wait for the answer; without one in time the process is killed."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, request)
            answer = self._answers.get(timeout=self.timeout_s)
        except queue.Empty:
            self.stop()
            return Fault(_overdue(self.timeout_s))
        except OSError:
            answer = EOFError
        if answer is EOFError:
            self.stop()
            return Fault(ENDED)
        return answer  # type: ignore[no-any-return]

    def _restart(self) -> None:
        """Start a process, and play the episodes of the one before again; an episode that cannot be played is lost."""
        self._launch()
        while not self._play_again():
            self._launch()

    def _play_again(self) -> bool:
        """Play every episode again up to where it was; return False if one of them ended the process."""
        for episode, played in list(self._played.items()):
            for request, expected in zip(played.requests, played.answers, strict=True):
                answer = self._exchange(request)
                if answer == expected:
                    continue
                self._lost[episode] = answer if isinstance(answer, Fault) else Fault(CHANGED)
                del self._played[episode]
                break
            if self._process is None:
                return False
        return True

    def _launch(self) -> None:
        """Start the process and wait until it has imported the environment.

        Raises:
            ResourceError: it did not start.
        """
        command = [sys.executable, "-m", "rlhf.environments.worker"]
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read_answers, args=(self._process.stdout, self._answers), daemon=True).start()
        send(self._process.stdin, self.start)
        try:
            answer = self._answers.get(timeout=START_S)
        except queue.Empty:
            answer = Fault(f"it did not start in {START_S:g} s")
        if answer is not None:
            self.stop()
            reason = answer.reason if isinstance(answer, Fault) else ENDED
            raise ResourceError(f"a worker process of the environment {self.start.target!r} failed: {reason}")


def _read_answers(stream: IO[bytes], answers: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            answers.put(receive(stream))
    except (EOFError, OSError, ValueError):  # ended, or closed here
        answers.put(EOFError)
