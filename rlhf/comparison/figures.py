"""The figures of a comparison for print: PNG and SVG of what the page shows, drawn offline by matplotlib.

They use the page's data, order, colors and symbols, on white. With the common kinds of color blindness the palette is
distinct only together with symbols and dashes, which is why no arm is identified by its color alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rlhf.comparison.page import EXACT, FIGURES, ComparisonCharts
from rlhf.report.charts import Axis, Chart, Series

# The page's colors by role, in the light (style.css).
PALETTE = {
    **{"s1": "#1f66c1", "s2": "#c8570e", "s3": "#16825d", "s4": "#a2357f"},
    **{"s5": "#7a6a00", "s6": "#0f7f95", "s7": "#b3261e", "s8": "#6249b5", "target": "#7a8496"},
}
MARKERS = {
    **{"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^"},
    **{"triangle-down": "v", "cross": "P", "x": "X", "star": "*"},
}
LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
POINTS = 0.7  # of print for a pixel of the page
DPI = 180
RC_PARAMS: Any = {
    **{"font.size": 9.0, "axes.titlesize": 10.0, "legend.fontsize": 8.0, "axes.grid": True, "grid.color": "#e3e6ec"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    # Text stays text, bytes stay equal.
    **{"svg.fonttype": "none", "svg.hashsalt": "rlhf", "figure.facecolor": "white"},
}

PlotFunction = Callable[[ComparisonCharts], Figure | None]


def write_figures(folder: Path, charts: ComparisonCharts) -> list[tuple[str, str]]:
    """Draw every figure that there is data for into `folder`/figures, as PNG and SVG.

    Returns:
        For each figure, the name of its files without their suffix, and its title.
    """
    written = []
    with rc_context(RC_PARAMS):
        for name, title, plot in DRAWINGS:
            figure = plot(charts)
            if figure is None:
                continue
            figure.draw_without_rendering()  # lay it out once, not for each file
            figure.set_layout_engine("none")
            (folder / FIGURES).mkdir(parents=True, exist_ok=True)
            for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
                temporary = folder / FIGURES / f".{name}.new"
                figure.savefig(temporary, format=ending, dpi=DPI, metadata=metadata)
                temporary.replace(folder / FIGURES / f"{name}.{ending}")
            written.append((name, title))
    return written


def frontier(charts: ComparisonCharts) -> Figure:
    """Draw the judge's score against KL."""
    figure, axes = _blank(7.2, 4.6)
    _draw(axes, charts.frontier.series)
    axes.set(xlabel=_label(charts.frontier.x), ylabel=_label(charts.frontier.y), title=charts.frontier.title)
    _legend(figure, axes)
    return figure


def learning_curves(charts: ComparisonCharts) -> Figure | None:
    """Draw every measure over the budget's unit in its own panel."""
    return _panels(charts.curves, columns=2, width=3.8, height=2.6)


def proxy_against_judge(charts: ComparisonCharts) -> Figure | None:
    """Draw each arm's gain in both scores in its own panel.

    A panel has no room for markers on a line, so its lines differ by their dashes.
    """
    plain = []
    for chart in charts.proxies:
        pairs = zip(chart.series, cycle(LINES), strict=False)
        lines = [replace(series, size=0, dash=dash) if series.width else series for series, dash in pairs]
        plain.append(replace(chart, series=lines))
    return _panels(plain, columns=min(4, max(2, len(plain))), width=2.5, height=2.0)


def win_rates(charts: ComparisonCharts) -> Figure | None:
    """Draw the percentage of prompts on which the row wins against the column, with 95 % intervals."""
    arms, matrix = [arm for arm, _ in charts.wins], [wins for _, wins in charts.wins]
    if all(win.share is None for wins in matrix for win in wins):
        return None
    size = max(4.2, 0.62 * len(arms) + 1.4)
    figure, axes = _blank(size + 0.6, size)
    shades = LinearSegmentedColormap.from_list("wins", [PALETTE["s2"], "#ffffff", PALETTE["s1"]])
    image = axes.imshow([[win.exact for win in wins] for wins in matrix], cmap=shades, vmin=0, vmax=100)
    for i, wins in enumerate(matrix):
        for j, win in enumerate(wins):
            if win.share is None:
                continue
            color = "white" if abs(win.exact - 50) > 35 else "black"
            centered: Any = {"ha": "center", "va": "center", "color": color}
            axes.text(j, i - 0.12, f"{win.share}", weight="bold" if win.clear else "normal", **centered)
            axes.text(j, i + 0.26, f"{win.low}–{win.high}", fontsize=5.5, **centered)
    axes.set_xticks(range(len(arms)), arms, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(arms)), arms)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    axes.set_xlabel("row against column: % of prompts won, a tie half; beneath, the 95 % interval (bold: clear of 50)")
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, label="% of prompts won")
    return figure


def costs(charts: ComparisonCharts) -> Figure | None:
    """Draw what every arm spent in each unit; the bars lie, so that the names beside them can be read."""
    if not charts.costs:
        return None
    height = 1.0 + 0.2 * len(charts.costs[0].series)
    figure, grid = _grid(charts.costs, columns=4, width=2.3, height=height, share_y=True)
    for axes, chart in zip(grid, charts.costs, strict=True):
        bars = list(reversed(chart.series))  # the first one on top
        amounts: Any = [series.ys[0] for series in bars]
        axes.barh(
            [series.name for series in bars],
            amounts,
            color=[PALETTE[series.role] for series in bars],
            hatch=["////" if series.hatched else "" for series in bars],
            edgecolor="white",
        )
        axes.set_xlabel(_label(chart.y))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(visible=False, axis="y")
        axes.margins(y=0.02)
    return figure


DRAWINGS: tuple[tuple[str, str, PlotFunction], ...] = (
    ("frontier", "score against KL", frontier),
    ("learning_curves", "learning curves", learning_curves),
    ("proxy_against_judge", "reward against judge", proxy_against_judge),
    ("win_rates", "win rates", win_rates),
    ("costs", "cost", costs),
)


def _panels(charts: Sequence[Chart], *, columns: int, width: float, height: float) -> Figure | None:
    """Draw each chart in a panel of the given size in inches, with one legend for all of them."""
    if not charts:
        return None
    figure, grid = _grid(charts, columns=columns, width=width, height=height)
    for axes, chart in zip(grid, charts, strict=True):
        _draw(axes, chart.series)
        axes.set(title=chart.title, xlabel=_label(chart.x), ylabel=chart.y.short or _label(chart.y))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(figure, max(grid, key=lambda axes: len(axes.lines)))
    return figure


def _draw(axes: Axes, drawn: Sequence[Series]) -> None:
    """Draw lines with their bands and markers; where a line's markers differ, its last point has that marker's size."""
    for series in drawn:
        xs: Any = series.xs
        ys: Any = series.ys
        sizes = series.size if isinstance(series.size, Sequence) else [series.size]
        color = "black" if series.name == EXACT else PALETTE[series.role]
        marker, line = MARKERS[series.symbol] if any(sizes) else "", LINES[series.dash] if series.width else ""
        style: Any = {"color": color, "marker": marker, "linestyle": line, "linewidth": POINTS * series.width}
        if series.band and not series.minor:
            lows, highs = zip(*series.band, strict=True)
            axes.fill_between(xs, lows, highs, color=color, alpha=0.13, linewidth=0)
        label = series.name if series.in_legend else None
        axes.plot(xs, ys, **style, markersize=POINTS * sizes[0], label=label)
        if sizes[-1] != sizes[0]:
            last: Any = {**style, "linestyle": "", "markersize": POINTS * sizes[-1]}
            axes.plot(xs[-1:], ys[-1:], **last)


def _label(axis: Axis) -> str:
    return f"{axis.label} ({axis.unit})" if axis.label and axis.unit else axis.label or axis.unit


def _blank(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _grid(
    charts: Sequence[Chart], *, columns: int, width: float, height: float, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a panel of the given size in inches for each chart, row by row, and their note."""
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    panels: list[Axes] = []
    for number in range(len(charts)):
        first = panels[0] if share_y and panels else None
        panels.append(figure.add_subplot(rows, columns, number + 1, sharey=first))
        if first is not None:
            panels[-1].tick_params(labelleft=False)
    if charts[0].note:
        figure.supxlabel(charts[0].note, fontsize=8)
    return figure, panels


def _legend(figure: Figure, axes: Axes) -> None:
    """Place the legend beside the panels, in as many columns as keep it no taller than they are."""
    handles, labels = axes.get_legend_handles_labels()
    rows = max(1, int(figure.get_figheight() / 0.2))
    figure.legend(handles, labels, loc="outside right upper", ncols=-(-len(labels) // rows), frameon=False)
