"""Parse `key=value` overrides into a tree of settings, and merge one tree into another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rlhf.config.files import InvalidYaml, parse_yaml
from rlhf.config.presets import (
    PRESETS,
    drop_keys,
    drop_overruled,
    get_setting,
    keep_last_alternative,
    sizes_of_preset,
)
from rlhf.errors import ConfigError

Tree = dict[str, Any]

TAGS = ("type", "preset")
SHORT_FORM_KEYS = {  # sections with a one-word short form: sharding=zero3 is sharding.mode=zero3
    "sharding": ("mode", str),
    "tune": ("trials", int),
}


def parse_overrides(overrides: Sequence[str], *, arms: Sequence[str] = ()) -> Tree:
    """Parse overrides such as `["policy.lr=1e-6"]` into one tree; values are YAML (1e-6, true, null, [0, 1], text).

    Of two settings that exclude each other (schedule.steps and schedule.epochs) the last one wins.

    Args:
        overrides: the overrides.
        arms: arms of a comparison, whose names may have dots: `arms.clip_0.1.policy.lr` is a setting of `clip_0.1`.

    Raises:
        ConfigError: an override without `=`, with an empty key, or whose value is not YAML.
    """
    tree: Tree = {}
    for text in overrides:
        key, equals, raw = text.partition("=")
        parts = _split_key(key, arms)
        if not equals or not all(parts):
            raise ConfigError(f"cannot read {text!r}: write section.key=value, e.g. policy.lr=1e-6")
        try:
            value = parse_yaml(raw)
        except InvalidYaml as error:
            raise ConfigError(
                f"{key}: the value {raw[:200]!r} is not valid YAML ({error}); put it in quotes"
            ) from error
        branch = _branch(parts, value)
        tree = merge(keep_last_alternative(tree, branch), branch)
    return tree


def branch_at(key: str, value: Any) -> Tree:
    """Return a tree with nothing in it but the value at a dotted key."""
    return _branch(key.split("."), value)


def _branch(parts: Sequence[str], value: Any) -> Tree:
    tree = value
    for part in reversed(parts):
        tree = {part: tree}
    return cast(Tree, tree)


def _split_key(key: str, arms: Sequence[str]) -> list[str]:
    """Split a dotted key, leaving the name of an arm whole."""
    section, _, rest = key.partition(".")
    names = [name for name in arms if f"{rest}.".startswith(f"{name}.")] if section == "arms" else []
    if not names:
        return key.split(".")
    name = max(names, key=len)
    return [section, name, *rest.removeprefix(name).split(".")[1:]]


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Merge two trees deeply, except that naming another tag (`type`, `preset`) replaces the whole section."""
    merged = {key: _expand_short_form(key, value) for key, value in base.items()}
    for key, value in over.items():
        old, value = merged.get(key), _expand_short_form(key, value)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _changes_tag(old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def _expand_short_form(key: str, value: Any) -> Any:
    if key not in SHORT_FORM_KEYS or type(value) is not SHORT_FORM_KEYS[key][1]:
        return value
    return {SHORT_FORM_KEYS[key][0]: value}


def _changes_tag(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return any(tag in new and old.get(tag, new[tag]) != new[tag] for tag in TAGS)


def merge_overrides(base: Tree, over: Tree) -> Tree:
    """Merge `over` into `base`; its settings win, also over settings of `base` that exclude them.

    If `over` names a preset other than the base's, the sizes that this preset sets are applied too.
    """
    base, over = merge({}, base), merge({}, over)
    return merge(merge(drop_overruled(base, over), _sizes_of_new_preset(base, over)), over)


def _sizes_of_new_preset(base: Tree, over: Tree) -> Tree:
    """Return the sizes of a preset that differs from the base's; a group size that the base already has stays."""
    preset = get_setting(over, "algorithm.preset")
    if preset == get_setting(base, "algorithm.preset"):
        return {}
    sizes = sizes_of_preset(preset)
    group_size = get_setting(base, "sampling.completions_per_prompt")
    has_group = isinstance(group_size, int) and group_size >= 2
    needs_any_group = get_setting(PRESETS, f"{preset}.algorithm.advantage.type") == "group"
    return drop_keys(sizes, ["sampling"]) if has_group and needs_any_group else sizes
