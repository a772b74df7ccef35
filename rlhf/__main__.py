"""Entry point of `python -m rlhf`."""

from __future__ import annotations

from rlhf.cli import main
from rlhf.process import end_process

if __name__ == "__main__":
    end_process(main())
