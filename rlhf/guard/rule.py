"""Defines the rules of `rlhf lint`: small functions of the configuration and a few facts, with reason, source and fix.

The facts are not in the configuration: for example the number of the model's parameters, read without loading it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig, RunConfiguration
from rlhf.model_files import count_parameters
from rlhf.planning.layout import trained_section
from rlhf.section import Facts, Rule, Value

ONLINE = (OnlineConfig,)
OFFLINE = (OfflineConfig,)
POLICY = (OnlineConfig, OfflineConfig)
ON_DATA = (OfflineConfig, RewardModelConfig)
EVERY = (OnlineConfig, OfflineConfig, RewardModelConfig)


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
    """Read the facts of a run: the number of its model's parameters."""
    return Facts(parameters=count_parameters(trained_section(config).model))
