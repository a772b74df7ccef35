"""A worker process: it makes environments and answers requests over its standard input and output.

    python -m rlhf.environments.worker

The output of an environment goes to standard error. The process ends when its input does, in the middle of a step too.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from rlhf.environments.host import Host
from rlhf.environments.protocol import Fault, describe_error

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Start:
    """The class of a worker's environments, and the process's plug-ins and path."""

    target: str
    kwargs: Mapping[str, Any]
    plugins: tuple[str, ...]
    path: tuple[str, ...]  # sys.path of the process that trains, in which modules of the user are found


def send(stream: IO[bytes], message: object) -> None:
    """Write a message."""
    content = pickle.dumps(message)
    stream.write(LENGTH.pack(len(content)) + content)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: the stream has ended.
    """
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains, which ends this one
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    host = _start(waiting.get(), answers)
    while host is not None:
        send(answers, host.handle(waiting.get()))


def _read(requests: IO[bytes], waiting: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            waiting.put(receive(requests))
    except (EOFError, OSError):
        os._exit(0)  # the process that trains is gone; a step may go on for ever


def _start(start: Start, answers: IO[bytes]) -> Host | None:
    """Import the environment, and say whether that worked."""
    from rlhf.environments.load import load_environment
    from rlhf.plugins import load_plugins

    sys.path[:] = [*start.path, *(place for place in sys.path if place not in start.path)]
    try:
        load_plugins({"plugins": list(start.plugins)})
        host = Host(load_environment(start.target, start.kwargs))
    except Exception as error:
        send(answers, Fault(describe_error(error)))
        return None
    send(answers, None)
    return host


if __name__ == "__main__":
    main()
