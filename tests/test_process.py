"""A launched process ends at once, with C++ threads left or not; one that is alone ends like Python.

A process that waits for its input's end does not outlive the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

LINGERS = """
import atexit, os, sys
from rlhf.process import exit_process
atexit.register(lambda: os.abort())  # stands for what C++ does at the way out
print("written", end="")
exit_process(3)
"""


@pytest.mark.parametrize(("launched", "code"), [(True, 3), (False, -6)])
def test_only_a_launched_process_leaves_by_the_short_way(launched: bool, code: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | ({"WORLD_SIZE": "2"} if launched else {})
    done = subprocess.run([sys.executable, "-c", LINGERS], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "written")


OUTLIVES = "import time; from rlhf.process import stop_with_input; stop_with_input(); time.sleep(100)"
PARENT = f"""
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {OUTLIVES!r}], stdin=subprocess.PIPE)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_stops_when_the_one_that_started_it_is_killed() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, check=False)  # until both are gone
    assert done.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 60
