"""Configuration files and `key=value` overrides as plain data: found, parsed, merged.

The project's own configurations are `configs/` of a checkout, which an installed package has beside this package.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from rlhf.algorithms.presets import PRESETS
from rlhf.config.presets import (
    drop_keys,
    drop_other_types,
    drop_overruled,
    get_setting,
    keep_last_alternative,
    release_held_out,
    sizes_of_preset,
)
from rlhf.errors import ConfigError
from rlhf.plugins import load_plugins

CONFIGS = "configs"
RUN_CONFIG = "config.yaml"
COMPARE_CONFIG = "compare.yaml"
PACKAGE = Path(__file__).resolve().parents[1]


def shipped_configs() -> Path:
    """Return the folder of the project's own configurations, in the installed package or in the checkout.

    Raises:
        ConfigError: it is in neither.
    """
    # The package first: beside an installed one is site-packages, where `configs` would be somebody else's.
    for folder in (PACKAGE / CONFIGS, PACKAGE.parent / CONFIGS):
        if (folder / "ppo.yaml").is_file():
            return folder
    raise ConfigError(f"the project's own {CONFIGS} are not where they were installed; reinstall the package")


def locate_config(path: str | Path) -> Path:
    """Return the configuration file that `path` names, or `path` itself if there is none.

    A run folder stands for its config.yaml, and a comparison's for its compare.yaml. A name such as `configs/ppo.yaml`
    is looked up in the working folder first, and then among the project's own configurations.
    """
    file = Path(path).expanduser()
    for name in (RUN_CONFIG, COMPARE_CONFIG):
        if (file / name).is_file():
            return file / name
    if file.exists() or not _is_shipped_name(file):
        return file
    shipped = shipped_configs().joinpath(*file.parts[1:])
    return shipped if shipped.is_file() else file


def nearest_config(path: str | Path) -> Path | None:
    """Return the existing configuration whose name is nearest to `path`'s, in the folder that `path` names.

    If that folder is missing, `config/ppo.yaml` and `ppo.yaml` stand for `configs/ppo.yaml`.
    """
    file = Path(path)
    shipped = Path(CONFIGS, *(file.parts[1:] or file.parts))
    if (len(file.parts) < 2 or not file.parent.is_dir()) and locate_config(shipped).is_file():
        return shipped
    folders = [file.parent]
    if _is_shipped_name(file):
        folders.append(shipped_configs().joinpath(*file.parts[1:-1]))
    names = {other.name for folder in folders for other in folder.glob("*.y*ml")}
    near = difflib.get_close_matches(file.name, sorted(names), n=1)
    return file.parent / near[0] if near else None


def _is_shipped_name(file: Path) -> bool:
    return len(file.parts) > 1 and file.parts[0] == CONFIGS and ".." not in file.parts


class _SettingsLoader(yaml.SafeLoader):
    """A safe loader of the values that JSON has: 2000-01-01 and all keys are text. No key may occur twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Build a node of a mapping, and refuse a key that is there twice: one value would be lost."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping with text keys, as in JSON: 16 becomes "16", for example as the name of an arm."""
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


class _SettingsDumper(yaml.SafeDumper):
    """A dumper that quotes the texts which `_SettingsLoader` would read as numbers."""


# In YAML 1.2 and in JSON 1e-3 and 1.5e3 are numbers. PyYAML reads them as text, which a user's function would get.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
for _kind in (_SettingsLoader, _SettingsDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


class InvalidYaml(ValueError):
    """A text that is not YAML, or that cannot hold settings."""


def parse_yaml(text: str, name: str = "the text") -> Any:
    """Parse a YAML text into plain data; errors call it `name`.

    Raises:
        InvalidYaml: the text is not YAML, a value cannot be constructed, a key is there twice, or JSON cannot hold it.
    """
    try:
        value = yaml.load(text, Loader=_SettingsLoader)
        json.dumps(value, ensure_ascii=False).encode()  # no date or bytes, no cycle, no half of a surrogate pair
        return value
    except RecursionError as error:
        raise InvalidYaml("it is nested too deep") from error
    # Besides its own errors PyYAML lets errors of its value constructors through: !!int "", !!float x.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise InvalidYaml((str(error) or type(error).__name__).replace('"<unicode string>"', name)) from error


def format_yaml(settings: Any, *, width: int | None = None) -> str:
    """Format settings as a YAML text that `parse_yaml` reads as the same settings."""
    return str(yaml.dump(settings, Dumper=_SettingsDumper, sort_keys=False, allow_unicode=True, width=width))


Tree = dict[str, Any]

TAGS = ("type", "preset")
SHORT_FORM_KEYS = {  # sections with a one-word short form: sharding=zero3 is sharding.mode=zero3
    "correction": ("type", str),
    "ensemble": ("size", int),
    "sharding": ("mode", str),
    "tune": ("trials", int),
}


def parse_overrides(overrides: Sequence[str], *, arms: Sequence[str] = ()) -> Tree:
    """Parse overrides such as `["policy.lr=1e-6"]` into one tree; values are YAML (1e-6, true, null, [0, 1], text).

    Of two settings that exclude each other (schedule.steps and schedule.epochs) the last one wins.

    Args:
        arms: arms of a comparison, whose names may have dots: `arms.clip_0.1.policy.lr` is a setting of `clip_0.1`.

    Raises:
        ConfigError: an override without `=`, with an empty key, or whose value is not YAML or has `{key:value}`.
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
        if (joined := _joined_key(value)) is not None:
            raise ConfigError(f"{key}: {joined!r} is one word in YAML: write a space after the colon")
        branch = _branch(parts, value)
        tree = merge(keep_last_alternative(tree, branch), branch)
    return tree


def _joined_key(value: Any) -> str | None:
    """Return the first key that has its value in it, as in `{key:value}` without a space; None if there is none."""
    if not isinstance(value, Mapping):
        return None
    joined = (key if ":" in key and inner is None else _joined_key(inner) for key, inner in value.items())
    return next((key for key in joined if key is not None), None)


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
    """Merge `over` into `base`, a file's or a run's settings, as `merge_over` does; see `release_held_out`."""
    return merge_over(release_held_out(base, over), over)


def merge_over(base: Tree, over: Tree) -> Tree:
    """Merge `over` into `base`; its settings win, also over settings of `base` that exclude them.

    If `over` names a preset other than the base's, the sizes that this preset sets are applied too.

    Raises:
        ConfigError: a plug-in, which may define what a choice excludes, cannot be imported.
    """
    base, over = merge({}, base), merge({}, over)
    load_plugins({**base, **over})
    base = drop_other_types(base, over)
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
