"""Freed memory is kept where glibc can be told to; elsewhere nothing happens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlhf.config.run import RunConfig
from rlhf.runtime import engine
from rlhf.runtime import memory as allocator

FAULTS = """
import resource, torch
from rlhf.runtime.memory import keep_memory
def work():
    for _ in range(20):
        torch.ones(2**24)
for keep in (False, True):
    if keep: assert keep_memory()
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

GAPS = """
import psutil, torch
from rlhf.runtime.memory import keep_memory, return_gaps
def resident():
    return psutil.Process().memory_info().rss / 2**20
def gaps():
    blocks = [torch.ones(2**18) for _ in range(128)]  # 1 MB each
    return blocks[::2]
for keep in (False, True):
    if keep: assert keep_memory()
    kept = gaps()
    before = resident()
    return_gaps()
    print(before - resident())
    assert all(bool((block == 1).all()) for block in kept)
"""


@pytest.mark.skipif(allocator.platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_gaps_between_blocks_are_returned() -> None:
    process = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, check=True)
    plain, kept = map(float, process.stdout.split())
    assert plain < 8
    assert 48 < kept < 80


@pytest.mark.skipif(allocator.platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_pages_are_not_asked_for_again() -> None:
    process = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True)
    plain, kept = map(int, process.stdout.split())
    assert kept < plain / 10


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert not allocator.keep_memory()
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not allocator.keep_memory()


@pytest.mark.parametrize("keep", [True, False])
def test_the_setting_decides(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(engine, "keep_memory", lambda: told.append(True))
    engine.make_engine(RunConfig(device="cpu", keep_memory=keep))
    assert told == [True] * keep
