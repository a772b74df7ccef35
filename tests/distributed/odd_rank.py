"""`python -m rlhf` with something wrong in one of the processes:  torchrun … odd_rank.py FAULT train CONFIG …

FAULT is JSON: {"rank": of the process, "call": the call of Distributed.gather at which it happens, counted from 1 once
there is a checkpoint in "after" (or from the start), "what": die | freeze | dawdle | sigterm | sigterm_launcher}. `{}`:
nothing is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rlhf.cli import main
from rlhf.process import exit_process
from rlhf.runtime.distributed import Distributed

DAWDLES_S = 0.15  # before each word to the others
HAPPENS = "it happens here"


def inject(rank: int, call: int, what: str, after: str | None = None) -> None:
    """Let it happen in the process of this rank."""
    if os.environ.get("RANK") != str(rank):
        return
    gather, calls = Distributed.gather, list[int]()

    def odd(self: Distributed, value: Any) -> list[Any]:
        if calls or after is None or any(Path(after).glob("step-*")):
            calls.append(1)
        if what == "dawdle" and len(calls) >= call:
            time.sleep(DAWDLES_S)
        elif len(calls) == call:
            print(f"{HAPPENS}: {what}", flush=True)  # noqa: T201
            match what:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "sigterm":
                    os.kill(os.getpid(), signal.SIGTERM)
                case "sigterm_launcher":
                    os.kill(os.getppid(), signal.SIGTERM)
                case _:
                    raise ValueError(what)
        return gather(self, value)

    Distributed.gather = odd  # type: ignore[method-assign]


if __name__ == "__main__":
    fault = json.loads(sys.argv[1])
    if fault:
        inject(**fault)
    exit_process(main(sys.argv[2:]))
