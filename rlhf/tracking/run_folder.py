"""The folder of a run: its files and their names, and the lock that keeps a second process out."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf.config.files import format_yaml, parse_yaml
from rlhf.config.load import RUN_FOLDER_KEYS
from rlhf.errors import DISTRIBUTION, CheckpointError, command_or_call
from rlhf.tracking.trackers import flatten, read_jsonl, to_json

LOCK = ".lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # on a file system without locks the run goes on unlocked


class FolderLock:
    """An exclusive lock on a folder, held until `release` or until the process ends, however it ends.

    Several runs of one process may use the same folder. A lock file that a dead process left behind locks nothing, and
    a forked child does not keep its parent's lock.
    """

    NAME = LOCK

    def __init__(self, folder: Path, key: str = "run.out_dir") -> None:
        """Acquire the lock, creating the folder if needed.

        Args:
            key: the setting that names the folder, for the message.

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
                f"wait for it or stop it, or choose another {command_or_call(key, 'folder')}"
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

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.release()


def is_in_use(folder: Path) -> bool:
    """Return whether a process has the lock of a folder; True too if that cannot be known."""
    path = folder.resolve() / LOCK
    if not path.is_file():
        return False
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except (Timeout, OSError):  # the file system has no locks, or the file is another user's
        return True
    lock.release()
    return False


def _owner(path: Path) -> str:
    """Format the pid stored in the lock file, or return an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        if number := path.read_bytes()[:20].decode(errors="replace").strip():
            return f" (pid {number})"
    return ""


PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "deepspeed",
)


class RunFolder:
    """The files of one run.

    config.yaml       the resolved configuration, `versions:`, `git_commit:`, and `functions:` given as Python objects;
                       `settings_since:` the step at which checkpoint.resume=always last changed the settings
    metrics.jsonl     {"step", "<metric>": float, ...}: no times, so equal runs give equal bytes
    timings.jsonl     {"step", "seconds": {phase: s}, "tokens_per_second", "peak_memory_mb",
                       "peak_memory_mb_by_phase": {phase: MB}, "time"}
    samples.jsonl     {"step", "split", "row", "prompt", "completion", "score", "parts", "kl", "length", "finished"}
    notes.jsonl       {"step", "text"}: skipped rows and warnings
    ratios.json       the importance ratios of the last logged step, for the figure of the clip
    report_card.json  the results of a reward model's evaluation
    export.json       the dtype of the exported weights, and how much of the training it keeps
    checkpoints/      state to resume from
    model/            the exported model
    complete.json     {"step"}: the run ended at this step, and its model is exported
    deepspeed/        DeepSpeed's complete JSON configuration of each model, if sharding uses it
    report.html       the page
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.timings = self.path / "timings.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.notes = self.path / "notes.jsonl"
        self.alarms = self.path / "alarms.jsonl"
        self.ratios = self.path / "ratios.json"
        self.report_card = self.path / "report_card.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.complete = self.path / "complete.json"
        self.report = self.path / "report.html"

    def write_config(
        self,
        resolved: Mapping[str, object],
        *,
        is_new: bool = False,
        functions: Mapping[str, str] | None = None,
        since: int | None = None,
    ) -> list[str]:
        """Write config.yaml, and return the packages whose version is not the one that the run began with.

        A run that `is_new`, since an earlier start got no checkpoint, records its own versions and commit. A run
        that continues keeps the recorded ones, and leaves a file with the same settings as it is.

        Args:
            functions: digests of the functions that were given as Python objects, by setting.
            since: the step from which these settings hold, if they replace others; None: the file keeps its step.
        """
        old = {} if is_new else self.read_config()
        began: dict[str, object] = {"versions": versions(), "git_commit": git_commit()}
        kept = {key: old[key] for key in began if key in old}
        digests = {**old.get("functions", {}), **(functions or {})}
        since = old.get("settings_since") if since is None else since
        additions = {"functions": digests or None, "settings_since": since}
        settings = to_json({**resolved, **{key: value for key, value in additions.items() if value is not None}})
        if differing_keys({key: value for key, value in old.items() if key not in began}, settings):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, format_yaml({**settings, **began, **kept}, width=100))
        recorded = kept.get("versions")
        return differing_keys(recorded, versions()) if isinstance(recorded, Mapping) else []

    def write_complete(self, step: int) -> None:
        """Write complete.json, once the model of a run that ended at `step` is exported."""
        write_atomically(self.complete, json.dumps({"step": step}) + "\n")

    def write_deepspeed(self, name: str, settings: Mapping[str, object]) -> None:
        """Write deepspeed/<name>.json, the configuration DeepSpeed was given for that model."""
        folder = self.path / "deepspeed"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{name}.json", json.dumps(to_json(settings), indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        """Read config.yaml; return an empty dict if there is none."""
        if not self.config.exists():
            return {}
        command = f"rlhf config FILE KEY=VALUE > {self.config}"
        damaged = f"{self.config} is damaged; with the file and settings of the run, `{command}` writes it again"
        try:
            loaded = parse_yaml(self.config.read_text(encoding="utf-8"), str(self.config))
        except ValueError as error:
            raise CheckpointError(f"{damaged}. {error}") from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{damaged}. It has no sections")
        return loaded

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl: one dict per logged step, in file order."""
        return list(read_jsonl(self.metrics))

    def read_timings(self) -> list[dict[str, Any]]:
        """Read timings.jsonl: seconds per phase, throughput and memory, one dict per logged step."""
        return list(read_jsonl(self.timings))

    def read_samples(self) -> list[dict[str, Any]]:
        """Read samples.jsonl: prompts with their completions, scores and other measurements."""
        return list(read_jsonl(self.samples))

    def read_notes(self) -> list[dict[str, Any]]:
        """Read notes.jsonl: skipped rows and warnings."""
        return list(read_jsonl(self.notes))

    def read_alarms(self) -> list[dict[str, Any]]:
        """Read alarms.jsonl: the alarms that went off or were over, with their steps."""
        return list(read_jsonl(self.alarms))

    def write_ratios(self, figure: Mapping[str, object]) -> None:
        """Write ratios.json, in place of an earlier step's."""
        write_atomically(self.ratios, json.dumps(to_json(figure)) + "\n")

    def read_ratios(self) -> dict[str, Any]:
        """Read ratios.json; return an empty dict if there is none, or if it cannot be read."""
        try:
            loaded = json.loads(self.ratios.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def write_report_card(self, card: Mapping[str, object]) -> None:
        """Write report_card.json, keeping the order of the keys: it is the order of the report's columns."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.report_card, json.dumps(to_json(card), indent=2) + "\n")

    def read_report_card(self) -> dict[str, Any]:
        """Read report_card.json; return an empty dict if there is none."""
        if not self.report_card.exists():
            return {}
        try:
            loaded = json.loads(self.report_card.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{self.report_card} is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{self.report_card}: expected an object, found {type(loaded).__name__}")
        return loaded


def discard_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing but the lock, which the caller still has."""
    with contextlib.suppress(OSError):  # another system may not remove a locked file
        if [entry.name for entry in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def newest_step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint, damaged or not; None without any."""
    names = [path.name for path in folder.checkpoints.glob("step-*")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=None)


def completed_step(folder: RunFolder) -> int | None:
    """Return the step at which the run in the folder ended; None if it has not, or has gone on since."""
    try:
        step = int(json.loads(folder.complete.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if newest_step(folder) in (None, step) else None


def flattened_config(tree: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted key, without the additions of a run folder."""
    return flatten({key: value for key, value in tree.items() if key not in RUN_FOLDER_KEYS})


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, by way of a temporary file: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that results depend on; None for one that is not installed."""
    own = {"python": platform.python_version(), "rlhf": _installed_version(DISTRIBUTION)}
    return own | {package: _installed_version(package) for package in PACKAGES}


@cache
def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(source: Path | None = None) -> str | None:
    """Return the commit of the checkout that the code runs from, with "-dirty" if it has changes; None outside git.

    Args:
        source: a file of the checkout; this file if None.
    """
    source = Path(__file__) if source is None else source
    # An installed copy may lie in a virtual environment inside another project's checkout, whose commit is not ours.
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def differing_keys(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """List the dotted keys, sorted, that only one of two configurations has or whose values differ."""
    left, right = flatten(to_json(old)), flatten(to_json(new))
    missing = object()
    return sorted(key for key in left.keys() | right.keys() if left.get(key, missing) != right.get(key, missing))
