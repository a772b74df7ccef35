"""python -m rlhf."""

from __future__ import annotations

import os
import sys

from rlhf.cli import main

if __name__ == "__main__":
    code = main()
    if "WORLD_SIZE" in os.environ:
        # All is written. Threads of gloo and DeepSpeed may outlive Python here, which then aborts: exit code -6.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
