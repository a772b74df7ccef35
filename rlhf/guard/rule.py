"""What a rule of `rlhf lint` is: a small function of the configuration, with its reason, its source and the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rlhf.config.reward import EnsembleSource, FunctionSource, RewardSourceConfig
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig

Level = Literal["error", "warning"]
RunConfiguration = OnlineConfig | OfflineConfig | RewardModelConfig
Value = float | str

ONLINE = (OnlineConfig,)
OFFLINE = (OfflineConfig,)
POLICY = (OnlineConfig, OfflineConfig)
REWARD_MODEL = (RewardModelConfig,)
ON_DATA = (OfflineConfig, RewardModelConfig)
EVERY = (OnlineConfig, OfflineConfig, RewardModelConfig)


@dataclass(frozen=True)
class Facts:
    """What a rule may need besides the configuration."""

    parameters: float | None = None  # of the model that is trained; None: not known before it is loaded


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table. An error will not learn or may lose data; a warning is outside what the source reports."""

    name: str
    level: Level
    runs: tuple[type, ...]  # the configurations that it applies to
    key: str
    violation: Callable[[Any, Facts], Value | None]  # the offending value; None where the setting is fine
    reason: str
    source: str
    fix: str


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
    """Return the value where it is below `low` or above `high`; else None."""
    return None if low <= value <= high else value


def is_learned(source: RewardSourceConfig) -> bool:
    """Return whether a reward is a model's opinion, which can be exploited, rather than a function that checks."""
    if isinstance(source, EnsembleSource):
        return any(is_learned(member) for member in source.sources)
    return not isinstance(source, FunctionSource)
