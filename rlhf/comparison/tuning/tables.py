"""Describe the tuning of a comparison: what every arm was given, what changed, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.comparison.costs import COSTS_TABLE, UNITS
from rlhf.comparison.results import ComparisonResults
from rlhf.comparison.summary import format_gain
from rlhf.comparison.tuning.results import ArmTuning, TrialResult, Tuning
from rlhf.comparison.tuning.search import DEFAULT
from rlhf.config.compare import Scalar
from rlhf.report.report_card import Table
from rlhf.tracking.formatting import format_number

NOTHING_TO_TUNE = "nothing to tune"
NOT_RERUN = "default not rerun on reporting seeds"
COST_COLUMNS = ("completions", "seconds")  # of tuning; results.json has the others


def tuning_in_words(results: ComparisonResults) -> str:
    """Describe what every trained arm was given; empty without tuning."""
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
                *(_score(arm.trial(DEFAULT)), _score(_chosen(arm))),
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
    chosen = _chosen(arm)
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


def _chosen(arm: ArmTuning) -> TrialResult | None:
    return None if arm.chosen is None else arm.trial(arm.chosen)


def _score(trial: TrialResult | None) -> str:
    if trial is None or (trial.score is None and trial.error is None):
        return "–"
    return "failed" if trial.score is None else format_number(trial.score)


def _values(trial: TrialResult) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in trial.values.items()) or "as written"


def _value(value: Scalar | Sequence[object]) -> str:
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)
