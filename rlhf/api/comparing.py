"""A comparison: several algorithms from the same start model, on one budget, under one judge; resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlhf.api.checks import check_arm_files
from rlhf.api.lab import check_lab_folder, prepare_lab
from rlhf.comparison.aggregate import read_cells, summarize, write_results
from rlhf.comparison.inputs import Digests, check_inputs
from rlhf.comparison.page import comparison_charts, write_compare_page
from rlhf.comparison.pairs import judge_pairs
from rlhf.comparison.plan import CELL, Cell, CellPlan, check_owner, locate_base, plan_cells, read_plan, trained_arms
from rlhf.comparison.results import ComparisonResults, FrontierPoint
from rlhf.comparison.scheduler import CellProcess, StartCell, check_devices, is_over, run_cells, visible_devices
from rlhf.comparison.trial import JUDGED
from rlhf.comparison.tuning.plan import tuned_config
from rlhf.comparison.tuning.run import Chosen, chosen_before, run_tuning
from rlhf.comparison.view import ComparisonView
from rlhf.config.compare import START_FOLDER, CompareConfig, LabConfig
from rlhf.config.files import COMPARE_CONFIG, format_yaml
from rlhf.config.load import compare_config, dump, read_yaml
from rlhf.data.paths import Lookups
from rlhf.errors import ConfigError, UserError, command_or_call, how_to_continue
from rlhf.factory.functions import check_functions
from rlhf.guard.lint import lint
from rlhf.models.folders import MODEL
from rlhf.runtime.distributed import world_size_from_env
from rlhf.tracking.run_folder import FolderLock, RunFolder, write_atomically
from rlhf.tracking.same_run import holds_run
from rlhf.tracking.view import View

EXACT_FRONTIER = "exact_frontier.json"


def run_compare(
    config: CompareConfig, *, beside: Path, view: ComparisonView | None = None, start: StartCell | None = None
) -> bool:
    """Run the unfinished cells of a comparison, and write its results and page.

    The lab is prepared first, if the comparison uses it.

    Args:
        beside: the folder of the comparison's file, where its base configuration is looked for too.
        view: shows the progress and the results; None shows nothing.
        start: starts a cell; None starts each in its own process.

    Returns:
        True if every cell was run or tried, False if the user stopped the comparison.

    Raises:
        UserError: the comparison is invalid, or another process uses its folder. An arm that fails is not an error.
    """
    if world_size_from_env() > 1:
        raise ConfigError(
            "rlhf compare starts the processes of each arm itself: run it without a launcher, processes=N"
        )
    view, plan = view or ComparisonView(), plan_cells(config, beside=beside)
    view.violations({name: lint(run) for name, run in trained_arms(plan).items()})
    check_arms(plan)
    check_devices(plan, visible_devices(os.environ))
    check_owners(plan, beside)
    if config.lab is not None:
        if not _prepare_lab(plan, config.lab, view.run):
            return False
        check_arm_files(plan)
    start = start or partial(CellProcess, jobs=config.jobs, processes=config.processes)
    with FolderLock(plan.folder, "out_dir"):
        return _run(plan, beside, start, view)


def _run(plan: CellPlan, beside: Path, start: StartCell, view: ComparisonView) -> bool:
    """Run and report a comparison whose folder no other process uses; return False if it was stopped."""
    check_owners(plan, beside)  # again: only now does no other process write into the folder
    digests = Digests()
    for warning in _check_inputs(plan, digests):
        view.run.warning(warning)
    settings = {**dump(plan.config), "base": str(locate_base(plan.config, beside))}
    write_atomically(plan.folder / COMPARE_CONFIG, format_yaml(settings))
    plan, complete = _run_arms(plan, beside, start, view, digests)
    if not complete:
        view.run.note(f"stopped; {how_to_continue()} from here")
    try:
        if complete:
            judge_pairs(plan)
    finally:  # finished arms are reported, also if the judge of pairs does not answer
        if (written := _write_results(plan)) is not None:
            view.results(*written)
    return complete


def check_owners(plan: CellPlan, beside: Path) -> None:
    """Check that the folders of all cells have no cell or the same one, before anything in them changes.

    Raises:
        ConfigError: one has another cell, or an arm was tuned with other trials, or the comparison's folder has a run.
    """
    if holds_run(RunFolder(plan.folder)):
        raise ConfigError(f"{plan.folder} holds a run: choose another {command_or_call('out_dir', 'folder')}")
    for cell in plan.untuned():
        check_owner(cell)
    if plan.config.tune is None:
        return
    chosen = chosen_before(plan)
    untuned = {cell.arm for cell in plan.trials} - chosen.keys()
    for cell in plan.cells:
        if cell.arm in untuned and (cell.folder / CELL).is_file():
            raise ConfigError(
                f"{cell.folder} has values that these trials of tuning did not choose (it was trained without `tune`, "
                "with other tune.seeds or with other tune.trials, or its trials were removed): undo that, choose "
                f"another out_dir, or remove {cell.folder.parent} to tune the arm"
            )
    for cell in plan_cells(tuned_config(plan.config, chosen), beside=beside, trials=False).cells:
        check_owner(cell)


def _check_inputs(plan: CellPlan, digests: Digests) -> list[str]:
    """Check that no weights or rows changed since a cell finished; return warnings about changed code."""
    cells = [*plan.cells, *plan.trials]
    judged = [cell for cell in cells if (cell.folder / JUDGED).is_file()]
    return check_inputs(judged, [cell for cell in cells if not is_over(cell)], digests)


def _run_arms(
    plan: CellPlan, beside: Path, start: StartCell, view: ComparisonView, digests: Digests
) -> tuple[CellPlan, bool]:
    """Run the arms, tuned first if the comparison tunes; return the plan that ran, and False if it was stopped."""
    if plan.config.tune is None:
        return plan, run_cells(plan, start, view, digests)
    chosen = _tune(plan, start, view, digests)
    tuned = plan_cells(tuned_config(plan.config, chosen or {}), beside=beside, trials=False)
    return tuned, chosen is not None and run_cells(tuned, start, view, digests)


def failed_arms(folder: str) -> list[str]:
    """List the arms of a comparison that failed, read from its results; none before there are any."""
    try:
        results = ComparisonResults.read(folder)
    except FileNotFoundError:
        return []
    return [name for name, arm in results.arms.items() if any(seed.status == "failed" for seed in arm.seeds)]


def check_arms(plan: CellPlan) -> None:
    """Check everything that the arms of a comparison name: folders, files, models, functions, and data of suites.

    Files that the comparison makes in the lab's folder are not looked for.

    Raises:
        ConfigError: something is missing or wrong, one line for each, with the arm's name.
    """
    lab = plan.config.lab
    check_arm_files(plan, Lookups(later=None if lab is None else Path(lab.folder)), check_functions)


def _tune(plan: CellPlan, start: StartCell, view: ComparisonView, digests: Digests) -> Chosen | None:
    """Judge the start model and tune every trained arm; return the values chosen, None if the user stopped it."""
    judged_first = [cell for cell in plan.cells if cell.arm == START_FOLDER]
    if not run_cells(replace(plan, cells=judged_first), start, view, digests):
        return None

    def run(cells: Sequence[Cell], title: str) -> bool:
        view.run.heading(title)
        return run_cells(replace(plan, cells=list(cells)), start, view, digests)

    return run_tuning(plan, run)


def is_comparison(path: str) -> bool:
    """Return whether a folder holds a comparison."""
    return (Path(path) / COMPARE_CONFIG).is_file()


def rebuild_comparison(path: str) -> tuple[ComparisonResults, Path]:
    """Rebuild results.json, results.parquet and report.html from the folder of a comparison.

    Returns:
        The results, and the path of report.html.

    Raises:
        UserError: its start model is not judged yet.
    """
    folder = Path(path)
    plan = read_plan(compare_config(read_yaml(folder / COMPARE_CONFIG)), folder)
    written = _write_results(plan)
    if written is None:
        raise UserError(f"{plan.folder}: the start model is not judged yet, so there is nothing to report")
    return written


def _write_results(plan: CellPlan) -> tuple[ComparisonResults, Path] | None:
    """Write the results and the page; return both, or None without a judged start model."""
    cells = read_cells(plan)
    if all(result.judged is None for result in cells if result.cell.arm == START_FOLDER):
        return None
    results = replace(summarize(plan, cells), exact_frontier=exact_frontier_of(plan.folder))
    write_results(plan, results, cells)
    return results, write_compare_page(plan, results, comparison_charts(results), cells)


def _prepare_lab(plan: CellPlan, lab: LabConfig, view: View) -> bool:
    """Make the files of the lab that the arms read if any of them is missing; return False if the user stopped it.

    These are the start model, the pairs and, if an arm or a judge names it, the reward model.
    """
    folder = Path(lab.folder)
    readers = [plan.config, *(cell.config for cell in (*plan.cells, *plan.trials))]  # a judge of pairs is in no cell
    needs_reward_model = any(str(folder / "rm") in reader.model_dump_json() for reader in readers)
    required = [folder / "sft" / MODEL, folder / "preferences" / "train.jsonl"]
    if needs_reward_model:
        required.append(folder / "rm" / MODEL)
    if all(path.exists() for path in required):
        check_lab_folder(folder, seed=lab.seed, view=view)
        view.note(f"the lab's models and pairs: as they are in {folder}")
        return True
    of = 3 if needs_reward_model else 2
    return prepare_lab(folder, seed=lab.seed, view=view, of=of, reward_model=needs_reward_model) is not None


def exact_frontier_of(folder: Path) -> tuple[FrontierPoint, ...] | None:
    """Read the exact optimum's curve of score over KL; None if exact_frontier.json is not in the folder.

    Only a task that can be enumerated has one; the user puts the file there.

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
