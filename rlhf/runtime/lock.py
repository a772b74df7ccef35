"""One process at a time in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from rlhf.errors import CheckpointError

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # a file system without locks

_held: dict[Path, tuple[int, int]] = {}  # folder -> its open lock file, and how many runs of this process are in it


class FolderLock:
    """Held from its making to `release`, or to the end of the process, however it ends: the kernel holds it (flock).

    Several runs of one process may be in the same folder; another process may not. A lock file that a dead process
    left locks nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another process has it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder: Path | None = folder.resolve()
        handle, count = _held.get(self._folder, (-1, 0))
        _held[self._folder] = (handle if count else _locked(folder), count + 1)

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._folder is None or self._folder not in _held:
            return
        handle, count = _held.pop(self._folder)
        if count > 1:
            _held[self._folder] = (handle, count - 1)
        else:
            os.close(handle)
        self._folder = None


def _locked(folder: Path) -> int:
    path = folder / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 20).decode(errors="replace").strip()
        os.close(handle)
        raise CheckpointError(
            f"{folder} is in use by another process{f' (pid {owner})' if owner else ''}: "
            "wait for it or stop it, or choose another run.out_dir"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(handle)
            raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _leave_to_the_parent() -> None:
    """A forked child must not keep its dead parent's locks; to close a copy releases nothing."""
    for handle, _ in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)
