"""How the process starts and ends: libraries are silenced before they are imported, and nothing aborts at exit."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import NoReturn


def silence_libraries() -> None:
    """Turn off progress bars and advice of libraries; call it before importing them, since most read this on import."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # reading GGUF draws a bar that nothing else turns off
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


def stop_with_input() -> None:
    """Send SIGTERM (save and stop) to this process when its standard input ends: whoever wrote to it has ended."""

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock a waiting thread would hold at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


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
