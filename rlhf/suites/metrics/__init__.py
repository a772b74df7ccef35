"""Metrics for the `evaluate` library: one script each, which `evaluate.load(path)` loads without network access.

`metric_path` returns the script of a metric by its name, and `NAMES` lists the names.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("gsm8k_exact", "pass_at_k", "distinct_n", "pairwise_accuracy", "win_rate")


def metric_path(name: str) -> str:
    """Return the script of a metric, for `evaluate.load`, as in `evaluate.load(metric_path("pass_at_k"))`.

    Raises:
        ValueError: there is no metric of that name.
    """
    if name not in NAMES:
        raise ValueError(f"no metric {name!r}; there are: {', '.join(NAMES)}")
    return str(Path(__file__).parent / f"{name}.py")
