"""Measure and set how memory is allocated, and adapt micro-batches to it: halved when memory runs out."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from rlhf.batching import Batch, group_by_size
from rlhf.errors import ResourceError
from rlhf.runtime.device import empty_cache, is_out_of_memory

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

# Constants of glibc's malloc.h; see mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
SETTINGS = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0))
_trim: Callable[[int], int] | None = None  # of glibc, once `keep_memory` has set the allocator of this process


def keep_memory() -> bool:
    """Make glibc keep freed memory for the next tensors of this process, and return whether that succeeded.

    A page returned to the system must be faulted in and zeroed again in the next step. Peak resident memory may grow,
    since blocks of different sizes no longer have pages of their own; see `return_gaps`. Does nothing except on Linux
    with glibc; results never depend on it.
    """
    global _trim  # for the whole process, like the allocator's settings
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        library = ctypes.CDLL("libc.so.6")
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    is_kept = all(mallopt(option, value) == 1 for option, value in SETTINGS)
    _trim = trim if is_kept else None
    return is_kept


def return_gaps() -> None:
    """Return to the system the freed memory that `keep_memory` keeps.

    Call it before the need is greatest, if the gaps between the blocks in use do not fit the next tensors.
    """
    if _trim is not None:
        _trim(0)


# oneDNN's cache of compiled matrix products, and the one in torch that holds the same programs. By default 1,024 each.
PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


def bound_product_caches() -> None:
    """Set how many compiled 16-bit matrix products a CPU process keeps; call it before the first of them.

    oneDNN compiles a program of up to a megabyte for each shape of a product, and rows of ever new lengths bring ever
    new shapes. A capacity that the environment sets stays.
    """
    for variable, capacity in PRODUCT_CACHES.items():
        os.environ.setdefault(variable, capacity)


STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


class MemoryProfiler:
    """The peak memory in MB: since the start, and in each phase since the last `take`.

    Memory used while a phase is nested in another counts towards both.
    """

    def __init__(self, peak: Callable[[], float], reset: Callable[[], None]) -> None:
        """Create a gauge from two functions: `peak` returns the largest memory in MB since `reset` was called."""
        self._peak = peak
        self._reset = reset
        self._highest = 0.0
        self._open: list[str] = []
        self._by_phase: dict[str, float] = {}

    def peak_mb(self) -> float:
        """Return the peak so far, in MB."""
        return self._measure()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the memory used inside the context towards `name`."""
        self._measure()
        self._reset()
        self._open.append(name)
        try:
            yield
        finally:
            self._measure()
            self._open.pop()
            self._reset()

    def take(self) -> dict[str, float]:
        """Return the peak of each phase in MB since the last call."""
        taken, self._by_phase = self._by_phase, {}
        return taken

    def _measure(self) -> float:
        peak = self._peak()
        for name in self._open:
            self._by_phase[name] = max(self._by_phase.get(name, 0.0), peak)
        self._highest = max(self._highest, peak)
        return self._highest


def make_memory_profiler(device: torch.device) -> MemoryProfiler:
    """Create a gauge of the GPU allocator's peak if `device` is a GPU, else of the process's resident set size.

    An Apple GPU's allocator counts no peak; Metal's memory is measured at the ends of the phases.
    """
    if device.type == "cuda":
        return MemoryProfiler(
            lambda: torch.cuda.max_memory_allocated(device) / 2**20,
            lambda: torch.cuda.reset_peak_memory_stats(device),
        )
    if device.type == "mps":
        return MemoryProfiler(lambda: torch.mps.driver_allocated_memory() / 2**20, lambda: None)
    return MemoryProfiler(_peak_resident_mb, _reset_peak_resident)


def _peak_resident_mb() -> float:
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return _peak_resident_mb_elsewhere()


def _peak_resident_mb_elsewhere() -> float:
    """Return the peak since the start of the process, in MB; on Windows, the resident memory now."""
    if resource is None:
        return float(psutil.Process().memory_info().rss) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere; see getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _reset_peak_resident() -> None:
    """Reset the peak resident set size on Linux; elsewhere a phase's peak is the process's peak so far."""
    with suppress(OSError):
        CLEAR.write_text("5", encoding="ascii")


T = TypeVar("T")


class AdaptiveMicroBatch:
    """The micro-batch size in rows, halved when memory runs out, and kept so.

    It never changes a result, so checkpoints do not store it. With `tokens` it counts live tokens instead of rows.
    """

    def __init__(
        self, size: int, *, tokens: bool = False, what: str = "a pass", note: Callable[[str], None] = lambda _: None
    ) -> None:
        """Set the initial size; `what` names the work in messages, and `note` is called at the first halving."""
        self.size = size
        self.tokens = tokens
        self.what = what
        self.note = note
        self._has_warned = False

    @property
    def unit(self) -> str:
        """Return what `size` counts: "row" or "token"."""
        return "token" if self.tokens else "row"

    def cut(self, batch: Batch, size: int | None = None) -> list[Tensor]:
        """Split a batch into the row indices of each micro-batch, of `size` units (the current size if None)."""
        size = size or self.size
        if self.tokens:
            return group_by_size(batch.live_tokens(), size)
        return list(torch.arange(len(batch)).split(size))

    def run(self, work: Callable[[int], T], *, again: Callable[[], object] = lambda: None) -> T:
        """Return `work(size)`; when it runs out of memory, call `again`, halve the size and start over.

        Raises:
            ResourceError: one row does not fit, or the run is distributed and other ranks are in the same pass.
        """
        while True:
            try:
                return work(self.size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.size == 1 or _in_company():
                    raise ResourceError(self._advice()) from error
            # Only here, with the error gone, is the memory that its frames referenced free again.
            again()
            empty_cache()
            before, self.size = self.size, -(-self.size // 2)
            if not self._has_warned:
                self.note(
                    f"out of memory in {self.what} of {before} {self.unit}s: halved, and again as often as needed; "
                    f"results do not change, speed does (set {self._setting} lower to start there)"
                )
                self._has_warned = True

    def _advice(self) -> str:
        work = f"{self.what} of {self.size} {self.unit}{'s' if self.size > 1 else ''}"
        if self.size > 1:
            return (
                f"out of memory in {work}; a distributed or DeepSpeed run cannot shrink the micro-batch automatically: "
                f"set {self._setting} lower"
            )
        return (
            f"out of memory in {work}: set sampling.max_new_tokens or data.*.max_tokens lower, "
            "policy.gradient_checkpointing=true, policy.lora.r=16, or policy.dtype=bfloat16"
        )

    @property
    def _setting(self) -> str:
        return "batch.micro_batch_tokens" if self.tokens else "batch.micro_batch_size"


def _in_company() -> bool:
    """Check whether the pass cannot be restarted alone: other ranks run it too, or DeepSpeed's hooks are in it."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
