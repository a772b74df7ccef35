"""Compare a run folder with the run of a configuration: the settings that may change on resume, and all others."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlhf.config.files import COMPARE_CONFIG
from rlhf.config.load import dump, load_run
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import CheckpointError, ConfigError, command_or_call
from rlhf.section import walk
from rlhf.tracking.run_folder import FolderLock, RunFolder, completed_step, flattened_config, newest_step
from rlhf.user_code import read_source, source_of

MACHINE = (
    "run.keep_memory",
    "run.cache_dir",
    "sharding.*",
    "offload.*",
    "batch.micro_batch_size",
    "batch.micro_batch_tokens",
    "sampling.batch_size",
    "sampling.copy_weights",
    "sampling.backend",
    "sampling.server*",
    "overlap.reward_parts",
    "environment.workers",
    "environment.prefix_cache",
    "environment.step_timeout_s",
    *(
        f"{model}.{setting}"
        for model in ("policy", "model")
        for setting in ("gradient_checkpointing", "log_probs", "packing", "trust_remote_code")
    ),
    "critic.gradient_checkpointing",
    *(
        f"teacher.{setting}"
        for setting in ("url", "timeout_s", "retries", "concurrency", "token_env", "trust_remote_code")
    ),
    *(
        f"{source}.*{setting}"
        for source in ("reward", "eval.source")
        for setting in (
            *("micro_batch_size", "timeout_s", "retries", "_env", "concurrency", "cache_dir"),
            *("workers", "memory_mb", "max_failures"),
        )
    ),
)
"""The settings of speed and memory, and of how servers are asked, as patterns of dotted keys: they change results by
rounding only."""

SAVING = ("checkpoint.every", "checkpoint.keep")
"""When a run saves checkpoints, and how many stay: they change no result."""

MAY_CHANGE = (
    # length and learning rate
    "schedule.*",
    *(f"{model}.{setting}" for model in ("policy", "critic", "model") for setting in ("lr", "max_grad_norm")),
    # logging, evaluation, checkpoints and alarms, and their intervals
    "run.name",
    "plugins*",
    "logging.*",
    "cost*",
    "eval.every",
    "eval.samples",
    "eval.greedy",
    "eval.judge*",
    *SAVING,
    "checkpoint.resume",
    "checkpoint.best",
    "checkpoint.best.confidence",
    "checkpoint.best.patience",
    "checkpoint.best.restore",
    "guard.*",
    "policy.export_dtype",
    "model.export_dtype",
    "policy.export",
    "model.export",
    # the machine, and its arithmetic
    *MACHINE,
    "run.out_dir",
    "run.device",
    "run.tf32",
    "reward.watch*",
    *(f"{model}.dtype" for model in ("policy", "model", "teacher", "reward*", "eval.source*")),
)
"""The settings that a run may be continued with another value of, as patterns of dotted keys. Every other setting
belongs to the run: with another value it is another run."""

FIXED = (
    *(f"{model}.{setting}" for model in ("policy", "model", "critic") for setting in ("lora*", "optimizer")),
    "critic.shared",
    "ensemble*",
)
"""The settings that decide which weights and optimizer states a checkpoint holds: not even checkpoint.resume=always
continues with another value."""

EXPORT = ("*.export_dtype", "*.export", "checkpoint.best", "checkpoint.best.restore")
"""The settings that decide which model a finished run exports."""

FIRST = (
    "algorithm.preset",
    "policy.model",
    "model.model",
    "reward.source.type",
    "reward.source*",
    "data.*path",
    "reference.model",
)
FREE = ("kwargs", "request")  # sections whose keys are the user's
SHOWN = 4  # changes that a message names
NOT_SET = object()
MEMBERS = "members"  # the folder of the runs of an ensemble's separate reward models


@dataclass(frozen=True)
class Change:
    """A setting whose value is not the one that a run has had."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        """Return `key: old → new`."""
        return f"{self.key}: {_shown(self.old)} → {_shown(self.new)}"

    @property
    def is_allowed(self) -> bool:
        """Return whether a run may be continued with it."""
        return matches(self.key, MAY_CHANGE)


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Return whether a dotted key is among those that the patterns describe."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """List the settings that differ; a section that only one side has, or a list of another length, is one change."""
    return sorted(_changes(old, new, ""), key=_importance)


def _changes(old: object, new: object, key: str) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping) and key.rpartition(".")[2] not in FREE:
        for name in dict.fromkeys([*old, *new]):
            inner = f"{key}.{name}" if key else str(name)
            yield from _changes(old.get(name, NOT_SET), new.get(name, NOT_SET), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _are_sections([*old, *new]):
        for number, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _changes(left, right, f"{key}.{number}")
    elif old != new and not _is_same_path(old, new):
        yield Change(key, old, new)


def _are_sections(values: Iterable[object]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _is_same_path(old: object, new: object) -> bool:
    if not (isinstance(old, str) and isinstance(new, str) and ("/" in old or "/" in new)):
        return False
    left, right = Path(old).expanduser(), Path(new).expanduser()
    return left.exists() and left.resolve() == right.resolve()


def _importance(change: Change) -> tuple[int, str]:
    ranks = [number for number, pattern in enumerate(FIRST) if fnmatchcase(change.key, pattern)]
    return min(ranks, default=len(FIRST)), change.key


def _shown(value: object) -> str:
    if value is NOT_SET:
        return "not set"
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    text = str(value) if text is None else text
    return text if len(text) <= 60 else f"{text[:57]}..."


def list_changes(changed: Iterable[Change | str]) -> str:
    """Format a few of the changes, with the number of the others."""
    texts = [str(change) for change in changed]
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f", and {more} more" if more > 0 else "")


def holds_run(folder: RunFolder) -> bool:
    """Return whether a folder holds a run: a checkpoint or an exported model."""
    return newest_step(folder) is not None or (folder.config.is_file() and folder.model.is_dir())


def has_trained(folder: RunFolder) -> bool:
    """Return whether a step was taken in a folder: it has a run, or metrics of a step after the first evaluation.

    In the folder of an ensemble of separate reward models, a step of the first one counts.
    """
    first = RunFolder(folder.path / MEMBERS / "0")
    return any(holds_run(run) or any(row["step"] > 0 for row in run.read_metrics()) for run in (folder, first))


def changes_since(folder: RunFolder, config: TrainConfig | RewardModelConfig) -> list[Change]:
    """List the settings of `config` that differ from the run's in the folder; none if it holds no run.

    Settings that the run's version of the program did not have count with their default. A function that was given as
    an object counts by its source, if that was recorded, and not by its name.
    """
    if not holds_run(folder) or not folder.config.is_file():
        return []
    before, now = folder.read_config().get("functions", {}), functions_of(config)
    known = [key for key in now if now[key] and before.get(key)]
    others = [change for change in _changed_settings(folder, config) if change.key not in known]
    source = ("the source that the run began with", "another source")
    return [*(Change(key, *source) for key in known if before[key] != now[key]), *others]


def functions_of(config: TrainConfig | RewardModelConfig) -> dict[str, str]:
    """Return digests of the source of the functions and classes that were given as Python objects, by their setting.

    One without a source has an empty digest. The functions that it calls, and global variables, are in no digest.
    """
    sources: dict[str, str] = {}
    for place, section in walk(config):
        source = source_of(str(getattr(section, "target", "")))
        if source is not None:
            sources[f"{place}.target"] = source
        if type(section).__module__ == "__main__":
            sources[f"{place}.type"] = read_source(type(section))
    return {key: source and hashlib.sha256(source.encode()).hexdigest() for key, source in sources.items()}


def _changed_settings(folder: RunFolder, config: TrainConfig | RewardModelConfig) -> list[Change]:
    new = dump(config)
    try:
        old = dump(load_run(folder.path))
    except ConfigError:  # of another version: settings that both versions know are compared
        known, now = flattened_config(folder.read_config()), flattened_config(new)
        both = [key for key in known if key in now]
        return changes({key: known[key] for key in both}, {key: now[key] for key in both})
    if all((tree.get("environment") or {}).get("truncation") == "drop" for tree in (old, new)):
        old["algorithm"]["mask_truncated"] = new["algorithm"]["mask_truncated"]  # earlier versions derived it
    own = {str(old["run"]["out_dir"]): str(new["run"]["out_dir"])}
    return changes(_moved(old, own), new)


def _moved(tree: Any, folders: Mapping[str, str]) -> Any:
    """Replace the run folder's old path at the beginning of paths inside it: the folder itself may have moved."""
    if isinstance(tree, dict):
        return {key: _moved(value, folders) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_moved(value, folders) for value in tree]
    for old, new in folders.items():
        if isinstance(tree, str) and tree.startswith(f"{old}/"):
            return f"{new}{tree.removeprefix(old)}"
    return tree


def check_same_run(config: TrainConfig | RewardModelConfig) -> list[Change]:
    """Check that the run folder holds no run, or the one that `config` describes; return all settings that differ.

    Raises:
        CheckpointError: a setting differs that may not change, or the run has no checkpoint to continue from.
    """
    folder, resume = RunFolder(config.run.out_dir), config.checkpoint.resume
    if (folder.path / COMPARE_CONFIG).is_file():
        raise CheckpointError(
            f"{folder.path} holds a comparison: choose another {command_or_call('run.out_dir', 'folder')} for the run"
        )
    if (folder.path / MEMBERS).is_dir() and not _trains_members(config):
        raise another_run(config, "an ensemble of separate reward models", always=False)
    if resume == "never" or not holds_run(folder):
        return []
    changed = changes_since(folder, config)
    refused = [change for change in changed if not change.is_allowed]
    if resume == "always":
        refused = [change for change in refused if matches(change.key, FIXED) or change.key in ("policy", "model")]
    if refused:
        raise another_run(config, list_changes(refused), always=resume != "always")
    return changed


def _trains_members(config: TrainConfig | RewardModelConfig) -> bool:
    """Return whether a run trains separate reward models, each in a folder of its own."""
    return isinstance(config, RewardModelConfig) and config.ensemble.size > 1 and config.ensemble.backbone == "separate"


def another_run(config: TrainConfig | RewardModelConfig, what: str, *, always: bool = True) -> CheckpointError:
    """Build the error for a folder that holds another run than the one that `config` describes.

    Args:
        what: the difference.
        always: whether checkpoint.resume=always would continue it.
    """
    folder = RunFolder(config.run.out_dir)
    step = newest_step(folder)
    at = "" if step is None else f" (step {step})"
    ways = command_or_call(
        "Train in another folder (run.out_dir=...), or begin again in this one (checkpoint.resume=never; the old run "
        f"moves to {aside(folder.path)})",
        "Train in another folder (folder=..., or leave resume out)",
    )
    if always:
        ways += command_or_call(
            ", or continue from its weights with the new settings (checkpoint.resume=always)",
            ', or continue from its weights with the new settings (resume="always")',
        )
    return CheckpointError(f"{folder.path} holds another run{at}: {what}. {ways}")


def finished_step(config: TrainConfig | RewardModelConfig, changed: Iterable[Change]) -> int | None:
    """Return the last step of the finished run in the folder if nothing is left to do; None if there may be.

    Something may be left if the length or the export changed, if the run ended before its last step, if an input file
    is newer than the end of the run, or if the exported model is gone. `changed` are the settings that differ.
    """
    folder = RunFolder(config.run.out_dir)
    step = completed_step(folder)
    unfinished = (*EXPORT, "schedule.steps", "schedule.epochs", "checkpoint.best.patience")
    if step is None or config.checkpoint.resume == "never" or not folder.model.is_dir():
        return None
    if config.schedule.steps is not None and step < config.schedule.steps:
        return None
    if any(matches(change.key, unfinished) or not change.is_allowed for change in changed):
        return None
    ended = folder.complete.stat().st_mtime
    return None if any(_newest(path) > ended for path in _paths(dump(config))) else step


def _paths(tree: Any) -> Iterator[Path]:
    """Yield the existing files and folders that settings name, except the run folder."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from () if key == "run" else _paths(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _paths(value)
    elif isinstance(tree, str) and 0 < len(tree) < 1024 and "\n" not in tree:
        path = Path(tree.partition("@")[0]).expanduser()
        if path.is_file() or (path.is_dir() and path != Path()):
            yield path


def _newest(path: Path) -> float:
    """Return when a file, or a file directly in a folder or in its exported model, was changed last."""
    files = [path] if path.is_file() else [*path.glob("*"), *path.glob("model/*")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def already_complete(folder: Path, step: int) -> str:
    """Format the message that a run has nothing left to train, and how to train further."""
    further = command_or_call(
        f"To train further: a schedule.steps above {step}, or more schedule.epochs; for a new run: another run.out_dir",
        f'To train further: schedule={{"steps": N}} with N above {step}; for a new run: leave resume out',
    )
    return f"{folder} is already complete (step {step}), nothing to train. {further}"


def aside(folder: Path) -> Path:
    """Return the folder that a run is moved to when another begins in its place: FOLDER.old-1, or the first free."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return target


def move_aside(folder: Path) -> Path:
    """Move everything in a run folder except its lock, which the caller holds, to another folder; return that one."""
    target = aside(folder)
    target.mkdir()
    for entry in sorted(folder.iterdir()):
        if entry.name != FolderLock.NAME:
            entry.rename(target / entry.name)
    return target


def remove_leftovers(folder: RunFolder) -> None:
    """Remove files that a killed process left half written or half deleted; the caller holds the folder's lock."""
    for place in (folder.path, folder.checkpoints, folder.path / "best"):
        for path in place.glob(".*") if place.is_dir() else ():
            if path.name.startswith((".writing-", ".deleting-")) and path.is_dir():
                shutil.rmtree(path)
            elif path.name.endswith(".new") and path.is_file():
                path.unlink()
