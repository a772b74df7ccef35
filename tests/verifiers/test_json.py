"""The json verifier: grades by hand, the grades of cheats, and properties over random shapes and values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config.load import validate
from rlhf.errors import ConfigError
from rlhf.verifiers.json_shape import (
    JsonShape,
    example,
    fits,
    has_exact_keys,
    parse_shape,
    read_schema,
    share_of_types,
)
from rlhf.verifiers.strict_json import STARTS_TRIED, JsonGrader, find_json, grade_json

ADDRESS = {"street": "string", "codes": {"array": "integer", "length": 3}}
RIGHT = '{"street": "Main", "codes": [1, 2, 3]}'


def total(completion: str, keys: Any = ADDRESS) -> float:
    named = grade_json(completion, parse_shape(keys))
    return sum(JsonGrader.default_weights[name] * value for name, value in named.items())


@pytest.mark.parametrize(
    "completion, parses, keys, types, right, only",
    [
        (RIGHT, 1, 1, 1, 1, 1),
        (f"  {RIGHT}\n", 1, 1, 1, 1, 1),
        (f"```json\n{RIGHT}\n```", 1, 1, 1, 1, 0),
        (f"Here you are: {RIGHT} Anything else?", 1, 1, 1, 1, 0),
        ('{"street": 5, "codes": [1, 2, 3]}', 1, 1, 1 / 2, 0, 1),
        ('{"street": "Main", "codes": [1, 2]}', 1, 1, (1 + 2 / 4) / 2, 0, 1),  # two items of three, and the length
        ('{"street": "Main", "codes": [1, 2, 3, 4]}', 1, 1, (1 + 4 / 5) / 2, 0, 1),
        ('{"street": "Main", "codes": [1, 2, true]}', 1, 1, (1 + 3 / 4) / 2, 0, 1),
        ('{"street": "Main", "codes": [1, 2, 3.0]}', 1, 1, (1 + 3 / 4) / 2, 0, 1),
        ('{"street": "Main", "codes": "123"}', 1, 1, 1 / 2, 0, 1),
        ('{"street": "Main"}', 1, 0, 1 / 2, 0, 1),
        ('{"street": "Main", "codes": [1, 2, 3], "note": ""}', 1, 0, 1, 0, 1),
        ("{}", 1, 0, 0, 0, 1),
        ("[]", 1, 0, 0, 0, 1),
        ('{"street": "Main", "street": "Main", "codes": [1, 2, 3]}', 0, 0, 0, 0, 0),
        ('{"street": "Main", "codes": [1, 2, NaN]}', 0, 0, 0, 0, 0),
        ("{'street': 'Main', 'codes': [1, 2, 3]}", 0, 0, 0, 0, 0),
        ("42", 0, 0, 0, 0, 0),
        ("null", 0, 0, 0, 0, 0),
        ("I don't know.", 0, 0, 0, 0, 0),
        ("", 0, 0, 0, 0, 0),
        ("[" * 100_000, 0, 0, 0, 0, 0),
        ("{" * 100_000, 0, 0, 0, 0, 0),
        ("9" * 5_000, 0, 0, 0, 0, 0),
    ],
)
def test_named_rewards(completion: str, parses: int, keys: int, types: float, right: int, only: int) -> None:
    named = grade_json(completion, parse_shape(ADDRESS))
    expected = {"parses": parses, "keys": keys, "types": types, "right": right, "only": only}
    assert named == pytest.approx({**expected, "full": right * only}, abs=1e-12)
    assert total(completion) == pytest.approx(0.2 * sum(expected.values()), abs=1e-12)


def test_a_whole_number_of_any_length_is_a_number() -> None:
    assert total(f'{{"a": {"1" * 400}}}', {"a": "number"}) == pytest.approx(1)
    assert total('{"a": 1e999}', {"a": "number"}) == pytest.approx(0.6)


def test_nested_objects_arrays_of_objects_and_enums() -> None:
    keys = {
        "owner": {"name": "string", "age": "integer"},
        "pets": {"array": {"kind": {"enum": ["cat", "dog"]}, "weight": "number"}, "min_length": 1},
    }
    owner, cat = {"name": "Ann", "age": 3}, {"kind": "cat", "weight": 4}
    assert total(json.dumps({"owner": owner, "pets": [cat, {"kind": "dog", "weight": 1.5}]}), keys) == 1
    named = grade_json(json.dumps({"owner": owner, "pets": [{**cat, "kind": "cow"}]}), parse_shape(keys))
    assert named["keys"] == 1
    assert named["types"] == (1 + (1 / 2 + 1) / 2) / 2  # of the pets: half an item, and the length
    assert grade_json(json.dumps({"owner": owner, "pets": [{"kind": "cat"}]}), parse_shape(keys))["keys"] == 0
    assert grade_json(json.dumps({"owner": owner, "pets": []}), parse_shape(keys))["right"] == 0
    assert grade_json(json.dumps({"owner": "Ann", "pets": [cat]}), parse_shape(keys))["keys"] == 0


def test_a_key_may_be_called_as_a_word_of_the_description() -> None:
    assert total('{"array": "a", "enum": 1}', {"array": "string", "enum": "integer"}) == 1
    assert total('{"enum": "a"}', {"object": {"enum": "string"}}) == 1


def test_a_column_as_text_and_a_row_without_it() -> None:
    grade = validate(JsonGrader, {"type": "json", "keys": "shape"}).start()
    assert grade('{"a": 1}', {"shape": '{"a": "integer"}'}) == grade('{"a": 1}', {"shape": {"a": "integer"}})
    assert grade('{"a": 1}', {}) is None


@pytest.mark.parametrize(
    "schema, right, wrong",
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            [{"a": 1}],
            [{}, {"a": 1, "b": 1}, {"a": "1"}, []],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": [], "additionalProperties": True},
            [{}, {"b": 1}],
            [{"a": "1"}],
        ),
        (
            {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
            [[1], [1, 2.5]],
            [[], [1, 2, 3]],
        ),
        ({"type": ["string", "null"]}, ["a", None], [1]),
        ({"const": 1}, [1], [True, 2]),
        ({"const": None}, [None], [0, "", False]),
        ({"const": [1]}, [[1], [1.0]], [[True], [1, 1], 1]),
        ({"const": {"a": [1, {"b": False}]}}, [{"a": [1, {"b": False}]}], [{"a": [1, {"b": 0}]}, {"a": [1]}, {}]),
        ({"enum": [None, "x"]}, [None, "x"], [0]),
        ({"type": "integer", "minimum": 2, "maximum": 2}, [2], [1, 3]),
        ({"enum": ["a", True]}, ["a", True], [1, "b"]),
        ({"const": 1, "enum": [1, 2]}, [1], [2, True]),
        ({"const": None, "enum": [None, 1]}, [None], [1]),
        ({"type": "integer", "minimum": None, "enum": None}, [1], ["x"]),
        ({"type": "number", "minimum": 1, "exclusiveMaximum": 2}, [1, 1.9], [0.9, 2]),
        ({"type": "string", "minLength": 2, "pattern": "^a"}, ["ab"], ["a", "ba"]),
        ({"type": "integer", "description": "ignored"}, [1], [1.5, True]),
    ],
)
def test_a_subset_of_json_schema(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    shape = read_schema(schema)
    assert [fits(value, shape) for value in right + wrong] == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"oneOf": []}, "the keyword 'oneOf' of JSON Schema is not understood"),
        ({"type": "text"}, "type 'text' is none of JSON Schema's"),
        ({"properties": {"a": {"type": "int"}}}, "a: type 'int'"),
        ({"additionalProperties": {"type": "string"}}, "additionalProperties: only true and false"),
        ({"enum": []}, "enum is empty"),
        ({"enum": "xy"}, "enum is a list of values, not 'xy'"),
        ({"const": 1, "enum": [2, True]}, "const 1 is none of the values of enum: nothing fits"),
        ({"type": 5}, "type is a name or a list of names, not 5"),
        ({"type": []}, r"type is a name or a list of names, not \[\]"),
        ({"type": [["string"]]}, r"type \['string'\] is none of JSON Schema's"),
        ({"properties": None, "type": 5}, "type is a name or a list of names, not 5"),
        ({"properties": ["a"]}, r"properties is an object, not \['a'\]"),
        ({"properties": {"a": {}}, "required": "a"}, "required is a list of names, not 'a'"),
        ({"required": [1]}, r"required is a list of names, not \[1\]"),
        ({"minimum": "1"}, "minimum is a number, not '1'"),
        ({"minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum is a number, not True"),
        ({"minimum": 3, "maximum": 2}, "no number is within minimum 3, maximum 2"),
        ({"exclusiveMinimum": 2, "maximum": 2}, "no number is within maximum 2, exclusiveMinimum 2"),
        ({"minLength": 5, "maxLength": 2}, "minLength 5 is above maxLength 2: nothing fits"),
        ({"minItems": 5, "maxItems": 2}, "minItems 5 is above maxItems 2: nothing fits"),
        ({"minItems": 2.5}, "minItems is a whole number from 0, not 2.5"),
        ({"maxLength": True}, "maxLength is a whole number from 0, not True"),
        ({"pattern": "("}, r"pattern '\(' is not a regular expression: "),
        ({"properties": {"a": {"pattern": 5}}}, "a: pattern is a text, not 5"),
    ],
)
def test_a_schema_that_is_not_understood_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_schema(schema)
    with pytest.raises(ConfigError, match=message):
        validate(JsonGrader, {"type": "json", "json_schema": schema})


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"a": "int"}, "a: 'int' is no type; choose from string, integer, number, boolean, null, object, array, any"),
        ({"a": {"b": 1}}, "a: b: a type is a name or an object, not 1"),
        ({"a": {"array": "string", "length": "3"}}, "a: length is a whole number from 0, not '3'"),
        ({"a": {"array": "string", "length": 2.5}}, "a: length is a whole number from 0, not 2.5"),
        ({"a": {"array": "string", "max_length": -1}}, "a: max_length is a whole number from 0, not -1"),
        ({"a": {"array": "string", "length": None}}, "a: length is a whole number from 0, not None"),
        (
            {"a": {"array": "string", "length": 2, "max_length": 9}},
            "a: length is the exact number of items: leave out min_length and max_length",
        ),
        ({"a": {"array": "string", "min_length": 2, "max_length": 1}}, "a: min_length 2 is above max_length 1"),
        ({"a": None}, 'a: a type is a name or an object, not None; the type of null is "null", in quotes'),
        ({"a": {"object": {"b": None}}}, "a: b: a type is a name or an object, not None"),
        ([], "a type is a name or an object"),
    ],
)
def test_a_description_that_is_malformed_is_refused(keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_shape(keys)


def test_null_is_refused_in_a_setting_and_left_out_of_a_column() -> None:
    """Arrow fills in the keys of other rows with null; a column of text, as a setting, has what was written."""
    with pytest.raises(ConfigError, match="a: a type is a name or an object, not None"):
        validate(JsonGrader, {"type": "json", "keys": {"a": None, "b": "integer"}})
    keys = validate(JsonGrader, {"type": "json"}).start()
    row = {"a": None, "b": {"array": "integer", "length": None, "min_length": 1}}
    assert (keys('{"b": [1]}', {"keys": row}) or {})["full"] == 1
    with pytest.raises(ValueError, match="a: a type is a name or an object, not None"):
        keys('{"b": [1]}', {"keys": json.dumps(row)})
    schema = validate(JsonGrader, {"type": "json", "json_schema": "shape"}).start()
    filled = {"properties": {"a": None, "b": {"type": "integer", "const": None, "maximum": None}}, "items": None}
    assert (schema('{"b": 1}', {"shape": filled}) or {})["full"] == 1
    null = {"properties": {"b": {"const": None}}}
    grades = [(schema(text, {"shape": json.dumps(null)}) or {})["full"] for text in ('{"b": null}', '{"b": 3}')]
    assert grades == [1, 0]
    dumped = json.dumps({"properties": {"b": {"type": "string", "pattern": None}}, "required": None})
    assert (schema('{"b": "x"}', {"shape": dumped}) or {})["full"] == 1
    with pytest.raises(ValueError, match="a: a schema is an object, not None"):
        schema('{"b": 1}', {"shape": json.dumps({"properties": {"a": None}})})


LEAVES = st.sampled_from(["string", "integer", "number", "boolean", "null"]) | st.builds(
    lambda values: {"enum": values}, st.lists(st.text(max_size=3) | st.integers(-3, 3), min_size=1, max_size=3)
)
DESCRIPTIONS = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(min_size=1, max_size=3), inner, min_size=1, max_size=3).map(
            lambda keys: {"object": keys}
        )
        | st.builds(lambda item, n: {"array": item, "length": n}, inner, st.integers(0, 3))
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(min_size=1, max_size=3), DESCRIPTIONS, min_size=1, max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def shape_of(keys: Any) -> JsonShape:
    return parse_shape({"object": keys})


@given(OBJECTS)
def test_an_example_earns_all_and_surplus_costs(keys: Any) -> None:
    shape = shape_of(keys)
    value = example(shape)
    assert set(grade_json(json.dumps(value), shape).values()) == {1.0}
    surplus = {**value, "another key": 1}
    assert grade_json(json.dumps(surplus), shape) | {"types": 1} == {
        "parses": 1, "keys": 0, "types": 1, "right": 0, "only": 1, "full": 0,
    }  # fmt: skip
    name = next(iter(value))
    missing = {key: inner for key, inner in value.items() if key != name}
    graded = grade_json(json.dumps(missing), shape)
    assert graded["keys"] == graded["right"] == 0
    assert graded["types"] == pytest.approx(1 - 1 / len(value))


@given(OBJECTS, JSON)
def test_any_value_is_graded_between_0_and_1_and_right_only_if_all_fits(keys: Any, value: Any) -> None:
    shape = shape_of(keys)
    named = grade_json(json.dumps(value), shape)
    assert all(0 <= share <= 1 and math.isfinite(share) for share in named.values())
    assert (named["right"] == 1) == fits(value, shape)
    assert named["right"] <= min(named["keys"], named["parses"])
    if fits(value, shape):
        assert has_exact_keys(value, shape)
        assert share_of_types(value, shape) == pytest.approx(1)


@given(JSON.filter(lambda value: isinstance(value, dict | list)), st.text(alphabet="ab .,\n", max_size=8))
def test_json_is_found_in_prose(value: Any, prose: str) -> None:
    text = json.dumps(value)
    assert find_json(prose + text) == (True, value, not prose.strip())
    assert find_json(text + prose) == (True, value, not prose.strip())


@given(st.text())
def test_any_text_is_graded(text: str) -> None:
    assert 0 <= total(text) <= 1


def test_the_search_for_the_beginning_is_short() -> None:
    assert find_json("{" * (STARTS_TRIED - 1) + "[1]") == (True, [1], False)
    assert find_json("{" * STARTS_TRIED + "[1]") == (False, None, False)
