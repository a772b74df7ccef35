"""The charts of a comparison's page: frontier, learning curves with seed bands, proxy against gold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

import plotly.graph_objects as go

from rlhf.compare.results import ComparisonResults, CurvePoint, Evaluation, FrontierPoint
from rlhf.compare.summary import UNITS, ranking
from rlhf.config.compare import BudgetUnit
from rlhf.evaluation.frontier import overoptimized
from rlhf.report.charts import Chart, to_json

ROLES, DASHES = 8, ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
MAX_ALL_SHOWN = 8  # arms that fit on one chart; of more than that, the best SHOWN are shown at first
INITIALLY_SHOWN = 6
EXACT = "exact optimum"
CURVES = (  # measure, title, unit
    ("score", "Judge's score", "score"),
    ("proxy", "Score under the trained-on reward", "score"),
    ("kl", "KL to the start model", "nats"),
    ("length", "Length", "tokens"),
    ("distinct_2", "Distinct bigrams", "share"),
)
MARGIN_SE = 2.0  # standard errors by which the gold must have fallen to be marked as gaming


@dataclass(frozen=True)
class Style:
    """How an arm is drawn in every chart: a color of the page, a symbol, and another dash after every eight arms.

    Of 64 arms no two have color and symbol in common; of the first eight no two have either.
    """

    role: str
    dash: str
    symbol: str


def styles(arms: Sequence[str]) -> dict[str, Style]:
    """Assign each arm a style, the same in every chart."""
    return {
        arm: Style(f"s{i % ROLES + 1}", DASHES[i // ROLES % len(DASHES)], SYMBOLS[(i + i // ROLES) % len(SYMBOLS)])
        for i, arm in enumerate(arms)
    }


def drawing_order(results: ComparisonResults) -> list[str]:
    """Return the arms in the order in which they are drawn.

    That is their order in results.json; where there are more than MAX_ALL_SHOWN, the best come first, so that those
    shown at first look least alike.
    """
    arms = list(results.arms)
    if len(arms) <= MAX_ALL_SHOWN:
        return arms
    return [*ranking(results), *(arm for arm in arms if arm not in ranking(results))]


def frontier_chart(results: ComparisonResults, drawn: Mapping[str, Style]) -> Chart:
    """Plot the judge's score against KL: every evaluation of every arm and seed, and best-of-n's curve."""
    figure = go.Figure(layout={"hovermode": "closest", "height": 440, "showlegend": True})
    for arm, style in drawn.items():
        first = True
        for rows in by_seed(results, arm).values():
            points = [row for row in rows if row.measures.kl is not None]
            figure.add_trace(_seed_trace(arm, points, style, showlegend=first))
            first = False
        if arm in results.best_of_n:
            figure.add_trace(_curve_trace(arm, results.best_of_n[arm], style))
    if results.exact_frontier:
        figure.add_trace(_exact_trace(results.exact_frontier))
    score = results.start_model.measures.score
    point = go.Scatter(x=[0.0], y=[score], mode="markers", name="start", meta={"role": "target"})
    figure.add_trace(point.update(marker={"size": 12, "symbol": "diamond"}))
    figure.update_xaxes(title="KL to the start model, nats per sequence").update_yaxes(title="judge's score")
    return Chart("frontier", "Score against KL", "", to_json(figure))


def curve_charts(results: ComparisonResults, drawn: Mapping[str, Style]) -> list[Chart]:
    """Plot the learning curves over the budget's unit.

    Each curve is the mean over seeds, with a band from the lowest seed to the highest.
    """
    unit = results.budget.unit
    charts = []
    for name, title, axis in CURVES:
        figure = go.Figure(layout={"showlegend": True})
        for arm, style in drawn.items():
            points = seed_means(by_seed(results, arm), name, unit)
            if points:
                _add_band(figure, arm, points, style)
        if figure.data:
            figure.update_xaxes(title=UNITS[unit])
            charts.append(Chart(f"curve:{name}", title, axis, to_json(figure)))
    return charts


def proxy_charts(results: ComparisonResults, drawn: Mapping[str, Style]) -> list[Chart]:
    """Plot each arm's gain over the start in both scores, each in its own unit; crosses mark gaming."""
    return [chart for arm in drawn if (chart := _proxy_chart(results, arm)) is not None]


def reward_hacking_points(results: ComparisonResults, arm: str) -> list[tuple[float, float]]:
    """Find the evaluations that game the reward: the proxy is up and the judge's score is down from its best.

    Returns:
        (cost, judge's score) of each of them.
    """
    rows = proxy_rows(results, arm)
    margins = [MARGIN_SE * row.score_std / sqrt(results.prompts) for row in rows]
    marked = overoptimized([row.proxy for row in rows], [row.score for row in rows], margins)
    return [(row.cost, row.score) for row, mark in zip(rows, marked, strict=True) if mark]


def by_seed(results: ComparisonResults, arm: str) -> dict[int, list[Evaluation]]:
    """Group the evaluations of an arm by seed, in order."""
    seeds: dict[int, list[Evaluation]] = {}
    for row in results.evaluations:
        if row.arm == arm:
            seeds.setdefault(row.seed, []).append(row)
    return seeds


def seed_means(
    seeds: Mapping[int, Sequence[Evaluation]], name: str, unit: BudgetUnit
) -> list[tuple[float, float, float, float]]:
    """Compute (mean cost, mean, lowest, highest) for each evaluation that every seed has reached."""
    points = []
    for rows in zip(*seeds.values(), strict=False):
        values = _measured(rows, name)
        if len(values) == len(rows):
            points.append((fmean(row.costs.amount(unit) for row in rows), fmean(values), min(values), max(values)))
    return points


def _measured(rows: Sequence[Evaluation], name: str) -> list[float]:
    """Return the values of a measure, without the evaluations that did not measure it."""
    return [value for row in rows if (value := row.measures.value(name)) is not None]


def _seed_trace(arm: str, points: Sequence[Evaluation], style: Style, *, showlegend: bool) -> go.Scatter:
    sizes = [5] * (len(points) - 1) + [11] if points else []
    trace = go.Scatter(
        x=[row.measures.kl for row in points],
        y=[row.measures.score for row in points],
        text=[f"{arm}, seed {row.seed}, step {row.step}" for row in points],
        name=arm,
        legendgroup=arm,
        showlegend=showlegend,
        mode="lines+markers",
        meta={"role": style.role},
    )
    return trace.update(
        line={"width": 1, "dash": style.dash}, marker={"size": sizes, "symbol": style.symbol}, hovertemplate=_HOVER
    )


def _curve_trace(arm: str, curve: Sequence[CurvePoint], style: Style) -> go.Scatter:
    trace = go.Scatter(
        x=[point.kl for point in curve],
        y=[point.score for point in curve],
        text=[f"best of {point.n:g} (KL: its bound)" for point in curve],
        name=arm,
        legendgroup=arm,
        mode="lines+markers",
        meta={"role": style.role},
    )
    return trace.update(
        line={"width": 2.5, "dash": "dot"}, marker={"size": 5, "symbol": style.symbol}, hovertemplate=_HOVER
    )


def _exact_trace(curve: Sequence[FrontierPoint]) -> go.Scatter:
    xs, ys = [point.kl for point in curve], [point.score for point in curve]
    trace = go.Scatter(x=xs, y=ys, name=EXACT, mode="lines", text=[EXACT] * len(xs), meta={"role": "target"})
    return trace.update(line={"width": 2.5, "dash": "dash"}, hovertemplate=_HOVER)


_HOVER = "%{text}<br>score %{y:.3f}<br>KL %{x:.2f}<extra></extra>"


def _add_band(figure: go.Figure, arm: str, points: Sequence[tuple[float, float, float, float]], style: Style) -> None:
    xs = [x for x, _, _, _ in points]
    if any(high > low for _, _, low, high in points):
        edge = [high for _, _, _, high in points] + [low for _, _, low, _ in reversed(points)]
        band = go.Scatter(x=xs + xs[::-1], y=edge, fill="toself", mode="lines", name=arm, legendgroup=arm)
        figure.add_trace(band.update(line={"width": 0}, showlegend=False, hoverinfo="skip", meta={"role": style.role}))
    line = go.Scatter(x=xs, y=[mean for _, mean, _, _ in points], name=arm, legendgroup=arm, mode="lines+markers")
    marker = {"size": 5, "symbol": style.symbol}
    line.update(line={"width": 2, "dash": style.dash}, marker=marker, meta={"role": style.role})
    figure.add_trace(line)


@dataclass(frozen=True)
class ProxyPoint:
    """The means over seeds of an evaluation that has both scores."""

    cost: float
    proxy: float
    score: float
    score_std: float


def proxy_rows(results: ComparisonResults, arm: str) -> list[ProxyPoint]:
    """Compute the means over seeds of the evaluations that have both scores."""
    rows = []
    for group in zip(*by_seed(results, arm).values(), strict=False):
        proxies, scores, stds = (_measured(group, name) for name in ("proxy", "score", "score_std"))
        if len(proxies) == len(scores) == len(stds) == len(group):
            cost = fmean(row.costs.amount(results.budget.unit) for row in group)
            rows.append(ProxyPoint(cost, fmean(proxies), fmean(scores), fmean(stds)))
    return rows


def _proxy_chart(results: ComparisonResults, arm: str) -> Chart | None:
    rows = proxy_rows(results, arm)
    if len(rows) < 2:
        return None
    figure = go.Figure(layout={"showlegend": True})
    xs = [row.cost for row in rows]
    judged, rewarded = [row.score - rows[0].score for row in rows], [row.proxy - rows[0].proxy for row in rows]
    for gains, label, role in ((judged, "judge", "s1"), (rewarded, "trained-on reward", "s2")):
        line = go.Scatter(x=xs, y=gains, name=label, mode="lines+markers", meta={"role": role})
        figure.add_trace(line.update(marker={"size": 4}))
    marked = reward_hacking_points(results, arm)
    if marked:
        crosses = go.Scatter(
            x=[cost for cost, _ in marked],
            y=[score - rows[0].score for _, score in marked],
            mode="markers",
            name="reward up, judge down",
            meta={"role": "s7"},
        )
        figure.add_trace(crosses.update(marker={"size": 11, "symbol": "x"}))
    figure.update_xaxes(title=UNITS[results.budget.unit])
    return Chart(f"proxy:{arm}", arm, "gain over the start, each in its own score", to_json(figure))
