"""How the process starts and ends: libraries are silenced before they are imported, and nothing aborts at exit."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn


def silence_libraries() -> None:
    """Turn off progress bars and advice of libraries; call it before importing them, since most read this on import."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # reading GGUF draws a bar that nothing else turns off
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    silence_loggers()


def silence_loggers() -> None:
    """Turn off advice that libraries log when any caller imports transformers."""
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def stop_with_input() -> None:
    """Send SIGTERM (save and stop) to this process when its standard input ends, as its writer has then ended."""

    _when_input_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))


def _when_input_ends(then: Callable[[], None]) -> None:
    """Call `then` in a thread when standard input ends."""

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock a waiting thread would hold at exit
            pass
        then()

    threading.Thread(target=wait, daemon=True).start()


def supervise(command: Sequence[str], *, grace_s: float = 10.0) -> int:
    """Run a command until it ends, or until this process's standard input ends or SIGTERM comes; return its exit code.

    The process that started this one holds the other end of the input, so that the command ends with it in any
    case. The command and its children get SIGTERM, and after `grace_s` seconds SIGKILL. On Windows only the command
    is killed.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    over = threading.Event()

    def end() -> None:
        over.wait()
        for is_last in (False, True):
            _end_group(child, by_force=is_last)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)

    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threading.Thread(target=end, daemon=True).start()
    _when_input_ends(over.set)
    code = child.wait()
    _end_group(child, by_force=True)  # the children that it has left behind
    return code


def _end_group(child: subprocess.Popen[bytes], *, by_force: bool) -> None:
    """End a process and its children; on Windows, which has no process groups, the process alone."""
    if not hasattr(os, "killpg"):
        child.kill()
        return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL if by_force else signal.SIGTERM)


def exit_process(code: int) -> NoReturn:
    """Exit the process with `code`; everything must have been written and closed.

    A process started by a launcher skips Python's own shutdown: threads of gloo and DeepSpeed may still be running when
    C++ destructors run, which then abort ("terminate called without an active exception", exit code -6), and the
    launcher would report a successful run as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    sys.exit(code)
