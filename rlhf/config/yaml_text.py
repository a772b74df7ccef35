"""YAML from anywhere: plain data, or one error; never a document that blows up in memory or refers to itself."""

from __future__ import annotations

from typing import Any

import yaml

DEEPEST = 32
LARGEST = 100_000  # values, each alias counted as all that it stands for


class _Settings(yaml.SafeLoader):
    """2000-01-01 is text: settings are what JSON has, so what the run folder has of them is read as it was."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class UnusableYaml(ValueError):
    """It is not YAML, or no settings can be in it."""


def parse_yaml(text: str) -> Any:
    """The value that a YAML text describes.

    Raises:
        UnusableYaml: the text is not YAML, a value cannot be made of it, or it is too deep, too large or cyclic.
    """
    try:
        _check_size(text)
        value = yaml.load(text, Loader=_Settings)
        _check_plain(value)
        return _with_text_keys(value)
    # Besides its own errors PyYAML lets through what its makers of values meet: the 99th of a month, !!int "".
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise UnusableYaml(str(error) or type(error).__name__) from error


def _check_plain(value: Any) -> None:
    """Settings are what JSON has: they are written to the run folder, and read from there."""
    match value:
        case dict():
            for key, inner in value.items():
                if isinstance(key, bytes | tuple | frozenset):
                    raise UnusableYaml(f"a key is a {type(key).__name__}")
                _check_plain(key)
                _check_plain(inner)
        case list():
            for inner in value:
                _check_plain(inner)
        case str():
            value.encode()  # half of a surrogate pair is no text: a UnicodeEncodeError, which is a ValueError
        case None | bool() | int() | float():
            pass
        case _:
            raise UnusableYaml(f"a value is a {type(value).__name__}, which is no setting")


def _with_text_keys(value: Any) -> Any:
    """Keys as JSON has them: 16 is "16", as a name of an arm may be, or as a mistake is told."""
    if isinstance(value, list):
        return [_with_text_keys(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {str(key): _with_text_keys(inner) for key, inner in value.items()}
    if len(found) < len(value):
        raise UnusableYaml("a key is there twice, as text and as another value")
    return found


def _check_size(text: str) -> None:
    """Walk over the document without building it."""
    inside: list[tuple[str | None, int]] = []  # collections that are open: their anchor, and the count at their start
    sizes: dict[str, int] = {}
    open_anchors: set[str] = set()
    count = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        match event:
            case yaml.CollectionStartEvent():
                inside.append((event.anchor, count))
                if event.anchor:
                    open_anchors.add(event.anchor)
                count += 1
            case yaml.CollectionEndEvent():
                anchor, start = inside.pop()
                if anchor:
                    open_anchors.discard(anchor)
                    sizes[anchor] = count - start
            case yaml.ScalarEvent():
                count += 1
            case yaml.AliasEvent():
                if event.anchor in open_anchors:
                    raise UnusableYaml(f"&{event.anchor} refers to itself")
                count += sizes.get(event.anchor or "", 1)
            case _:
                pass
        if len(inside) > DEEPEST:
            raise UnusableYaml(f"it is nested more than {DEEPEST} deep")
        if count > LARGEST:
            raise UnusableYaml(f"it is larger than {LARGEST:,} values")
