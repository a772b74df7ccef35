"""Peak memory by phase."""

from __future__ import annotations

import mmap

import pytest
import torch

from rlhf.runtime.memory import MemoryProfiler, make_memory_profiler


class Machine:
    """Memory that a test sets; remembers its peak like Linux."""

    def __init__(self) -> None:
        self.now = self.high = 10.0

    def use(self, mb: float) -> None:
        self.now = mb
        self.high = max(self.high, mb)

    def reset(self) -> None:
        self.high = self.now


def test_each_phase_has_its_own_peak_and_the_process_the_largest() -> None:
    machine = Machine()
    gauge = MemoryProfiler(lambda: machine.high, machine.reset)
    machine.use(90.0)
    machine.use(20.0)
    with gauge.phase("outer"):
        machine.use(40.0)
        machine.use(25.0)
        with gauge.phase("inner"):
            machine.use(50.0)
            machine.use(21.0)
        machine.use(22.0)
    with gauge.phase("after"):
        machine.use(23.0)
    assert gauge.take() == {"outer": 50.0, "inner": 50.0, "after": 23.0}
    assert gauge.take() == {}
    assert gauge.peak_mb() == 90.0


def test_the_process_is_measured() -> None:
    gauge = make_memory_profiler(torch.device("cpu"))
    with gauge.phase("small"):
        pass
    with gauge.phase("large"):
        block = mmap.mmap(-1, 128 * 2**20)  # by malloc it might come from memory that is kept
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    peaks = gauge.take()
    if peaks["small"] == peaks["large"]:
        pytest.skip("this system does not let a process reset its peak")
    assert 100 < peaks["large"] - peaks["small"] < 200
    assert gauge.peak_mb() >= peaks["large"]
