"""Run the tuning of a comparison, round after round, read its results from the trials' folders, and describe them.

All decisions follow from the trials' folders, so a tuning that was interrupted goes on to the same end.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.comparison.costs import COSTS, COSTS_TABLE, UNITS, Costs
from rlhf.comparison.plan import CELL, Cell, CellPlan, read_cell
from rlhf.comparison.results import ComparisonResults
from rlhf.comparison.scheduler import is_over
from rlhf.comparison.summary import format_gain
from rlhf.comparison.trial import FAILED, Judgment, failure_of
from rlhf.comparison.tuning.plan import (
    DEFAULT,
    FOLDER,
    choose,
    default_values,
    promote,
    round_sizes,
    trial_limits,
    tuning_budget,
)
from rlhf.comparison.tuning.results import ArmTuning, TrialResult, Tuning, total_costs
from rlhf.config.compare import UNTUNED, CompareConfig, Scalar, TrainedArm, TrialConfig, TuneConfig
from rlhf.errors import UserError
from rlhf.models.folders import MODEL
from rlhf.report.charts import Table
from rlhf.tracking.metrics import format_number
from rlhf.tracking.trackers import read_jsonl

WEIGHTS = ("checkpoints", "best", MODEL)  # folders of a run that its results do not need
Chosen = Mapping[str, Mapping[str, Scalar]]  # arm -> the values that tuning chose; empty: as it is written
RunCells = Callable[[Sequence[Cell], str], bool]  # the cells of a round and its title; False if the user stopped it


def run_tuning(plan: CellPlan, run: RunCells) -> Chosen | None:
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
        _check_all_over(cells)
        scores = {arm: round_scores([cell for cell in cells if cell.arm == arm]) for arm in arms}
        _check_any_finished(cells, scores)
        going = {arm: promote(scores[arm], places) for arm in arms}
        for cell in cells:
            if not _is_going(cell, number, going):
                _discard_weights(cell)
    return {arm: chosen_values(plan.trials, arm, choose(scores[arm])) for arm in arms}


def chosen_before(plan: CellPlan) -> Chosen:
    """Return what tuning chose for each arm whose trials have all been run; nothing is run."""
    assert plan.config.tune is not None, "only a comparison that tunes has trials"
    arms = dict.fromkeys(cell.arm for cell in plan.trials)
    best = {arm: _best_trial([cell for cell in plan.trials if cell.arm == arm], plan.config.tune) for arm in arms}
    return {arm: chosen_values(plan.trials, arm, number) for arm, number in best.items() if number is not None}


def _best_trial(cells: Sequence[Cell], tune: TuneConfig) -> int | None:
    """Return the trial of an arm that won; None if one has still to be run."""
    going, scores = list(range(tune.trials)), dict[int, float | None]()
    for number, places in enumerate([*round_sizes(tune.trials, tune.keep)[1:], 0], start=1):
        played = [cell for cell in cells if trial_of(cell).round == number and trial_of(cell).number in going]
        if not all(map(is_over, played)):
            return None
        scores = round_scores(played)
        going = promote(scores, places)
    return choose(scores)


def _check_all_over(cells: Sequence[Cell]) -> None:
    """Check that no trial failed by anything but its values, for once: a killed process, memory, a disk, a server.

    Raises:
        UserError: one did; the same command tries it again before the next round.
    """
    left = [cell for cell in cells if not is_over(cell)]
    if left:
        raise UserError(
            f"{len(left)} of {len(cells)} trials of this round of tuning failed, and not by their values. The same "
            "command tries them again; the same failure a second time is a loss. The first is "
            f"{left[0].label}: {failure_of(left[0].folder)}"
        )


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
    """Return trial -> the judge's mean over tuning seeds and prompts; None if a seed has failed."""
    by_trial: dict[int, list[float | None]] = {}
    for cell in cells:
        by_trial.setdefault(trial_of(cell).number, []).append(tuning_score(cell))
    return {
        trial: fmean(known) if len(known := [s for s in scores if s is not None]) == len(scores) else None
        for trial, scores in by_trial.items()
    }


def tuning_score(cell: Cell) -> float | None:
    """Return the judge's mean score of a trial with one seed after a round; None without a finite one."""
    judged = Judgment.read(cell.folder)
    score = judged.metrics.get("eval/score") if judged is not None else None
    return score if score is not None and math.isfinite(score) else None


def trial_of(cell: Cell) -> TrialConfig:
    """Return the trial that a cell is a round of."""
    assert cell.config.trial is not None, "a cell of tuning"
    return cell.config.trial


def chosen_values(trials: Sequence[Cell], arm: str, number: int) -> dict[str, Scalar]:
    """Return the values of a trial of an arm."""
    return next(dict(trial_of(cell).values) for cell in trials if cell.arm == arm and trial_of(cell).number == number)


def _is_going(cell: Cell, number: int, going: Mapping[str, Sequence[int]]) -> bool:
    return trial_of(cell).round == number and trial_of(cell).number in going[cell.arm]


def _discard_weights(cell: Cell) -> None:
    for name in WEIGHTS:
        shutil.rmtree(cell.run_folder / name, ignore_errors=True)


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
    cells = {name: _trial_cells(folder / name, tune.seeds) for name in written}
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


def _trial_cells(arm_folder: Path, seeds: Sequence[int]) -> list[Cell]:
    """Read the trials of an arm with these seeds: a refused change of the seeds leaves others behind."""
    cells = [read_cell(path.parent) for path in sorted((arm_folder / FOLDER).glob(f"trial-*/seed-*/round-*/{CELL}"))]
    cells = [cell for cell in cells if cell.seed in seeds]
    return sorted(cells, key=lambda cell: (trial_of(cell).number, trial_of(cell).round, cell.seed))


def _tuning_prompts(cells_of_arms: Iterable[Sequence[Cell]]) -> list[str]:
    """Return the prompts that trials were judged on, as the first judgment has them."""
    judgments = (Judgment.read(cell.folder) for cells in cells_of_arms for cell in cells)
    first = next((judged for judged in judgments if judged is not None), None)
    return [str(row["prompt"]) for row in first.rows] if first is not None else []


def _arm(cells: Sequence[Cell], rounds: int, untuned_arm: str | None) -> ArmTuning:
    numbers = sorted({trial_of(cell).number for cell in cells})
    settings = sorted({key for cell in cells for key in trial_of(cell).values})
    default = next((cell for cell in cells if trial_of(cell).number == DEFAULT), None)
    return ArmTuning(
        defaults=default_values(default.config, dict.fromkeys(settings)) if default is not None else {},
        trials=tuple(_trial(number, [cell for cell in cells if trial_of(cell).number == number]) for number in numbers),
        chosen=_chosen(cells, rounds) if cells else None,
        untuned_arm=untuned_arm,
    )


def _chosen(cells: Sequence[Cell], rounds: int) -> int | None:
    """Return the trial that won; None while there is a round to come."""
    latest = max(trial_of(cell).round for cell in cells)
    newest = [cell for cell in cells if trial_of(cell).round == latest]
    if not all(map(is_over, newest)):
        return None
    scores = round_scores(newest)
    is_last = latest == rounds or all(score is None for score in scores.values())
    return choose(scores) if is_last else None


def _trial(number: int, cells: Sequence[Cell]) -> TrialResult:
    by_round = {trial_of(cell).round: [c for c in cells if trial_of(c).round == trial_of(cell).round] for cell in cells}
    scores = [round_scores(same)[number] for same in by_round.values() if all(map(is_over, same))]
    return TrialResult(
        trial=number,
        values=trial_of(cells[0]).values,
        scores=tuple(scores),
        error=next((error for cell in cells if (error := _loss(cell)) is not None), None),
        costs=total_costs(_spent(folder) for folder in dict.fromkeys(cell.run_folder for cell in cells)),
    )


def _loss(cell: Cell) -> str | None:
    """Return the error of a trial that counts as a loss; None for one that is tried again."""
    return failure_of(cell.folder) if is_over(cell) else None


def _spent(run_folder: Path) -> Costs:
    rows = list(read_jsonl(run_folder / COSTS))
    return Costs.of(rows[-1]) if rows else Costs()


NOTHING_TO_TUNE = "nothing to tune"
NOT_RERUN = "default not rerun on reporting seeds"
COST_COLUMNS = ("completions", "seconds")  # of tuning; results.json has the others


def tuning_in_words(results: ComparisonResults) -> str:
    """Describe the tuning that every trained arm was given; empty without tuning."""
    tuning = results.tuning
    if tuning is None:
        return ""
    unit = UNITS[results.budget.unit]
    rounds = ", ".join(f"{size} up to {limit:,.0f}" for size, limit in zip(tuning.rounds, tuning.limits, strict=True))
    prompts = "prompts" if tuning.prompts is None else f"{tuning.prompts:,} prompts"
    kind = "a part of the held-out ones, on the rest of which the arms are judged" if tuning.are_split else "their own"
    return (
        f"Every trained arm was tuned with {tuning.trials} trials, the first of them the arm as it is written, on seed"
        f"{'s' if len(tuning.seeds) > 1 else ''} {', '.join(map(str, tuning.seeds))} and {prompts} ({kind}), and may "
        f"spend {tuning.budget:,.0f} {unit} on it. Trials go on in rounds, {rounds} {unit} for each seed; after a "
        "round the worst are dropped. The best of the last round, by the judge's mean, is the arm in all that follows; "
        "a tie goes to the arm as it is written. Nothing spent on tuning counts into the budget of an arm."
    )


def tuning_table(results: ComparisonResults) -> Table | None:
    """Build the table of what tuning changed, one row for each arm; None without tuning."""
    if results.tuning is None:
        return None
    shown = [cost for cost in COSTS_TABLE if cost.name in COST_COLUMNS]
    columns = [
        *("", "trials", "failed", "changed", "gain on the reporting seeds"),
        *("tuning score as written", "tuning score chosen", *(f"{cost.column} for tuning" for cost in shown)),
    ]
    rows: list[list[Any]] = []
    for name, arm in results.tuning.arms.items():
        if arm is None:
            rows.append([name, *[None] * 2, NOTHING_TO_TUNE, *[None] * (len(columns) - 4)])
            continue
        rows.append(
            [
                *(name, len(arm.trials), len(arm.failed), describe_choice(arm), gain_of_tuning(results, name, arm)),
                *(_score(arm.trial(DEFAULT)), _score(_chosen_trial(arm))),
                *(cost.format(getattr(arm.costs, cost.name)) for cost in shown),
            ]
        )
    return Table("What tuning changed", columns, rows)


def trial_tables(results: ComparisonResults) -> list[Table]:
    """Build a table of all trials for each tuned arm: their values, and their score after each round."""
    tuning = results.tuning
    arms = tuning.arms.items() if tuning is not None else ()
    return [_trial_table(name, arm, tuning) for name, arm in arms if arm is not None and tuning is not None]


def _trial_table(name: str, arm: ArmTuning, tuning: Tuning) -> Table:
    rounds = [f"after {limit:,.0f}" for limit in tuning.limits]
    rows = [
        [
            trial.trial,
            *(_value({**arm.defaults, **trial.values}[key]) for key in arm.defaults),
            *(trial.scores[k] if k < len(trial.scores) else None for k in range(len(rounds))),
            _fate(trial, arm, tuning),
        ]
        for trial in arm.trials
    ]
    return Table(name, ["trial", *arm.defaults, *rounds, ""], rows)


def _fate(trial: TrialResult, arm: ArmTuning, tuning: Tuning) -> str:
    written = " (as written)" if trial.trial == DEFAULT else ""
    if trial.error is not None:
        return f"failed: {trial.error}{written}"
    if trial.trial == arm.chosen:
        return f"chosen{written}"
    is_out = arm.chosen is not None or len(trial.scores) < max(len(other.scores) for other in arm.trials)
    if is_out and len(trial.scores) < len(tuning.rounds):
        return f"dropped after round {len(trial.scores)}{written}"
    return written.strip(" ()")


def describe_choice(arm: ArmTuning) -> str:
    """Describe the chosen values beside the arm's own: `policy.lr 0.0003 → 0.0012`."""
    chosen = _chosen_trial(arm)
    if arm.chosen is None:
        return "not finished"
    if chosen is None or not chosen.values:
        return "nothing: as written" if len(arm.failed) < len(arm.trials) else "nothing: every trial failed"
    return ", ".join(
        f"{key} {_value(arm.defaults[key])} → {_value(value)}"
        for key, value in chosen.values.items()
        if value != arm.defaults[key]
    )


def gain_of_tuning(results: ComparisonResults, name: str, arm: ArmTuning) -> str:
    """Describe what tuning changed on the reporting seeds: the paired difference, if the arm as written was run too."""
    if arm.chosen is None:
        return "not finished"
    if arm.chosen == DEFAULT:
        return "the arm as written"
    if arm.untuned_arm is None:
        return NOT_RERUN
    pair = next((rate for rate in results.win_rates if (rate.a, rate.b) == (name, arm.untuned_arm)), None)
    return format_gain(pair.difference) if pair is not None else "not finished"


def tuning_notes(results: ComparisonResults) -> list[str]:
    """List the caveats of tuning: unfinished, failed trials, prompts that tuning and report have in common."""
    tuning = results.tuning
    if tuning is None:
        return []
    lines = []
    tuned: Mapping[str, ArmTuning] = {name: arm for name, arm in tuning.arms.items() if arm is not None}
    unfinished = [name for name, arm in tuned.items() if arm.chosen is None]
    if unfinished:
        lines.append(f"Tuning is not finished: {', '.join(unfinished)}. The same command continues.")
    for name, arm in tuned.items():
        lines += [
            f"{name}, trial {trial.trial} of tuning ({_values(trial)}), failed and counts as a loss: {trial.error}"
            for trial in arm.failed
        ]
    if tuning.shared_prompts:
        lines.append(
            f"{tuning.shared_prompts} of the {tuning.prompts} tuning prompts are also among those that the arms are "
            "judged on: leave tune.prompts out, or give others."
        )
    return lines


def _chosen_trial(arm: ArmTuning) -> TrialResult | None:
    return None if arm.chosen is None else arm.trial(arm.chosen)


def _score(trial: TrialResult | None) -> str:
    if trial is None or (trial.score is None and trial.error is None):
        return "–"
    return "failed" if trial.score is None else format_number(trial.score)


def _values(trial: TrialResult) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in trial.values.items()) or "as written"


def _value(value: Scalar | Sequence[object]) -> str:
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)
