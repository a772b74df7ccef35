"""The last setting wins, also where two settings exclude each other: the earlier of the two is removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]

# At most one of each row may be set (the sections themselves check that).
ALTERNATIVES = (
    ("schedule.steps", "schedule.epochs"),
    ("budget.completions", "budget.tokens", "budget.flops", "budget.seconds"),
)


@dataclass(frozen=True)
class Exclusion:
    """A choice and the settings that it makes meaningless."""

    key: str
    is_chosen: Callable[[Any], bool]
    excludes: tuple[str, ...]


EXCLUSIONS = (
    Exclusion("sharding.mode", lambda mode: not str(mode).startswith("zero"), ("sharding.deepspeed",)),
    Exclusion("sharding.mode", lambda mode: not str(mode).endswith("_offload"), ("sharding.cpu_adam",)),
    Exclusion("critic.shared", lambda shared: shared is True, ("critic.init", "critic.lr", "critic.warmup_steps")),
    Exclusion("algorithm.advantage.type", lambda kind: kind != "gae", ("algorithm.value_loss",)),
)


def keep_last_alternative(tree: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from `tree` each setting to which `over` sets an alternative."""
    overruled = [
        other
        for row in ALTERNATIVES
        for key in row
        if setting(over, key) is not None
        for other in row
        if setting(over, other) is None
    ]
    return without(tree, overruled)


def without_overruled(tree: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from `tree` the alternatives to what `over` sets and the settings that its choices make meaningless."""
    excluded = [
        key
        for exclusion in EXCLUSIONS
        if setting(over, exclusion.key) is not None and exclusion.is_chosen(setting(over, exclusion.key))
        for key in exclusion.excludes
        if setting(over, key) is None
    ]
    return without(keep_last_alternative(tree, over), excluded)


def setting(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def without(tree: Mapping[str, Any], keys: list[str]) -> Tree:
    """Return a copy of `tree` without the given dotted keys."""
    copy = dict(tree)
    for key in keys:
        first, _, rest = key.partition(".")
        if not rest:
            copy.pop(first, None)
        elif isinstance(copy.get(first), Mapping):
            copy[first] = without(copy[first], [rest])
    return copy
