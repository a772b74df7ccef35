"""Checkpoints: written to a temporary folder with checksums, renamed into place, rotated, verified on loading."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from rlhf.errors import CheckpointError, UserError, how_to_continue
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed, is_lost_rank
from rlhf.tracking.metrics import format_megabytes

MANIFEST = "manifest.json"
IS_WINDOWS = sys.platform == "win32"
CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")
_TEMPORARY = (".writing-", ".deleting-")  # folders that are not a checkpoint yet, or no longer


class Checkpoints:
    """The checkpoints of a run folder. A folder `step-…` appears only once it is complete."""

    def __init__(self, folder: Path, *, keep: int, ranks: Distributed = SINGLE_PROCESS) -> None:
        self.folder = folder
        self.keep = keep
        self.ranks = ranks

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save the checkpoint of `step`: `write` fills a new folder, which is renamed into place; delete the oldest.

        Every rank calls this, and `write` runs on every rank, since weights may have to be gathered; only the main rank
        creates files.

        Raises:
            CheckpointError: it could not be written (a full disk, for example); the earlier content is untouched.
        """
        temporary = self.folder / f".writing-step-{step:06d}"
        target = self.folder / f"step-{step:06d}"
        with CheckpointWriteErrors(f"the checkpoint {target}", temporary, self.ranks):
            self.ranks.on_main(lambda: self._begin(temporary))
            write(temporary)
            self.ranks.on_main(lambda: self._finish(step, temporary, target))
        return target

    def _begin(self, temporary: Path) -> None:
        self.remove_leftovers()
        temporary.mkdir(parents=True)

    def _finish(self, step: int, temporary: Path, target: Path) -> None:
        write_manifest(temporary)
        _rename_over(temporary, target)
        self._rotate(step)

    def remove_leftovers(self) -> None:
        """Remove folders that a killed process left half written or half deleted."""
        for path in self.folder.glob(".*") if self.folder.is_dir() else ():
            if path.name.startswith(_TEMPORARY):
                shutil.rmtree(path)

    def _rotate(self, step: int) -> None:
        """Delete all but the newest `keep`, and any later than `step`: a restart found those damaged or went back."""
        for later in [path for path in self.all() if _step(path) > step]:
            _delete(later)
        for old in self.all()[: -self.keep]:
            _delete(old)

    def all(self) -> list[Path]:
        """List the checkpoint folders, oldest first, without verifying them."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)), key=_step)

    def latest_intact(self, note: Callable[[str], None]) -> Path | None:
        """Return the newest intact checkpoint, or None if there is none; `note` is called for each damaged one skipped.

        Raises:
            CheckpointError: there are checkpoints, but all of them are damaged.
        """
        folders = self.all()
        for path in reversed(folders):
            damage = find_damage(path)
            if damage is None:
                return path
            note(f"checkpoint {path} is damaged ({damage}): passed over")
        if folders:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: start in another run.out_dir, or remove that folder"
            )
        return None


def find_damage(path: Path) -> str | None:
    """Describe the damage to a checkpoint folder; None if every file has its listed size and checksum."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = _parse_manifest(manifest)
    except (OSError, ValueError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    for name, (size, checksum) in files.items():
        file = path / name
        try:
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, not {size}"
            if _sha256(file) != checksum:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def _parse_manifest(manifest: Any) -> dict[str, tuple[int, str]]:
    """Return the size and checksum of each file by its name.

    Raises:
        ValueError: it is not a manifest, or it was changed after it was written.
    """
    if not isinstance(manifest, dict) or set(manifest) != {"files", "sha256"}:
        raise ValueError("it is not a list of files with a checksum")
    files = manifest["files"]
    if _checksum_of(files) != manifest["sha256"]:
        raise ValueError("it does not match its own checksum")
    return {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}


def _checksum_of(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class CheckpointWriteErrors:
    """A context for filling the folder `aside`: a failure removes the folder and is raised as a CheckpointError.

    Libraries report "no space left" in different ways: torch by a RuntimeError, safetensors and tokenizers by error
    types of their own that contain the system's text.
    """

    def __init__(self, what: str, aside: Path, ranks: Distributed = SINGLE_PROCESS) -> None:
        self.what, self.aside, self.ranks = what, aside, ranks

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        free = _free_space(self.aside.parent)
        if self.ranks.is_main:
            shutil.rmtree(self.aside, ignore_errors=True)
        is_write_error = isinstance(error, OSError | RuntimeError | SafetensorError) or "os error" in str(error)
        if is_write_error and not isinstance(error, UserError) and not is_lost_rank(error):
            raise CheckpointError(
                f"cannot write {self.what}: {error}. What was there before is untouched. {free}"
                f"Make room, or whatever else it lacks; then {how_to_continue()} from the newest checkpoint"
            ) from error


def replace_folder(target: Path, write: Callable[[Path], None], ranks: Distributed = SINGLE_PROCESS) -> None:
    """Replace the folder `target` by one that `write` fills: a reader sees either the old one or the new one.

    Every rank calls this, as for `Checkpoints.save`.

    Raises:
        CheckpointError: it could not be written; the earlier content is untouched.
    """
    temporary = target.with_name(f".writing-{target.name}")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        _sync_tree(temporary)
        _rename_over(temporary, target)

    with CheckpointWriteErrors(str(target), temporary, ranks):
        ranks.on_main(begin)
        write(temporary)
        ranks.on_main(finish)


def _rename_over(temporary: Path, target: Path) -> None:
    """Rename the folder `temporary`, already flushed to disk, to `target`, deleting the earlier one."""
    if target.exists():
        _delete(target)
    temporary.rename(target)
    _sync_folder(target.parent)


def _delete(folder: Path) -> None:
    """Rename a folder, then remove it: a kill in between leaves nothing that looks like a checkpoint."""
    temporary = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    shutil.rmtree(temporary)


def _free_space(folder: Path) -> str:
    try:
        return f"The disk has {format_megabytes(shutil.disk_usage(folder).free / 2**20)} free. "
    except OSError:
        return ""


def _step(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        else:
            _sync_file(path)
    _sync_folder(folder)


def write_manifest(folder: Path) -> None:
    """Write size and checksum of every file of a folder into it; `find_damage` reads them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files: Mapping[str, Mapping[str, int | str]] = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in paths
    }
    manifest = {"files": files, "sha256": _checksum_of(files)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync_tree(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("r+b" if IS_WINDOWS else "rb") as file:  # Windows flushes only files that are open for writing
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if IS_WINDOWS:  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
