"""Metrics for the `evaluate` library, each in a folder that `evaluate.load(path)` takes, without a network."""

from __future__ import annotations

from pathlib import Path

NAMES = ("gsm8k_exact", "pass_at_k", "distinct_n", "pairwise_accuracy", "win_rate")


def metric_path(name: str) -> str:
    """The folder of a metric, for `evaluate.load`: `evaluate.load(metric_path("pass_at_k"))`."""
    if name not in NAMES:
        raise ValueError(f"no metric {name!r}; there are: {', '.join(NAMES)}")
    return str(Path(__file__).parent / name)
