"""A reward model's report card, an arbitrarily nested mapping of numbers, as tables; and its calibration bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREDICTED = ("predicted", "mean_predicted", "expected", "confidence", "mean_confidence", "probability")
OBSERVED = ("observed", "mean_observed", "accuracy", "fraction", "frequency", "share")
COUNT = ("count", "n", "pairs", "size")


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def card_tables(card: Mapping[str, Any], title: str = "") -> list[Table]:
    """Convert a report card to tables: one of its scalars, one for each list or mapping of rows, recursively."""
    scalars = [(humanize(key), value) for key, value in card.items() if _is_scalar(value)]
    tables = [Table(title or "Figures", ("", "value"), scalars)] if scalars else []
    for key, value in card.items():
        name = f"{title} · {humanize(key)}" if title else humanize(key).capitalize()
        if isinstance(value, Mapping) and value:
            flat = all(isinstance(entry, Mapping) and all(map(_is_scalar, entry.values())) for entry in value.values())
            if flat:
                tables.append(_table(name, [{"": humanize(str(row)), **entry} for row, entry in value.items()]))
            else:
                tables.extend(card_tables(value, name))
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            tables.append(_table(name, value))
    return tables


def calibration_bins(card: Mapping[str, Any]) -> list[tuple[float, float, float | None]]:
    """Return (predicted, observed, count) of each bin under `calibration`, sorted by prediction; empty without bins."""
    rows = card.get("calibration")
    if isinstance(rows, Mapping):
        rows = next((value for value in rows.values() if isinstance(value, list)), None)
    if not isinstance(rows, list):
        return []
    bins = []
    for row in rows:
        if isinstance(row, Mapping):
            predicted, observed = _first_number(row, PREDICTED), _first_number(row, OBSERVED)
            if predicted is not None and observed is not None:
                bins.append((predicted, observed, _first_number(row, COUNT)))
    return sorted(bins, key=lambda entry: entry[0])


def humanize(key: str) -> str:
    """Turn an identifier into words."""
    return key.replace("_", " ")


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table whose columns are all keys of the rows."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return Table(title, [humanize(key) for key in keys], [[row.get(key) for key in keys] for row in rows])


def _is_scalar(value: object) -> bool:
    """Check whether a value fits into one cell: no mapping, and no list of mappings or lists."""
    plain_list = isinstance(value, list) and not any(isinstance(entry, Mapping | list) for entry in value)
    return plain_list or not isinstance(value, Mapping | list)


def _first_number(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """Return the first of the named values that is a number; None without one."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
