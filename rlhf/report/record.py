"""The contents of a run folder, read once, as series of metrics and before/after pairs for the report.

Secrets in the configuration and in notes are hidden here, so that neither the page nor the card shows one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf.config.run import UNKNOWN_LENGTH
from rlhf.errors import ConfigError, UserError
from rlhf.plugins import load_plugins
from rlhf.tracking.exported import ExportRecord, read_export
from rlhf.tracking.redact import redact
from rlhf.tracking.run_folder import RunFolder


@dataclass(frozen=True)
class MetricSeries:
    """One metric over the steps at which it was logged; NaN and infinite values are None."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    def until(self, step: int) -> MetricSeries:
        """Return the part of the series up to a step, which it includes."""
        count = bisect_right(self.steps, step)
        return MetricSeries(self.name, self.steps[:count], self.values[:count])

    def finite(self) -> list[tuple[int, float]]:
        """Return (step, value) wherever the value is finite."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    def tail_mean(self, share: float = 0.2) -> float | None:
        """Compute the mean over the last `share` of the finite values, at least one; None if there is none."""
        points = self.finite()
        last = points[-max(1, round(share * len(points))) :]
        return math.fsum(value for _, value in last) / len(last) if last else None


@dataclass(frozen=True)
class Pair:
    """The samples of one held-out prompt: before training, after it, and on the way."""

    row: int
    prompt: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    between: tuple[Mapping[str, Any], ...] = ()  # of the evaluations on the way, in the order of their steps


@dataclass(frozen=True)
class Record:
    """The contents of a run folder; secrets are hidden."""

    path: Path
    config: dict[str, Any]
    series: dict[str, MetricSeries]
    last_step: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    card: dict[str, Any] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    export: ExportRecord | None = None
    ratios: dict[str, Any] = field(default_factory=dict)  # of the last logged step

    @property
    def name(self) -> str:
        """Return the name of the run, or of its folder if the run has none."""
        return str(self.setting("run", "name") or self.path.resolve().name)

    def setting(self, *keys: str) -> Any:
        """Return the value at a path of the configuration; None if any part of the path is missing."""
        value: Any = self.config
        for key in keys:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value

    @property
    def planned_steps(self) -> int | None:
        """Return the length of the run in steps; None if the configuration does not state it."""
        steps = self.setting("schedule", "steps")
        return steps if isinstance(steps, int) and steps < UNKNOWN_LENGTH else None

    @property
    def best_step(self) -> int | None:
        """Return the step of the best checkpoint; None if the run keeps none."""
        best = self.points("best/step")
        return int(best[-1][1]) if best else None

    @property
    def exports_best(self) -> bool:
        """Return whether the model of the run is its best checkpoint, rather than the last one."""
        best = self.setting("checkpoint", "best")
        return self.best_step is not None and isinstance(best, dict) and best.get("restore", True) is True

    def exported(self) -> Record:
        """Return the record up to the step of the run's model: later measurements are of other weights."""
        step = self.best_step
        if step is None or not self.exports_best:
            return self
        return replace(self.until(step), card=self.card)  # the report card is of the exported model

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric wherever it is finite; empty for a metric that was never logged."""
        return self.series[name].finite() if name in self.series else []

    def until(self, step: int) -> Record:
        """Return the record as it was at a step; the report card, which is of the end, is left out."""

        def before(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [row for row in rows if int(row.get("step", 0)) <= step]

        return replace(
            self,
            series={name: cut for name, series in self.series.items() if (cut := series.until(step)).steps},
            last_step=step,
            samples=before(self.samples),
            timings=before(self.timings),
            notes=before(self.notes),
            card={},
            alarms=before(self.alarms),
            ratios=self.ratios if self.ratios.get("step", 0) <= step else {},
        )

    def kl_target(self) -> float | None:
        """Return the target of an adaptive KL controller, in nats per sequence; None without one."""
        controller = self.setting("algorithm", "kl", "controller")
        adaptive = isinstance(controller, dict) and controller.get("type") == "adaptive"
        target = controller.get("target") if adaptive else None
        return float(target) if isinstance(target, int | float) else None

    def pairs(self) -> tuple[list[Pair], int, int]:
        """Return the held-out samples of the first and the last evaluation, paired by row, and the two steps.

        Without held-out samples, return the last samples of training, which have no counterpart.
        """
        held_out = [sample for sample in self.samples if sample.get("split") == "eval"]
        samples = held_out or self.samples
        steps = sorted({int(sample["step"]) for sample in samples})
        if not steps:
            return [], 0, 0
        after = [sample for sample in samples if sample["step"] == steps[-1]]
        if not held_out or len(steps) == 1:
            return [_pair(None, sample) for sample in after], steps[-1], steps[-1]
        before = [sample for sample in samples if sample["step"] == steps[0]]
        pairs = match(before, after)
        between: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
        for sample in samples:
            if steps[0] < int(sample["step"]) < steps[-1]:
                between.setdefault(_identity(sample), []).append(sample)
        return (
            [replace(pair, between=tuple(between.get((pair.row, pair.prompt), ()))) for pair in pairs],
            steps[0],
            steps[-1],
        )


def match(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[Pair]:
    """Pair samples of equal row and prompt, in the order of rows; a sample without a counterpart stays unpaired."""
    first = {_identity(sample): sample for sample in before}
    second = {_identity(sample): sample for sample in after}
    return [_pair(first.get(key), second.get(key)) for key in sorted(first.keys() | second.keys())]


def _identity(sample: Mapping[str, Any]) -> tuple[int, str]:
    """Return the row and the prompt, which identify a sample across evaluations."""
    return int(sample.get("row", 0)), str(sample.get("prompt", ""))


def _pair(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Pair:
    """Build a pair from one or two samples of the same prompt."""
    sample = after if after is not None else before
    assert sample is not None
    row, prompt = _identity(sample)
    return Pair(row, prompt, before, after)


def read_record(run_dir: Path) -> Record:
    """Read the run folder at `run_dir`.

    Raises:
        UserError: there is no such folder, or it contains no run.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the run folder (run.out_dir) of a finished or running run")
    folder = RunFolder(run_dir)
    rows, card = folder.read_metrics(), folder.read_report_card()
    if not rows and not card:
        raise UserError(
            f"{run_dir} has no metrics.jsonl with a logged step, so there is nothing to report: is it a run folder "
            "(run.out_dir), and has the run logged a step (logging.every)?"
        )
    config = folder.read_config()
    return Record(
        path=run_dir,
        config=redact(config),
        series=collect_series(rows),
        last_step=max((int(row.get("step", 0)) for row in rows), default=0),
        samples=folder.read_samples(),
        timings=folder.read_timings(),
        notes=[*redact(folder.read_notes()), *_missing_plugins(config)],
        card=card,
        alarms=folder.read_alarms(),
        export=read_export(run_dir),
        ratios=folder.read_ratios(),
    )


def _missing_plugins(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Load the plug-ins of a run, whose sections declare metrics; return a note if one cannot be loaded."""
    try:
        load_plugins(config)
    except ConfigError as error:
        return [{"step": 0, "text": f"warning: the page lacks what plug-ins declare: {error}"}]
    return []


def collect_series(rows: Iterable[Mapping[str, Any]]) -> dict[str, MetricSeries]:
    """Collect the lines of metrics.jsonl into one series per metric, in the order of first appearance."""
    steps: dict[str, list[int]] = {}
    values: dict[str, list[float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, int | float)):
                steps.setdefault(name, []).append(int(row.get("step", 0)))
                values.setdefault(name, []).append(None if value is None else float(value))
    return {name: MetricSeries(name, tuple(steps[name]), tuple(values[name])) for name in steps}
