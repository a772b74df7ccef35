"""Silencing what libraries print on their own, so that the terminal shows the run's output only."""

from __future__ import annotations

import logging
import os


def quiet_libraries() -> None:
    """Turn off progress bars and advice of libraries; call it before importing them, since most read this on import."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # reading GGUF draws a bar that nothing else turns off
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
