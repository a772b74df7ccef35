"""Describe what a chart shows, and draw it on a page with plotly; rlhf/comparison/figures.py draws it for print.

Colors are roles; the page resolves them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import plotly.graph_objects as go

Number = int | float


@dataclass(frozen=True)
class Axis:
    """An axis; the unit of the upright one is beside the title of a page's chart."""

    label: str = ""
    unit: str = ""
    short: str = ""  # where there is little room


@dataclass(frozen=True)
class Series:
    """Points, and how they are drawn: as a line, as markers or as both, or as bars. Sizes are in pixels of a page."""

    name: str
    role: str  # what its color stands for: s1 to s8, or target
    xs: Sequence[Number]
    ys: Sequence[Number | None]  # None leaves a gap
    _: KW_ONLY
    kind: Literal["line", "bars"] = "line"
    width: Number = 2  # of the line; 0 for none
    dash: str = "solid"  # or dash, dot, dashdot
    size: Number | Sequence[Number] = 0  # of the markers, or of each of them; 0 for none
    symbol: str = "circle"
    opacity: Number = 1
    hatched: bool = False
    band: Sequence[tuple[Number, Number]] = ()  # (low, high) at each point
    errors: Sequence[Number | None] = ()  # the standard error of each point
    texts: Sequence[str] = ()  # on pointing at each point
    group: str = ""  # shown and hidden as one
    in_legend: bool = True
    interactive: bool = True  # False for what only accompanies another series
    minor: bool = False  # one of too many for their bands to be told apart in print


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
    note: str = ""  # below it in print


Json = dict[str, Any]


def plotly_figure(chart: Chart) -> Json:
    """Convert a chart to plotly's JSON data without plotly's theme: the page has two themes of its own."""
    layout: Json = {"showlegend": chart.has_legend}
    if chart.by_point:
        layout |= {"hovermode": "closest", "height": 440}
    if any(series.kind == "bars" for series in chart.series):
        layout |= {"barmode": "stack", "bargap": 0.15}
    figure = go.Figure(layout=layout)
    for series in chart.series:
        if series.band:
            figure.add_trace(_band(series))
        figure.add_trace(_line(series, chart) if series.kind == "line" else go.Bar(_points(series)))
    figure.update_xaxes(title=", ".join(part for part in (chart.x.label, chart.x.unit) if part))
    if chart.y.label:  # its unit is beside the chart's title
        figure.update_yaxes(title=chart.y.label)
    loaded: Json = json.loads(figure.to_json())
    loaded.get("layout", {}).pop("template", None)
    return loaded


def _points(series: Series) -> Json:
    return {"x": series.xs, "y": series.ys, "name": series.name, "meta": {"role": series.role}}


def _line(series: Series, chart: Chart) -> go.Scatter:
    parts = (("lines", series.width), ("markers", series.size))
    trace = go.Scatter(
        **_points(series),
        text=series.texts or None,
        mode="+".join(part for part, is_drawn in parts if is_drawn),
        line={"width": series.width, "dash": series.dash},
        marker={"size": series.size, "symbol": series.symbol},
        opacity=series.opacity,
        legendgroup=series.group or None,
        showlegend=series.in_legend,
        hoverinfo=None if series.interactive else "skip",
    )
    if series.texts and chart.by_point:
        xy = f"{chart.y.short} %{{y:.3f}}<br>{chart.x.short} %{{x:.2f}}"
        trace.hovertemplate = f"%{{text}}<br>{xy}<extra></extra>"
    if series.errors:
        trace.error_y = {"array": series.errors, "thickness": 1, "width": 3}
    return trace


def _band(series: Series) -> go.Scatter:
    """Draw a band as the area inside a closed curve: along its upper edge, and back along the lower one."""
    ys = [*(high for _, high in series.band), *(low for low, _ in reversed(series.band))]
    band = go.Scatter(
        **_points(series), mode="lines", line={"width": 0}, fill="toself", legendgroup=series.group or None
    )
    return band.update(x=[*series.xs, *reversed(series.xs)], y=ys, showlegend=False, hoverinfo="skip")
