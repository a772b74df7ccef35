"""Reads a model's files without its weights: the base of an adapter, the header of a file, the number of parameters."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

CONFIG = "config.json"
ADAPTER = "adapter_config.json"

_HEADER = struct.Struct("<Q")
_LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_SIZE = re.compile(r"(?<![A-Za-z0-9.])([A-Za-z]*)[-_]?(\d+(?:\.\d+)?)([KMB])(?![A-Za-z0-9])", re.IGNORECASE)
_LENGTHS = ("4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K")  # of contexts, in tokens
_COUNTED = ("run", "exp", "trial", "try", "test")  # run-29b is the second run of number 29
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}


def adapter_at(path: str) -> dict[str, Any]:
    """Return peft's settings of the adapter at `path`; empty if there is a whole model or nothing."""
    folder = existing_folder(path)
    return {} if folder is None else read_json(folder / ADAPTER)


def path_of_base(path: str) -> str:
    """Return the model below an adapter's folder, or the path itself: the same for all models on one base."""
    return resolved(str(adapter_at(path).get("base_model_name_or_path") or path))


def resolved(path: str) -> str:
    """Return the whole path of a file or folder; a hub id unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def existing_folder(path: str) -> Path | None:
    """Return the folder of a model or of a run's model; None if the path is no folder here."""
    name, at, best = path.rpartition("@")
    if at and best == "best":
        kept = sorted(Path(name).expanduser().glob("best/step-*"), key=lambda kept: int(kept.name.partition("-")[2]))
        path = str(kept[-1]) if kept else name
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    is_exported = any((folder / "model" / name).is_file() for name in (CONFIG, ADAPTER))
    return folder / "model" if is_exported and (folder / "config.yaml").is_file() else folder


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the dtype, shape and place of each tensor of a safetensors file, none if it is no such file; and the start.

    A place is relative to the start, which is in bytes.
    """
    try:
        with file.open("rb") as stream:
            (length,) = _HEADER.unpack(stream.read(_HEADER.size))
            header = json.loads(stream.read(length)) if length <= _LARGEST_HEADER else None
    except (OSError, ValueError, struct.error):
        return {}, 0
    entries = header if isinstance(header, dict) else {}
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, _HEADER.size + length


def count_parameters(model: str) -> float | None:
    """Count the parameters of a model: by the headers of its safetensors files, else by its name; None if unknown.

    Of an adapter it is the model below it; the name of a run folder says nothing of the model in it.
    """
    base = path_of_base(model)
    folder = Path(base.removesuffix("@best")).expanduser()
    is_run = (folder / "config.yaml").is_file()
    return _parameters_in(folder) or (None if is_run else parameters_in_name(base))


def parameters_in_name(name: str) -> float | None:
    """Return the number of parameters that the last part of a model's name states, or None.

    Of several (`Qwen2.5-7B-Instruct-1M`) it is the largest: the others are a length, or the parameters of a token.
    """
    sizes = [
        float(number) * _UNITS[unit.upper()]
        for word, number, unit in _SIZE.findall(Path(name).name)
        if word.lower() not in _COUNTED and (number + unit).upper() not in _LENGTHS
    ]
    return max(sizes, default=None)


def _parameters_in(folder: Path) -> float | None:
    """Count the parameters in the weights of a model folder or of a run's model; None if there are none."""
    for place in (folder, folder / "model"):
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else []
        if files and not (place / ADAPTER).is_file():
            headers = [read_header(file)[0] for file in files]
            counts = [math.prod(entry["shape"]) for header in headers for entry in header.values()]
            return float(sum(counts)) if all(headers) else None
    return None
