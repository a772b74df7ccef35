"""Checkpoints: written aside, checksummed, renamed, rotated; the newest whole one is found again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from rlhf.errors import CheckpointError, UserError
from rlhf.runtime.ranks import ALONE, Ranks

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")
_ASIDE = (".writing-", ".deleting-")  # folders that are no checkpoint yet, or no longer


class Checkpoints:
    """The checkpoints of a run folder. A folder `step-…` exists only when it was whole."""

    def __init__(self, folder: Path, *, keep: int, ranks: Ranks = ALONE) -> None:
        self.folder = folder
        self.keep = keep
        self.ranks = ranks

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a new folder, then make it the checkpoint of `step` in one rename; drop the oldest.

        Every process calls it, and `write` in every process, since weights may have to be gathered; files are made by
        the main one.

        Raises:
            CheckpointError: it could not be written (a full disk, say); what was there before is untouched.
        """
        aside = self.folder / f".writing-step-{step:06d}"
        target = self.folder / f"step-{step:06d}"
        with Writing(f"the checkpoint {target}", aside, self.ranks):
            self.ranks.on_main(lambda: self._begin(aside))
            write(aside)
            self.ranks.on_main(lambda: self._finish(step, aside, target))
        return target

    def _begin(self, aside: Path) -> None:
        self.sweep()
        aside.mkdir(parents=True)

    def _finish(self, step: int, aside: Path, target: Path) -> None:
        _write_manifest(aside)
        _put(aside, target)
        self._rotate(step)

    def sweep(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        for path in self.folder.glob(".*") if self.folder.is_dir() else ():
            if path.name.startswith(_ASIDE):
                shutil.rmtree(path)

    def _rotate(self, step: int) -> None:
        """Keep the newest up to `step`. Later ones are damaged, or of a course that was left: a restart passed them."""
        for later in [path for path in self.all() if _step(path) > step]:
            _delete(later)
        for old in self.all()[: -self.keep]:
            _delete(old)

    def all(self) -> list[Path]:
        """Every checkpoint folder, oldest first; whether it is whole is not looked at."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_step)

    def newest(self, note: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint; damaged ones are passed over, and `note` is told of each.

        Raises:
            CheckpointError: there are checkpoints and none is whole.
        """
        found = self.all()
        for path in reversed(found):
            damage = damage_of(path)
            if damage is None:
                return path
            note(f"checkpoint {path} is damaged ({damage}): passed over")
        if found:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: start in another run.out_dir, or remove that folder"
            )
        return None


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint folder; None when every file is there with its size and checksum."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = _listed(manifest)
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


def _listed(manifest: Any) -> dict[str, tuple[int, str]]:
    """Name -> size and checksum of each file.

    Raises:
        ValueError: the manifest is not one, or not the one that was written.
    """
    if not isinstance(manifest, dict) or set(manifest) != {"files", "sha256"}:
        raise ValueError("it is not a list of files with a checksum")
    files = manifest["files"]
    if _checksum_of(files) != manifest["sha256"]:
        raise ValueError("it does not match its own checksum")
    return {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}


def _checksum_of(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Writing:
    """Around the filling of the folder `aside`: a failure removes it and is a CheckpointError that says what failed.

    Libraries say "no space left" in their own ways: torch by a RuntimeError, safetensors and tokenizers by errors of
    their own with the system's text in them.
    """

    def __init__(self, what: str, aside: Path, ranks: Ranks = ALONE) -> None:
        self.what, self.aside, self.ranks = what, aside, ranks

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        free = _free_mb(self.aside.parent)
        if self.ranks.is_main:
            shutil.rmtree(self.aside, ignore_errors=True)
        ours = isinstance(error, OSError | RuntimeError | SafetensorError) or "os error" in str(error)
        if ours and not isinstance(error, UserError):
            raise CheckpointError(
                f"cannot write {self.what}: {error}. What was there before is untouched. {free}"
                "Make room, or whatever else it lacks; then the same command continues from the newest checkpoint"
            ) from error


def replace_folder(target: Path, write: Callable[[Path], None], ranks: Ranks = ALONE) -> None:
    """Let `write` fill a folder beside `target`, then put it in its place: a reader sees the old one or the new one.

    Every process calls it, as Checkpoints.save.

    Raises:
        CheckpointError: it could not be written; what was there before is untouched.
    """
    aside = target.with_name(f".writing-{target.name}")

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        _sync_tree(aside)
        _put(aside, target)

    with Writing(str(target), aside, ranks):
        ranks.on_main(begin)
        write(aside)
        ranks.on_main(finish)


def _put(aside: Path, target: Path) -> None:
    """Make the folder `aside`, which is on the disk, the folder `target`."""
    if target.exists():
        _delete(target)
    aside.rename(target)
    _sync_folder(target.parent)


def _delete(folder: Path) -> None:
    """Rename, then remove: a kill in between leaves nothing that looks like a checkpoint."""
    aside = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def _free_mb(folder: Path) -> str:
    try:
        return f"The disk has {shutil.disk_usage(folder).free / 2**20:,.0f} MB free. "
    except OSError:
        return ""


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        else:
            _sync_file(path)
    _sync_folder(folder)


def _write_manifest(folder: Path) -> None:
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
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
