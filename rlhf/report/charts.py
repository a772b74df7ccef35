"""Learning curves: which metrics share a chart, and the plotly figures. Colors are roles; the page resolves them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import plotly.graph_objects as go

from rlhf.report.record import Record, Series
from rlhf.tracking.metrics import MetricInfo, shown_in

MAX_POINTS = 2000  # a curve with more is thinned, so that the page opens on a phone
SMOOTH_FROM = 40  # points from which a running mean is drawn over the curve
MAX_BARS = 80

Json = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A figure with its title and unit."""

    key: str
    title: str
    unit: str
    figure: Json


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
    figure = go.Figure()
    for number, name in enumerate(names, start=1):
        exact = name in table and table[name].curve == "exact"
        _add_curve(figure, record.series[name], record.series.get(f"{name}_se"), role=f"s{number}", exact=exact)
    target = _target(record, names)
    if target is not None:
        steps = [step for name in names for step, _ in record.points(name)]
        ends = [min(steps), max(steps)]
        trace = go.Scatter(x=ends, y=[target] * 2, mode="lines", name=f"target {target:g}", meta={"role": "target"})
        figure.add_trace(trace.update(line={"dash": "dash", "width": 1.5}))
    unit = table[names[0]].unit if names[0] in table else ""
    figure.update_layout(showlegend=len(names) > 1 or target is not None)
    figure.update_xaxes(title="step")
    return Chart(f"curve:{names[0]}", title, "" if unit == "-" else unit, to_json(figure))


def _target(record: Record, names: Sequence[str]) -> float | None:
    """Return the configured target of the metrics; None where they have none."""
    if "kl/reference" in names or "eval/kl" in names:
        return record.kl_target()
    if "kl/old" in names and record.setting("algorithm", "policy_loss", "type") == "penalty":
        target = record.setting("algorithm", "policy_loss", "target")
        return float(target) if isinstance(target, int | float) else None
    return None


def _add_curve(figure: go.Figure, series: Series, errors: Series | None, *, role: str, exact: bool) -> None:
    """Add a metric to a figure: thinned, with error bars, and with a running mean where it is long and noisy."""
    thinned = decimate(series)
    held_out = series.name.startswith("eval/")
    smooth = not held_out and not exact and len(series.finite()) >= SMOOTH_FROM
    few = len(thinned.steps) <= 60
    trace = go.Scatter(
        x=thinned.steps,
        y=thinned.values,
        name=series.name,
        mode="lines+markers" if held_out or few else "lines",
        line={"width": 1 if smooth else 2},
        marker={"size": 5 if held_out else 3},
        opacity=0.35 if smooth else 1.0,
        showlegend=not smooth,
        legendgroup=series.name,
        meta={"role": role},
    )
    if errors is not None:
        spread = dict(errors.finite())
        trace.error_y = {"array": [spread.get(step) for step in thinned.steps], "thickness": 1, "width": 3}
    figure.add_trace(trace)
    if smooth:
        mean = decimate(running_mean(series))
        line = go.Scatter(x=mean.steps, y=mean.values, name=series.name, mode="lines", legendgroup=series.name)
        figure.add_trace(line.update(line={"width": 2.2}, meta={"role": role}, hoverinfo="skip"))


def running_mean(series: Series) -> Series:
    """Compute the centered mean over about a tenth of the finite points (at least 5), narrower at the ends."""
    points = series.finite()
    half = max(2, len(points) // 20)
    sums = [0.0, *accumulate(value for _, value in points)]
    means: list[float | None] = []
    for index in range(len(points)):
        radius = min(half, index, len(points) - 1 - index)
        means.append((sums[index + radius + 1] - sums[index - radius]) / (2 * radius + 1))
    return Series(series.name, tuple(step for step, _ in points), tuple(means))


def decimate(series: Series, limit: int = MAX_POINTS) -> Series:
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
    return Series(series.name, tuple(series.steps[i] for i in order), tuple(series.values[i] for i in order))


def timing_chart(timings: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> Chart:
    """Build the stacked chart of seconds per step by phase; in a long run, neighboring steps share a bar.

    A step that was done twice, before and after an interruption, is drawn with its second timing.
    """
    timings = list({row.get("step", 0): row for row in timings}.values())
    width = max(1, math.ceil(len(timings) / MAX_BARS))
    parts = [timings[i : i + width] for i in range(0, len(timings), width)]
    figure = go.Figure(layout={"barmode": "stack", "bargap": 0.15, "showlegend": True})
    for number, phase in enumerate(phases):
        seconds = [sum(row.get("seconds", {}).get(phase) or 0.0 for row in part) / len(part) for part in parts]
        steps = [part[-1].get("step", 0) for part in parts]
        figure.add_trace(go.Bar(x=steps, y=seconds, name=phase, meta={"role": f"s{number % 8 + 1}"}))
    title = "Seconds per logged step" if width == 1 else f"Seconds per logged step, mean of {width}"
    return Chart("timings", title, "s", to_json(figure.update_xaxes(title="step")))


def calibration_chart(bins: Sequence[tuple[float, float, float | None]]) -> Chart:
    """Build the calibration chart: predicted against observed share of pairs won, and the ideal diagonal."""
    sizes = [count or 0.0 for _, _, count in bins]
    largest = max(sizes, default=0.0)
    markers = [6 + 14 * math.sqrt(size / largest) if largest else 8 for size in sizes]
    predicted, observed = [p for p, _, _ in bins], [o for _, o, _ in bins]
    low = min(0.5, *predicted, *observed) if bins else 0.0
    figure = go.Figure(layout={"showlegend": True})
    diagonal = go.Scatter(x=[low, 1], y=[low, 1], mode="lines", name="calibrated", meta={"role": "target"})
    figure.add_trace(diagonal.update(line={"dash": "dash", "width": 1.5}))
    figure.add_trace(
        go.Scatter(
            x=predicted,
            y=observed,
            mode="lines+markers",
            name="this model",
            marker={"size": markers},
            text=[f"{size:g} pairs" for size in sizes] if largest else None,
            meta={"role": "s1"},
        )
    )
    figure.update_xaxes(title="predicted probability").update_yaxes(title="observed share")
    return Chart("calibration", "Calibration", "share", to_json(figure))


def to_json(figure: go.Figure) -> Json:
    """Convert a figure to JSON data without plotly's theme: the page has two themes of its own."""
    loaded: Json = json.loads(figure.to_json())
    loaded.get("layout", {}).pop("template", None)
    return loaded
