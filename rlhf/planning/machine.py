"""The memory that a run may use on this machine, and the rate at which the machine computed in a probe."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from rlhf.errors import UserError, command_or_call
from rlhf.model_files import read_json
from rlhf.section import cache_folder

GB = 1e9
MOST_GB = 1e6  # a number above it was meant in bytes
LIBRARIES = {"cpu": 0.7 * GB, "cuda": 0.6 * GB}
"""The memory that a process needs besides: on a CPU Python, torch and transformers; on a GPU the context of CUDA."""
CGROUP = Path("/sys/fs/cgroup")
RATES = "machine.json"  # in the cache
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> float:
    """Return the bytes that a size such as 24GB, 80GiB or 512MB names; a bare number is in GB.

    Raises:
        UserError: it is no size.
    """
    match = _SIZE.fullmatch(text)
    is_bare = not text.strip().lower().endswith("b")
    if match is None or float(match[1]) <= 0 or (is_bare and not match[2] and float(match[1]) > MOST_GB):
        name = command_or_call("--memory", "memory")
        raise UserError(f"{name} is {text!r}: write a size such as 24GB or 80GiB; a number alone is in GB")
    unit = match[2].lower() or ("g" if is_bare else "")
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[unit]
    return float(match[1]) * (1024.0**power if match[3] else _UNITS[unit])


def host_memory() -> float:
    """Return the bytes that a process could still use on this machine, swap included, within its container."""
    free = float(psutil.virtual_memory().available + psutil.swap_memory().free)
    room = _room_in_container()
    return free if room is None else min(free, room)


def _room_in_container() -> float | None:
    """Return the bytes that the container's limit leaves, without what it could drop; None without a limit."""
    for limit, usage, stat, drop in (
        (CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat", "inactive_file"),
        (
            CGROUP / "memory" / "memory.limit_in_bytes",
            CGROUP / "memory" / "memory.usage_in_bytes",
            CGROUP / "memory" / "memory.stat",
            "total_inactive_file",
        ),
    ):
        with suppress(OSError, ValueError):
            most, used = float(limit.read_text(encoding="ascii")), float(usage.read_text(encoding="ascii"))
            lines = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
            droppable = sum(float(value) for name, value in lines if name == drop)
            return most - used + droppable
    return None


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU, without asking torch."""
    return Path("/dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _key(device: str, dtype: str) -> str:
    return f"{platform.node()} {device} {dtype}"


def read_rates(cache_dir: str | None, device: str, dtype: str) -> dict[str, float]:
    """Return the operations per second by phase that a probe measured here; empty without a probe."""
    rates = read_json(cache_folder(cache_dir, os.environ) / RATES).get(_key(device, dtype), {})
    return {str(phase): float(rate) for phase, rate in rates.items()}


def write_rates(cache_dir: str | None, device: str, dtype: str, rates: Mapping[str, float]) -> Path:
    """Keep the rates that a probe measured, beside the rates of other devices and dtypes; return the file."""
    file = cache_folder(cache_dir, os.environ) / RATES
    content = read_json(file)
    content[_key(device, dtype)] = {**content.get(_key(device, dtype), {}), **rates}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return file
