"""Numbers, durations and sizes as text for people to read. Files keep the numbers themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping


def format_number(value: float) -> str:
    """Format a number compactly: 0.53, 5.90, 53.1, 12,400, 1.0e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.01 or size == 0:
        return f"{value:.2f}"
    return f"{value:.1e}"


def format_value(value: object) -> str:
    """Format any value for a table or a tile: numbers are rounded, those below 1 to three decimals; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1 else format_number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_value(entry) for entry in value)
    return str(value)


def format_fixed(value: float | None) -> str:
    """Format a number with three decimals, for columns that are compared; empty where it is missing or NaN."""
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def format_significant(value: float) -> str:
    """Format a number with four significant digits, for figures of any size: 0.6125, 12.35, 1.2e-05."""
    return f"{value:.4g}"


def format_interval(value: float, low: float, high: float, digits: str = ".3g") -> str:
    """Format a value with its interval, all with the same digits: 0.612 [0.58, 0.645]."""
    return f"{value:{digits}} [{low:{digits}}, {high:{digits}}]"


def format_percent(value: float, low: float, high: float) -> str:
    """Format a share with its interval in percent: 61 % [58, 65]."""
    return f"{100 * value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds: 8.2s, 1m20s, 2h05m."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if round(seconds) < 60:
        return f"{seconds:.0f}s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{remainder:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def format_megabytes(megabytes: float) -> str:
    """Format a size in megabytes: 1,234 MB."""
    return f"{megabytes:,.0f} MB"


def format_gigabytes(megabytes: float) -> str:
    """Format a size in megabytes as gigabytes, for a column that has the unit in its head: 1.2."""
    return f"{megabytes / 1024:.1f}"
