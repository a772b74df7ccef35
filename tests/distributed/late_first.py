"""The rlhf command whose first process comes late, as on a loaded machine: started by a launcher, as a script."""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    from rlhf.cli import main

    if os.environ["RANK"] == "0":
        time.sleep(3.0)
    sys.exit(main())
