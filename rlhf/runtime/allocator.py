"""Keep the memory that tensors gave back: on a CPU, glibc else returns large blocks to the system at every step."""

from __future__ import annotations

import ctypes
import platform
import sys

# malloc.h of glibc, and what mallopt(3) says of them
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
SETTINGS = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0))


def keep_memory() -> bool:
    """Tell glibc to keep freed memory for this process's next tensors; whether it was told.

    A page that was given back is faulted in and zeroed again when the next step asks for it. The peak of resident
    memory may grow, since blocks of different sizes no longer come from pages of their own. Elsewhere than on Linux
    with glibc nothing is done; results never depend on it.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all(mallopt(name, value) == 1 for name, value in SETTINGS)
