"""The alarms of a run as a table: when each went off, what it saw, until when, and what was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.report.report_card import Table
from rlhf.tracking.formatting import format_number


def alarm_table(lines: Sequence[Mapping[str, Any]]) -> Table | None:
    """Build the table of the alarms that went off; None where there were none."""
    rows = [
        (
            line.get("step"),
            line.get("alarm"),
            _reading(line),
            _span(lines, line),
            line.get("causes"),
            line.get("cure"),
            line.get("action"),
        )
        for line in lines
        if line.get("event") == "on"
    ]
    columns = ("step", "alarm", "what it saw", "since … until", "usual causes", "what to try", "action")
    return Table("Alarms", columns, rows) if rows else None


def _reading(line: Mapping[str, Any]) -> str:
    """Describe what an alarm saw: what the value is (older versions wrote the metric alone), the value, its limit."""
    value, limit = _shown(line.get("value")), _shown(line.get("limit"))
    return f"{line.get('reads', line.get('metric'))} {value} (limit {limit})"


def _shown(value: Any) -> str:
    return format_number(float(value)) if isinstance(value, int | float) else "–"


def _span(lines: Sequence[Mapping[str, Any]], on: Mapping[str, Any]) -> str:
    """Describe from which step on an alarm saw what it saw, and until when."""
    over = [
        line["step"]
        for line in lines
        if line.get("event") == "over" and line.get("alarm") == on.get("alarm") and line["step"] > on["step"]
    ]
    return f"{on.get('since')} … {min(over) if over else 'the end'}"
