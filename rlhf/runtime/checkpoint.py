"""Checkpoints: written aside, checksummed, renamed, rotated; the newest whole one is found again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from rlhf.errors import CheckpointError
from rlhf.runtime.ranks import ALONE, Ranks

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")


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
        try:
            self.ranks.on_main(lambda: _begin(aside))
            write(aside)
            self.ranks.on_main(lambda: self._finish(aside, target))
        except OSError as error:
            if self.ranks.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error
        return target

    def _finish(self, aside: Path, target: Path) -> None:
        _write_manifest(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        _sync_folder(self.folder)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)

    def all(self) -> list[Path]:
        """Every checkpoint folder, oldest first; whether it is whole is not looked at."""
        if not self.folder.is_dir():
            return []
        named = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted((int(match[1]), path) for match, path in named)]

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
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read: {type(error).__name__}"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes, not {expected['size']}"
        if _sha256(file) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None


def _begin(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    for path in files:
        _sync_file(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
    _sync_file(manifest)


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
