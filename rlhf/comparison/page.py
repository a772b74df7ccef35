"""Write the report.html of a comparison: one self-contained page from its results and the cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.comparison.aggregate import CellResult
from rlhf.comparison.charts import ComparisonCharts, Style, reward_hacking_points
from rlhf.comparison.costs import UNITS
from rlhf.comparison.plan import Plan
from rlhf.comparison.results import ComparisonResults
from rlhf.comparison.summary import (
    budget_in_words,
    cost_table,
    end_table,
    equal_kl_table,
    notes,
    parallel_note,
    suite_tables,
    verdict,
)
from rlhf.comparison.tuning.tables import trial_tables, tuning_in_words, tuning_notes, tuning_table
from rlhf.config.compare import START_FOLDER
from rlhf.config.load import dump
from rlhf.config.reward import FunctionSource, ModelSource, RemoteSource, RewardSourceConfig
from rlhf.config.sections import TrainConfig
from rlhf.report.page import pair_details, write_page
from rlhf.report.report_card import Table
from rlhf.tracking.trackers import flatten

PER_CELL_KEYS = ("run.name", "run.out_dir", "run.seed")  # differ between any two cells


def differences(configs: Mapping[str, TrainConfig]) -> dict[str, dict[str, Any]]:
    """Return dotted key -> arm -> value, for every key that some arm sets and on which two arms disagree.

    An arm has no value for the keys of a section that it does not read.
    """
    settings_of = {arm: _settings_read(config) for arm, config in configs.items()}
    keys = dict.fromkeys(key for config in configs.values() for key in _settings_set(config))
    missing = object()
    return {
        key: {arm: settings[key] for arm, settings in settings_of.items() if key in settings}
        for key in keys
        if key not in PER_CELL_KEYS and len({repr(settings.get(key, missing)) for settings in settings_of.values()}) > 1
    }


def _settings_set(config: TrainConfig) -> dict[str, object]:
    """Return the keys that the files or a preset set."""
    return flatten(config.model_dump(mode="json", exclude_unset=True))


def _settings_read(config: TrainConfig) -> dict[str, object]:
    """Return every key, defaults included, of the sections and data sets that are set."""
    tree = {section: value for section, value in dump(config).items() if section in config.model_fields_set}
    data = {name: value for name, value in tree.get("data", {}).items() if name in config.data.model_fields_set}
    return flatten({**tree, "data": data})


REPORT = "report.html"
PROMPTS = 8  # whose completions are shown side by side
FIRST_PROMPTS = 3  # shown unfolded; the others are folded
FIGURES = "figures"  # the folder of the figures for print
GLYPHS = {
    **{"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲"},
    **{"triangle-down": "▼", "cross": "✚", "x": "✖", "star": "★"},
}


def write_compare_page(
    plan: Plan,
    results: ComparisonResults,
    charts: ComparisonCharts,
    cells: Sequence[CellResult],
    drawings: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write report.html into the comparison's folder and return its path.

    Args:
        plan: the comparison.
        results: its results.
        charts: what is drawn of them.
        cells: what each cell's folder contains.
        drawings: the figures that write_figures drew: (name of the files without suffix, title).
    """
    configs = {name: plan.of(name)[0].config.train for name, arm in results.arms.items() if arm.type == "train"}
    return write_page(
        plan.folder / REPORT,
        "compare.html.j2",
        [charts.frontier, *charts.curves, *charts.proxies],
        title=results.name,
        facts=_facts(results),
        verdict=verdict(results),
        notes=[*notes(results), *tuning_notes(results), *parallel_note(plan.config.jobs)],
        tuning=tuning_table(results),
        tuning_in_words=tuning_in_words(results),
        trials=trial_tables(results),
        charts=charts,
        chips=chips(results, charts.drawn),
        glyphs=GLYPHS,
        figures_in=FIGURES,
        drawings=drawings,
        exact=bool(results.exact_frontier),
        axis=UNITS[results.budget.unit],
        end=end_table(results),
        suites=suite_tables(results),
        equal_kl=equal_kl_table(results),
        cost=cost_table(results),
        gamed=[arm for arm in results.arms if reward_hacking_points(results, arm)],
        prompts=side_by_side(list(results.arms), cells),
        first_prompts=FIRST_PROMPTS,
        details=pair_details,
        differing=difference_table(configs),
        configs={name: yaml.safe_dump(dump(config), sort_keys=False, width=88) for name, config in configs.items()},
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

    Each model is that of its first finished cell.
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
    rows = [[key, *(_shown(values, arm) for arm in configs)] for key, values in settings.items()]
    return Table("Settings that differ", ["", *configs], rows)


def _shown(values: Mapping[str, Any], arm: str) -> str:
    if arm not in values:
        return "–"
    value = values[arm]
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _facts(results: ComparisonResults) -> list[tuple[str, str]]:
    source, tuning = results.reward_source, results.tuning
    return [
        ("budget", budget_in_words(results.budget)),
        ("seeds", ", ".join(map(str, results.seeds))),
        ("held-out prompts", f"{results.prompts:,}"),
        ("start", results.start),
        ("judge", _source(results.judge)),
        ("trained-on reward", _source(source) if source is not None else "none"),
        *([("tuning", f"{tuning.trials} trials for each trained arm")] if tuning is not None else []),
    ]


def _source(source: RewardSourceConfig) -> str:
    """Describe a reward source: its function, its path or its address, otherwise its type."""
    match source:
        case FunctionSource():
            return source.target
        case ModelSource():
            return source.path
        case RemoteSource():
            return source.url
        case _:
            return source.type
