"""The json verifier: whether a completion is JSON of the shape that its row asks for, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from rlhf.verifiers.grader import GradeFunction, Grader, Row
from rlhf.verifiers.json_shape import (
    JsonShape,
    example,
    fits,
    fits_kind,
    has_exact_keys,
    parse_shape,
    read_schema,
    share_of_types,
    without_nulls,
)

STARTS_TRIED = 32  # of a text around the JSON, brackets at which it may begin
LONGEST = 200_000  # characters: a longer text is no answer
FIFTH = 0.2


class JsonGrader(Grader):
    """Grades JSON of a given shape, by five named rewards of weight 0.2 each, so that the best sum is 1.

        parses  it has a JSON object or array in it, without a key twice, NaN or Infinity
        keys    every object has exactly the keys that it should have
        types   the share of the values that fit type and limits (a number from 0 to 1, the others 0 or 1)
        right   keys, types, lengths and values are all right
        only    the completion is the JSON and nothing else: no prose, no fence

    `full` is 1 if all of them are 1, and has weight 0: it is the rate of answers that meet every constraint.
    """

    default_weights: ClassVar[Mapping[str, float]] = {
        "parses": FIFTH,
        "keys": FIFTH,
        "types": FIFTH,
        "right": FIFTH,
        "only": FIFTH,
        "full": 0.0,
    }

    type: Literal["json"] = "json"
    keys: str | dict[str, Any] | None = None
    """The column that names each key and its type, or these themselves, as in {street: string, codes: {array: integer,
    length: 3}}; null: the column `keys`, unless json_schema is set."""
    json_schema: str | dict[str, Any] | None = None
    """In place of keys: the column with a JSON Schema, or the schema itself; a subset is understood. In a column of
    objects null is a key that the row leaves out: write a schema with `const: null` as JSON text."""

    @model_validator(mode="after")
    def _check_shape(self) -> JsonGrader:
        if self.keys is not None and self.json_schema is not None:
            raise ValueError("keys and json_schema both describe the JSON: give one of them")
        for given, read in ((self.keys, parse_shape), (self.json_schema, read_schema)):
            if isinstance(given, dict):
                read(given)
        return self

    def start(self) -> GradeFunction:
        """Return the function that parses and compares."""

        def grade(completion: str, row: Row) -> dict[str, float] | None:
            shape = self.shape(row)
            return None if shape is None else grade_json(completion, shape)

        return grade

    def shape(self, row: Row) -> JsonShape | None:
        """Return the shape that the row asks for; None if it has no such column.

        Raises:
            ValueError: the column is malformed.
        """
        keys, schema = self.keys or "keys", self.json_schema
        given, read = (keys, parse_shape) if schema is None else (schema, read_schema)
        if isinstance(given, dict):
            return read(given)
        value = row.get(given)  # a column may hold the description as JSON text, whose nulls are meant
        value = json.loads(value) if isinstance(value, str) else without_nulls(value)
        return None if value is None else read(value)

    def reference(self, row: Row) -> str | None:
        """Return JSON that fits, made up."""
        shape = self.shape(row)
        if shape is None:
            return None
        value = example(shape)
        return json.dumps(value) if fits(value, shape) else None


def grade_json(completion: str, shape: JsonShape) -> dict[str, float]:
    """Return the named rewards of a completion; see JsonGrader."""
    has_json, value, only = find_json(completion, lambda value: fits_kind(value, shape))
    if not has_json or not (
        isinstance(value, dict | list) or fits_kind(value, shape)
    ):  # a bare word or number is no try
        return dict.fromkeys(JsonGrader.default_weights, 0.0)
    keys = has_exact_keys(value, shape)
    right = keys and fits(value, shape)
    return {
        "parses": 1.0,
        "keys": float(keys),
        "types": share_of_types(value, shape),
        "right": float(right),
        "only": float(only),
        "full": float(right and only),
    }


def find_json(text: str, wanted: Callable[[Any], bool] = lambda value: True) -> tuple[bool, Any, bool]:
    """Find the JSON of a text: the whole of it, or else the first object or array in it that is `wanted`.

    Returns:
        Whether there is any, its value, and whether there is nothing else but white space.
    """
    text = text.strip()
    if not text or len(text) > LONGEST:
        return False, None, False
    try:
        return True, DECODER.decode(text), True
    except (ValueError, RecursionError):
        pass
    starts = (i for i, character in enumerate(text) if character in "{[")
    for _, start in zip(range(STARTS_TRIED), starts, strict=False):
        try:
            value, _ = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if wanted(value):
            return True, value, False
    return False, None, False


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
