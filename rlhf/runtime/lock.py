"""One process at a time in a run folder."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf.errors import CheckpointError

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # a file system without locks: the run goes on without


class FolderLock:
    """Keep other processes out of a folder, from its making to `release` or the end of the process, however it ends.

    Several runs of one process may be in the same folder. A lock file that a dead process left locks nothing, and a
    forked child does not keep its parent's lock.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another process has it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / LOCK
        # A singleton counts its holders in this process; without a soft lock, whose file a killed process would leave.
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
        with contextlib.suppress(OSError):  # the number is for messages; Windows lets nobody write a locked file
            path.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def _owner(path: Path) -> str:
    """Name the process that wrote its number into the lock file, if it can be read."""
    with contextlib.suppress(OSError):
        if number := path.read_bytes()[:20].decode(errors="replace").strip():
            return f" (pid {number})"
    return ""
