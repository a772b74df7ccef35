"""Defines the rules of `rlhf lint`: small functions of the configuration and a few facts, with reason, source and fix.

The facts are not in the configuration: for example the number of the model's parameters, read without loading it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig, RunConfiguration
from rlhf.planning.shapes import path_of_base, read_header
from rlhf.section import Facts, Rule, Value

ONLINE = (OnlineConfig,)
OFFLINE = (OfflineConfig,)
POLICY = (OnlineConfig, OfflineConfig)
ON_DATA = (OfflineConfig, RewardModelConfig)
EVERY = (OnlineConfig, OfflineConfig, RewardModelConfig)

_SIZE = re.compile(r"(?<![A-Za-z0-9.])([A-Za-z]*)[-_]?(\d+(?:\.\d+)?)([KMB])(?![A-Za-z0-9])", re.IGNORECASE)
_LENGTHS = ("4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K")  # of contexts, in tokens
_COUNTED = ("run", "exp", "trial", "try", "test")  # run-29b is the second run of number 29
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A rule that a configuration breaks, and the value that breaks it."""

    rule: Rule
    value: Value

    @property
    def setting(self) -> str:
        """Return the key and its value: `batch.epochs is 50`."""
        return f"{self.rule.key} is {f'{self.value:g}' if isinstance(self.value, float | int) else self.value}"

    def __str__(self) -> str:
        """Return one line: rule, key and value, reason, source and fix."""
        return f"{self.rule.name}: {self.setting}. {self.rule.reason} ({self.rule.source}). Fix: {self.rule.fix}"


def outside(value: float, low: float, high: float) -> float | None:
    """Return the value if it is below `low` or above `high`; else None."""
    return None if low <= value <= high else value


def read_facts(config: RunConfiguration) -> Facts:
    """Read the facts of a run: from the headers of the model's safetensors files, else from its name.

    Of an adapter it is the model below it; the name of a run folder says nothing of the model in it.
    """
    model = config.model.model if isinstance(config, RewardModelConfig) else config.policy.model
    base = path_of_base(model)
    folder = Path(base.removesuffix("@best")).expanduser()
    is_run = (folder / "config.yaml").is_file()
    return Facts(parameters=_parameters_in(folder) or (None if is_run else parameters_in_name(base)))


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
        if files and not (place / "adapter_config.json").is_file():
            headers = [read_header(file)[0] for file in files]
            counts = [math.prod(entry["shape"]) for header in headers for entry in header.values()]
            return float(sum(counts)) if all(headers) else None
    return None
