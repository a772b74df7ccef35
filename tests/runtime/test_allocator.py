"""Freed memory is kept if glibc can be told to; compiled products are bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlhf.config.run import RunConfig
from rlhf.runtime import engine
from rlhf.runtime import memory as allocator
from rlhf.runtime.device import cpu_has_bfloat16_products

# The setting cannot be taken back: the memory that gaps give back and the faults of pages, without it and with it.
PROGRAM = """
import psutil, resource, torch
from rlhf.runtime.memory import keep_memory, return_gaps
def resident():
    return psutil.Process().memory_info().rss / 2**20
def gaps():
    blocks = [torch.ones(2**18) for _ in range(128)]  # 1 MB each
    return blocks[::2]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for keep in (False, True):
    if keep: assert keep_memory()
    kept = gaps()
    before = resident()
    return_gaps()
    returned = before - resident()
    assert all(bool((block == 1).all()) for block in kept)
    faults()
    print(returned, faults())
"""


@pytest.fixture(scope="module")
def measured() -> list[tuple[float, float]]:
    """The measurements of a new process before it kept memory, and after."""
    if allocator.platform.libc_ver()[0] != "glibc":
        pytest.skip("glibc's allocator")
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    return [(float(line.split()[0]), float(line.split()[1])) for line in process.stdout.splitlines()]


def test_gaps_between_blocks_are_returned(measured: list[tuple[float, float]]) -> None:
    (plain, _), (kept, _) = measured
    assert plain < 8
    assert 48 < kept < 80


def test_pages_are_not_asked_for_again(measured: list[tuple[float, float]]) -> None:
    (_, plain), (_, kept) = measured
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


# What 300 products of different shapes leave in memory, in MB; torch is imported before the caches are bounded.
PRODUCTS = """
import psutil, torch
from rlhf.config.run import RunConfig
from rlhf.runtime import memory
from rlhf.runtime.engine import make_engine
memory.PRODUCT_CACHES.update(dict.fromkeys(memory.PRODUCT_CACHES, CAPACITY))
make_engine(RunConfig(device="cpu"))
weight = torch.ones(1536, 576, dtype=torch.bfloat16)
def resident():
    return psutil.Process().memory_info().rss / 2**20
torch.nn.functional.linear(torch.ones(300, 576, dtype=torch.bfloat16), weight)
before = resident()
for rows in range(1, 300):
    torch.nn.functional.linear(torch.ones(rows, 576, dtype=torch.bfloat16), weight)
print(resident() - before)
"""


def kept_by_products(capacity: str) -> float:
    """Measure in a new process whose caches have this capacity."""
    program = PRODUCTS.replace("CAPACITY", repr(capacity))
    clean = {name: value for name, value in os.environ.items() if name not in allocator.PRODUCT_CACHES}
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, env=clean)
    return float(process.stdout)


@pytest.mark.skipif(not cpu_has_bfloat16_products(), reason="no bfloat16 products on this CPU")
def test_few_compiled_products_are_kept() -> None:
    assert kept_by_products("8") < kept_by_products("1024") / 2


def test_a_capacity_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    engine.make_engine(RunConfig(device="cpu"))
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
