"""A lock that lets only one process at a time use a run folder."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf.errors import CheckpointError

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # on a file system without locks the run goes on unlocked


class FolderLock:
    """An exclusive lock on a folder, held until `release` or until the process ends, however it ends.

    Several runs of one process may use the same folder. A lock file that a dead process left behind locks nothing, and
    a forked child does not keep its parent's lock.
    """

    def __init__(self, folder: Path) -> None:
        """Acquire the lock, creating the folder if needed.

        Raises:
            CheckpointError: another process holds it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK
        # A singleton counts its holders in this process. No soft lock: a killed process would leave its file behind.
        self._lock: FileLock | None = FileLock(
            path, blocking=False, thread_local=False, is_singleton=True, fallback_to_soft=False
        )
        try:
            self._lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"{folder} is in use by another process{_owner(path)}: "
                "wait for it or stop it, or choose another run.out_dir"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        with contextlib.suppress(OSError):  # the pid is for messages only; on Windows a locked file cannot be written
            path.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def _owner(path: Path) -> str:
    """Format the pid stored in the lock file, or return an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        if number := path.read_bytes()[:20].decode(errors="replace").strip():
            return f" (pid {number})"
    return ""
