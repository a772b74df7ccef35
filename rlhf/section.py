"""The base classes of sections: frozen, closed to unknown keys, documented by their attribute docstrings.

A section owns what it configures. A choice (a loss, an advantage, a reward source, a suite) is a `Choice`: a class with
its settings, its computation, its usual ranges and its rules. Defining the class adds it to its family; no other
code has to know its name.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from types import GenericAlias, NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    SerializationInfo,
    Tag,
    TypeAdapter,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Level = Literal["error", "warning"]
Value = float | str


@dataclass(frozen=True)
class Facts:
    """The facts that a rule may need besides the section that it judges."""

    parameters: float | None = None  # of the model that is trained; None: not known before it is loaded
    run: Any = None  # the whole configuration of the run
    memory: float | None = None  # bytes of the device that the run starts on; None: not known, as for `rlhf lint`
    device: str = "cpu"  # cpu or cuda
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check of a section. An error will not learn or may lose data; a warning is outside the source's reports."""

    name: str
    level: Level
    key: str  # relative to the section; of a run's own rule the full key
    violation: Callable[[Any, Facts], Value | None]  # the offending value; None if the setting is fine
    reason: str
    source: str
    fix: str
    runs: tuple[type, ...] = ()  # of a run's own rule: the configurations that it applies to


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The range that papers report for a field, written into its annotation; outside it `rlhf lint` warns.

    Either end may be None, for no limit on this side. A value of None (switched off) is not judged.
    """

    low: float | None = None
    high: float | None = None
    rule: str
    reason: str
    source: str
    fix: str
    level: Level = "warning"

    def contains(self, value: float) -> bool:
        """Check whether a value is within the range."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def as_rule(self, field: str) -> Rule:
        """Return the rule that judges the field of this name."""

        def violation(section: Any, facts: Facts) -> Value | None:
            value = getattr(section, field)
            return None if value is None or self.contains(value) else float(value)

        return Rule(
            name=self.rule,
            level=self.level,
            key=field,
            violation=violation,
            reason=self.reason,
            source=self.source,
            fix=self.fix,
        )


Positive = Annotated[float, Field(gt=0)]
Folder = Annotated[str, AfterValidator(os.path.expanduser)]  # ~ is the home folder: no shell expands it after a "="
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

C = TypeVar("C", bound="Choice")


def cache_folder(configured: str | None, environment: Mapping[str, str]) -> Path:
    """Return the folder that runs share: `configured`, or the user's cache."""
    if configured is not None:
        return Path(configured).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlhf"


class Section(BaseModel):
    """A frozen section of the configuration; an unknown key is an error."""

    # Not use_attribute_docstrings: it parses the source of every class when it is defined, a third of the time that it
    # takes to load a configuration. `description` reads a docstring when somebody asks. And of a hundred classes a
    # command validates a few: pydantic makes a validator at the first use.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, defer_build=True)

    lint_rules: ClassVar[tuple[Rule, ...]] = ()
    """The rules by which `rlhf lint` checks this section, beyond the usual ranges of its fields."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_truth(cls, value: object, info: Any) -> object:
        """Read the words on and off, which YAML takes for true and false; refuse truth as a number, 1 or 0."""
        word = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else None
        if word is not None and word in typing.get_args(cls.model_fields[info.field_name].annotation):
            return word
        if _has_truth(value) and info.field_name in _numeric_fields(cls):
            raise PydanticCustomError("number_type", "Input should be a number")
        return value


def _has_truth(value: object) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_truth, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, bool)


@cache
def _numeric_fields(section: type[Section]) -> frozenset[str]:
    """Return the names of the fields that hold numbers, also in lists, and nothing that true could be meant for."""
    kinds = {name: set(_plain_kinds(field.annotation)) for name, field in section.model_fields.items()}
    return frozenset(name for name, of in kinds.items() if of & {int, float} and of <= {int, float, str, NoneType})


def _plain_kinds(annotation: Any) -> Iterator[Any]:
    """Yield the parts of an annotation: int and None for Annotated[int, ...] | None."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        arguments = arguments[:1]
    elif typing.get_origin(annotation) is Literal:
        arguments = tuple(type(value) for value in arguments)
    yield from (kind for argument in arguments for kind in _plain_kinds(argument))
    if not arguments:
        yield annotation


class Choice(Section):
    """A section that is one of a family, chosen by its `type`.

    A direct subclass founds a family. A class below it whose `type` has a default is a member: it is registered when
    it is defined, in this package or in a user's module.
    """

    members: ClassVar[dict[str, builtins.type[Choice]]]
    metrics: ClassVar[str] = ""
    """Rows of metrics that only this choice reports, in the format of the table in rlhf/tracking/metrics.py."""
    type: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class: it founds a family, or joins one.

        Raises:
            TypeError: the family has another member of this type, or an abstract method is not defined.
        """
        super().__pydantic_init_subclass__(**kwargs)
        if Choice in cls.__bases__:
            cls.members = {}
        name = cls.model_fields["type"].default
        if "type" not in inspect.get_annotations(cls) or not isinstance(name, str):
            return
        if inspect.isabstract(cls):
            raise TypeError(f"{cls.__name__} has to define {', '.join(sorted(cls.__abstractmethods__))}")
        _join(cls.members, "type", name, cls)

    @classmethod
    def choices(cls: builtins.type[C]) -> dict[str, builtins.type[C]]:
        """Return the registered classes below this one by their type, in the order of their files."""
        members = sorted(cls.members.items(), key=lambda entry: entry[1].__module__)
        return {name: member for name, member in members if issubclass(member, cls)}


class Named:
    """A class that is one of a family by its class variable `name`, as a suite or an alarm.

    A direct subclass founds a family. A class below it that sets `name` is a member: it is registered when it is
    defined, in this package or in a user's module.
    """

    members: ClassVar[dict[str, builtins.type[Any]]]
    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class: it founds a family, or joins one.

        Raises:
            TypeError: the family has another member of this name.
        """
        super().__init_subclass__(**kwargs)
        if Named in cls.__bases__:
            cls.members = {}
        elif "name" in cls.__dict__:
            _join(cls.members, "name", cls.__dict__["name"], cls)

    @classmethod
    def choices(cls) -> dict[str, builtins.type[Any]]:
        """Return the members of the family by name."""
        return dict(cls.members)


def _join(members: dict[str, builtins.type[Any]], key: str, name: str, cls: builtins.type) -> None:
    other = members.get(name, cls)
    if _origin(other) != _origin(cls):
        raise TypeError(f"{key} {name!r} of {cls.__name__} is taken by {other.__module__}.{other.__qualname__}")
    members[name] = cls


def is_left_out(kind: type) -> bool:
    """Check whether a class of a family is no member of it, and no base of other classes either."""
    if not issubclass(kind, Choice | Named) or {Choice, Named} & set(kind.__bases__):
        return False
    is_base = inspect.isabstract(kind) or bool(kind.__subclasses__())
    return not is_base and _origin(kind) not in map(_origin, kind.members.values())


def _origin(kind: type) -> tuple[str, str]:
    """Return where a class is defined: a file that is imported again, by another name, may define its classes again."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", kind.__module__)), kind.__qualname__


def declared_metrics() -> set[str]:
    """Return the rows of metrics that the members of all families declare."""
    return {member.metrics for family in Choice.__subclasses__() for member in family.members.values()} - {""}


@dataclass(frozen=True)
class OneOf:
    """Marks a field that holds a member of a family: `loss: Annotated[PairLoss, OneOf("dpo")]`.

    The members are looked up when a value is validated, so a class that is defined later is a choice too. `default` is
    the type of settings that name none; None: they have to. `only` limits the members to the ones for which it holds.
    """

    default: str | None = None
    only: Callable[[type[Any]], bool] | None = None

    def members(self, family: type[Choice]) -> dict[str, type[Choice]]:
        """Return the members of a family that the field can hold."""
        choices = family.choices().items()
        return {name: member for name, member in choices if self.only is None or self.only(member)}

    def __get_pydantic_core_schema__(self, family: type[Choice], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that validates as a tagged union of the family's members at that time."""

        def validate(value: object) -> object:
            return _union(tuple(self.members(family).items()), self.default)(value)

        def dump(section: Choice, info: SerializationInfo) -> dict[str, Any]:
            dumped = section.model_dump(
                mode=info.mode,
                exclude_unset=info.exclude_unset,
                exclude_defaults=info.exclude_defaults,
                exclude_none=info.exclude_none,
            )
            return {"type": section.type, **dumped}  # also if it is unset, as in a section made by its class

        return core_schema.no_info_plain_validator_function(
            validate, serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True)
        )


def members_of(annotation: Any, marks: Sequence[object] = ()) -> dict[str, type[Choice]]:
    """Return the members of families that a field with this annotation and these marks can hold, by type."""
    if typing.get_origin(annotation) is Annotated:
        annotation, *inner = typing.get_args(annotation)
        return members_of(annotation, (*marks, *inner))
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        one_of = next((mark for mark in marks if isinstance(mark, OneOf)), OneOf())
        return one_of.members(annotation)
    return {name: of for inner in typing.get_args(annotation) for name, of in members_of(inner, marks).items()}


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the section classes that an annotation names: of a family, the members that the field can hold."""
    family, *marks = typing.get_args(annotation) or (None,)
    if choice := next((mark for mark in marks if isinstance(mark, OneOf)), None):
        return list(choice.members(family).values())
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return list(annotation.choices().values())
    if isinstance(annotation, type) and not isinstance(annotation, GenericAlias):
        return [annotation] if issubclass(annotation, Section) else []
    return [section for inner in typing.get_args(annotation) for section in sections_of(inner)]


@cache
def _union(choices: tuple[tuple[str, type[Choice]], ...], default: str | None) -> Callable[[object], object]:
    tagged: Any = reduce(or_, (Annotated[member, Tag(name)] for name, member in choices))
    union: Any = Annotated[tagged, Discriminator(type_discriminator(default))]
    return TypeAdapter(union).validate_python


def rules_of(section: type[Section]) -> Iterator[Rule]:
    """Yield the rules of a section: the usual ranges of its fields, then its own."""
    for name, info in section.model_fields.items():
        yield from (mark.as_rule(name) for mark in info.metadata if isinstance(mark, Usual))
    yield from section.lint_rules


def description(section: type[Section], field: str) -> str:
    """Return the docstring of a field, the text below it in its class; empty if it has none."""
    owner = next(kind for kind in section.__mro__ if field in inspect.get_annotations(kind))
    return _attribute_docstrings(owner).get(field, "")


@cache
def _attribute_docstrings(kind: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):  # a class without a file, as of an interactive session
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        statement.target.id: inspect.cleandoc(below.value.value)
        for statement, below in pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def walk(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    """Yield a section and all sections in it, each with its dotted path (empty for the outermost)."""
    yield path, section
    for name in type(section).model_fields:
        value, here = getattr(section, name), f"{path}.{name}" if path else name
        members = enumerate(value) if isinstance(value, list | tuple) else ()
        inner = [(here, value), *((f"{here}.{number}", member) for number, member in members)]
        for place, candidate in inner:
            if isinstance(candidate, Section):
                yield from walk(candidate, place)


@dataclass(frozen=True)
class Needed:
    """Marks a field that has to be set; if it is not, the error says `<key> is missing: <reason>`."""

    reason: str


def type_discriminator(default: str | None) -> Callable[[object], str | None]:
    """Build a discriminator for a union of sections: it returns a section's `type`, or `default` if that is not set."""

    def tag(value: object) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return None if kind is None else str(kind)

    return tag
