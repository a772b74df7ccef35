"""Keeping freed tensor memory in the process: on a CPU, glibc would return large blocks to the system at every step."""

from __future__ import annotations

import ctypes
import platform
import sys

# Constants of glibc's malloc.h; see mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
SETTINGS = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0))


def keep_memory() -> bool:
    """Make glibc keep freed memory for the next tensors of this process, and return whether that succeeded.

    A page returned to the system must be faulted in and zeroed again in the next step. Peak resident memory may grow,
    since blocks of different sizes no longer have pages of their own. Does nothing except on Linux with glibc; results
    never depend on it.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all(mallopt(option, value) == 1 for option, value in SETTINGS)
