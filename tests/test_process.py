"""A launched process ends at once, whatever C++ threads are left; one that is alone ends as Python does."""

from __future__ import annotations

import os
import subprocess
import sys

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
