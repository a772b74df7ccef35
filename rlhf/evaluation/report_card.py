"""A reward model's report card, any nesting of figures, as tables; and the calibration bins found in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREDICTED = ("predicted", "mean_predicted", "expected", "confidence", "mean_confidence", "probability")
OBSERVED = ("observed", "mean_observed", "accuracy", "fraction", "frequency", "share")
COUNT = ("count", "n", "pairs", "size")


@dataclass(frozen=True)
class Table:
    """Rows under column heads; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def card_tables(card: Mapping[str, Any], title: str = "") -> list[Table]:
    """Scalars as one table, rows and equal-keyed mappings as one each, deeper mappings by the same rule."""
    scalars = [(words(key), value) for key, value in card.items() if _is_scalar(value)]
    tables = [Table(title or "Figures", ("", "value"), scalars)] if scalars else []
    for key, value in card.items():
        name = f"{title} · {words(key)}" if title else words(key).capitalize()
        if isinstance(value, Mapping) and value:
            rows = all(isinstance(entry, Mapping) and all(map(_is_scalar, entry.values())) for entry in value.values())
            if rows:
                tables.append(_table(name, [{"": words(str(row)), **entry} for row, entry in value.items()]))
            else:
                tables.extend(card_tables(value, name))
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            tables.append(_table(name, value))
    return tables


def calibration_bins(card: Mapping[str, Any]) -> list[tuple[float, float, float | None]]:
    """(predicted, observed, count) of each bin under `calibration`; empty where there is none."""
    found = card.get("calibration")
    if isinstance(found, Mapping):
        found = next((value for value in found.values() if isinstance(value, list)), None)
    if not isinstance(found, list):
        return []
    bins = []
    for row in found:
        if isinstance(row, Mapping):
            predicted, observed = _first_number(row, PREDICTED), _first_number(row, OBSERVED)
            if predicted is not None and observed is not None:
                bins.append((predicted, observed, _first_number(row, COUNT)))
    return sorted(bins, key=lambda entry: entry[0])


def words(key: str) -> str:
    """An identifier as words."""
    return key.replace("_", " ")


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return Table(title, [words(key) for key in keys], [[row.get(key) for key in keys] for row in rows])


def _is_scalar(value: object) -> bool:
    plain_list = isinstance(value, list) and not any(isinstance(entry, Mapping | list) for entry in value)
    return plain_list or not isinstance(value, Mapping | list)


def _first_number(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
