"""The results of tuning: trials, choices and costs. The key `tuning` of results.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf.comparison.costs import Costs
from rlhf.config.compare import Scalar


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One trial of an arm."""

    trial: int
    values: Mapping[str, Scalar]
    scores: tuple[float | None, ...]  # the judge's mean after each round that it was in; None if it failed
    error: str | None
    costs: Costs  # over its seeds

    @property
    def score(self) -> float | None:
        """Return the score after the trial's last round; None if it failed."""
        return self.scores[-1] if self.scores else None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> TrialResult:
        """Build the trial from its form in results.json."""
        return cls(**{**record, "scores": tuple(record["scores"]), "costs": Costs(**record["costs"])})


@dataclass(frozen=True, kw_only=True)
class ArmTuning:
    """The tuning of one arm."""

    defaults: Mapping[str, Scalar]  # setting of the space -> the arm's own value
    trials: tuple[TrialResult, ...]
    chosen: int | None  # the trial whose values the arm has; None until tuning is over
    untuned_arm: str | None  # the arm as it is written, among the comparison's arms, if it is run too

    @property
    def costs(self) -> Costs:
        """Return the costs of all trials."""
        return total_costs(trial.costs for trial in self.trials)

    @property
    def failed(self) -> list[TrialResult]:
        """Return the trials that failed."""
        return [trial for trial in self.trials if trial.error is not None]

    def trial(self, number: int) -> TrialResult | None:
        """Return a trial by its number; None if it was not begun."""
        return next((trial for trial in self.trials if trial.trial == number), None)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ArmTuning:
        """Build the tuning of an arm from its form in results.json."""
        return cls(**{**record, "trials": tuple(TrialResult.of(trial) for trial in record["trials"])})


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tuning of a comparison; every arm in it had the same trials, rounds, seeds, prompts and budget."""

    trials: int
    seeds: tuple[int, ...]
    rounds: tuple[int, ...]  # trials in each round
    limits: tuple[float, ...]  # cost limits of a trial with one seed at the end of each, in the budget's unit
    budget: float  # of the tuning of one arm
    prompts: int | None  # that trials are judged on; None until one is judged
    are_split: bool  # whether the prompts are a part of the held-out ones
    shared_prompts: int  # of them, how many the arms are reported on too
    arms: Mapping[str, ArmTuning | None]  # None: nothing to tune

    @property
    def untuned_arms(self) -> set[str]:
        """Return the arms that are run as they are written, to measure what tuning changed."""
        return {arm.untuned_arm for arm in self.arms.values() if arm is not None and arm.untuned_arm is not None}

    def record(self) -> dict[str, Any]:
        """Return the tuning as results.json has it."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Tuning:
        """Build the tuning from the dictionary that `record` returned."""
        arms = {name: ArmTuning.of(arm) if arm is not None else None for name, arm in record["arms"].items()}
        lists = {name: tuple(record[name]) for name in ("seeds", "rounds", "limits")}
        return cls(**{**record, **lists, "arms": arms})


def total_costs(costs: Iterable[Costs]) -> Costs:
    """Add up costs."""
    total = Costs()
    for cost in costs:
        total = total.plus(cost)
    return total
