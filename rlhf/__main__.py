"""Entry point of `python -m rlhf`."""

from __future__ import annotations

from rlhf.cli import main
from rlhf.process import exit_process

if __name__ == "__main__":
    exit_process(main())
