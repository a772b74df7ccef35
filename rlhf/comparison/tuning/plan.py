"""Plan the tuning of a comparison: the values and budgets of every arm's trials, and the choice among them.

Trials are drawn from the space of an arm, seeded, at the same quantiles for every arm. No library: the draws are
uniform numbers and three maps of them (docs/decisions/016-own-draws-for-tuning.md). Halving is from Karnin et al. 2013,
Jamieson & Talwalkar 2016 (algorithm 1); `keep` is the eta of Li et al. 2018. A trial goes on from where it stopped, and
trial 0, the default, is in every round.

Trials lie beside the seeds of their arm: ppo/tuning/trial-3/seed-1000/, with round-1/, round-2/ inside.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Any

from rlhf.config.compare import (
    UNTUNED,
    Arm,
    BudgetConfig,
    CellConfig,
    Choices,
    CompareConfig,
    Factor,
    Range,
    Scalar,
    TrainedArm,
    TrialConfig,
    TuneConfig,
)
from rlhf.config.files import Tree, branch_at, merge
from rlhf.config.load import dump, unread_keys, validate
from rlhf.errors import ConfigError, did_you_mean
from rlhf.tracking.trackers import flatten

FOLDER = "tuning"


BuildCell = Callable[[str, Arm, int, Path], CellConfig]  # name, arm, seed, run folder; judged on the tuning prompts


def tuning_prompts(tune: TuneConfig, base: Tree) -> Tree:
    """Return the settings by which a trial is judged on the tuning prompts: the given ones, or a part of the held-out.

    Raises:
        ConfigError: the given ones are the prompts that the arms are reported on.
    """
    held_out = base["data"]["eval_prompts"]
    if tune.prompts is None:
        first, last = held_out.get("part") or (0.0, 1.0)
        return _eval_prompts({**held_out, "part": [first, first + tune.prompts_share * (last - first)]})
    given = tune.prompts.model_dump(mode="json", exclude_unset=True)
    if _source(given) == _source(held_out) and _overlap(given.get("part"), held_out.get("part")):
        raise ConfigError(
            f"tune.prompts: {given['path']} has the prompts that the arms are reported on: give others, or leave "
            "tune.prompts out, and the held-out prompts are split"
        )
    return _eval_prompts(given)


def reporting_prompts(tune: TuneConfig, base: Tree) -> Tree:
    """Return the settings by which an arm is judged on other prompts than its trials."""
    if tune.prompts is not None:
        return {}
    held_out = base["data"]["eval_prompts"]
    first, last = held_out.get("part") or (0.0, 1.0)
    return _eval_prompts({"part": [first + tune.prompts_share * (last - first), last]})


def _eval_prompts(settings: Tree) -> Tree:
    return {"data": {"eval_prompts": settings}}


def _source(prompts: Tree) -> tuple[object, object]:
    return prompts.get("path"), prompts.get("split", "train")


def _overlap(a: Any, b: Any) -> bool:
    (first, last), (other_first, other_last) = a or (0.0, 1.0), b or (0.0, 1.0)
    return bool(max(first, other_first) < min(last, other_last))


def tuning_budget(config: CompareConfig, tune: TuneConfig) -> float:
    """Return the budget of the tuning of one arm, over all its trials and seeds, in the unit of the budget.

    Raises:
        ConfigError: it is more than the trials of the last round can use.
    """
    most = full_budget(round_sizes(tune.trials, tune.keep), config.budget.limit) * len(tune.seeds)
    if tune.budget is not None and tune.budget > most * (1 + 1e-9):
        raise ConfigError(
            f"tune.budget is {tune.budget:,.0f}, but with {most:,.0f} {config.budget.unit} the trials of the last "
            "round are trained as long as an arm, and longer they cannot be: lower it (null is as much as can be used)"
        )
    return most if tune.budget is None else tune.budget


def trial_limits(config: CompareConfig, tune: TuneConfig) -> list[float]:
    """Return the most that a trial with one seed may have spent at the end of each round."""
    return round_limits(round_sizes(tune.trials, tune.keep), tuning_budget(config, tune) / len(tune.seeds))


def space_of(tune: TuneConfig, arm: TrainedArm) -> dict[str, Dimension]:
    """Return the space of an arm: the comparison's, with its own over it."""
    return {key: values for key, values in {**tune.space, **arm.tune.space}.items() if values is not None}


def plan_trials(
    config: CompareConfig, tune: TuneConfig, folder: Path, build: BuildCell
) -> Iterator[tuple[Path, CellConfig]]:
    """Yield the folder and configuration of every trial with every seed in every round.

    Raises:
        ConfigError: a setting of the space is wrong, or a trial with its values is no valid run.
    """
    limits = trial_limits(config, tune)
    trained = {name: arm for name, arm in config.arms.items() if isinstance(arm, TrainedArm)}
    spaces = {name: _readable_space(tune, name, arm, build, folder) for name, arm in trained.items()}
    _check_shared_space(tune, spaces)
    for name, arm in trained.items():
        if not spaces[name]:
            continue
        defaults = default_values(_build(build, name, arm, {}, tune.seeds[0], folder), spaces[name])
        try:
            drawn = draw_trials(spaces[name], defaults, tune.trials, tune.draw_seed)
        except ConfigError as error:
            raise ConfigError(f"arms.{name}: {error}") from error
        for number, values in enumerate(drawn):
            for seed in tune.seeds:
                run_folder = folder / name / FOLDER / f"trial-{number}" / f"seed-{seed}"
                cell = _build(build, name, arm, values, seed, run_folder, number)
                for round_number, limit in enumerate(limits, start=1):
                    yield run_folder / f"round-{round_number}", _with_round(cell, number, round_number, values, limit)


def with_values(arm: TrainedArm, values: Mapping[str, Scalar]) -> TrainedArm:
    """Return the arm with the values of a trial over its own settings."""
    settings = reduce(merge, (branch_at(key, value) for key, value in values.items()), arm.tree())
    return validate(TrainedArm, {**settings, "tune": arm.tune})


def tuned_config(config: CompareConfig, chosen: Mapping[str, Mapping[str, Scalar]]) -> CompareConfig:
    """Return the comparison of the tuned arms; with tune.report_default also of the changed arms as written.

    Args:
        config: the comparison.
        chosen: arm -> the values that tuning chose for it; empty if it chose the arm as it is written.
    """
    arms: dict[str, Arm] = {}
    for name, arm in config.arms.items():
        values = chosen.get(name, {})
        arms[name] = with_values(arm, values) if isinstance(arm, TrainedArm) else arm
        if config.tune is not None and config.tune.report_default and values:
            arms[f"{name}{UNTUNED}"] = arm
    return config.model_copy(update={"arms": arms})


def default_values(cell: CellConfig, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of some settings in a cell's run."""
    values = flatten(dump(cell.train))
    return {key: values[key] for key in settings}


def _build(
    build: BuildCell,
    name: str,
    arm: TrainedArm,
    values: Mapping[str, Scalar],
    seed: int,
    run_folder: Path,
    number: int = 0,
) -> CellConfig:
    """Build the cell of a trial; an error names it."""
    if not values:
        return build(name, arm, seed, run_folder)
    try:
        return build(name, with_values(arm, values), seed, run_folder)
    except ConfigError as error:
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        raise ConfigError(f"{error} (in trial {number} of tuning: {shown}; change tune.space)") from error


def _with_round(
    cell: CellConfig, number: int, round_number: int, values: Mapping[str, Scalar], limit: float
) -> CellConfig:
    """Return the cell of one round of a trial, with as much of the budget as it may have spent at the end of it."""
    assert cell.budget is not None, "only trained arms are tuned"
    run = cell.train.run.model_copy(update={"name": f"{cell.arm} trial {number} seed {cell.seed}"})
    checkpoint = cell.train.checkpoint.model_copy(update={"resume": "auto"})  # a round goes on where the last one ended
    unit = cell.budget.unit
    amount = limit if unit in ("flops", "seconds") else round(limit)
    if unit == "completions":
        size = cell.train.completions_per_step
        amount = math.floor(limit / size + 1e-9) * size
        if not amount:
            raise ConfigError(
                f"arms.{cell.arm}: in round {round_number} of its tuning a trial has {limit:.0f} completions, which is "
                f"less than one step of {size}: raise the budget (tune.budget), or lower tune.trials"
            )
    return cell.model_copy(
        update={
            "train": cell.train.model_copy(update={"run": run, "checkpoint": checkpoint}),
            "budget": BudgetConfig.model_validate({unit: amount}),
            "suites": {},
            "trial": TrialConfig(number=number, round=round_number, values=dict(values)),
        }
    )


def _readable_space(
    tune: TuneConfig, name: str, arm: TrainedArm, build: BuildCell, folder: Path
) -> dict[str, Dimension]:
    """Return the space of an arm without the comparison's settings that it does not read.

    Raises:
        ConfigError: the arm does not read a setting of its own space, or has no value to take a factor of.
    """
    cell = build(name, arm, tune.seeds[0], folder)
    values = flatten(dump(cell.train))
    space: dict[str, Dimension] = {}
    for key, dimension in space_of(tune, arm).items():
        if key in values and _is_read(key, dimension, values[key], name, arm, build, folder):
            try:
                check_default(key, dimension, values[key])
            except ConfigError as error:
                raise ConfigError(f"arms.{name}: {error}") from error
            space[key] = dimension
        elif key in arm.tune.space:
            raise ConfigError(f"arms.{name}.tune.space: the arm reads no setting {key}{_nearest(key, values)}")
    return space


def _is_read(
    key: str, dimension: Dimension, default: Any, name: str, arm: TrainedArm, build: BuildCell, folder: Path
) -> bool:
    """Return whether the arm's algorithm reads a setting: another value of it is not reported as unread."""
    is_positive = isinstance(default, int | float) and not isinstance(default, bool) and default > 0
    candidates = [value_at(dimension, default if is_positive else 1.0, u) for u in (0.0, 0.5, 0.99)]
    probe = next((value for value in candidates if value != default), None)
    if probe is None:
        return True
    try:
        train = build(name, with_values(arm, {key: probe}), 0, folder).train
    except ConfigError:
        return True  # the trial that has this value reports the error
    return not any(key == unread or key.startswith(f"{unread}.") for unread in unread_keys(train))


def _check_shared_space(tune: TuneConfig, spaces: Mapping[str, Mapping[str, Dimension]]) -> None:
    unread = [
        key
        for key, values in tune.space.items()
        if values is not None and spaces and not any(key in space for space in spaces.values())
    ]
    if unread:
        raise ConfigError(f"tune.space: no arm reads a setting {unread[0]}")


def _nearest(key: str, known: Mapping[str, object]) -> str:
    return did_you_mean(key, [name for name in known if name != key])


DEFAULT = 0  # the trial that is the arm as it is written
ATTEMPTS = 1000  # draws of a trial that would repeat an earlier one

Dimension = Range | Factor | Choices


def draw_trials(
    space: Mapping[str, Dimension], defaults: Mapping[str, Any], trials: int, seed: int
) -> list[dict[str, Scalar]]:
    """Draw the values of each trial; trial 0 is the default, which changes nothing.

    A draw depends on the seed, the trial and the setting alone. So trial 3 of every arm has the same quantile of its
    learning rates, more trials leave the first ones as they are, and so does another setting in the space.

    Args:
        space: setting -> its values.
        defaults: setting -> the arm's own value.
        trials: the number of trials, the default included.
        seed: the seed of the draws.

    Raises:
        ConfigError: the space has fewer configurations than there are trials, or no values around a default.
    """
    drawn: list[dict[str, Scalar]] = []
    seen = [dict(defaults)]
    for trial in range(1, trials):
        values = next((v for v in _attempts(space, defaults, trial, seed) if v not in seen), None)
        if values is None:
            raise ConfigError(
                f"tune.trials is {trials}, but the space ({', '.join(space)}) has only {len(seen)} configurations, the "
                "arm's own included: give it more values, or lower tune.trials"
            )
        seen.append(values)
        drawn.append(values)
    return [{}, *drawn]


def value_at(dimension: Dimension, default: Any, u: float) -> Scalar:
    """Map a number in [0, 1) to a value of the dimension.

        log      low (high / low)^u            around a default   default factor^(2u - 1)
        linear   low + u (high - low)          choices            the one at floor(u n)

    Numbers are rounded to four digits, or to whole ones if the default is whole.
    """
    match dimension:
        case Choices(choices=choices):
            return choices[int(u * len(choices))]
        case Factor(factor=factor):
            smallest = 1.0 if isinstance(default, int) else 0.0  # a count does not round to nothing
            return _rounded(max(smallest, default * factor ** (2 * u - 1)), default)
        case Range(low=low, high=high, scale="linear"):
            return _rounded(low + u * (high - low), default)
        case Range(low=low, high=high):
            return _rounded(low * math.exp(u * math.log(high / low)), default)


def check_default(key: str, dimension: Dimension, default: Any) -> None:
    """Check that there are values around the arm's own, if the dimension is a factor.

    Raises:
        ConfigError: the arm's own value is no number above 0.
    """
    if isinstance(dimension, Factor) and (isinstance(default, bool | str) or not default or default < 0):
        raise ConfigError(
            f"tune.space: {key} is {default!r} in this arm, so there are no values within a factor of it: give its "
            "ends instead, {low: …, high: …}, or a list"
        )


def _attempts(
    space: Mapping[str, Dimension], defaults: Mapping[str, Any], trial: int, seed: int
) -> Iterator[dict[str, Scalar]]:
    streams = {key: random.Random(f"{seed}/{trial}/{key}") for key in space}
    for _ in range(ATTEMPTS):
        yield {key: value_at(space[key], defaults[key], stream.random()) for key, stream in streams.items()}


def _rounded(value: float, default: Any) -> int | float:
    if isinstance(default, int) and not isinstance(default, bool):
        return round(value)
    return float(f"{value:.4g}")


def round_sizes(trials: int, keep: int) -> list[int]:
    """Compute how many trials each round has; the winner is chosen after the last.

        n_1 = trials,   n_{k+1} = ceil(n_k / keep),   and no round after the first with n_k <= keep

    With keep = 2: 8 trials give 8, 4, 2, and 5 give 5, 3, 2.
    """
    sizes = [trials]
    while sizes[-1] > keep:
        sizes.append(-(-sizes[-1] // keep))
    return sizes


def round_limits(sizes: Sequence[int], budget: float) -> list[float]:
    """Compute the most that a trial may have spent at the end of each round, given the budget of all trials together.

    Every round spends the same part of the budget, shared evenly by its trials:

        R_k = sum over j <= k of  B / (K n_j),   K rounds,   and so  sum over k of  n_k (R_k - R_{k-1}) = B
    """
    return [float(Fraction(budget) / len(sizes) * weight) for weight in _cumulative_weights(sizes)]


def full_budget(sizes: Sequence[int], limit: float) -> float:
    """Compute the budget of all trials together with which the trials of the last round reach the limit of a whole run.

    B = limit K / sum over k of (1 / n_k)
    """
    return float(Fraction(limit) * len(sizes) / _cumulative_weights(sizes)[-1])


def promote(scores: Mapping[int, float | None], places: int) -> list[int]:
    """Return the trials of the next round, in order of their numbers: the default, and the best of the others.

    A trial without a score has failed and goes no further, the default included. Of equal trials the earlier goes on.

    Args:
        scores: trial -> its score after this round.
        places: the size of the next round; fewer go on if more have failed.
    """
    ranked = sorted(_finished(scores), key=lambda trial: (trial != DEFAULT, -_finished(scores)[trial], trial))
    return sorted(ranked[:places])


def choose(scores: Mapping[int, float | None]) -> int:
    """Return the trial with the highest score after the last round; ties go to the default, then to the earlier trial.

    If every trial failed it is the default.
    """
    finished = _finished(scores)
    return min(finished, key=lambda trial: (-finished[trial], trial), default=DEFAULT)


def _finished(scores: Mapping[int, float | None]) -> dict[int, float]:
    return {trial: score for trial, score in scores.items() if score is not None}


def _cumulative_weights(sizes: Sequence[int]) -> list[Fraction]:
    return [sum((Fraction(1, size) for size in sizes[: k + 1]), Fraction(0)) for k in range(len(sizes))]
