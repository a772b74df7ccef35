"""Start `python -m rlhf …` from a process that has imported everything: a real process, without seconds of imports.

Signals, pipes, exit codes and files need a process of their own, and do not depend on the origin of its modules. A
waiting process that imported them is forked twice, so that the new process is left to this one, which adopts it as its
child: a caller of `subprocess.Popen` gets the process that it would have started, with its own environment, folder
and files. It works on Linux; elsewhere `Popen` is unchanged. The fixture is `warm_start` in suite_fixtures.py. A test
of the imports or the output of a new interpreter does not use it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rlhf.process import silence_libraries

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("rlhf", "rlhf.comparison", "job")  # the modules that are started warm, by `python -m`
IMPORTED = ("rlhf.cli", "rlhf.api.training", "rlhf.comparison.trial", "rlhf.factory.reward_model")
SAVING = "deepspeed"  # transformers imports it, if it is installed, to save a model
SET_CHILD_SUBREAPER = 36  # of prctl
LIMIT = 2**20  # bytes of a request


class Waiting:
    """The process that waits for requests, started by the first."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    def start(self, request: dict[str, Any], files: list[int]) -> int:
        """Have a process started; return its id."""
        socket.send_fds(self._channel, [json.dumps(request).encode()], files)
        return int(self._channel.recv(32))

    def close(self) -> None:
        """Let the process end."""
        self._channel.close()
        self._process.wait()


class WarmPopen(subprocess.Popen[Any]):
    """A Popen that starts processes from the waiting one if possible."""

    waiting: Waiting | None = None

    @classmethod
    def close(cls) -> None:
        """Let the waiting process end, if there is one."""
        if cls.waiting is not None:
            cls.waiting.close()
            cls.waiting = None

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes = rest
        plain = not (preexec_fn or pass_fds or shell or executable) and (args[0], args[1]) == (sys.executable, "-m")
        if not plain or args[2] not in MODULES:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = pipes[:6]
        files = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        start_new_session = pipes[11]
        if WarmPopen.waiting is None:
            WarmPopen.waiting = Waiting()
        self.pid = WarmPopen.waiting.start(
            {
                "args": [os.fspath(word) for word in args[2:]],
                "cwd": os.fspath(cwd or os.getcwd()),
                "env": dict(os.environ if env is None else env),
                "new_session": bool(start_new_session),
            },
            files,
        )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


@contextmanager
def warm() -> Iterator[None]:
    """Start processes so, for as long as the context lasts."""
    if sys.platform != "linux":
        yield
        return
    with mock.patch.object(subprocess, "Popen", WarmPopen), _adopting():
        yield


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopt the processes that the waiting one leaves."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _wait(channel: socket.socket) -> None:
    """Start processes until the other end is closed; in a process that was started, return."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, LIMIT, 3)
        if not message:
            sys.exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            started = os.fork()
            if started:
                os.write(writer, str(started).encode())
                os._exit(0)
            for descriptor in (reader, writer, channel.detach()):
                os.close(descriptor)
            _become(json.loads(message), files)
            return
        os.waitpid(between, 0)  # from here on the new process has its new parent
        channel.send(os.read(reader, 32))
        for descriptor in (reader, writer, *files):
            os.close(descriptor)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Take the place of an interpreter that was started with these words, environment and files."""
    if request["new_session"]:
        os.setsid()
    for own, given in enumerate(files):
        os.dup2(given, own)
    for given in files:
        os.close(given)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.path[1:1] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.argv = request["args"]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _main(descriptor: int) -> None:
    silence_libraries()
    for name in IMPORTED:
        importlib.import_module(name)
    if importlib.util.find_spec(SAVING) is not None:
        importlib.import_module(SAVING)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _wait(socket.socket(fileno=descriptor))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
