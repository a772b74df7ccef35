"""The shape that a JSON value has to have: read from a short description or from a subset of JSON Schema, and checked.

The short description names each key and its type:

    {"street": "string", "codes": {"array": "integer", "length": 3}, "size": {"enum": ["S", "M"]},
     "owner": {"name": "string", "age": "integer"}, "pets": {"array": {"name": "string"}}}

A number or text that is `true` is no integer, and 1.0 is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Number: TypeAlias = int | float  # a whole number stays exact, however long
KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: type(value) is str,
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
    "object": lambda value: type(value) is dict,
    "array": lambda value: type(value) is list,
}
ANY = tuple(KINDS)
EXAMPLES: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "null": None,
    "object": {},
    "array": [],
}
IGNORED = frozenset(("$schema", "$id", "title", "description", "default", "examples", "format", "$comment"))
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SIZES = ("minItems", "maxItems", "minLength", "maxLength")
VALUES = ("type", "enum", "const", "properties", "required", "additionalProperties", "items", "pattern")
KEYWORDS = frozenset((*VALUES, *SIZES, *LIMITS))


@dataclass(frozen=True, kw_only=True)
class JsonShape:
    """The rules for a value: it is one of `kinds`, and within the limits that apply to its kind."""

    kinds: tuple[str, ...] = ANY
    enum: tuple[Any, ...] | None = None
    keys: Mapping[str, JsonShape] | None = None  # of an object; None: any keys
    required: frozenset[str] = frozenset()
    closed: bool = True  # no other keys than `keys`
    items: JsonShape | None = None  # of an array; None: any items
    sizes: tuple[Number, Number] = (0.0, math.inf)  # least and most items of an array
    lengths: tuple[Number, Number] = (0.0, math.inf)  # least and most characters of a text
    limits: Mapping[str, Number] = field(default_factory=dict)  # of a number, by JSON Schema's keywords
    pattern: str | None = None  # of a text


# --- reading ------------------------------------------------------------


def parse_shape(given: object) -> JsonShape:
    """Read a shape from its short description: the name of a type, or a mapping.

    A mapping with `array` is an array: the shape of its items, and `length`, `min_length` or `max_length`. One with
    `enum` has a list of values. One with `object` alone, or with anything else, is an object with exactly these keys.

    Raises:
        ValueError: the description is malformed; the message says where.
    """
    if isinstance(given, str):
        if given == "any":
            return JsonShape()
        if given not in KINDS:
            raise ValueError(f"{given!r} is no type; choose from {', '.join(KINDS)}, any")
        return JsonShape(kinds=(given,))
    if not isinstance(given, Mapping):
        hint = '; the type of null is "null", in quotes' if given is None else ""
        raise ValueError(f"a type is a name or an object, not {given!r}{hint}")
    if "array" in given and set(given) <= {"array", "length", "min_length", "max_length"}:
        return JsonShape(kinds=("array",), items=parse_shape(given["array"]), sizes=_sizes(given))
    if set(given) == {"enum"} and isinstance(given["enum"], list | tuple):
        return JsonShape(enum=_values(given["enum"]))
    keys = given["object"] if set(given) == {"object"} and isinstance(given["object"], Mapping) else given
    shapes = {str(name): _below(str(name), value, parse_shape) for name, value in keys.items()}
    return JsonShape(kinds=("object",), keys=shapes, required=frozenset(shapes))


def read_schema(schema: object) -> JsonShape:
    """Read a shape from a subset of JSON Schema.

    type, enum, const, properties, required, additionalProperties (a boolean), items, minItems, maxItems, minimum,
    maximum, exclusiveMinimum, exclusiveMaximum, minLength, maxLength and pattern. Keys are exact unless the schema
    says otherwise: without `required` every property is required, and without `additionalProperties` there may be
    no other keys. A keyword that is null counts as left out, except const.

    Raises:
        ValueError: the schema has another keyword, or a malformed one.
    """
    if schema is True:
        return JsonShape()
    if not isinstance(schema, Mapping):
        raise ValueError(f"a schema is an object, not {schema!r}")
    stated = {name: value for name, value in schema.items() if value is not None or name == "const"}
    given = {name: value for name, value in stated.items() if name not in IGNORED}
    unknown = [name for name in given if name not in KEYWORDS]
    if unknown:
        raise ValueError(f"the keyword {unknown[0]!r} of JSON Schema is not understood")
    keys = _properties(given)
    additional = given.get("additionalProperties", keys is None)
    if not isinstance(additional, bool):
        raise ValueError("additionalProperties: only true and false are understood")
    return JsonShape(
        kinds=_kinds(given),
        enum=_enum(given),
        keys=keys if keys is not None or additional else {},
        required=_required(given, keys or {}),
        closed=not additional,
        items=_below("items", given["items"], read_schema) if "items" in given else None,
        sizes=_range(given, "minItems", "maxItems"),
        lengths=_range(given, "minLength", "maxLength"),
        limits=_limits(given),
        pattern=_pattern(given),
    )


def without_nulls(given: object) -> object:
    """Leave out what is null in an object, at every depth: Arrow fills in the keys of other rows so."""
    if not isinstance(given, Mapping):
        return given
    return {name: without_nulls(value) for name, value in given.items() if value is not None}


def _properties(given: Mapping[str, Any]) -> dict[str, JsonShape] | None:
    if "properties" not in given:
        return None
    properties = given["properties"]
    if not isinstance(properties, Mapping):
        raise ValueError(f"properties is an object, not {properties!r}")
    return {name: _below(name, value, read_schema) for name, value in properties.items()}


def _required(given: Mapping[str, Any], keys: Mapping[str, JsonShape]) -> frozenset[str]:
    required = given.get("required", list(keys))
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"required is a list of names, not {required!r}")
    return frozenset(required)


def _kinds(given: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = given.get("type", ANY)
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple) or not kinds:
        raise ValueError(f"type is a name or a list of names, not {kinds!r}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"type {kind!r} is none of JSON Schema's: {', '.join(KINDS)}")
    return tuple(kinds)


def _enum(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    values = _values(given["enum"]) if "enum" in given else None
    if "const" not in given:
        return values
    const = given["const"]
    if values is not None and not any(_same(const, value) for value in values):
        raise ValueError(f"const {const!r} is none of the values of enum: nothing fits")
    return (const,)


def _limits(given: Mapping[str, Any]) -> dict[str, Number]:
    limits = {name: given[name] for name in LIMITS if name in given}
    for name, value in limits.items():
        if not KINDS["number"](value):
            raise ValueError(f"{name} is a number, not {value!r}")
    least = max(limits.get("minimum", -math.inf), limits.get("exclusiveMinimum", -math.inf))
    most = min(limits.get("maximum", math.inf), limits.get("exclusiveMaximum", math.inf))
    if least >= most and not _within(least, limits):
        raise ValueError(f"no number is within {', '.join(f'{name} {value}' for name, value in limits.items())}")
    return limits


def _pattern(given: Mapping[str, Any]) -> str | None:
    if "pattern" not in given:
        return None
    pattern = given["pattern"]
    if not isinstance(pattern, str):
        raise ValueError(f"pattern is a text, not {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    return pattern


def _below(name: str, value: object, read: Callable[[object], JsonShape]) -> JsonShape:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _sizes(given: Mapping[str, Any]) -> tuple[Number, Number]:
    """Return the least and most items of an array of the short description."""
    if "length" not in given:
        return _range(given, "min_length", "max_length")
    if len(given) > 2:
        raise ValueError("length is the exact number of items: leave out min_length and max_length")
    return _range(given, "length", "length")


def _range(given: Mapping[str, Any], least: str, most: str) -> tuple[Number, Number]:
    """Return two lengths by their keys; without them 0 and infinity."""
    for name in (least, most):
        size = given.get(name, 0)
        if not KINDS["number"](size) or size < 0 or size % 1:
            raise ValueError(f"{name} is a whole number from 0, not {size!r}")
    low, high = given.get(least, 0.0), given.get(most, math.inf)
    if low > high:
        raise ValueError(f"{least} {low} is above {most} {high}: nothing fits")
    return low, high


def _values(values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"enum is a list of values, not {values!r}")
    if not values:
        raise ValueError("enum is empty: no value is right")
    return tuple(values)


# --- checking ------------------------------------------------------------


def has_exact_keys(value: object, shape: JsonShape) -> bool:
    """Check whether every object has its required keys, and no others if they are closed, at every depth.

    If an object is wanted and there is none, its keys are missing.
    """
    if shape.keys is not None:
        if not isinstance(value, dict):
            return "object" not in shape.kinds or (len(shape.kinds) > 1 and fits(value, shape))
        return _has_these_keys(value, shape, shape.keys) and all(
            has_exact_keys(value[name], inner) for name, inner in shape.keys.items() if name in value
        )
    if shape.items is not None and isinstance(value, list):
        return all(has_exact_keys(item, shape.items) for item in value)
    return True


def _has_these_keys(value: Mapping[str, Any], shape: JsonShape, keys: Mapping[str, JsonShape]) -> bool:
    return value.keys() >= shape.required and not (shape.closed and value.keys() - keys.keys())


def fits_kind(value: object, shape: JsonShape) -> bool:
    """Check whether a value is of a type that the shape allows."""
    return any(KINDS[kind](value) for kind in shape.kinds)


def fits(value: object, shape: JsonShape) -> bool:
    """Check whether a value follows the whole shape."""
    if not fits_kind(value, shape):
        return False
    if shape.enum is not None and not any(_same(value, allowed) for allowed in shape.enum):
        return False
    if isinstance(value, dict) and shape.keys is not None:
        return _has_these_keys(value, shape, shape.keys) and all(
            fits(value[name], inner) for name, inner in shape.keys.items() if name in value
        )
    if isinstance(value, list):
        sized = shape.sizes[0] <= len(value) <= shape.sizes[1]
        return sized and (shape.items is None or all(fits(item, shape.items) for item in value))
    if isinstance(value, str):
        sized = shape.lengths[0] <= len(value) <= shape.lengths[1]
        return sized and (shape.pattern is None or re.search(shape.pattern, value) is not None)
    return isinstance(value, bool) or not isinstance(value, int | float) or _within(value, shape.limits)


def share_of_types(value: object, shape: JsonShape) -> float:
    """Compute the share of a value that is right, from 0 to 1.

    Of an object it is the mean over the keys that the shape names, 0 for one that is missing. Of an array whose length
    is limited it is the mean over the items and the length, 0 for an item that is missing; without limits the mean over
    the items. Of anything else it is 1 if it fits, else 0.
    """
    if shape.keys and isinstance(value, dict) and "object" in shape.kinds:
        named = [name for name in shape.keys if name in shape.required or name in value]
        shares = [share_of_types(value[name], shape.keys[name]) if name in value else 0.0 for name in named]
        return sum(shares) / len(shares) if shares else 1.0
    if shape.items is not None and isinstance(value, list) and "array" in shape.kinds:
        low, high = shape.sizes
        limited = (low, high) != (0.0, math.inf)
        missing = max(int(low) - len(value), 0)
        shares = [share_of_types(item, shape.items) for item in value] + [0.0] * missing
        shares += [float(low <= len(value) <= high)] * limited
        return sum(shares) / len(shares) if shares else 1.0
    return float(fits(value, shape))


def example(shape: JsonShape) -> Any:
    """Return a value that fits; one may fail if a text has a pattern, or a number narrow limits."""
    if shape.enum is not None:
        return shape.enum[0]
    if shape.keys is not None and "object" in shape.kinds:
        return {name: example(shape.keys[name]) for name in shape.keys if name in shape.required}
    kind = shape.kinds[0]
    if kind == "array":
        return [example(shape.items or JsonShape()) for _ in range(int(shape.sizes[0]))]
    if kind == "string":
        text = str(EXAMPLES[kind]).ljust(int(shape.lengths[0]), "x")
        return text[: int(min(shape.lengths[1], len(text)))]
    if kind in ("integer", "number") and shape.limits:
        return _number_within(shape.limits)
    return EXAMPLES[kind]


def _number_within(limits: Mapping[str, Number]) -> int:
    """Return a whole number within the limits, as far as there is one beside them."""
    lows = [limits[name] for name in ("minimum", "exclusiveMinimum") if name in limits]
    highs = [limits[name] for name in ("maximum", "exclusiveMaximum") if name in limits]
    tried = [math.ceil(low) for low in lows] + [math.floor(low) + 1 for low in lows]
    tried += [math.floor(high) for high in highs] + [math.ceil(high) - 1 for high in highs]
    return next((value for value in tried if _within(value, limits)), tried[0])


def _within(value: Number, limits: Mapping[str, Number]) -> bool:
    return (
        value >= limits.get("minimum", -math.inf)
        and value <= limits.get("maximum", math.inf)
        and value > limits.get("exclusiveMinimum", -math.inf)
        and value < limits.get("exclusiveMaximum", math.inf)
    )


def _same(value: object, allowed: object) -> bool:
    """Compare like JSON: true is not 1, at any depth."""
    if isinstance(value, list) and isinstance(allowed, list | tuple):
        return len(value) == len(allowed) and all(map(_same, value, allowed))
    if isinstance(value, dict) and isinstance(allowed, Mapping):
        return value.keys() == allowed.keys() and all(_same(value[name], allowed[name]) for name in value)
    return value == allowed and (isinstance(value, bool) == isinstance(allowed, bool))
