"""The settings of presets outside `algorithm`, and the choice between two exclusive settings: the last given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.presets import PRESETS

Tree = dict[str, Any]


def sizes_of_preset(name: object) -> Tree:
    """Return the settings of a preset outside `algorithm`; none if there is no such preset."""
    settings = PRESETS.get(name, {}) if isinstance(name, str) else {}
    return {section: sizes for section, sizes in settings.items() if section != "algorithm"}


def has_critic(advantage: object) -> bool:
    """Return whether an advantage of this type reads a critic's values; no if there is no such type."""
    member = Advantage.choices().get(str(advantage))
    return member is not None and member.needs_critic


# At most one of each row may be set (the sections themselves check that).
ALTERNATIVES = (
    ("schedule.steps", "schedule.epochs"),
    ("budget.completions", "budget.tokens", "budget.flops", "budget.seconds"),
    *((f"data.{name}.path", f"data.{name}.sources") for name in ("prompts", "sft", "preferences")),
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
    Exclusion("sharding.mode", lambda mode: not str(mode).startswith("zero3"), ("sharding.rollout",)),
    Exclusion(
        "critic.shared",
        lambda shared: shared is True,
        ("critic.init", "critic.lr", "critic.warmup_steps", "critic.epochs"),
    ),
    Exclusion("algorithm.advantage.type", lambda kind: not has_critic(kind), ("algorithm.value_loss",)),
)


def release_held_out(run: Tree, over: Tree, *, has_trained: bool = False) -> Tree:
    """Remove from a run's settings the parts that data.holdout filled in, if `over` names other rows or another share.

    So `over` does what it would do over the run's file. If the run `has_trained`, its training rows keep their part,
    and held-out rows from another file keep the other settings of the run's.
    """
    share, given, dropped = get_setting(run, "data.holdout"), get_setting(over, "data"), []
    for rows in ("prompts", "sft", "preferences"):
        own, held_out = get_setting(run, f"data.{rows}"), get_setting(run, f"data.eval_{rows}")
        if not _are_trees(given, own, held_out):
            continue
        if own.get("part") != [share, 1.0] or own.get("path") != held_out.get("path"):
            continue
        names_file = get_setting(given, f"eval_{rows}.path") is not None
        if has_trained and names_file:
            dropped += [f"data.eval_{rows}.part", f"data.eval_{rows}.limit"]
        elif has_trained and "holdout" in given:
            dropped += [f"data.eval_{rows}"]
        elif not has_trained and (names_file or {"holdout", rows} & given.keys()):
            dropped += [f"data.eval_{rows}", f"data.{rows}.part"]
    return drop_keys(run, dropped)


def keep_last_alternative(tree: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from `tree` each setting to which `over` sets an alternative."""
    overruled = [
        other
        for row in ALTERNATIVES
        for key in row
        if get_setting(over, key) is not None
        for other in row
        if get_setting(over, other) is None
    ]
    return drop_keys(tree, overruled)


def drop_overruled(tree: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from `tree` the alternatives to `over`'s settings and the settings that its choices make meaningless."""
    excluded = [
        key
        for exclusion in EXCLUSIONS
        if get_setting(over, exclusion.key) is not None and exclusion.is_chosen(get_setting(over, exclusion.key))
        for key in exclusion.excludes
        if get_setting(over, key) is None
    ]
    return drop_keys(keep_last_alternative(tree, over), excluded)


def drop_other_types(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from the algorithm of `base` each section whose type is its preset's, if `over` names another type.

    So a section that leaves its type to the preset is replaced like one that names it; the same in a comparison's arms.
    """
    kept = drop_keys(base, [f"algorithm.{name}" for name in _sections_of_other_types(base, over)])
    arms, changed = kept.get("arms"), over.get("arms")
    if isinstance(arms, Mapping) and isinstance(changed, Mapping):
        kept["arms"] = {
            name: drop_other_types(arm, changed[name]) if _are_trees(arm, changed.get(name)) else arm
            for name, arm in arms.items()
        }
    return kept


def _sections_of_other_types(base: Mapping[str, Any], over: Mapping[str, Any]) -> list[str]:
    named, algorithm = get_setting(over, "algorithm"), get_setting(base, "algorithm")
    if not _are_trees(named, algorithm):
        return []
    preset = named.get("preset", algorithm.get("preset"))
    implied = PRESETS.get(preset, {}).get("algorithm", {}) if isinstance(preset, str) else {}
    return [
        name
        for name, section in named.items()
        if _are_trees(section, algorithm.get(name), implied.get(name))
        and "type" not in algorithm[name]
        and section.get("type", implied[name].get("type")) != implied[name].get("type")
    ]


def _are_trees(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def get_setting(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def drop_keys(tree: Mapping[str, Any], keys: list[str]) -> Tree:
    """Return a copy of `tree` without the given dotted keys."""
    copy = dict(tree)
    for key in keys:
        first, _, rest = key.partition(".")
        if not rest:
            copy.pop(first, None)
        elif isinstance(copy.get(first), Mapping):
            copy[first] = drop_keys(copy[first], [rest])
    return copy
