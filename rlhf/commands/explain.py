"""rlhf config --explain: the meaning of a configuration's key, with its choices and usual range, plug-ins included."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf.errors import ConfigError, did_you_mean
from rlhf.plugins import plugin_of
from rlhf.section import Choice, Section, Usual, description, members_of, rules_of

LIMITS = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}


def explain(config: Section, key: str, console: Console) -> None:
    """Print the meaning of a section or a setting; of a section, all of its settings too.

    Args:
        key: a dotted key, such as algorithm.policy_loss or policy.lr.

    Raises:
        ConfigError: the configuration has no such key.
    """
    section, name = _locate(config, key)
    value = getattr(section, name)
    if isinstance(value, Section):
        _print_section(value, key, console, others=_other_types(value, type(section).model_fields[name]))
    else:
        _print_setting(section, name, key, console)


def _locate(config: Section, key: str) -> tuple[Section, str]:
    """Return the innermost section on the way to a key, and the name of the field there."""
    section, parts = config, key.split(".")
    for number, part in enumerate(parts):
        fields = type(section).model_fields
        if part not in fields:
            here = ".".join(parts[:number])
            raise ConfigError(f"{key}: {here or 'the configuration'} has no {part!r}{did_you_mean(part, list(fields))}")
        value = getattr(section, part)
        if number == len(parts) - 1:
            return section, part
        if not isinstance(value, Section):
            raise ConfigError(f"{key}: {'.'.join(parts[: number + 1])} is {value!r}, which has no settings")
        section = value
    raise AssertionError("a key has at least one part")


def _print_section(section: Section, key: str, console: Console, *, others: Sequence[str]) -> None:
    title = Text(key, style="bold")
    if isinstance(section, Choice):
        title.append(f".type is {section.type}", style="not bold")
    console.print(title)
    console.print(Text(inspect.cleandoc(type(section).__doc__ or "")), soft_wrap=True)
    if others:
        console.print(Text(f"\nOther types: {', '.join(others)}"), soft_wrap=True)
    console.print()
    for name in type(section).model_fields:
        if name != "type":
            _print_setting(section, name, f"{key}.{name}", console)
    for rule in rules_of(type(section)):
        console.print(Text(f"lint: {rule.name} ({rule.level}): {rule.reason} {rule.source}"), soft_wrap=True)
    if isinstance(section, Choice):
        for row in inspect.cleandoc(section.metrics).splitlines():
            if not row.startswith(" "):  # an indented line says where the metric above it is shown
                metric, unit, meaning = (cell.strip() for cell in row.split("|", 2))
                console.print(Text(f"metric: {metric} ({unit}): {meaning}"), soft_wrap=True)


def _other_types(section: Section, field: FieldInfo) -> list[str]:
    """List the types that the field could have in place of this section, plug-ins with their files."""
    members = members_of(field.annotation, field.metadata)
    plugins = {name: plugin_of(member) for name, member in members.items() if member is not type(section)}
    return [name if plugin is None else f"{name} ({plugin})" for name, plugin in plugins.items()]


def _print_setting(section: Section, name: str, key: str, console: Console) -> None:
    info, value = type(section).model_fields[name], getattr(section, name)
    console.print(Text(key, style="cyan").append(f" = {_shown(value)}", style="default"))
    for line in (description(type(section), name), *_facts(info)):
        console.print(Padding(Text(" ".join(line.split())), (0, 0, 0, 4)))


def _shown(value: object) -> str:
    """Return a value in YAML; of a section its type alone."""
    if isinstance(value, Section):
        return f"{{type: {value.type}, …}}" if isinstance(value, Choice) else "{…}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _facts(info: FieldInfo) -> Iterator[str]:
    marks = [(mark, *LIMITS[type(mark)]) for mark in info.metadata if type(mark) in LIMITS]
    limits = [f"{sign} {getattr(mark, of):g}" for mark, sign, of in marks]
    if limits:
        yield f"Allowed: {', '.join(limits)}."
    for mark in info.metadata:
        if isinstance(mark, Usual):
            yield f"Usual: {_range(mark)} ({mark.source})."


def _range(usual: Usual) -> str:
    if usual.low is None or usual.high is None:
        return f"at most {usual.high:g}" if usual.low is None else f"at least {usual.low:g}"
    return f"{usual.low:g} to {usual.high:g}"
