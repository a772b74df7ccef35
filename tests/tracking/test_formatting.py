"""Numbers, durations and sizes as people read them."""

from __future__ import annotations

import math

import pytest

from rlhf.tracking.metrics import (
    format_duration,
    format_fixed,
    format_gigabytes,
    format_interval,
    format_megabytes,
    format_number,
    format_percent,
    format_significant,
    format_value,
)


@pytest.mark.parametrize(
    "seconds, text",
    [(0.04, "0.0s"), (8.24, "8.2s"), (59.4, "59s"), (59.7, "1m00s"), (9.97, "10s"), (80.0, "1m20s"), (7500.0, "2h05m")],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0.00"), (0.534, "0.53"), (-5.912, "-5.91"), (12.34, "12.3"), (12400.0, "12,400"), (1e-6, "1.0e-06")],
)
def test_number(value: float, text: str) -> None:
    assert format_number(value) == text


def test_numbers_that_are_none_are_named() -> None:
    assert [format_number(float(name)) for name in ("nan", "inf", "-inf")] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    "value, text",
    [
        *(
            (None, "–"),
            (True, "yes"),
            (1234, "1,234"),
            (0.9124, "0.912"),
            (12.34, "12.3"),
            (0.0, "0.00"),
            (1e-7, "1.0e-07"),
        ),
        *(([1, 0.5], "1, 0.500"), ({"a": 1}, "a 1"), ("x", "x")),
    ],
)
def test_value(value: object, text: str) -> None:
    assert format_value(value) == text


def test_columns_that_are_compared_have_three_decimals_and_no_text_for_what_is_missing() -> None:
    assert [format_fixed(value) for value in (12.3456, 0.0, None, math.nan)] == ["12.346", "0.000", "", ""]


def test_an_interval_has_the_digits_of_its_value() -> None:
    assert format_interval(0.61249, 0.58, 0.64512) == "0.612 [0.58, 0.645]"
    assert format_interval(0.61249, 0.58, 0.64512, ".3f") == "0.612 [0.580, 0.645]"


def test_figures_of_any_size_have_four_significant_digits() -> None:
    assert [format_significant(value) for value in (0.61249, 12.3456, 0.000012, 1.0)] == [
        *("0.6125", "12.35", "1.2e-05", "1")
    ]


def test_percent() -> None:
    assert format_percent(0.6149, 0.58, 0.645001) == "61 % [58, 65]"
    assert format_percent(1.0, 0.0, 1.0) == "100 % [0, 100]"


def test_megabytes() -> None:
    assert format_megabytes(1234.56) == "1,235 MB"
    assert format_gigabytes(1234.56) == "1.2"
