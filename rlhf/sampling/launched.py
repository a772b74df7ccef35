"""A sampling server that the run starts on its own machine: started again if it dies, and ended with the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from rlhf.errors import SamplingError

SUPERVISE = "import sys; from rlhf.process import supervise; sys.exit(supervise(sys.argv[1:]))"
SHOWN_LINES = 15  # of the log, in an error
STOP_S = 30.0  # to wait for the end


class LaunchedServer:
    """The process of a server. It ends with this one, however this one ends: a pipe between them tells."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, port: int, log: Path) -> None:
        """Take the command; nothing is started.

        Args:
            command: the program and its arguments.
            environment: variables besides this process's.
            port: the port where it will listen.
            log: the file that gets its output.
        """
        self.command, self.environment, self.port, self.log = list(command), dict(environment), port, log
        self.has_answered = False
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def ensure(self) -> bool:
        """Start the process if it does not run, and return whether it was started.

        Raises:
            SamplingError: it ended before it ever answered, cannot be started, or its port is taken.
        """
        if self._is_over:
            raise SamplingError("the run has ended, and its sampling servers with it")
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return False
            if not self.has_answered:
                raise SamplingError(f"the sampling server ended with exit code {code} before it answered{self._tail()}")
            self._close_input()
        self._start()
        return True

    def _start(self) -> None:
        self.has_answered = False
        with closing(socket.socket()) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise SamplingError(
                    f"port {self.port} is taken, so no sampling server can be started there: set "
                    "sampling.server.launch.port, or stop what listens there"
                ) from error
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C is for the trainer, which still needs the server to end its step
            )

    def _tail(self) -> str:
        """Return the end of the log, for an error."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return f"; the end of {self.log}:\n" + "\n".join(lines[-SHOWN_LINES:])

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def stop(self) -> None:
        """End the process for good, and wait until it has ended."""
        self._is_over = True
        self._close_input()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
