"""The alarms of a run on its page: a table of what went off, and marks on the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.report.chart import Series
from rlhf.report.record import Record
from rlhf.report.report_card import Table
from rlhf.tracking.formatting import format_number


def alarm_table(record: Record) -> Table | None:
    """Build the table of the alarms that went off; None where there were none."""
    rows = [
        (
            line.get("step"),
            line.get("alarm"),
            f"{line.get('metric')} {_shown(line.get('value'))} (limit {_shown(line.get('limit'))})",
            _until(record.alarms, line),
            line.get("causes"),
            line.get("cure"),
            line.get("action"),
        )
        for line in record.alarms
        if line.get("event") == "on"
    ]
    columns = ("step", "alarm", "what it saw", "since … until", "usual causes", "what to try", "action")
    return Table("Alarms", columns, rows) if rows else None


def _shown(value: Any) -> str:
    return format_number(float(value)) if isinstance(value, int | float) else "–"


def _until(lines: Sequence[Mapping[str, Any]], on: Mapping[str, Any]) -> str:
    """Describe from which step on an alarm saw what it saw, and until when."""
    over = [
        line["step"]
        for line in lines
        if line.get("event") == "over" and line.get("alarm") == on.get("alarm") and line["step"] > on["step"]
    ]
    return f"{on.get('since')} … {min(over) if over else 'the end'}"


def marks(record: Record, name: str) -> Series | None:
    """Build the marks on the curve of a metric: a triangle at each step at which an alarm of it went off."""
    lines = [line for line in record.alarms if line.get("event") == "on" and line.get("metric") == name]
    points = dict(record.points(name))
    lines = [line for line in lines if line.get("step") in points]
    if not lines:
        return None
    steps = [int(line["step"]) for line in lines]
    texts = [str(line["alarm"]) for line in lines]
    values = [points[step] for step in steps]
    return Series("alarm", "target", steps, values, width=0, size=11, symbol="triangle-down", texts=texts)
