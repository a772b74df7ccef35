"""Write the report.html of a comparison: its charts, computed once from its results, its tables, and its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlhf.comparison.aggregate import CellResult
from rlhf.comparison.costs import UNITS
from rlhf.comparison.plan import CellPlan
from rlhf.comparison.results import ComparisonResults, CurvePoint, Evaluation, FrontierPoint, Measures
from rlhf.comparison.rows import browser_data
from rlhf.comparison.summary import (
    budget_in_words,
    cost_table,
    difference_tables,
    end_table,
    equal_kl_table,
    few_prompts_note,
    notes,
    parallel_note,
    ranking,
    suite_tables,
    verdict,
)
from rlhf.comparison.tuning.run import trial_tables, tuning_in_words, tuning_notes, tuning_table
from rlhf.config.compare import START_FOLDER, BudgetUnit
from rlhf.config.load import dump
from rlhf.config.sections import TrainConfig
from rlhf.evaluation.frontier import overoptimized
from rlhf.report.charts import DASHES, ROLES, Axis, Chart, Series, Table
from rlhf.report.page import pair_details, write_page
from rlhf.tracking.exported import rounding_warnings
from rlhf.tracking.metrics import shown_in
from rlhf.tracking.redact import redact, redact_text
from rlhf.tracking.trackers import flatten

REPORT = "report.html"
PROMPTS = 8  # whose completions are shown side by side
FIRST_PROMPTS = 3  # shown unfolded; the others are folded
GLYPHS = {
    **{"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"},
    **{"triangle-down": "▼", "cross": "✚", "x": "✖", "star": "★"},
}


def write_compare_page(
    plan: CellPlan,
    results: ComparisonResults,
    charts: ComparisonCharts,
    cells: Sequence[CellResult],
) -> Path:
    """Write report.html into the comparison's folder and return its path.

    Args:
        plan: the comparison.
        results: its results.
        charts: its charts.
        cells: the contents of each cell's folder.
    """
    configs = {name: plan.of(name)[0].config.train for name, arm in results.arms.items() if arm.type == "train"}
    caveats = [*notes(results), *tuning_notes(results), *parallel_note(plan.config.jobs)]
    caveats += rounding_warnings({result.cell.label: result.cell.run_folder for result in cells})
    caveats += few_prompts_note({name: arm.eval_prompts for name, arm in results.arms.items()}, results.prompts)
    return write_page(
        plan.folder / REPORT,
        "compare.html.j2",
        [charts.frontier, *charts.curves, *charts.proxies],
        scripts=["rows.js"],
        title=results.name,
        facts=_facts(results),
        verdict=verdict(results),
        notes=caveats,
        tuning=tuning_table(results),
        tuning_in_words=tuning_in_words(results),
        trials=trial_tables(results),
        charts=charts,
        chips=chips(results, charts.drawn),
        glyphs=GLYPHS,
        exact=bool(results.exact_frontier),
        axis=UNITS[results.budget.unit],
        end=end_table(results),
        suites=suite_tables(results),
        suite_differences=difference_tables(results),
        equal_kl=equal_kl_table(results),
        cost=cost_table(results),
        gamed=[arm for arm in results.arms if reward_hacking_points(results, arm)],
        prompts=side_by_side(list(results.arms), cells),
        first_prompts=FIRST_PROMPTS,
        rows=browser_data(cells),
        details=pair_details,
        differing=difference_table(configs),
        configs={
            name: yaml.safe_dump(redact(dump(config)), sort_keys=False, width=88) for name, config in configs.items()
        },
    )


def chips(results: ComparisonResults, drawn: Mapping[str, Style]) -> list[Style]:
    """List the arms that get a button to show or hide them: those with anything to show.

    There is none if one chart has room for all arms.
    """
    if all(style.shown for style in drawn.values()):
        return []
    with_data = {row.arm for row in results.evaluations} | set(results.best_of_n)
    return [style for arm, style in drawn.items() if arm in with_data]


@dataclass(frozen=True)
class PromptCompletions:
    """The completions of one prompt: (arm, its record in judged.json)."""

    prompt: str
    completions: list[tuple[str, Mapping[str, Any]]]


def side_by_side(arms: Sequence[str], cells: Sequence[CellResult]) -> list[PromptCompletions]:
    """Collect the completions of the first held-out prompts by the start model and every arm.

    Each arm shows the model of its first finished cell.
    """
    judged: dict[str, Sequence[Mapping[str, Any]]] = {}
    for arm in (START_FOLDER, *arms):
        first = next((result for result in cells if result.cell.arm == arm and result.judged is not None), None)
        if first is not None and first.judged is not None:
            judged[arm] = first.judged.rows
    if START_FOLDER not in judged:
        return []
    return [
        PromptCompletions(row["prompt"], [(arm, rows[i]) for arm, rows in judged.items()])
        for i, row in enumerate(judged[START_FOLDER][:PROMPTS])
    ]


def difference_table(configs: Mapping[str, TrainConfig]) -> Table | None:
    """Build the table of the settings on which two trained arms disagree; None with fewer than two arms."""
    if len(configs) < 2:
        return None
    settings = differences(configs)
    rows = [[key, *(_shown(key, values, arm) for arm in configs)] for key, values in settings.items()]
    return Table("Settings that differ", ["", *configs], rows)


def _shown(key: str, values: Mapping[str, Any], arm: str) -> str:
    if arm not in values:
        return "–"
    name = key.rpartition(".")[2]
    value = redact({name: values[arm]})[name]
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _facts(results: ComparisonResults) -> list[tuple[str, str]]:
    source, tuning = results.reward_source, results.tuning
    return [
        ("budget", budget_in_words(results.budget)),
        ("seeds", ", ".join(map(str, results.seeds))),
        ("held-out prompts", f"{results.prompts:,}"),
        ("start", results.start),
        ("judge", redact_text(results.judge.describe())),
        ("trained-on reward", redact_text(source.describe()) if source is not None else "none"),
        *([("tuning", f"{tuning.trials} trials for each trained arm")] if tuning is not None else []),
    ]


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
MAX_ALL_SHOWN = 8  # arms that fit on one chart; of more than that, the best SHOWN are shown at first
INITIALLY_SHOWN = 6
EXACT = "exact optimum"
MARGIN_SE = 2.0  # standard errors by which the gold must have fallen to be marked as gaming


@dataclass(frozen=True)
class Style:
    """The style of an arm in every chart: a color of the page, a symbol, and another dash after every eight arms.

    Of 64 arms no two have color and symbol in common; of the first eight no two have either.
    """

    arm: str
    role: str
    dash: str
    symbol: str
    shown: bool  # at first, if the page has room for some arms only

    def series(self, xs: Sequence[float], ys: Sequence[float | None]) -> Series:
        """Draw points of the arm."""
        return Series(self.arm, self.role, xs, ys, dash=self.dash, symbol=self.symbol, size=5, group=self.arm)


@dataclass(frozen=True)
class Win:
    """The win rate of the row against the column, in percent; None on the diagonal and if no seed is in common."""

    share: int | None
    low: int = 0
    high: int = 0

    @property
    def clear(self) -> bool:
        """Return whether the interval excludes 50 %."""
        return self.share is not None and not self.low <= 50 <= self.high


@dataclass(frozen=True)
class ComparisonCharts:
    """The charts of a comparison's page."""

    drawn: Mapping[str, Style]  # by arm, in the order in which they are drawn
    frontier: Chart
    curves: Sequence[Chart]  # one for each measure
    proxies: Sequence[Chart]  # one for each arm
    wins: Sequence[tuple[str, Sequence[Win]]]  # by arm, against each arm


def comparison_charts(results: ComparisonResults) -> ComparisonCharts:
    """Compute everything that is drawn of a comparison."""
    drawn = styles(drawing_order(results))
    return ComparisonCharts(
        drawn=drawn,
        frontier=frontier_chart(results, drawn),
        curves=curve_charts(results, drawn),
        proxies=[chart for arm in drawn if (chart := _proxy_chart(results, arm)) is not None],
        wins=win_matrix(results),
    )


def styles(arms: Sequence[str]) -> dict[str, Style]:
    """Assign each arm a style, the same in every chart."""
    shown = INITIALLY_SHOWN if len(arms) > MAX_ALL_SHOWN else MAX_ALL_SHOWN
    return {
        arm: Style(arm, f"s{i % ROLES + 1}", DASHES[i // ROLES % 4], SYMBOLS[(i + i // ROLES) % ROLES], i < shown)
        for i, arm in enumerate(arms)
    }


def drawing_order(results: ComparisonResults) -> list[str]:
    """Return the arms in the order in which they are drawn.

    That is their order in results.json; if there are more than MAX_ALL_SHOWN, the best come first, so that those
    shown at first look least alike.
    """
    arms = list(results.arms)
    if len(arms) <= MAX_ALL_SHOWN:
        return arms
    return [*ranking(results), *(arm for arm in arms if arm not in ranking(results))]


def frontier_chart(results: ComparisonResults, drawn: Mapping[str, Style]) -> Chart:
    """Plot the judge's score against KL: every evaluation of every arm and seed, and best-of-n's curve."""
    series: list[Series] = []
    for arm, style in drawn.items():
        lines = [_seed_series(style, rows) for rows in by_seed(results, arm).values() if _with_kl(rows)]
        if curve := results.best_of_n.get(arm):
            texts = [f"best of {point.n:g} (KL: its bound)" for point in curve]
            lines.append(replace(style.series(*_points(curve)), width=2.5, dash="dot", texts=texts))
        series += [replace(line, in_legend=number == 0) for number, line in enumerate(lines)]
    if exact := results.exact_frontier:
        texts = [EXACT] * len(exact)
        series.append(Series(EXACT, "target", *_points(exact), width=2.5, dash="dash", texts=texts))
    start = results.start_model.measures.score
    series.append(Series("start", "target", [0.0], [start], width=0, size=12, symbol="diamond"))
    x, y = Axis("KL to the start model", "nats per sequence", short="KL"), Axis("judge's score", short="score")
    return Chart("frontier", "Score against KL", x, y, series, by_point=True)


def _seed_series(style: Style, rows: Sequence[Evaluation]) -> Series:
    """Draw the evaluations of a seed that have a KL, the last one larger."""
    rows = _with_kl(rows)
    line = style.series(*_points([row.measures for row in rows]))
    texts = [f"{row.arm}, seed {row.seed}, step {row.step}" for row in rows]
    return replace(line, width=1, size=[5] * (len(rows) - 1) + [11], texts=texts)


def _with_kl(rows: Sequence[Evaluation]) -> list[Evaluation]:
    return [row for row in rows if row.measures.kl is not None]


def _points(points: Sequence[Measures | CurvePoint | FrontierPoint]) -> tuple[list[float], list[float | None]]:
    return [point.kl for point in points if point.kl is not None], [point.score for point in points]


def curve_charts(results: ComparisonResults, drawn: Mapping[str, Style]) -> list[Chart]:
    """Plot the learning curves over the budget's unit.

    Each curve is the mean over seeds, with a band from the lowest seed to the highest.
    """
    unit, charts = results.budget.unit, []
    for info, place in shown_in("compare/curve"):
        name, series = info.name.removeprefix("eval/"), []
        for arm, style in drawn.items():
            if points := seed_means(finished_seeds(results, arm), name, unit):
                band = [(low, high) for _, _, low, high in points]
                line = style.series([x for x, _, _, _ in points], [mean for _, mean, _, _ in points])
                series.append(replace(line, band=band if any(high > low for low, high in band) else ()))
        if series:
            x, y = Axis(UNITS[unit]), Axis(unit=info.unit)
            charts.append(Chart(f"curve:{name}", place.title, x, y, series))
    return charts


def reward_hacking_points(results: ComparisonResults, arm: str) -> list[tuple[float, float]]:
    """Find the evaluations that game the reward: the proxy is up and the judge's score is down from its best.

    Returns:
        (cost, judge's score) of each of them.
    """
    rows, limit = proxy_rows(results, arm), results.arms[arm].eval_prompts
    prompts = results.prompts if limit is None else min(limit, results.prompts)
    margins = [MARGIN_SE * row.score_std / sqrt(prompts - row.unjudged) for row in rows]
    marked = overoptimized([row.proxy for row in rows], [row.score for row in rows], margins)
    return [(row.cost, row.score) for row, mark in zip(rows, marked, strict=True) if mark]


def by_seed(results: ComparisonResults, arm: str) -> dict[int, list[Evaluation]]:
    """Group the evaluations of an arm by seed, in order."""
    seeds: dict[int, list[Evaluation]] = {}
    for row in results.evaluations:
        if row.arm == arm:
            seeds.setdefault(row.seed, []).append(row)
    return seeds


def finished_seeds(results: ComparisonResults, arm: str) -> dict[int, list[Evaluation]]:
    """Group the evaluations of an arm by seed: only its finished seeds, but all seeds as long as none is finished.

    A mean over seeds ends with the shortest one, so a seed that failed early would cut the curve of the others.
    """
    seeds = by_seed(results, arm)
    done = {seed.seed for seed in results.arms[arm].seeds if seed.is_judged} if arm in results.arms else set()
    return {seed: rows for seed, rows in seeds.items() if seed in done} or seeds


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


@dataclass(frozen=True)
class ProxyPoint:
    """The means over seeds of an evaluation that has both scores."""

    cost: float
    proxy: float
    score: float
    score_std: float
    unjudged: float


def proxy_rows(results: ComparisonResults, arm: str) -> list[ProxyPoint]:
    """Compute the means over seeds of the evaluations that have both scores."""
    rows = []
    for group in zip(*finished_seeds(results, arm).values(), strict=False):
        proxies, scores, stds = (_measured(group, name) for name in ("proxy", "score", "score_std"))
        if len(proxies) == len(scores) == len(stds) == len(group):
            cost = fmean(row.costs.amount(results.budget.unit) for row in group)
            unjudged = fmean(row.measures.unjudged or 0.0 for row in group)
            rows.append(ProxyPoint(cost, fmean(proxies), fmean(scores), fmean(stds), unjudged))
    return rows


def _proxy_chart(results: ComparisonResults, arm: str) -> Chart | None:
    """Plot an arm's gain over the start in both scores, each in its own unit; crosses mark gaming."""
    rows = proxy_rows(results, arm)
    if len(rows) < 2:
        return None
    xs = [row.cost for row in rows]
    judged, rewarded = [row.score - rows[0].score for row in rows], [row.proxy - rows[0].proxy for row in rows]
    series = [Series("judge", "s1", xs, judged, size=4), Series("trained-on reward", "s2", xs, rewarded, size=4)]
    if marked := reward_hacking_points(results, arm):
        costs, gains = [cost for cost, _ in marked], [score - rows[0].score for _, score in marked]
        series.append(Series("reward up, judge down", "s7", costs, gains, width=0, size=11, symbol="x"))
    y = Axis(unit="gain over the start, each in its own score", short="gain")
    return Chart(f"proxy:{arm}", arm, Axis(UNITS[results.budget.unit]), y, series)


def win_matrix(results: ComparisonResults) -> list[tuple[str, list[Win]]]:
    """Build the matrix of win rates: (arm, its Win against each arm), both in the order of their scores.

    It is empty if no two arms can be compared.
    """
    if not results.win_rates:
        return []
    wins: dict[tuple[str, str], Win] = {}
    for row in results.win_rates:
        value, low, high = (100 * share for share in (row.rate.value, row.rate.low, row.rate.high))
        wins[row.a, row.b] = Win(round(value), round(low), round(high))
    arms = ranking(results)
    return [(a, [wins.get((a, b), Win(None)) for b in arms]) for a in arms]


PER_CELL_KEYS = ("run.name", "run.out_dir", "run.seed")  # differ between any two cells


def differences(configs: Mapping[str, TrainConfig]) -> dict[str, dict[str, Any]]:
    """Return dotted key -> arm -> value, for every key that some arm sets and on which two arms disagree.

    An arm has no value for the keys of a section that it does not read.
    """
    settings_of = {arm: _settings_read(config) for arm, config in configs.items()}
    given = [flatten(config.model_dump(mode="json", exclude_unset=True)) for config in configs.values()]
    keys = dict.fromkeys(key for settings in given for key in settings)
    missing = object()
    return {
        key: {arm: settings[key] for arm, settings in settings_of.items() if key in settings}
        for key in keys
        if key not in PER_CELL_KEYS and len({repr(settings.get(key, missing)) for settings in settings_of.values()}) > 1
    }


def _settings_read(config: TrainConfig) -> dict[str, object]:
    """Return every key, defaults included, of the sections and data sets that are set."""
    tree = {section: value for section, value in dump(config).items() if section in config.model_fields_set}
    data = {name: value for name, value in tree.get("data", {}).items() if name in config.data.model_fields_set}
    return flatten({**tree, "data": data})
