"""A run folder: the resolved configuration, metrics, timings, samples, checkpoints, report, under fixed names."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import CheckpointError
from rlhf.runtime.loggers import flatten, plain, read_jsonl

PACKAGES = (
    "rlhf",
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

    config.yaml       the resolved configuration, `versions:` and `git_commit:`
    metrics.jsonl     {"step", "<metric>": float, ...}: no times, so equal runs give equal bytes
    timings.jsonl     {"step", "seconds": {phase: s}, "tokens_per_second", "peak_memory_mb",
                       "peak_memory_mb_by_phase": {phase: MB}, "time"}
    samples.jsonl     {"step", "split", "row", "prompt", "completion", "score", "parts", "kl", "length", "finished"}
    notes.jsonl       {"step", "text"}: skipped rows and warnings
    report_card.json  what a reward model's evaluation found
    checkpoints/      state to resume from
    deepspeed/        DeepSpeed's whole JSON of each model, where sharding is one of its modes
    report.html       the page
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.timings = self.path / "timings.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.notes = self.path / "notes.jsonl"
        self.report_card = self.path / "report_card.json"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"

    def write_config(self, resolved: Mapping[str, object]) -> list[str]:
        """Write config.yaml; where one exists it is kept, and the dotted keys that now differ are returned.

        The versions and the commit are compared too: a run resumed under another torch is worth a word.
        """
        new = {**_plain_dict(resolved), "versions": versions(), "git_commit": git_commit()}
        if self.config.exists():
            return differing_keys(self.read_config(), new)
        self.path.mkdir(parents=True, exist_ok=True)
        write_aside(self.config, yaml.safe_dump(new, sort_keys=False, allow_unicode=True, width=100))
        return []

    def write_deepspeed(self, name: str, settings: Mapping[str, object]) -> None:
        """Write deepspeed/<name>.json: what DeepSpeed was given for that model."""
        folder = self.path / "deepspeed"
        folder.mkdir(parents=True, exist_ok=True)
        write_aside(folder / f"{name}.json", json.dumps(plain(settings), indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        """What config.yaml holds; empty where there is none."""
        if not self.config.exists():
            return {}
        try:
            loaded = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.config} cannot be read as YAML: {error}") from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{self.config}: expected sections, found {type(loaded).__name__}")
        return loaded

    def read_metrics(self) -> list[dict[str, Any]]:
        """One mapping a logged step, in the order of the file."""
        return list(read_jsonl(self.metrics))

    def read_timings(self) -> list[dict[str, Any]]:
        """Seconds per phase, throughput and memory, one mapping a logged step."""
        return list(read_jsonl(self.timings))

    def read_samples(self) -> list[dict[str, Any]]:
        """Prompts with completions and what was measured of them."""
        return list(read_jsonl(self.samples))

    def read_notes(self) -> list[dict[str, Any]]:
        """Skipped rows and warnings."""
        return list(read_jsonl(self.notes))

    def write_report_card(self, card: Mapping[str, object]) -> None:
        """Write report_card.json; keys stay in their order, which is the order of the report's columns."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_aside(self.report_card, json.dumps(plain(card), indent=2) + "\n")

    def read_report_card(self) -> dict[str, Any]:
        """What report_card.json holds; empty where there is none."""
        if not self.report_card.exists():
            return {}
        try:
            loaded = json.loads(self.report_card.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{self.report_card} is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{self.report_card}: expected an object, found {type(loaded).__name__}")
        return loaded


def write_aside(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it there: a reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def versions() -> dict[str, str | None]:
    """Python and the packages a result depends on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit(source: Path | None = None) -> str | None:
    """The commit of the checkout that the code runs from, "-dirty" appended where it has changes; None outside git.

    Args:
        source: a file of the checkout; this one if None.
    """
    source = Path(__file__) if source is None else source
    # An installed copy may lie in a virtual environment inside somebody else's checkout: that commit is not ours.
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def differing_keys(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """The dotted keys that only one of the two has, or that they give different values; sorted."""
    left, right = flatten(_plain_dict(old)), flatten(_plain_dict(new))
    missing = object()
    return sorted(key for key in left.keys() | right.keys() if left.get(key, missing) != right.get(key, missing))


def _plain_dict(tree: Mapping[str, object]) -> dict[str, object]:
    return {str(key): plain(value) for key, value in tree.items()}
