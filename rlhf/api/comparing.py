"""A comparison: several algorithms from the same start model, on one budget, under one judge; resumable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.api.checks import check_arm_files
from rlhf.api.lab import check_lab_folder, prepare_lab
from rlhf.comparison.aggregate import read_cells, summarize, write_results
from rlhf.comparison.page import comparison_charts, write_compare_page
from rlhf.comparison.pairs import judge_pairs
from rlhf.comparison.plan import Cell, Plan, check_owner, locate_base, make_plan, read_plan, trained_arms
from rlhf.comparison.results import ArmResult, ComparisonResults, FrontierPoint
from rlhf.comparison.scheduler import CellProcess, StartCell, run_cells
from rlhf.comparison.summary import format_gain, ranking, suite_tables, verdict
from rlhf.comparison.tuning.plan import tuned_config
from rlhf.comparison.tuning.run import Chosen, run_tuning, tuning_notes, tuning_table
from rlhf.config.compare import START_FOLDER, CompareConfig, LabConfig
from rlhf.config.files import COMPARE_CONFIG, format_yaml
from rlhf.config.load import compare_config, dump, read_yaml
from rlhf.data.paths import Lookups
from rlhf.errors import ConfigError, UserError, how_to_continue
from rlhf.factory.functions import check_functions
from rlhf.guard.lint import lint
from rlhf.models.folders import MODEL
from rlhf.report.charts import Table as SuiteTable
from rlhf.report.terminal import print_violations
from rlhf.runtime.distributed import world_size_from_env
from rlhf.tracking.progress import printable
from rlhf.tracking.run_folder import write_atomically

EXACT_FRONTIER = "exact_frontier.json"


def run_compare(config: CompareConfig, *, beside: Path, console: Console, start: StartCell | None = None) -> bool:
    """Run the unfinished cells of a comparison, and write its results and page.

    The lab is prepared first, if the comparison uses it.

    Args:
        config: the comparison.
        beside: the folder of the comparison's file, where its base configuration is looked for too.
        console: where progress and results are printed.
        start: starts a cell; None starts each in its own process.

    Returns:
        True if every cell was run or tried, False if the user stopped the comparison.

    Raises:
        UserError: the comparison is invalid. An arm that fails is not an error.
    """
    if world_size_from_env() > 1:
        raise ConfigError(
            "rlhf compare starts the processes of each arm itself: run it without a launcher, processes=N"
        )
    plan = make_plan(config, beside=beside)
    print_violations({name: lint(run) for name, run in trained_arms(plan).items()}, console)
    check_arms(plan)
    if config.lab is not None:
        if not _prepare_lab(config.lab, console):
            return False
        check_arm_files(plan)
    for cell in plan.untuned():
        check_owner(cell)  # of all cells, before anything in the folder changes
    plan.folder.mkdir(parents=True, exist_ok=True)
    settings = {**dump(config), "base": str(locate_base(config, beside))}
    write_atomically(plan.folder / COMPARE_CONFIG, format_yaml(settings))
    start = start or partial(CellProcess, jobs=config.jobs, processes=config.processes)
    complete = True
    if config.tune is not None:
        chosen = _tune(plan, start, console)
        complete = chosen is not None
        plan = make_plan(tuned_config(config, chosen or {}), beside=beside, trials=False)
    complete = complete and run_cells(plan, start, console)
    if not complete:
        console.print(f"stopped; {how_to_continue()} from here")
    try:
        if complete:
            judge_pairs(plan)
    finally:  # what was trained is reported, also if the judge of pairs does not answer
        _report(plan, console)
    return complete


def failed_arms(folder: str) -> list[str]:
    """List the arms of a comparison that failed, read from its results; none before there are any."""
    try:
        results = ComparisonResults.read(folder)
    except FileNotFoundError:
        return []
    return [name for name, arm in results.arms.items() if any(seed.status == "failed" for seed in arm.seeds)]


def check_arms(plan: Plan) -> None:
    """Check everything that the arms of a comparison name: folders, files, models, functions, and data of suites.

    What the comparison makes in the lab's folder is not looked for.

    Raises:
        ConfigError: something is missing or wrong, one line for each, with the arm's name.
    """
    lab = plan.config.lab
    check_arm_files(plan, Lookups(later=None if lab is None else Path(lab.folder)), check_functions)


def _tune(plan: Plan, start: StartCell, console: Console) -> Chosen | None:
    """Judge the start model and tune every trained arm; return the values chosen, None if the user stopped it."""
    judged_first = [cell for cell in plan.cells if cell.arm == START_FOLDER]
    if not run_cells(replace(plan, cells=judged_first), start, console):
        return None

    def run(cells: Sequence[Cell], title: str) -> bool:
        console.rule(title)
        return run_cells(replace(plan, cells=list(cells)), start, console)

    return run_tuning(plan, run)


def is_comparison(path: str) -> bool:
    """Return whether a folder holds a comparison."""
    return (Path(path) / COMPARE_CONFIG).is_file()


def rebuild_comparison(path: str, console: Console) -> None:
    """Rebuild results.json, results.parquet and report.html from the folder of a comparison.

    Raises:
        UserError: its start model is not judged yet.
    """
    folder = Path(path)
    _report(read_plan(compare_config(read_yaml(folder / COMPARE_CONFIG)), folder), console, required=True)


def _prepare_lab(lab: LabConfig, console: Console) -> bool:
    """Make the lab's start model, pairs and reward model if any is missing; return False if the user stopped it."""
    folder = Path(lab.folder)
    required = (folder / "sft" / MODEL, folder / "preferences" / "train.jsonl", folder / "rm" / MODEL)
    if all(path.exists() for path in required):
        check_lab_folder(folder, seed=lab.seed, console=console)
        console.print(Text(f"the lab's start model, pairs and reward model: as they are in {folder}"))
        return True
    return prepare_lab(folder, seed=lab.seed, console=console) is not None


def exact_frontier_of(folder: Path) -> tuple[FrontierPoint, ...] | None:
    """Read the exact optimum's curve of score over KL; None if exact_frontier.json is not in the folder.

    Only a task that can be enumerated has one; whoever computed it puts the file there.

    Raises:
        ConfigError: exact_frontier.json is not a list of points with `kl` and `score`.
    """
    path = folder / EXACT_FRONTIER
    if not path.is_file():
        return None
    try:
        points = [
            FrontierPoint(kl=float(point["kl"]), score=float(point["score"])) for point in json.loads(path.read_bytes())
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f'{path} should be a list of points like {{"kl": 1.5, "score": 2.0}}: {error!r}') from error
    return tuple(sorted(points, key=lambda point: point.kl))


def _print_tuning(results: ComparisonResults, console: Console) -> None:
    """Print what tuning changed, without its costs, which the page has."""
    tuning = tuning_table(results)
    if tuning is None:
        return
    shown = [number for number, column in enumerate(tuning.columns) if not column.endswith("for tuning")]
    table = Table(box=None, pad_edge=False)
    for number in shown:
        table.add_column(tuning.columns[number] or "tuning", overflow="fold")
    for row in tuning.rows:
        table.add_row(*("" if row[number] is None else str(row[number]) for number in shown))
    console.print(table)
    for note in tuning_notes(results):
        console.print(Text(printable(note)), soft_wrap=True)


def _print_suite(suite: SuiteTable, console: Console) -> None:
    """Print the arm, the first two figures and the gain of each row; the page shows the rest."""
    table = Table(suite.title, *_shown_columns(suite.columns), box=None, pad_edge=False)
    for row in suite.rows:
        table.add_row(str(row[0]), *map(str, _shown_columns(row)))
    console.print(table)


def _shown_columns(row: Sequence[object]) -> list[Any]:
    return [*row[1:3], row[-1]]


def _report(plan: Plan, console: Console, *, required: bool = False) -> None:
    """Write and print the results; without a judged start model do nothing, or raise if `required`."""
    cells = read_cells(plan)
    if all(result.judged is None for result in cells if result.cell.arm == START_FOLDER):
        if required:
            raise UserError(f"{plan.folder}: the start model is not judged yet, so there is nothing to report")
        return
    results = replace(summarize(plan, cells), exact_frontier=exact_frontier_of(plan.folder))
    write_results(plan, results, cells)
    report = write_compare_page(plan, results, comparison_charts(results), cells)
    table = Table("arm", "judge's score", "gain over start", "KL, nats", "status", box=None, pad_edge=False)
    ranked = ranking(results)
    for name in [*ranked, *(name for name in results.arms if name not in ranked)]:
        table.add_row(name, *_row(results.arms[name]))
    console.print(table)
    _print_tuning(results, console)
    for suite in suite_tables(results):
        _print_suite(suite, console)
    console.print(Text(printable(verdict(results))))
    console.print(Text(f"report  {report}"), soft_wrap=True)


def _row(arm: ArmResult) -> list[str]:
    """Format an arm for the terminal: score, gain, KL and status."""
    if arm.final is None:
        return ["", "", "", arm.status]
    measures, bound = arm.final.measures, "≤ " if arm.kl_is_bound else ""
    return [
        "" if measures.score is None else f"{measures.score:.2f}",
        "" if measures.score is None else format_gain(arm.final.gain),
        "" if measures.kl is None else f"{bound}{measures.kl:.2f}",
        arm.status,
    ]
