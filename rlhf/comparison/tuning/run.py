"""Run the tuning of a comparison: round after round, and then the arms with the values that scored best.

Everything that is decided follows from the trials' folders, so a tuning that was interrupted goes on to the same end.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from rlhf.comparison.plan import Cell, Plan
from rlhf.comparison.scheduler import FAILED, failure_of
from rlhf.comparison.trial import Judgment
from rlhf.comparison.tuning.halving import choose, promote, round_sizes
from rlhf.config.compare import Scalar
from rlhf.errors import UserError
from rlhf.factory.context import MODEL

WEIGHTS = ("checkpoints", "best", MODEL)  # folders of a run that its results do not need
Chosen = Mapping[str, Mapping[str, Scalar]]  # arm -> the values that tuning chose; empty: as it is written
RunCells = Callable[[Sequence[Cell], str], bool]  # the cells of a round and its title; False if the user stopped it


def run_tuning(plan: Plan, run: RunCells) -> Chosen | None:
    """Run the rounds of every arm's trials, all arms together, and choose; return None if the user stopped it.

    The checkpoints and models of trials that go no further are deleted; their metrics and judgments stay.
    """
    assert plan.config.tune is not None, "only a comparison that tunes has trials"
    sizes = round_sizes(plan.config.tune.trials, plan.config.tune.keep)
    arms = list(dict.fromkeys(cell.arm for cell in plan.trials))
    going = {arm: list(range(plan.config.tune.trials)) for arm in arms}
    scores: dict[str, dict[int, float | None]] = {}
    for number, places in enumerate([*sizes[1:], 0], start=1):
        cells = [cell for cell in plan.trials if _is_going(cell, number, going)]
        if not run(cells, f"tuning, round {number} of {len(sizes)}"):
            return None
        scores = {arm: round_scores([cell for cell in cells if cell.arm == arm]) for arm in arms}
        _check_any_finished(cells, scores)
        going = {arm: promote(scores[arm], places) for arm in arms}
        for cell in cells:
            if not _is_going(cell, number, going):
                _discard_weights(cell)
    return {arm: chosen_values(plan.trials, arm, choose(scores[arm])) for arm in arms}


def _check_any_finished(cells: Sequence[Cell], scores: Mapping[str, Mapping[int, float | None]]) -> None:
    """Check that not all trials of all arms have failed, which is no property of their values.

    Raises:
        UserError: they have; the same command tries them again.
    """
    if not cells or any(score is not None for arm in scores.values() for score in arm.values()):
        return
    reason = failure_of(cells[0].folder)
    for cell in cells:
        (cell.folder / FAILED).unlink(missing_ok=True)
    raise UserError(f"every trial of tuning failed, the first because: {reason}. The same command tries them again")


def round_scores(cells: Sequence[Cell]) -> dict[int, float | None]:
    """Return trial -> the judge's mean over tuning seeds and prompts; None where a seed has failed."""
    by_trial: dict[int, list[float | None]] = {}
    for cell in cells:
        by_trial.setdefault(trial_number(cell), []).append(tuning_score(cell))
    return {
        trial: fmean(known) if len(known := [s for s in scores if s is not None]) == len(scores) else None
        for trial, scores in by_trial.items()
    }


def tuning_score(cell: Cell) -> float | None:
    """Return the judge's mean score of a trial with one seed after a round; None without a finite one."""
    judged = Judgment.read(cell.folder)
    score = judged.metrics.get("eval/score") if judged is not None else None
    return score if score is not None and math.isfinite(score) else None


def trial_number(cell: Cell) -> int:
    """Return the number of the cell's trial."""
    assert cell.config.trial is not None, "a cell of tuning"
    return cell.config.trial.number


def round_number(cell: Cell) -> int:
    """Return the round of the cell's trial."""
    assert cell.config.trial is not None, "a cell of tuning"
    return cell.config.trial.round


def chosen_values(trials: Sequence[Cell], arm: str, number: int) -> dict[str, Scalar]:
    """Return the values of a trial of an arm."""
    return next(
        dict(cell.config.trial.values)
        for cell in trials
        if cell.arm == arm and cell.config.trial is not None and cell.config.trial.number == number
    )


def _is_going(cell: Cell, number: int, going: Mapping[str, Sequence[int]]) -> bool:
    return round_number(cell) == number and trial_number(cell) in going[cell.arm]


def _discard_weights(cell: Cell) -> None:
    for name in WEIGHTS:
        shutil.rmtree(cell.run_folder / name, ignore_errors=True)
