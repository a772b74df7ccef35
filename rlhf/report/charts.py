"""The charts and tables of a page: described once, and drawn on a page with plotly.

Colors are roles; the page resolves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal

from rlhf.report.record import MetricSeries, Record
from rlhf.tracking.metrics import MetricInfo, format_number, shown_in

Number = int | float
ROLES, DASHES = 8, ("solid", "dash", "dot", "dashdot")  # colors of a page, and the dashes after each eight of them


@dataclass(frozen=True)
class Axis:
    """An axis; the unit of the upright one is beside the title of a page's chart."""

    label: str = ""
    unit: str = ""
    short: str = ""  # if there is little room


@dataclass(frozen=True)
class Series:
    """Points, and how they are drawn: as a line, as markers or as both, or as bars. Sizes are in pixels of a page."""

    name: str
    role: str  # the meaning of its color: s1 to s8, or target
    xs: Sequence[Number]
    ys: Sequence[Number | None]  # None leaves a gap
    _: KW_ONLY
    kind: Literal["line", "bars"] = "line"
    width: Number = 2  # of the line; 0 for none
    dash: str = "solid"  # or dash, dot, dashdot
    size: Number | Sequence[Number] = 0  # of the markers, or of each of them; 0 for none
    symbol: str = "circle"
    opacity: Number = 1
    band: Sequence[tuple[Number, Number]] = ()  # (low, high) at each point
    errors: Sequence[Number | None] = ()  # the standard error of each point
    texts: Sequence[str] = ()  # on pointing at each point
    group: str = ""  # shown and hidden as one
    in_legend: bool = True
    interactive: bool = True  # False for a series that only accompanies another


@dataclass(frozen=True)
class Chart:
    """A chart: its series in the order in which they are drawn, and its axes."""

    key: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    _: KW_ONLY
    has_legend: bool = True
    by_point: bool = False  # one points at a single point of it, not at all points above one another


Json = dict[str, Any]


def plotly_figure(chart: Chart) -> Json:
    """Describe a chart in plotly's JSON, without a theme: the page has two themes of its own."""
    axes: Json = {"xaxis": {"title": {"text": ", ".join(part for part in (chart.x.label, chart.x.unit) if part)}}}
    if chart.y.label:  # its unit is beside the chart's title
        axes["yaxis"] = {"title": {"text": chart.y.label}}
    layout: Json = {"showlegend": chart.has_legend, **axes}
    if chart.by_point:
        layout |= {"hovermode": "closest", "height": 440}
    if any(series.kind == "bars" for series in chart.series):
        layout |= {"barmode": "stack", "bargap": 0.15}
    traces: list[Json] = []
    for series in chart.series:
        if series.band:
            traces.append(_band(series))
        traces.append(_line(series, chart) if series.kind == "line" else {"type": "bar", **_points(series)})
    return {"data": traces, "layout": layout}


def _points(series: Series) -> Json:
    return {"x": list(series.xs), "y": list(series.ys), "name": series.name, "meta": {"role": series.role}}


def _line(series: Series, chart: Chart) -> Json:
    parts = (("lines", series.width), ("markers", series.size))
    trace: Json = {
        "type": "scatter",
        **_points(series),
        "mode": "+".join(part for part, is_drawn in parts if is_drawn),
        "line": {"width": series.width, "dash": series.dash},
        "marker": {"size": series.size if isinstance(series.size, int | float) else list(series.size)},
        "opacity": series.opacity,
        "showlegend": series.in_legend,
    }
    trace["marker"]["symbol"] = series.symbol
    if series.group:
        trace["legendgroup"] = series.group
    if not series.interactive:
        trace["hoverinfo"] = "skip"
    if series.texts:
        trace["text"] = list(series.texts)
    if series.texts and chart.by_point:
        xy = f"{chart.y.short} %{{y:.3f}}<br>{chart.x.short} %{{x:.2f}}"
        trace["hovertemplate"] = f"%{{text}}<br>{xy}<extra></extra>"
    if series.errors:
        trace["error_y"] = {"type": "data", "array": list(series.errors), "thickness": 1, "width": 3}
    return trace


def _band(series: Series) -> Json:
    """Draw a band as the area inside a closed curve: along its upper edge, and back along the lower one."""
    band: Json = {"type": "scatter", **_points(series), "mode": "lines", "line": {"width": 0}, "fill": "toself"}
    band["x"] = [*series.xs, *reversed(series.xs)]
    band["y"] = [*(high for _, high in series.band), *(low for low, _ in reversed(series.band))]
    if series.group:
        band["legendgroup"] = series.group
    return {**band, "showlegend": False, "hoverinfo": "skip"}


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


def calibration_bins(card: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """Return predicted and observed share and the number of pairs of each bin; empty for a card without bins."""
    bins = card.get("calibration", {}).get("bins", ())
    return [(row["predicted"], row["observed"], row["n"]) for row in bins]


CARD_WORDS = {
    "accuracy_low": "accuracy, 95 % interval from",
    "accuracy_high": "accuracy, 95 % interval to",
    "low": "95 % interval from",
    "high": "95 % interval to",
    "n": "pairs",
    "n_train": "training pairs",
    "ece": "expected calibration error",
    "loss": "loss, nats per pair",
    "score_mean": "mean score",
    "score_std": "standard deviation of the scores",
    "pearson": "Pearson correlation with length",
    "spearman": "Spearman correlation with length",
    "scores_higher": "share in which the worse completion scores higher",
    "auc": "AUC",
}


def humanize(key: str) -> str:
    """Turn an identifier into words."""
    return CARD_WORDS.get(key, key.replace("_", " "))


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table whose columns are all keys of the rows."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return Table(title, [humanize(key) for key in keys], [[row.get(key) for key in keys] for row in rows])


def _is_scalar(value: object) -> bool:
    """Check whether a value fits into one cell: no mapping, and no list of mappings or lists."""
    plain_list = isinstance(value, list) and not any(isinstance(entry, Mapping | list) for entry in value)
    return plain_list or not isinstance(value, Mapping | list)


def alarm_table(lines: Sequence[Mapping[str, Any]]) -> Table | None:
    """Build the table of the alarms that went off; None if there were none."""
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
    """Describe the reading of an alarm: the meaning of the value, the value, its limit."""
    return f"{line['reads']} {_shown(line['value'])} (limit {_shown(line['limit'])})"


def _shown(value: Any) -> str:
    return format_number(float(value)) if isinstance(value, int | float) else "–"


def _span(lines: Sequence[Mapping[str, Any]], on: Mapping[str, Any]) -> str:
    """Describe the steps from which and until which an alarm was on."""
    over = [
        line["step"]
        for line in lines
        if line.get("event") == "over" and line.get("alarm") == on.get("alarm") and line["step"] > on["step"]
    ]
    return f"{on.get('since')} … {min(over) if over else 'the end'}"


MAX_POINTS = 2000  # a curve with more is thinned, so that the page opens on a phone
SMOOTH_FROM = 40  # points from which a running mean is drawn over the curve
MAX_BARS = 80


@dataclass(frozen=True)
class ChartGroup:
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
        "Believe the held-out score. If only the training score still rises, the policy is gaming the reward.",
    ),
    (
        "cost",
        "Cost",
        "The cost should settle at its limit. If the multiplier is at its maximum and the cost above the "
        "limit, the policy cannot meet it.",
    ),
    (
        "kl",
        "Distance from the reference",
        "KL per sequence should settle, at its target if the coefficient is adaptive, and not climb for ever.",
    ),
    (
        "preferences",
        "Preference loss",
        "Trust the held-out accuracy; 0.5 is chance. Both log-probabilities falling is common: watch that "
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
        "Held-out loss should fall; if it turns up while the training loss still falls, the run is too long.",
    ),
    ("losses", "Losses", "A policy-gradient loss need not fall."),
    (
        "critic",
        "Critic",
        "Explained variance near 1 means that the critic predicts the return; near 0, that it is no better than a "
        "constant.",
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
    (
        "environment",
        "Environment",
        "If the return rises while turns fall to one, or malformed actions rise, the policy learns another task.",
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


def overlay_groups(records: Mapping[str, Record], table: Mapping[str, MetricInfo]) -> list[ChartGroup]:
    """Build one chart for each metric of several runs, with a curve for each run, in the groups of a run's page."""
    groups: list[ChartGroup] = []
    names = dict.fromkeys(name for record in records.values() for name in _worth_drawing(record))
    rest = [name for name in names if not name.endswith("_se")]
    for key, title, _ in GROUPS:
        shown = [name for _, metrics in panels(key, table) for name in metrics if name in rest]
        charts = [_overlay_chart(records, name, table) for name in shown]
        rest = [name for name in rest if name not in shown]
        groups += [ChartGroup(key, title, "", charts)] if charts else []
    others = [_overlay_chart(records, name, table) for name in rest]
    return [*groups, ChartGroup("other", "Other", "", others)] if others else groups


def _worth_drawing(record: Record) -> list[str]:
    """List the metrics that were measured and did not stay 0."""
    zero = set(stayed_zero(record))
    return [name for name in record.series if name not in zero and record.points(name)]


def _overlay_chart(records: Mapping[str, Record], name: str, table: Mapping[str, MetricInfo]) -> Chart:
    """Build the chart of one metric with a curve for each run that logged it."""
    curves: list[Series] = []
    for number, (run, record) in enumerate(records.items()):
        if record.points(name):
            metric, errors = record.series[name], record.series.get(f"{name}_se")
            role, dash = f"s{number % ROLES + 1}", DASHES[number // ROLES % len(DASHES)]
            series = _curve(metric, errors, role=role, exact=_is_exact(name, table), label=run)
            curves += [replace(curve, dash=dash) for curve in series]
    unit = table[name].unit if name in table else ""
    return Chart(f"overlay:{name}", name, Axis("step"), Axis(unit="" if unit == "-" else unit), curves)


def chart_groups(record: Record, table: Mapping[str, MetricInfo]) -> list[ChartGroup]:
    """Build the charts of all metrics of the run, grouped, without empty charts and groups."""
    groups, drawn = [], set(stayed_zero(record))
    for key, title, hint in GROUPS:
        charts = []
        for chart_title, names in panels(key, table):
            present = [name for name in names if record.points(name) and name not in drawn]
            drawn.update(present)
            if present:
                charts.append(_curves_chart(record, present, chart_title, table))
        charts += ratio_charts(record) if key == "updates" else []
        if charts:
            groups.append(ChartGroup(key, title, hint, charts))
    rest = [n for n in record.series if n not in drawn and not _error_bar_of(n, record) and record.points(n)]
    if rest:
        charts = [_curves_chart(record, [name], name, table) for name in rest]
        groups.append(ChartGroup("other", "Other", "Everything else that the run logged.", charts))
    return groups


def ratio_charts(record: Record) -> list[Chart]:
    """Build the figure of the clip: the ratios of the last step over the objective, for either sign of the advantage.

    Bars are shares of the tokens with that sign; the line is the gain of a ratio over ratio 1 for an advantage of 1.
    """
    ratios = record.ratios
    charts = []
    for name, words in (("positive", "above 0"), ("negative", "below 0")):
        counts = ratios.get("counts", {}).get(name) or []
        if total := sum(counts):
            xs = ratios["ratios"]
            shares = Series("share of tokens", "s1", xs, [count / total for count in counts], kind="bars")
            gain = Series("gain of the objective", "s2", xs, ratios["gains"][name])
            title = f"Ratios of step {ratios['step']}, advantages {words}"
            charts.append(Chart(f"ratios:{name}", title, Axis("importance ratio"), Axis(), [shares, gain]))
    return charts


def stayed_zero(record: Record) -> list[str]:
    """List the metrics that were 0 whenever they were logged; a chart of them would say no more."""
    return [
        name
        for name in record.series
        if (points := record.points(name)) and not any(value for _, value in points) and not _error_bar_of(name, record)
    ]


def _error_bar_of(name: str, record: Record) -> bool:
    """Check whether a metric is the standard error of another, which is drawn as its error bar."""
    return name.endswith("_se") and name.removesuffix("_se") in record.series


def _curves_chart(record: Record, names: Sequence[str], title: str, table: Mapping[str, MetricInfo]) -> Chart:
    """Build a chart of several metrics, with their target if they have one."""
    curves: list[Series] = []
    for number, name in enumerate(names, start=1):
        metric, errors = record.series[name], record.series.get(f"{name}_se")
        curves += _curve(metric, errors, role=f"s{number}", exact=_is_exact(name, table))
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
    """Return the configured target of the metrics; None if they have none."""
    if "kl/reference" in names or "eval/kl" in names:
        return record.kl_target()
    if "cost/mean" in names:
        limit = record.setting("algorithm", "lagrange", "cost_limit")
        return float(limit) if isinstance(limit, int | float) else None
    if "kl/old" in names and record.setting("algorithm", "policy_loss", "type") == "penalty":
        target = record.setting("algorithm", "policy_loss", "target")
        return float(target) if isinstance(target, int | float) else None
    return None


def _is_exact(name: str, table: Mapping[str, MetricInfo]) -> bool:
    """Check whether a metric is set or counted, so that there is no noise to smooth."""
    return name in table and table[name].curve == "exact"


def _curve(
    metric: MetricSeries, errors: MetricSeries | None, *, role: str, exact: bool, label: str = ""
) -> list[Series]:
    """Build the curve of a metric: thinned, with error bars, and with a running mean if it is long and noisy."""
    thinned, name = decimate(metric), label or metric.name
    held_out, few = metric.name.startswith("eval/"), len(thinned.steps) <= 60
    size = 5 if held_out else 3 if few else 0
    spread = dict(errors.finite()) if errors is not None else {}
    bars = [spread.get(step) for step in thinned.steps] if errors is not None else ()
    if len(metric.finite()) <= 2:  # before and after: a line between them would suggest a curve
        return [Series(name, role, thinned.steps, thinned.values, width=0, size=8, errors=bars, group=name)]
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


def calibration_chart(bins: Sequence[tuple[float, float, int]]) -> Chart:
    """Build the calibration chart: predicted against observed share of pairs won, and the ideal diagonal."""
    predicted, observed, sizes = zip(*bins, strict=True)
    markers = [6 + 14 * math.sqrt(size / max(sizes)) for size in sizes]
    low = min(0.5, *predicted, *observed)
    texts = [f"{size:g} pairs" for size in sizes]
    model = Series("this model", "s1", predicted, observed, size=markers, texts=texts)
    x, y = Axis("predicted probability"), Axis("observed share", "share")
    return Chart("calibration", "Calibration", x, y, [_ideal("calibrated", [low, 1], [low, 1]), model])
