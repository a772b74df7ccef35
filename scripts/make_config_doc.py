"""Write docs/configuration.md from the sections that validate configurations: `python scripts/make_config_doc.py`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhf.config.base import Section
from rlhf.config.compare import CompareConfig
from rlhf.config.presets import PRESETS
from rlhf.config.sections import RewardModelConfig, TrainSections

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
ROOTS: tuple[tuple[str, type[Section]], ...] = (
    ("rlhf train", TrainSections),
    ("rlhf rm", RewardModelConfig),
    ("rlhf compare", CompareConfig),
)
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false"}
SIGNS = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}

INTRODUCTION = """\
# Configuration

This page is made by `python scripts/make_config_doc.py` from the sections in `rlhf/config/`. Change it there.

A run is a YAML file and `key=value` on the command line:

    rlhf train configs/ppo.yaml policy.lr=2e-6 algorithm.kl.controller.target=4
    rlhf config configs/ppo.yaml policy.lr=2e-6

The second prints the whole configuration with every default filled in, and runs nothing.

- **What is said last wins.** Defaults, then the preset, then the file, then the command line from left to right. A few
  presets set sizes outside `algorithm` too ([below](#presets)); where the command line, or an arm of a comparison,
  names another preset than the file's, the sizes of that preset replace the file's. (A group of completions that the
  file has already stays as it is.)
- **Settings that exclude each other** follow the same rule: `schedule.steps=60` on the command line replaces
  `schedule.epochs` of the file, `budget.seconds=600` the file's budget, `critic.shared=true` the file's `critic.init`,
  `sharding=ddp` the file's DeepSpeed keys. Both of them in one place are an error.
- **Another algorithm for the same file.** Where the command line names another preset (or another
  `algorithm.advantage.type`), the sections of the file that this algorithm does not read are left out:
  `rlhf train configs/ppo.yaml algorithm.preset=grpo` has no critic. A section that you name on the command line
  yourself and that nothing reads is a warning.
- **Values** on the command line are YAML: `1e-6`, `true`, `null`, `[0.9, 0.95]`, `{type: fixed}`. Quote what the shell
  would take apart.
- **Sections are merged**, key by key. A section that names another `type` or `preset` replaces the old one whole: what
  belonged to the old one is gone.
- **Mistakes are reported at once**, all together and before any model is loaded: a key that does not exist (with
  the nearest one that does), a value of the wrong type or out of range, settings that contradict each other, a file or
  folder that is not there. A section that nothing in the run reads is a warning.
- **Sizes are global.** `batch.micro_batch_size`, `sampling.batch_size` and `reward.source.micro_batch_size` are about
  memory only.
- **`lab:name`** as a path is a file of the built-in lab, made on first use: see
  [own_model_and_data.md](own_model_and_data.md#the-lab).
"""


@dataclass
class Shape:
    """A section class, and the keys at which it occurs."""

    kind: type[Section]
    keys: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """A setting: its dotted key and its default."""

    key: str
    default: object


def page() -> str:
    """Build the Markdown of docs/configuration.md."""
    lines, known = [INTRODUCTION], dict[type[Section], list[str]]()
    for command, root in ROOTS:
        sections = shapes(root)
        lines += [f"## {command}\n", *_table(sections[0])]
        for shape in sections[1:]:
            kind = _documented_kind(shape.kind, known)
            if kind not in known:
                lines += _section(shape, sections)
            elif not set(shape.keys) & set(known[kind]):
                heading = [f"### `{shape.keys[0]}`\n"] if kind is shape.kind else _heading(shape, sections)
                reference = "\n".join([*heading, f"The same settings as `{known[kind][0]}`.\n"])
                lines += [reference] if reference not in lines else []
            known.setdefault(shape.kind, shape.keys)
    presets = yaml.dump(PRESETS, Dumper=_NoAliasDumper, sort_keys=False, default_flow_style=None, width=110)
    lines += ["## Presets\n", "What `algorithm.preset` stands for; what it does not name has its default.\n"]
    return "\n".join([*lines, f"```yaml\n{presets}```\n"])


def _documented_kind(kind: type[Section], known: Mapping[type[Section], object]) -> type[Section]:
    """Return the class whose table describes `kind`: itself, or a known base with the same keys except for `type`."""
    bases = [base for base in kind.__mro__ if base in known and issubclass(base, Section)]
    return next((base for base in bases if kind.model_fields.keys() - base.model_fields.keys() <= {"type"}), kind)


class _NoAliasDumper(yaml.SafeDumper):
    """YAML dumper that writes shared objects in full each time, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: no object is written as an alias."""
        return True


def shapes(root: type[Section]) -> list[Shape]:
    """List every section class under `root` with all its keys, in the order in which a reader meets them."""
    shape_of: dict[type[Section], Shape] = {}

    def visit(kind: type[Section], key: str, inside: tuple[type[Section], ...] = ()) -> None:
        shape = shape_of.setdefault(kind, Shape(kind))
        if key in shape.keys:
            return
        shape.keys.append(key)
        for name, annotation in hints_of(kind).items():
            around = {*inside, kind} & set(_kinds(annotation))  # a source around a source is not described again
            if typing.get_origin(annotation) is not list and not around:
                suffix = ".<name>" if _is_mapping(annotation) else ""
                for inner in _kinds(annotation):
                    visit(inner, (f"{key}.{name}" if key else name) + suffix, (*inside, kind))

    visit(root, "")
    return list(shape_of.values())


def hints_of(kind: type[Section]) -> dict[str, Any]:
    """Return the annotation of every setting of a section, limits included."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.model_fields}


def settings() -> Iterator[Setting]:
    """Yield every setting of every variant; a key occurs several times where variants share its name."""
    for _, root in ROOTS:
        for shape in shapes(root):
            for key in shape.keys:
                for name, info in shape.kind.model_fields.items():
                    yield Setting(f"{key}.{name}" if key else name, _plain_default(info))


def _section(shape: Shape, among: list[Shape]) -> Iterator[str]:
    yield from _heading(shape, among)
    yield from _table(shape)


def _heading(shape: Shape, among: list[Shape]) -> Iterator[str]:
    keys = ", ".join(f"`{key}`" for key in shape.keys)
    tag = shape.kind.model_fields.get("type")
    variant = f" (type: {tag.default})" if tag is not None else ""
    if tag is None and sum(shape.keys == other.keys for other in among) > 1:
        variant = f" ({shape.kind.__name__.lower()})"
    yield f"### {keys}{variant}\n"
    yield f"{' '.join((shape.kind.__doc__ or '').split())}\n"


def _table(shape: Shape) -> Iterator[str]:
    rows = [name for name in shape.kind.model_fields if name != "type"]
    if not rows:
        return
    kinds = hints_of(shape.kind)
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name in rows:
        info = shape.kind.model_fields[name]
        key = f"{shape.keys[0]}.{name}" if shape.keys[0] else name
        cells = (f"`{key}`", _named(kinds[name]), _default(info), " ".join((info.description or "").split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _plain_default(info: FieldInfo) -> object:
    """Return the default as plain data; for a section, only what the default itself sets."""
    if info.is_required():
        return PydanticUndefined
    if isinstance(info.default, Section):
        values = info.default.model_dump(mode="json")
        return {key: values[key] for key in values if key == "type" or key in info.default.model_fields_set}
    return list(info.default) if isinstance(info.default, tuple) else info.default


def _default(info: FieldInfo) -> str:
    default = _plain_default(info)
    if default is PydanticUndefined:
        return "required"
    if default == {} and isinstance(info.default, Section):
        return "see below"
    style = '"' if isinstance(default, str) and "\n" in default else None  # a line break would end the table
    text = yaml.safe_dump(default, default_flow_style=True, default_style=style, width=1000)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"


def _named(annotation: Any, metadata: typing.Sequence[object] = ()) -> str:
    """Describe a type in words, followed by its limits."""
    describe = GENERIC_TYPES.get(typing.get_origin(annotation))
    if describe is not None:
        return describe(typing.get_args(annotation))
    if annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return NAMES.get(annotation, str(annotation)) + _limits(metadata)


def _named_annotated(inner: typing.Sequence[Any]) -> str:
    return _named(inner[0], [limit for given in inner[1:] for limit in getattr(given, "metadata", [])])


def _named_literal(inner: typing.Sequence[Any]) -> str:
    return " or ".join(f"`{value}`" for value in inner)


def _named_union(inner: typing.Sequence[Any]) -> str:
    """Describe the members once each, null last."""
    members = [_named(member) for member in inner if member is not types.NoneType]
    return " or ".join(dict.fromkeys([*members, *(["null"] if types.NoneType in inner else [])]))


def _named_mapping(inner: typing.Sequence[Any]) -> str:
    has_sections = any(_kinds(argument) for argument in inner)
    return "mapping of sections" if has_sections else "mapping"


# How a type with arguments is described, by its origin: list of list[int].
GENERIC_TYPES: dict[Any, typing.Callable[[typing.Sequence[Any]], str]] = {
    typing.Annotated: _named_annotated,
    typing.Literal: _named_literal,
    typing.Union: _named_union,
    types.UnionType: _named_union,
    list: lambda inner: f"list of {_named(inner[0])}",
    tuple: lambda inner: f"[{', '.join(map(_named, inner))}]",
    dict: _named_mapping,
}


def _limits(metadata: typing.Sequence[object]) -> str:
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in metadata
        for kind, (sign, name) in SIGNS.items()
        if isinstance(limit, kind)
    ]
    return f" {', '.join(limits)}" if limits else ""


def _is_mapping(annotation: Any) -> bool:
    """Return whether the sections are the values of a mapping with keys of the user's choice."""
    bare = typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
    return typing.get_origin(bare) is dict


def _kinds(annotation: Any) -> list[type[Section]]:
    """Return the section classes that an annotation names."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, Section) else []
    return [kind for inner in typing.get_args(annotation) for kind in _kinds(inner)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
