"""Measure the worth of alarms, and of stopping early, against over-optimization in the lab.

    python benchmarks/overoptimization.py --stage rm ppo ...          makes the runs
    python benchmarks/alarm_roc.py "runs/overoptimization/ppo-*"

Reads metrics.jsonl of finished runs that were judged by the gold at every evaluation. The gold has fallen at an
evaluation if it is more than a fifth of its standard deviation over prompts below its best so far. For every alarm:
the area under the ROC curve of its reading at that step (over all evaluations of all runs; 0.5 is chance), its rates
at its own limit, and in which runs it went off. Stopping early: the gold at the evaluation that the other seeds would
have chosen, less the gold at the end. Intervals are bootstraps over runs. Writes alarm_roc.json.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from rlhf.guard.alarms.alarm import Alarm, Reading, all_alarms
from rlhf.guard.alarms.history import History
from rlhf.guard.alarms.scores import JUDGE_FALL
from rlhf.tracking.run_folder import RunFolder
from rlhf.training.health import Watch

ROOT = Path(__file__).resolve().parents[1]
RESAMPLES = 1000
Floats = NDArray[np.float64]
Metrics = list[dict[str, Any]]


@dataclass(frozen=True)
class Points:
    """An alarm's readings at the evaluations of one run: how far beyond its limit, and whether the gold had fallen."""

    excess: list[float]
    is_bad: list[bool]
    has_fallen: list[bool]


def excess(reading: Reading) -> float:
    """Return how far a value is beyond its limit, as a share of the limit; negative on the good side."""
    is_upper = reading.is_bad == (reading.value > reading.limit)
    distance = reading.value - reading.limit if is_upper else reading.limit - reading.value
    return distance / max(abs(reading.limit), 1e-6)


def falls(metrics: Metrics) -> list[bool | None]:
    """Return for every line whether the gold is well below its best so far; None if it was not judged."""
    best, fallen = -np.inf, []
    for row in metrics:
        score = row.get("eval/score")
        if score is not None:
            best = max(best, score)
        fallen.append(None if score is None else bool(score < best - JUDGE_FALL * row["eval/score_std"]))
    return fallen


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a line that are numbers."""
    return {name: float(value) for name, value in row.items() if isinstance(value, float | int)}


def points_of(alarm: Alarm, metrics: Metrics) -> Points:
    """Return the last reading of an alarm at every evaluation of a run, from its metrics."""
    history, latest, points = History(), None, Points([], [], [])
    for row, fallen in zip(metrics, falls(metrics), strict=True):
        history.add(numbers(row))
        latest = alarm.read(history) or latest
        if fallen is not None and latest is not None:
            points.excess.append(excess(latest))
            points.is_bad.append(latest.is_bad)
            points.has_fallen.append(fallen)
    return points


def first_firing(alarm: Alarm, metrics: Metrics) -> int | None:
    """Return the step at which the alarm goes off for the first time in a run."""
    watch = Watch(alarms=[alarm])
    for row in metrics:
        if any(not firing.is_over for firing in watch.observe(int(row["step"]), numbers(row))):
            return int(row["step"])
    return None


def area(runs: Sequence[Points]) -> float | None:
    """Compute the area under the ROC curve of the pooled points; None if the gold always or never fell."""
    labels = [label for run in runs for label in run.has_fallen]
    return float(roc_auc_score(labels, [x for run in runs for x in run.excess])) if len(set(labels)) == 2 else None


def area_with_interval(runs: Sequence[Points], seed: int = 0) -> dict[str, float] | None:
    """Compute the area with its 95 % interval over resampled runs."""
    value = area(runs)
    if value is None:
        return None
    generator = np.random.default_rng(seed)
    resampled = (area([runs[i] for i in generator.integers(len(runs), size=len(runs))]) for _ in range(RESAMPLES))
    low, high = np.percentile([sample for sample in resampled if sample is not None], [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}


def rates(runs: Sequence[Points]) -> dict[str, float | int]:
    """Count the evaluations at which the gold had fallen or not, and the share of each beyond the alarm's limit."""
    labels = np.array([label for run in runs for label in run.has_fallen], dtype=bool)
    bad = np.array([is_bad for run in runs for is_bad in run.is_bad], dtype=bool)
    return {
        "fallen": int(labels.sum()),
        "not_fallen": int((~labels).sum()),
        "true_positive_rate": float(bad[labels].mean()) if labels.any() else float("nan"),
        "false_positive_rate": float(bad[~labels].mean()) if (~labels).any() else float("nan"),
    }


def score_alarm(alarm: Alarm, runs: dict[str, Metrics]) -> dict[str, Any] | None:
    """Measure an alarm on all runs; None if no run has its metric."""
    points = [points_of(alarm, metrics) for metrics in runs.values()]
    points = [run for run in points if run.excess]
    if not points:
        return None
    steps = {name: first_firing(alarm, metrics) for name, metrics in runs.items()}
    return {
        "area": area_with_interval(points),
        **rates(points),
        "went_off_in_runs": sum(step is not None for step in steps.values()),
        "went_off_before_the_fall": sum(_is_before_fall(step, runs[name]) for name, step in steps.items()),
    }


def _is_before_fall(step: int | None, metrics: Metrics) -> bool:
    fall = first_fall(metrics)
    return step is not None and fall is not None and step <= fall


def first_fall(metrics: Metrics) -> int | None:
    """Return the step of the first evaluation at which the gold had fallen."""
    steps = (int(row["step"]) for row, fallen in zip(metrics, falls(metrics), strict=True) if fallen)
    return next(steps, None)


def stopping_gains(golds: Floats) -> Floats:
    """Compute the gain of stopping early in each run: the gold where the mean of the other runs peaks, less the last.

    Args:
        golds: the gold at every evaluation of runs that differ in their seed, [S, M], S > 1.
    """
    gains = []
    for run in range(len(golds)):
        others = np.delete(golds, run, axis=0).mean(axis=0)
        gains.append(golds[run, others.argmax()] - golds[run, -1])
    return np.array(gains)


@dataclass(frozen=True)
class Stopping:
    """The gain of stopping early in each run of a setting, and the share of runs it helped."""

    gains: list[float]
    mean: float


def early_stopping(runs: dict[str, Metrics]) -> dict[str, Stopping]:
    """Compute the gains of stopping early for every setting, which is a run's name without its seed."""
    settings: dict[str, list[list[float]]] = defaultdict(list)
    for name, metrics in runs.items():
        golds = [float(row["eval/score"]) for row in metrics if "eval/score" in row]
        settings[re.sub(r"-seed\d+$", "", name)].append(golds)
    results = {}
    for setting, curves in settings.items():
        length = min(map(len, curves))
        if len(curves) > 1 and length > 1:
            gains = stopping_gains(np.array([curve[:length] for curve in curves]))
            results[setting] = Stopping(gains.tolist(), float(gains.mean()))
    return results


def main() -> None:
    """Read the runs, measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or patterns of them")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "alarm_roc.json")
    options = parser.parse_args()
    folders = sorted({Path(path) for pattern in options.runs for path in glob.glob(pattern)})
    runs = {folder.name: RunFolder(folder).read_metrics() for folder in folders}
    alarms = {alarm.name: score_alarm(alarm, runs) for alarm in all_alarms()}
    measured = {name: result for name, result in alarms.items() if result is not None}
    stopping = {name: asdict(result) for name, result in early_stopping(runs).items()}
    content = {
        "runs": {name: first_fall(metrics) for name, metrics in runs.items()},  # the step of the gold's first fall
        "alarms": measured,
        "early_stopping": stopping,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, result in sorted(measured.items(), key=lambda item: -(item[1]["area"] or {"value": 0.0})["value"]):
        line = {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}
        print(f"{name:30} {line}")  # noqa: T201
    for setting, gain in stopping.items():
        print(f"stopping early, {setting:40} {gain['mean']:+.3f} {np.round(gain['gains'], 3)}")  # noqa: T201


if __name__ == "__main__":
    main()
