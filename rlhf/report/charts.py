"""The charts of a run: which metrics share one, the seconds of its steps, and a reward model's calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from rlhf.report.chart import Axis, Chart, Number, Series
from rlhf.report.record import MetricSeries, Record
from rlhf.tracking.metrics import MetricInfo, shown_in

MAX_POINTS = 2000  # a curve with more is thinned, so that the page opens on a phone
SMOOTH_FROM = 40  # points from which a running mean is drawn over the curve
MAX_BARS = 80


@dataclass(frozen=True)
class Group:
    """Charts that answer one question about a run."""

    key: str
    title: str
    hint: str
    charts: Sequence[Chart]


# (key, title, what to look for): the table of metrics has the charts of each; metrics in none are drawn under "Other".
GROUPS = (
    (
        "score",
        "Score",
        "Held-out score is the one to believe; where the training score still rises and it does not, the reward is "
        "being gamed.",
    ),
    (
        "kl",
        "Distance from the reference",
        "KL per sequence should settle (at its target, where the coefficient is adaptive), not climb for ever.",
    ),
    (
        "preferences",
        "Preference loss",
        "Held-out accuracy is the one to believe; 0.5 is chance. Both log-probabilities falling is common: watch that "
        "the chosen side's does not fall far, and that the held-out score follows the margin.",
    ),
    (
        "reward-model",
        "Preference pairs",
        "Held-out accuracy says how often the chosen side scores higher; 0.5 is chance.",
    ),
    (
        "language-modeling",
        "Language modeling",
        "Held-out loss should fall; where it turns up while the training loss still falls, the run is too long.",
    ),
    (
        "losses",
        "Losses and the critic",
        "A policy-gradient loss need not fall. Explained variance near 1 means the critic predicts the return.",
    ),
    (
        "updates",
        "Size of the updates",
        "A clip fraction near zero means timid updates; above about 0.3 much of the gradient is thrown away.",
    ),
    (
        "completions",
        "Completions",
        "Falling entropy and distinct bigrams, and rising repetition, warn of collapse; lengths drifting to the limit, "
        "of a length bias.",
    ),
    ("optimization", "Optimization", "Gradient norms are before clipping."),
    (
        "data",
        "Sources of the data",
        "A source whose score stands still while the others rise is too hard, or its reward does not fit it.",
    ),
)


def panels(group: str, table: Mapping[str, MetricInfo]) -> list[tuple[str, list[str]]]:
    """Return the title and the metrics of each chart of a group, in order."""
    charts = groupby(shown_in(f"chart/{group}", table), key=lambda shown: shown[1].position)
    rows = [list(chart) for _, chart in charts]
    return [(row[0][1].title, [info.name for info, _ in row]) for row in rows]


def chart_groups(record: Record, table: Mapping[str, MetricInfo]) -> list[Group]:
    """Build the charts of all metrics of the run, grouped, without empty charts and groups."""
    groups, drawn = [], set()
    for key, title, hint in GROUPS:
        charts = []
        for chart_title, names in panels(key, table):
            present = [name for name in names if record.points(name)]
            drawn.update(present)
            if present:
                charts.append(_curves_chart(record, present, chart_title, table))
        if charts:
            groups.append(Group(key, title, hint, charts))
    rest = [n for n in record.series if n not in drawn and not _error_bar_of(n, record) and record.points(n)]
    if rest:
        charts = [_curves_chart(record, [name], name, table) for name in rest]
        groups.append(Group("other", "Other", "Everything else that the run logged.", charts))
    return groups


def _error_bar_of(name: str, record: Record) -> bool:
    """Check whether a metric is the standard error of another, which is drawn as its error bar."""
    return name.endswith("_se") and name.removesuffix("_se") in record.series


def _curves_chart(record: Record, names: Sequence[str], title: str, table: Mapping[str, MetricInfo]) -> Chart:
    """Build a chart of several metrics, with their target where they have one."""
    curves: list[Series] = []
    for number, name in enumerate(names, start=1):
        exact = name in table and table[name].curve == "exact"
        curves += _curve(record.series[name], record.series.get(f"{name}_se"), role=f"s{number}", exact=exact)
    target = _target(record, names)
    if target is not None:
        steps = [step for name in names for step, _ in record.points(name)]
        curves.append(_ideal(f"target {target:g}", [min(steps), max(steps)], [target] * 2))
    alarms = [mark for name in names if (mark := _alarm_marks(record, name)) is not None]
    curves += alarms
    unit = table[names[0]].unit if names[0] in table else ""
    y, has_legend = Axis(unit="" if unit == "-" else unit), len(names) > 1 or target is not None or bool(alarms)
    return Chart(f"curve:{names[0]}", title, Axis("step"), y, curves, has_legend=has_legend)


def _alarm_marks(record: Record, name: str) -> Series | None:
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


def _ideal(name: str, xs: Sequence[Number], ys: Sequence[Number]) -> Series:
    """Build the dashed line that a curve is measured against."""
    return Series(name, "target", xs, ys, width=1.5, dash="dash")


def _target(record: Record, names: Sequence[str]) -> float | None:
    """Return the configured target of the metrics; None where they have none."""
    if "kl/reference" in names or "eval/kl" in names:
        return record.kl_target()
    if "kl/old" in names and record.setting("algorithm", "policy_loss", "type") == "penalty":
        target = record.setting("algorithm", "policy_loss", "target")
        return float(target) if isinstance(target, int | float) else None
    return None


def _curve(metric: MetricSeries, errors: MetricSeries | None, *, role: str, exact: bool) -> list[Series]:
    """Build the curve of a metric: thinned, with error bars, and with a running mean where it is long and noisy."""
    thinned, name = decimate(metric), metric.name
    held_out, few = name.startswith("eval/"), len(thinned.steps) <= 60
    size = 5 if held_out else 3 if few else 0
    spread = dict(errors.finite()) if errors is not None else {}
    bars = [spread.get(step) for step in thinned.steps] if errors is not None else ()
    curve = Series(name, role, thinned.steps, thinned.values, size=size, errors=bars, group=name)
    if held_out or exact or len(metric.finite()) < SMOOTH_FROM:
        return [curve]
    mean = decimate(running_mean(metric))
    line = Series(name, role, mean.steps, mean.values, width=2.2, group=name, interactive=False)
    return [replace(curve, width=1, opacity=0.35, in_legend=False), line]


def running_mean(series: MetricSeries) -> MetricSeries:
    """Compute the centered mean over about a tenth of the finite points (at least 5), narrower at the ends."""
    points = series.finite()
    half = max(2, len(points) // 20)
    sums = [0.0, *accumulate(value for _, value in points)]
    means: list[float | None] = []
    for index in range(len(points)):
        radius = min(half, index, len(points) - 1 - index)
        means.append((sums[index + radius + 1] - sums[index - radius]) / (2 * radius + 1))
    return MetricSeries(series.name, tuple(step for step, _ in points), tuple(means))


def decimate(series: MetricSeries, limit: int = MAX_POINTS) -> MetricSeries:
    """Thin a series to at most `limit` points: the ends, and the extremes of each stretch, so that no spike is lost."""
    count = len(series.steps)
    if count <= limit:
        return series
    stretches = (limit - 2) // 2
    edges = [1 + (count - 2) * i // stretches for i in range(stretches + 1)]
    kept = {0, count - 1}
    for start, stop in pairwise(edges):
        finite = [i for i in range(start, stop) if series.values[i] is not None]
        if finite:
            kept |= {
                min(finite, key=lambda i: series.values[i] or 0.0),
                max(finite, key=lambda i: series.values[i] or 0.0),
            }
        else:
            kept.add(start)
    order = sorted(kept)
    return MetricSeries(series.name, tuple(series.steps[i] for i in order), tuple(series.values[i] for i in order))


def timing_chart(timings: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> Chart:
    """Build the stacked chart of seconds per step by phase; in a long run, neighboring steps share a bar.

    A step that was done twice, before and after an interruption, is drawn with its second timing.
    """
    timings = list({row.get("step", 0): row for row in timings}.values())
    width = max(1, math.ceil(len(timings) / MAX_BARS))
    parts = [timings[i : i + width] for i in range(0, len(timings), width)]
    steps, bars = [part[-1].get("step", 0) for part in parts], []
    for number, phase in enumerate(phases):
        seconds = [sum(row.get("seconds", {}).get(phase) or 0.0 for row in part) / len(part) for part in parts]
        bars.append(Series(phase, f"s{number % 8 + 1}", steps, seconds, kind="bars"))
    title = "Seconds per logged step" if width == 1 else f"Seconds per logged step, mean of {width}"
    return Chart("timings", title, Axis("step"), Axis(unit="s"), bars)


def calibration_chart(bins: Sequence[tuple[float, float, float | None]]) -> Chart:
    """Build the calibration chart: predicted against observed share of pairs won, and the ideal diagonal."""
    sizes = [count or 0.0 for _, _, count in bins]
    largest = max(sizes, default=0.0)
    markers = [6 + 14 * math.sqrt(size / largest) if largest else 8 for size in sizes]
    predicted, observed = [p for p, _, _ in bins], [o for _, o, _ in bins]
    low = min(0.5, *predicted, *observed) if bins else 0.0
    texts = [f"{size:g} pairs" for size in sizes] if largest else ()
    model = Series("this model", "s1", predicted, observed, size=markers, texts=texts)
    x, y = Axis("predicted probability"), Axis("observed share", "share")
    return Chart("calibration", "Calibration", x, y, [_ideal("calibrated", [low, 1], [low, 1]), model])
