"""The pool of children: deadlines, crashes, memory, and an end with their parent, for any grader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from extras import import_extra
from sandboxes import RIGHT

from rlhf.errors import RewardError
from rlhf.verifiers.pool import GraderPool

ROOT = Path(__file__).resolve().parents[2]
GRADER = """
import os, signal, subprocess, sys, time
def grade(completion, row):
    if completion == "loop":
        while True: pass
    if completion == "regex":
        import re
        re.match("(a+)+$", "a" * 40 + "b")
    if completion == "sleep":
        time.sleep(60)
    if completion == "ignore":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(60)
    if completion == "8 GB":
        return len("a" * 8 * 10**9)
    if completion == "exit":
        os._exit(0)
    if completion == "sys.exit":
        sys.exit(0)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "print":
        print("x" * 10**6)
        sys.stdout.write('{"grade": 100}')
    if completion == "start":
        subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    if completion == "raise":
        raise KeyError("answer")
    if completion == "none":
        return None
    return float(row["n"])
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(GRADER)
    return f"{tmp_path / 'mine.py'}:grade"


def pool_of(target: str, *, timeout_s: float = 0.5, workers: int = 1, **settings: Any) -> GraderPool:
    return GraderPool({"": {"type": "function", "target": target}}, timeout_s=timeout_s, workers=workers, **settings)


def descendants() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def test_every_mishap_costs_its_item_and_no_other(target: str) -> None:
    before = {child.pid for child in descendants()}
    pool = pool_of(target, memory_mb=2048)
    mishaps = {
        "loop": "timeout", "regex": "timeout", "sleep": "timeout", "ignore": "timeout", "start": "timeout",
        "8 GB": "error", "exit": "error", "sys.exit": "error", "segfault": "error", "raise": "error",
        "none": "none", "print": "graded",
    }  # fmt: skip
    texts = [text for name in mishaps for text in (name, "fine")]
    outcomes = pool.grade([("", text, {"n": n}) for n, text in enumerate(texts)])
    assert {name: outcome.state for name, outcome in zip(texts, outcomes, strict=True) if name != "fine"} == mishaps
    assert [outcome.grade for outcome in outcomes[1::2]] == [float(n) for n in range(1, len(texts), 2)]
    errors = {text: outcome.message for text, outcome in zip(texts, outcomes, strict=True)}
    assert "MemoryError" in errors["8 GB"]
    assert "KeyError: 'answer'" in errors["raise"]
    assert "mine.py:" in errors["raise"]
    assert "code -11" in errors["segfault"]
    assert all(outcome.seconds < 3 for outcome in outcomes)
    pool.close()
    assert {child.pid for child in descendants()} <= before


def test_the_order_does_not_depend_on_the_number_of_children(target: str) -> None:
    items = [("", "fine", {"n": n}) for n in range(300)]
    for workers in (1, 3):
        pool = pool_of(target, workers=workers)
        assert [outcome.grade for outcome in pool.grade(items)] == [float(n) for n in range(300)]
        pool.close()
    assert pool_of(target).grade([]) == []


def test_a_grader_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module\ngrade = 0\n")
    with pytest.raises(RewardError, match=r"the verifier cannot start: importing .*No module named 'no_such_module'"):
        pool_of(f"{tmp_path / 'mine.py'}:grade").grade([("", "x", {})])
    (tmp_path / "mine.py").write_text("import os\n\nos._exit(3)\ngrade = 0\n")
    with pytest.raises(RewardError, match="ends with code 3 before it grades anything"):
        pool_of(f"{tmp_path / 'mine.py'}:grade").grade([("", "x", {})])


def test_a_row_that_cannot_be_sent_is_named(target: str) -> None:
    with pytest.raises(RewardError, match="a row's columns cannot be sent"):
        pool_of(target).grade([("", "x", {"n": lambda: 1})])


@pytest.mark.parametrize("busy", ["", "sleep", "regex"])
def test_children_end_with_a_parent_that_is_killed(target: str, busy: str) -> None:
    script = (
        "import sys, os\nfrom rlhf.verifiers.pool import GraderPool\n"
        f"pool = GraderPool({{'': {{'type': 'function', 'target': {target!r}}}}}, timeout_s=2, workers=1)\n"
        "pool.grade([('', 'fine', {'n': 1})])\nprint(pool.children[0].process.pid, flush=True)\n"
        f"pool.grade([('', {busy!r}, {{'n': 1}})]) if {busy!r} else sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    for stream in (parent.stdin, parent.stdout):
        if stream is not None:
            stream.close()


def test_the_environment_of_a_child_has_no_device(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\ndef grade(completion, row):\n    return len(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    assert pool_of(f"{tmp_path / 'mine.py'}:grade").grade([("", "x", {})])[0].grade == 0


def test_ten_thousand_gradings_leak_nothing(target: str) -> None:
    """Children, descriptors and memory are the same as before; a child that was killed is replaced and not added."""
    pool = pool_of(target, timeout_s=0.2, workers=2)
    items = [("", "fine", {"n": n}) for n in range(1000)]
    pool.grade(items)
    before, files, memory = len(descendants()), len(os.listdir("/proc/self/fd")), measure(pool)
    for _ in range(9):
        pool.grade(items)
    pool.grade([("", "sleep" if n in (3, 50) else "fine", {"n": n}) for n in range(100)])
    assert len(descendants()) <= before
    assert len(os.listdir("/proc/self/fd")) == files
    assert measure(pool) < memory + 20 * 2**20
    pool.close()


def measure(pool: GraderPool) -> int:
    pids = [child.process.pid for child in pool.children if child.process is not None]
    return sum(psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *pids))


@pytest.mark.slow
def test_ten_thousand_programs_leak_nothing() -> None:
    import_extra("pydantic_monty")
    pool = GraderPool({"": {"type": "code", "sandbox": "monty"}}, timeout_s=5.0, workers=2)
    items = [("", RIGHT, {"tests": ["assert f(1) == 2"]})] * 1000
    pool.grade(items)
    before, memory = len(descendants()), measure(pool)
    for _ in range(9):
        assert {outcome.state for outcome in pool.grade(items)} == {"graded"}
    assert len(descendants()) <= before
    assert measure(pool) < memory + 50 * 2**20
    pool.close()
