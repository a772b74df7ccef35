"""report.html of a comparison: one self-contained page from results.json's content and the cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.compare.charts import (
    AXES,
    FEW,
    SHOWN,
    Style,
    curve_charts,
    drawing_order,
    frontier_chart,
    gaming,
    proxy_charts,
    styles,
)
from rlhf.compare.differences import differences
from rlhf.compare.plan import Plan
from rlhf.compare.results import Found
from rlhf.compare.words import at_once, cost_table, end_table, equal_kl_table, notes, ranking, suite_tables, verdict
from rlhf.config.compare import START
from rlhf.config.load import dump
from rlhf.evaluation.report import pair_details
from rlhf.evaluation.report_card import Table
from rlhf.evaluation.report_page import write_page

REPORT = "report.html"
PROMPTS = 8  # shown side by side
FIRST_PROMPTS = 3  # shown at once; the rest is folded
FIGURES = "figures"  # the folder of drawings for print
GLYPHS = {
    **{"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"},
    **{"triangle-down": "▼", "cross": "✚", "x": "✖", "star": "★"},
}

Json = dict[str, Any]


def write_compare_page(
    plan: Plan, results: Json, cells: Sequence[Found], drawings: Sequence[tuple[str, str]] = ()
) -> Path:
    """Write report.html into the comparison's folder and return its path.

    `drawings` are the figures that write_figures drew: (name of the file, less its ending; title).
    """
    drawn = styles(drawing_order(results))
    frontier, curves, proxies = (
        frontier_chart(results, drawn),
        curve_charts(results, drawn),
        proxy_charts(results, drawn),
    )
    configs = {name: plan.of(name)[0].config.train for name, arm in results["arms"].items() if arm["type"] == "train"}
    return write_page(
        plan.folder / REPORT,
        "compare.html.j2",
        [frontier, *curves, *proxies],
        title=results["name"],
        facts=_facts(results),
        verdict=verdict(results),
        notes=[*notes(results), *at_once(plan.config.jobs)],
        frontier=frontier,
        chips=chips(results, drawn),
        figures_in=FIGURES,
        drawings=drawings,
        exact=bool(results.get("exact_frontier")),
        curves=curves,
        axis=AXES[results["budget"]["unit"]],
        matrix=win_matrix(results),
        end=end_table(results),
        suites=suite_tables(results),
        equal_kl=equal_kl_table(results),
        cost=cost_table(results),
        proxies=proxies,
        gamed=[arm for arm in results["arms"] if gaming(results, arm)],
        prompts=side_by_side(list(results["arms"]), cells),
        first_prompts=FIRST_PROMPTS,
        details=pair_details,
        differing=difference_table(configs),
        configs={name: yaml.safe_dump(dump(config), sort_keys=False, width=88) for name, config in configs.items()},
    )


@dataclass(frozen=True)
class Chip:
    """A button that shows or hides an arm."""

    arm: str
    role: str
    glyph: str
    shown: bool


def chips(results: Json, drawn: Mapping[str, Style]) -> list[Chip]:
    """A button for each arm that has anything to show, the best on at first; none where a chart has room for all."""
    if len(drawn) <= FEW:
        return []
    begun = {row["arm"] for row in results["evaluations"]} | set(results["best_of_n"])
    return [
        Chip(arm, style.role, GLYPHS[style.symbol], place < SHOWN)
        for place, (arm, style) in enumerate(drawn.items())
        if arm in begun
    ]


@dataclass(frozen=True)
class Win:
    """How often the row wins against the column, in percent; None on the diagonal and where no seed is in common."""

    share: int | None
    low: int = 0
    high: int = 0

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 50 %."""
        return self.share is not None and not self.low <= 50 <= self.high


def win_matrix(results: Json) -> list[tuple[str, list[Win]]]:
    """(arm, a Win against each arm), both in the order of their scores."""
    found = {
        (row["a"], row["b"]): Win(*(round(100 * row[key]) for key in ("value", "low", "high")))
        for row in results["win_rates"]
    }
    arms = ranking(results)
    return [(a, [found.get((a, b), Win(None)) for b in arms]) for a in arms]


def side_by_side(arms: Sequence[str], cells: Sequence[Found]) -> list[Json]:
    """The first held-out prompts with the completion of the start model and of every arm, all of the same seed."""
    judged: dict[str, Sequence[Any]] = {}
    for arm in (START, *arms):
        first = next((one for one in cells if one.cell.arm == arm and one.judged is not None), None)
        if first is not None and first.judged is not None:
            judged[arm] = first.judged.rows
    if START not in judged:
        return []
    return [
        {"prompt": row["prompt"], "completions": [(arm, rows[i]) for arm, rows in judged.items()]}
        for i, row in enumerate(judged[START][:PROMPTS])
    ]


def difference_table(configs: Json) -> Table | None:
    """Every setting on which two trained arms disagree; None with fewer than two."""
    if len(configs) < 2:
        return None
    found = differences(configs)
    rows = [[key, *(_shown(values, arm) for arm in configs)] for key, values in found.items()]
    return Table("Settings that differ", ["", *configs], rows)


def _shown(values: Json, arm: str) -> str:
    if arm not in values:
        return "–"
    value = values[arm]
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _facts(results: Json) -> list[tuple[str, str]]:
    budget = results["budget"]
    judge, source = results["judge"], results["reward_source"]
    found = [
        ("budget", f"{budget['limit']:,.0f} {AXES[budget['unit']]}"),
        ("seeds", ", ".join(map(str, results["seeds"]))),
        ("held-out prompts", f"{results['prompts']:,}"),
        ("start", results["start"]),
        ("judge", _source(judge)),
        ("trained-on reward", _source(source) if source else "none"),
    ]
    return [(name, str(value)) for name, value in found]


def _source(source: Json) -> str:
    return str(source.get("target") or source.get("path") or source.get("url") or source["type"])
