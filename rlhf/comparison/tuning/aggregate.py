"""Read the results of tuning from the trials' folders alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rlhf.comparison.costs import COSTS, Costs
from rlhf.comparison.plan import CELL, Cell, read_cell
from rlhf.comparison.scheduler import failure_of, is_over
from rlhf.comparison.trial import Judgment
from rlhf.comparison.tuning.halving import DEFAULT, choose, round_sizes
from rlhf.comparison.tuning.plan import FOLDER, default_values, trial_limits, tuning_budget
from rlhf.comparison.tuning.results import ArmTuning, TrialResult, Tuning, total_costs
from rlhf.comparison.tuning.run import round_number, round_scores, trial_number
from rlhf.config.compare import UNTUNED, CompareConfig, TrainedArm, TuneConfig
from rlhf.tracking.trackers import read_jsonl


def read_tuning(config: CompareConfig, folder: Path, reported: Iterable[str], prompts: Iterable[str]) -> Tuning | None:
    """Read the tuning of a comparison from its folder; None if it does not tune.

    Args:
        config: the comparison, as it is written.
        folder: its folder.
        reported: the names of the arms that are reported.
        prompts: the prompts that the arms are reported on.
    """
    tune = config.tune
    if tune is None:
        return None
    sizes, names = round_sizes(tune.trials, tune.keep), set(reported)
    written = [name for name in config.arms if not _is_twin(name, config, tune)]
    cells = {name: _trial_cells(folder / name) for name in written}
    judged_on = _tuning_prompts(cells.values())
    return Tuning(
        trials=tune.trials,
        seeds=tuple(tune.seeds),
        rounds=tuple(sizes),
        limits=tuple(trial_limits(config, tune)),
        budget=tuning_budget(config, tune),
        prompts=len(judged_on) or None,
        are_split=tune.prompts is None,
        shared_prompts=len(set(judged_on) & set(prompts)),
        arms={
            name: _arm(cells[name], len(sizes), f"{name}{UNTUNED}" if f"{name}{UNTUNED}" in names else None)
            if cells[name] or (not judged_on and isinstance(config.arms[name], TrainedArm))
            else None
            for name in written
        },
    )


def _is_twin(name: str, config: CompareConfig, tune: TuneConfig) -> bool:
    """Return whether an arm is one that tune.report_default added."""
    return tune.report_default and name.endswith(UNTUNED) and name.removesuffix(UNTUNED) in config.arms


def _trial_cells(arm_folder: Path) -> list[Cell]:
    cells = [read_cell(path.parent) for path in sorted((arm_folder / FOLDER).glob(f"trial-*/seed-*/round-*/{CELL}"))]
    return sorted(cells, key=lambda cell: (trial_number(cell), round_number(cell), cell.seed))


def _tuning_prompts(cells_of_arms: Iterable[Sequence[Cell]]) -> list[str]:
    """Return the prompts that trials were judged on, as the first judgment has them."""
    judgments = (Judgment.read(cell.folder) for cells in cells_of_arms for cell in cells)
    first = next((judged for judged in judgments if judged is not None), None)
    return [str(row["prompt"]) for row in first.rows] if first is not None else []


def _arm(cells: Sequence[Cell], rounds: int, untuned_arm: str | None) -> ArmTuning:
    numbers = sorted({trial_number(cell) for cell in cells})
    settings = sorted({key for cell in cells if cell.config.trial is not None for key in cell.config.trial.values})
    default = next((cell for cell in cells if trial_number(cell) == DEFAULT), None)
    return ArmTuning(
        defaults=default_values(default.config, dict.fromkeys(settings)) if default is not None else {},
        trials=tuple(_trial(number, [cell for cell in cells if trial_number(cell) == number]) for number in numbers),
        chosen=_chosen(cells, rounds) if cells else None,
        untuned_arm=untuned_arm,
    )


def _chosen(cells: Sequence[Cell], rounds: int) -> int | None:
    """Return the trial that won; None while there is a round to come."""
    latest = max(map(round_number, cells))
    newest = [cell for cell in cells if round_number(cell) == latest]
    if not all(map(is_over, newest)):
        return None
    scores = round_scores(newest)
    is_last = latest == rounds or all(score is None for score in scores.values())
    return choose(scores) if is_last else None


def _trial(number: int, cells: Sequence[Cell]) -> TrialResult:
    by_round = {round_number(cell): [c for c in cells if round_number(c) == round_number(cell)] for cell in cells}
    scores = [round_scores(same)[number] for same in by_round.values() if all(map(is_over, same))]
    assert cells[0].config.trial is not None
    return TrialResult(
        trial=number,
        values=cells[0].config.trial.values,
        scores=tuple(scores),
        error=next((error for cell in cells if (error := failure_of(cell.folder)) is not None), None),
        costs=total_costs(_spent(folder) for folder in dict.fromkeys(cell.run_folder for cell in cells)),
    )


def _spent(run_folder: Path) -> Costs:
    rows = list(read_jsonl(run_folder / COSTS))
    return Costs.of(rows[-1]) if rows else Costs()
