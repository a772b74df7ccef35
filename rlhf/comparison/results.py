"""The results of a comparison, and results.json, which stores them; docs/compare.md defines each key.

Each record has `record()`, its form in results.json, and `of(record)`, which reads that form back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import TypeAdapter

from rlhf.comparison.costs import Costs
from rlhf.comparison.tuning.results import Tuning
from rlhf.config.compare import BudgetUnit
from rlhf.evaluation.win_rate import Interval, LengthControlled
from rlhf.rewards.source import Source
from rlhf.section import OneOf
from rlhf.tracking.run_folder import write_atomically
from rlhf.tracking.trackers import to_json

T = TypeVar("T")
SCHEMA = 1
RESULTS = "results.json"

ArmType = Literal["train", "best_of_n"]
Status = Literal["done", "partly done", "failed", "unfinished"]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """The measures of a model on the held-out prompts; None for a measure that was not taken."""

    score: float | None = None
    score_std: float | None = None
    unjudged: float | None = None
    proxy: float | None = None
    kl: float | None = None
    kl_se: float | None = None
    kl_exact: float | None = None
    kl_exact_se: float | None = None
    reference_perplexity: float | None = None
    length: float | None = None
    finished: float | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None
    distinct_3: float | None = None
    repetition: float | None = None
    entropy: float | None = None
    cost: float | None = None
    cost_se: float | None = None

    def value(self, name: str) -> float | None:
        """Return the measure of that name."""
        value: float | None = getattr(self, name)
        return value

    def record(self) -> dict[str, object]:
        """Return the measures by name."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Measures:
        """Build the measures from a record that contains them."""
        return cls(**{name: record.get(name) for name in MEASURES})  # an older record has fewer

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float | None]) -> Measures:
        """Build the measures from the metrics of an evaluation."""
        return cls(**{name: metrics.get(key) for name, key in MEASURES.items()})


MEASURES = {name: f"eval/{name}" for name in Measures.__dataclass_fields__}  # measure -> metric


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation during training, with the costs of the run so far."""

    arm: str
    seed: int
    step: int
    measures: Measures
    costs: Costs

    def record(self) -> dict[str, object]:
        """Return the evaluation as results.json has it.

        The costs are in the order of a line of costs.jsonl, which is alphabetical. Before the first step there is no
        such line, and they are in the order of `Costs`.
        """
        costs = self.costs.record()
        ordered = costs if self.costs == Costs() else dict(sorted(costs.items()))
        return {"arm": self.arm, "seed": self.seed, "step": self.step, **self.measures.record(), **ordered}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Evaluation:
        """Build the evaluation from the dictionary that `record` returned."""
        return _build(cls, record, measures=Measures.of(record), costs=Costs.of(record))


@dataclass(frozen=True, kw_only=True)
class SuiteFigure:
    """One figure of a suite: the mean over seeds, its interval, and its gain over the start model, paired by row."""

    value: float
    low: float | None  # None if the figure has no number for each row
    high: float | None
    gain: Interval | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SuiteFigure:
        """Build the figure from its form in results.json."""
        return _build(cls, record, gain=_interval(record["gain"]))


Suites = Mapping[str, Mapping[str, SuiteFigure]]  # suite -> figure


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point of best-of-n's curve: the scores expected of the best of n samples."""

    n: float
    kl: float  # its upper bound
    score: float
    proxy: float


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A point of the exact optimum's curve."""

    kl: float
    score: float


@dataclass(frozen=True, kw_only=True)
class MeanCosts:
    """The mean over seeds of an arm's costs."""

    completions: float
    generated_tokens: float
    trained_tokens: float
    flops: float
    seconds: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class EqualKl:
    """The score of an arm at the KL at which all arms are compared; None if no seed reached it."""

    kl: float
    score: float | None
    low: float | None  # the lowest seed
    high: float | None
    seeds: int  # that reached it
    gain: float | None = None  # over the start model, on the prompts of these evaluations


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One arm with one seed."""

    seed: int
    status: Status
    error: str | None
    folder: str
    measures: Measures
    costs: Costs | None
    suites: Suites  # empty until the seed is finished

    @property
    def is_judged(self) -> bool:
        """Return whether the final model was judged: a suite that is added later may fail."""
        return self.measures.score is not None

    def record(self) -> dict[str, object]:
        """Return the seed's result as results.json has it."""
        parts = {"measures": self.measures.record(), "suites": _suites_record(self.suites)}
        return _record(self, flat=("measures",), costs=self.costs.record() if self.costs is not None else None, **parts)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SeedResult:
        """Build the seed's result from the dictionary that `record` returned."""
        costs = Costs.of(record["costs"]) if record["costs"] is not None else None
        suites = _suites_of(record.get("suites", {}))  # earlier results have none
        return _build(cls, record, measures=Measures.of(record), costs=costs, suites=suites)


@dataclass(frozen=True, kw_only=True)
class FinalModels:
    """The final models of an arm: means over its finished seeds, and their gains over the start model."""

    measures: Measures
    gain: Interval
    gain_in_std: Interval | None  # None if the start model's scores are all equal
    win_rate_over_start: Interval
    length_controlled_win_rate_over_start: LengthControlled
    at_equal_kl: EqualKl | None  # None if the comparison has no equal KL
    costs: MeanCosts | None

    def record(self) -> dict[str, object]:
        """Return the keys that an arm has in results.json once a seed is finished."""
        record = asdict(self)
        return {**record.pop("measures"), **record}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> FinalModels:
        """Build the final models from a record that contains them."""
        reached, costs = record["at_equal_kl"], record["costs"]
        return cls(
            measures=Measures.of(record),
            gain=Interval(**record["gain"]),
            gain_in_std=_interval(record["gain_in_std"]),
            win_rate_over_start=Interval(**record["win_rate_over_start"]),
            length_controlled_win_rate_over_start=LengthControlled(**record["length_controlled_win_rate_over_start"]),
            at_equal_kl=EqualKl(**reached) if reached is not None else None,
            costs=MeanCosts(**costs) if costs is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm over all seeds."""

    type: ArmType
    preset: str | None  # of a trained arm, if it has one
    n: int | None  # of best-of-n
    kl_is_bound: bool
    status: Status
    peak_memory_mb: float | None  # the most that a process of the arm held in training; None if nothing is trained
    eval_prompts: int | None  # the most held-out prompts of an evaluation in training (eval.prompts); None: all
    seeds: tuple[SeedResult, ...]
    final: FinalModels | None  # None until a seed is finished
    suites: Suites

    def record(self) -> dict[str, object]:
        """Return the arm as results.json has it."""
        seeds, final = [seed.record() for seed in self.seeds], self.final.record() if self.final is not None else {}
        return _record(self, flat=("final",), seeds=seeds, final=final, suites=_suites_record(self.suites))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ArmResult:
        """Build the arm from the dictionary that `record` returned."""
        seeds = tuple(SeedResult.of(seed) for seed in record["seeds"])
        final = FinalModels.of(record) if "gain" in record else None
        suites, prompts = _suites_of(record["suites"]), record.get("eval_prompts")  # earlier results have none
        return _build(cls, record, seeds=seeds, final=final, suites=suites, eval_prompts=prompts)


@dataclass(frozen=True, kw_only=True)
class ArmWinRate:
    """The share in which arm `a` scores higher than arm `b`, over the prompts and the seeds that both have finished."""

    a: str
    b: str
    rate: Interval
    length_controlled: LengthControlled
    difference: Interval  # of the scores
    seeds: int

    def record(self) -> dict[str, object]:
        """Return the win rate as results.json has it."""
        parts = {name: asdict(getattr(self, name)) for name in ("rate", "length_controlled", "difference")}
        return _record(self, flat=("rate",), **parts)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ArmWinRate:
        """Build the win rate from the dictionary that `record` returned."""
        return _build(
            cls,
            record,
            rate=Interval(record["value"], record["low"], record["high"]),
            length_controlled=LengthControlled(**record["length_controlled"]),
            difference=Interval(**record["difference"]),
        )


@dataclass(frozen=True, kw_only=True)
class SuiteDifference:
    """Arm `a` less arm `b` in the first figure of a suite, paired by row, over the seeds that both have finished."""

    suite: str
    figure: str
    a: str
    b: str
    difference: Interval
    seeds: int

    def record(self) -> dict[str, object]:
        """Return the difference as results.json has it."""
        return _record(self, flat=("difference",), difference=asdict(self.difference))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SuiteDifference:
        """Build the difference from the dictionary that `record` returned."""
        return _build(cls, record, difference=Interval(record["value"], record["low"], record["high"]))


@dataclass(frozen=True, kw_only=True)
class StartModel:
    """The model that every arm starts from."""

    measures: Measures
    spread: float  # standard deviation of its scores over prompts
    suites: Suites

    def record(self) -> dict[str, object]:
        """Return the start model as results.json has it."""
        return {**self.measures.record(), "spread": self.spread, "suites": _suites_record(self.suites)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StartModel:
        """Build the start model from the dictionary that `record` returned."""
        return _build(cls, record, measures=Measures.of(record), suites=_suites_of(record["suites"]))


@dataclass(frozen=True, kw_only=True)
class ArmBudget:
    """The budget of every trained arm."""

    unit: BudgetUnit
    limit: float


@dataclass(frozen=True, kw_only=True)
class ComparisonResults:
    """The results of a comparison, everything that its page shows except the completions."""

    name: str
    start: str
    judge: Source
    reward_source: Source | None
    judge_is_trained_on: bool
    budget: ArmBudget
    seeds: tuple[int, ...]
    prompts: int  # held-out prompts
    start_model: StartModel
    equal_kl: float | None  # nats; None if no KL is common to all
    arms: Mapping[str, ArmResult]
    win_rates: tuple[ArmWinRate, ...]
    suite_differences: tuple[SuiteDifference, ...]
    evaluations: tuple[Evaluation, ...]
    best_of_n: Mapping[str, tuple[CurvePoint, ...]]  # by arm, the mean over seeds
    notes: tuple[str, ...] = ()  # caveats about single cells
    exact_frontier: tuple[FrontierPoint, ...] | None = None  # of a task whose completions can be enumerated
    tuning: Tuning | None = None  # None if the arms were run as they are written

    @property
    def finals(self) -> dict[str, FinalModels]:
        """Return the final models of each arm that has finished a seed."""
        return {name: arm.final for name, arm in self.arms.items() if arm.final is not None}

    def record(self) -> dict[str, object]:
        """Return the content of results.json."""
        parts: dict[str, object] = {
            "judge": self.judge.model_dump(mode="json"),
            "reward_source": self.reward_source.model_dump(mode="json") if self.reward_source is not None else None,
            "budget": asdict(self.budget),
            "seeds": list(self.seeds),
            "start_model": self.start_model.record(),
            "arms": {name: arm.record() for name, arm in self.arms.items()},
            "win_rates": [rate.record() for rate in self.win_rates],
            "suite_differences": [difference.record() for difference in self.suite_differences],
            "evaluations": [evaluation.record() for evaluation in self.evaluations],
            "best_of_n": {name: _points_record(curve) for name, curve in self.best_of_n.items()},
        }
        exact = {"exact_frontier": _points_record(self.exact_frontier)} if self.exact_frontier is not None else {}
        tuning = {"tuning": self.tuning.record()} if self.tuning is not None else {}
        flat = {"exact_frontier": exact, "tuning": tuning}
        return {"schema": SCHEMA, **_record(self, flat=tuple(flat), **flat, **parts)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ComparisonResults:
        """Build the results from the content of results.json."""
        exact, proxy, tuning = record.get("exact_frontier"), record["reward_source"], record.get("tuning")
        curves = record["best_of_n"].items()
        differences = record.get("suite_differences", [])  # earlier results have none
        return _build(
            cls,
            record,
            judge=_source_of(record["judge"]),
            reward_source=_source_of(proxy) if proxy is not None else None,
            budget=ArmBudget(**record["budget"]),
            seeds=tuple(record["seeds"]),
            start_model=StartModel.of(record["start_model"]),
            arms={name: ArmResult.of(arm) for name, arm in record["arms"].items()},
            win_rates=tuple(ArmWinRate.of(rate) for rate in record["win_rates"]),
            suite_differences=tuple(SuiteDifference.of(difference) for difference in differences),
            evaluations=tuple(Evaluation.of(evaluation) for evaluation in record["evaluations"]),
            best_of_n={name: tuple(CurvePoint(**point) for point in curve) for name, curve in curves},
            notes=tuple(record.get("notes", ())),  # earlier results have none
            exact_frontier=tuple(FrontierPoint(**point) for point in exact) if exact is not None else None,
            tuning=Tuning.of(tuning) if tuning is not None else None,
        )

    def write(self, folder: Path) -> None:
        """Write results.json atomically."""
        text = json.dumps(to_json(self.record()), indent=1, ensure_ascii=False)
        write_atomically(folder / RESULTS, text + "\n")

    @classmethod
    def read(cls, folder: Path | str) -> ComparisonResults:
        """Read results.json, as `write` left it."""
        return cls.of(json.loads((Path(folder) / RESULTS).read_text(encoding="utf-8")))


def _record(result: object, *, flat: Sequence[str] = (), **parts: Any) -> dict[str, object]:
    """Return the fields of a dataclass in order, some as `parts` has them; those in `flat` add their own keys."""
    record: dict[str, object] = {}
    for name in type(result).__annotations__:
        record |= parts[name] if name in flat else {name: parts.get(name, getattr(result, name))}
    return record


def _build(cls: type[T], record: Mapping[str, Any], **parts: object) -> T:
    """Build a dataclass from its parts and, for the other fields, the record's values of their names."""
    return cls(**{name: record[name] for name in cls.__annotations__ if name not in parts}, **parts)


def _interval(record: Mapping[str, float] | None) -> Interval | None:
    return Interval(**record) if record is not None else None


def _source_of(record: Mapping[str, Any]) -> Source:
    source: Source = TypeAdapter(Annotated[Source, OneOf()]).validate_python(record)
    return source


def _points_record(points: Sequence[CurvePoint | FrontierPoint]) -> list[dict[str, float]]:
    return [asdict(point) for point in points]


def _suites_record(suites: Suites) -> dict[str, object]:
    return {suite: {name: asdict(figure) for name, figure in figures.items()} for suite, figures in suites.items()}


def _suites_of(record: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Suites:
    return {
        suite: {name: SuiteFigure.of(figure) for name, figure in figures.items()} for suite, figures in record.items()
    }
