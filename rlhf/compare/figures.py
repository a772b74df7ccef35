"""The figures of a comparison for print: PNG and SVG of what the page shows, drawn offline by matplotlib.

They use the page's data, order, colors and symbols, on white. With the common kinds of color blindness the palette is
distinct only together with symbols and dashes, which is why no arm is identified by its color alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rlhf.compare.charts import (
    CURVES,
    EXACT,
    INITIALLY_SHOWN,
    MAX_ALL_SHOWN,
    Style,
    by_seed,
    drawing_order,
    proxy_rows,
    reward_hacking_points,
    seed_means,
    styles,
)
from rlhf.compare.page import FIGURES
from rlhf.compare.results import ComparisonResults
from rlhf.compare.summary import UNITS, ranking

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
KL_LABEL = "KL to the start model (nats per sequence)"
DPI = 180
RC_PARAMS: Any = {
    **{"font.size": 9.0, "axes.titlesize": 10.0, "legend.fontsize": 8.0, "axes.grid": True, "grid.color": "#e3e6ec"},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{
        "svg.fonttype": "none",
        "svg.hashsalt": "rlhf",
        "figure.facecolor": "white",
    },  # text stays text, bytes stay equal
}

PlotFunction = Callable[[ComparisonResults, Mapping[str, Style]], Figure | None]


def write_figures(folder: Path, results: ComparisonResults) -> list[tuple[str, str]]:
    """Draw every figure that there is data for into `folder`/figures, as PNG and SVG.

    Returns:
        For each figure, the name of its files without their suffix, and its title.
    """
    drawn, written = styles(drawing_order(results)), []
    with rc_context(RC_PARAMS):
        for name, title, plot in DRAWINGS:
            figure = plot(results, drawn)
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


def frontier(results: ComparisonResults, drawn: Mapping[str, Style]) -> Figure:
    """Plot the judge's score against KL: every evaluation of every arm and seed, the last one larger."""
    figure, axes = _blank(7.2, 4.6)
    for arm, style in drawn.items():
        line_style, before = _line_style(style), len(axes.lines)
        for rows in by_seed(results, arm).values():
            measures = [row.measures for row in rows]
            points = [(row.kl, row.score) for row in measures if row.kl is not None and row.score is not None]
            xs, ys = [kl for kl, _ in points], [score for _, score in points]
            axes.plot(xs, ys, **line_style, linewidth=0.8, markersize=3, alpha=0.8)
            axes.plot(xs[-1:], ys[-1:], **line_style, markersize=7, linewidth=0)
        if arm in results.best_of_n:
            curve = results.best_of_n[arm]
            xs, ys = [point.kl for point in curve], [point.score for point in curve]
            axes.plot(xs, ys, **{**line_style, "linestyle": ":"}, linewidth=1.8, markersize=3)
        if axes.lines[before:]:
            axes.plot([], [], **line_style, linewidth=1.2, markersize=5, label=arm)
    if results.exact_frontier:
        xs, ys = [point.kl for point in results.exact_frontier], [point.score for point in results.exact_frontier]
        axes.plot(xs, ys, color="black", linewidth=1.4, linestyle="--", label=EXACT)
    start = results.start_model.measures.score
    assert start is not None, "a judged model has a score"
    axes.plot([0.0], [start], color=PALETTE["target"], marker="D", markersize=8, linewidth=0, label="start")
    axes.set(xlabel=KL_LABEL, ylabel="judge's score", title="Score against KL")
    _legend(figure, axes)
    return figure


def learning_curves(results: ComparisonResults, drawn: Mapping[str, Style]) -> Figure | None:
    """Plot every measure over the budget's unit: the mean over seeds, in a band from lowest to highest seed."""
    unit = results.budget.unit
    curves = {
        name: {arm: points for arm in drawn if (points := seed_means(by_seed(results, arm), name, unit))}
        for name, _, _ in CURVES
    }
    shown = [(name, title, axis) for name, title, axis in CURVES if curves[name]]
    if not shown:
        return None
    banded = list(drawn)[: INITIALLY_SHOWN if len(drawn) > MAX_ALL_SHOWN else MAX_ALL_SHOWN]
    figure, grid = _grid(len(shown), columns=2, width=3.8, height=2.6)
    for axes, (name, title, axis) in zip(grid, shown, strict=False):
        for arm, points in curves[name].items():
            xs, means, lows, highs = (list(column) for column in zip(*points, strict=True))
            line_style = _line_style(drawn[arm])
            if len(results.seeds) > 1 and arm in banded:
                axes.fill_between(xs, lows, highs, color=line_style["color"], alpha=0.13, linewidth=0)
            axes.plot(xs, means, **line_style, linewidth=1.4, markersize=3.5, label=arm)
        axes.set(title=title, ylabel=axis, xlabel=UNITS[unit])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if len(drawn) > len(banded):
        figure.supxlabel(f"bands from the lowest seed to the highest: the best {len(banded)} only", fontsize=8)
    _legend(figure, max(grid, key=lambda axes: len(axes.lines)))
    return figure


def proxy_against_judge(results: ComparisonResults, drawn: Mapping[str, Style]) -> Figure | None:
    """Plot each arm's gain in both scores in its own panel; crosses where the reward is up and the judge down."""
    rows_of = {arm: rows for arm in drawn if len(rows := proxy_rows(results, arm)) > 1}
    if not rows_of:
        return None
    unit = results.budget.unit
    figure, grid = _grid(len(rows_of), columns=min(4, max(2, len(rows_of))), width=2.5, height=2.0)
    for axes, (arm, rows) in zip(grid, rows_of.items(), strict=False):
        xs = [row.cost for row in rows]
        judged, rewarded = [row.score - rows[0].score for row in rows], [row.proxy - rows[0].proxy for row in rows]
        for gains, label, color, line in ((judged, "judge", "s1", "-"), (rewarded, "trained-on reward", "s2", "--")):
            axes.plot(xs, gains, color=PALETTE[color], linestyle=line, linewidth=1.3, label=label)
        marked = reward_hacking_points(results, arm)
        if marked:
            ys = [score - rows[0].score for _, score in marked]
            axes.plot([x for x, _ in marked], ys, "X", color=PALETTE["s7"], label="reward up, judge down")
        axes.set(title=arm, ylabel="gain", xlabel=UNITS[unit])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _legend(figure, max(grid, key=lambda axes: len(axes.lines)))
    return figure


def win_rates(results: ComparisonResults, drawn: Mapping[str, Style]) -> Figure | None:
    """Plot the percentage of prompts on which the row wins against the column, with 95 % intervals."""
    arms = ranking(results)
    rates = {(row.a, row.b): row.rate for row in results.win_rates}
    if len(arms) < 2 or not rates:
        return None
    size = max(4.2, 0.62 * len(arms) + 1.4)
    figure, axes = _blank(size + 0.6, size)
    values = [[100 * rates[a, b].value if (a, b) in rates else 50.0 for b in arms] for a in arms]
    shades = LinearSegmentedColormap.from_list("wins", [PALETTE["s2"], "#ffffff", PALETTE["s1"]])
    image = axes.imshow(values, cmap=shades, vmin=0, vmax=100)
    for i, a in enumerate(arms):
        for j, b in enumerate(arms):
            rate = rates.get((a, b))
            if rate is None:
                continue
            low, high = round(100 * rate.low), round(100 * rate.high)
            color = "white" if abs(values[i][j] - 50) > 35 else "black"
            weight = "normal" if low <= 50 <= high else "bold"
            axes.text(j, i - 0.12, f"{values[i][j]:.0f}", ha="center", va="center", color=color, weight=weight)
            axes.text(j, i + 0.26, f"{low}–{high}", ha="center", va="center", color=color, fontsize=5.5)
    axes.set_xticks(range(len(arms)), arms, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(arms)), arms)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    axes.set_xlabel("row against column: % of prompts won, a tie half; beneath, the 95 % interval (bold: clear of 50)")
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, label="% of prompts won")
    return figure


def costs(results: ComparisonResults, drawn: Mapping[str, Style]) -> Figure | None:
    """Plot what every arm spent, the mean over seeds, in each of the four units."""
    finals = results.finals
    costs_of = {arm: spent for arm in drawn if arm in finals and (spent := finals[arm].costs) is not None}
    if not costs_of:
        return None
    figure, grid = _grid(4, columns=4, width=2.3, height=1.0 + 0.2 * len(costs_of), share_y=True)
    names = list(costs_of)[::-1]
    for axes, (unit, label) in zip(grid, UNITS.items(), strict=True):
        colors = [PALETTE[drawn[arm].role] for arm in names]
        hatches = ["////" if results.arms[arm].type == "best_of_n" else "" for arm in names]
        axes.barh(names, [costs_of[arm].amount(unit) for arm in names], color=colors, hatch=hatches, edgecolor="white")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(visible=False, axis="y")
        axes.margins(y=0.02)
    if any(results.arms[arm].type == "best_of_n" for arm in names):
        figure.supxlabel("hatched: paid at every use, and no part of the budget", fontsize=8)
    return figure


DRAWINGS: tuple[tuple[str, str, PlotFunction], ...] = (
    ("frontier", "score against KL", frontier),
    ("learning_curves", "learning curves", learning_curves),
    ("proxy_against_judge", "reward against judge", proxy_against_judge),
    ("win_rates", "win rates", win_rates),
    ("costs", "cost", costs),
)


def _line_style(style: Style) -> dict[str, Any]:
    return {"color": PALETTE[style.role], "marker": MARKERS[style.symbol], "linestyle": LINES[style.dash]}


def _blank(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _grid(count: int, *, columns: int, width: float, height: float, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """Create a figure with `count` panels of the given size in inches, row by row."""
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    panels: list[Axes] = []
    for number in range(count):
        first = panels[0] if share_y and panels else None
        panels.append(figure.add_subplot(rows, columns, number + 1, sharey=first))
        if first is not None:
            panels[-1].tick_params(labelleft=False)
    return figure, panels


def _legend(figure: Figure, axes: Axes) -> None:
    """Place the legend beside the panels, in as many columns as keep it no taller than they are."""
    handles, labels = axes.get_legend_handles_labels()
    rows = max(1, int(figure.get_figheight() / 0.2))
    figure.legend(handles, labels, loc="outside right upper", ncols=-(-len(labels) // rows), frameon=False)
