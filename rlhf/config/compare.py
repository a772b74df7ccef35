"""The configuration of a comparison: one base run, arms that differ from it, one budget, one judge, and tuning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from rlhf.config.algorithm import algorithm_kind
from rlhf.config.data import Count, PromptsConfig
from rlhf.config.sections import OfflineConfig, OnlineConfig
from rlhf.errors import did_you_mean
from rlhf.rewards.pair_judge import PairwiseJudge
from rlhf.rewards.source import Source
from rlhf.section import Folder, OneOf, Positive, Section, type_discriminator

START_FOLDER = "start"  # folder of the cells that evaluate the start model itself
UNTUNED = "_untuned"  # ending of the name under which an arm as it is written is run beside the tuned one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

BudgetUnit = Literal["completions", "tokens", "flops", "seconds"]


class BudgetConfig(Section):
    """The budget of every trained arm: set exactly one of the four limits; all four quantities are recorded."""

    completions: Count | None = None
    """Completions sampled (online) or read from the data (offline, two per pair)."""
    tokens: Count | None = None
    """Tokens generated plus tokens read by passes with gradient."""
    flops: Positive | None = None
    """Estimated floating-point operations: docs/compare.md has the formula."""
    seconds: Positive | None = None
    """Wall-clock seconds of training steps; evaluation, checkpoints and loading are not counted."""

    @model_validator(mode="after")
    def _check_one_limit(self) -> BudgetConfig:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of budget.completions, budget.tokens, budget.flops, budget.seconds")
        return self

    @property
    def unit(self) -> BudgetUnit:
        """Return which of the four limits is set."""
        if self.completions is not None:
            return "completions"
        if self.tokens is not None:
            return "tokens"
        return "flops" if self.flops is not None else "seconds"

    @property
    def limit(self) -> float:
        """Return the limit, in `unit`."""
        limit: float = getattr(self, self.unit)
        return float(limit)


class PairsConfig(Section):
    """A judge that compares the final completions of the models pair by pair, each pair in both orders."""

    judge: Annotated[PairwiseJudge, OneOf()]
    """openai, function or scores; a pair on which the two orders disagree is a tie."""
    against: Annotated[list[str], Field(min_length=1)] = [START_FOLDER]
    """The opponents of every arm: start, or names of arms."""
    limit: Count | None = None
    """The number of held-out prompts to judge; null: all."""

    def check_opponents(self, models: Sequence[str]) -> None:
        """Check that every opponent is one of the models.

        Raises:
            ValueError: one is not.
        """
        for name in self.against:
            if name not in models:
                hint = did_you_mean(name, models)
                raise ValueError(f"pairs.against: {name!r} is not one of {', '.join(models)}{hint}")


class LabConfig(Section):
    """The built-in lab's start model, preference pairs and reward model; created if missing."""

    folder: Folder = "runs/lab"
    """Folder with sft/, preferences/ and rm/, for example from `rlhf quickstart`."""
    seed: int = 0
    """Seed for creating missing stages."""


Scalar = bool | int | float | str | None


class Factor(Section):
    """Values around the arm's value, log-uniform between value / factor and value · factor."""

    factor: Annotated[float, Field(gt=1)]
    """Ratio of the largest value to the arm's value, and of the arm's value to the smallest."""


class Range(Section):
    """Values in an interval; integer settings get integers."""

    low: float
    """The smallest value."""
    high: float
    """The largest value."""
    scale: Literal["log", "linear"] = "log"
    """Distribution of the values: uniform in the logarithm, or uniform."""

    @model_validator(mode="after")
    def _check_ends(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}: low must be below high")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low is {self.low:g}, which has no logarithm: set scale=linear, or a low above 0")
        return self


class Choices(Section):
    """Values from a list, with equal probability; the list alone is the short form."""

    choices: Annotated[list[Scalar], Field(min_length=1)]
    """The values."""


def _kind_of_values(value: object) -> str:
    if isinstance(value, Section):
        return type(value).__name__.lower()
    return next((kind for kind in ("choices", "factor") if isinstance(value, Mapping) and kind in value), "range")


Values = Annotated[
    Annotated[Range, Tag("range")] | Annotated[Factor, Tag("factor")] | Annotated[Choices, Tag("choices")],
    Discriminator(_kind_of_values),
]
_KEYS_OF_VALUES = frozenset({*Factor.model_fields, *Range.model_fields, *Choices.model_fields})


def _flatten_space(space: Any) -> Any:
    """Return the space by dotted key, with lists as choices: {policy: {lr: [1, 2]}} is {policy.lr: {choices: [1, 2]}}.

    Of a key given twice (dotted in the file, nested from the command line) the last one counts.
    """
    if not isinstance(space, Mapping):
        return space
    flat: dict[str, Any] = {}
    for key, value in space.items():
        if isinstance(value, Mapping) and not set(value) & _KEYS_OF_VALUES:
            flat |= {f"{key}.{inner}": values for inner, values in _flatten_space(value).items()}
        else:
            flat[str(key)] = {"choices": value} if isinstance(value, list) else value
    return flat


Space = Annotated[dict[str, Values | None], BeforeValidator(_flatten_space)]


_RATE: Any = {"policy.lr": {"factor": 10.0}}  # as in a file; a section checks its defaults too


class ArmTuneConfig(Section):
    """Changes of the tuning for one arm."""

    space: Space = {}
    """Values per setting, merged over the comparison's tune.space; null removes a setting."""


class TuneConfig(Section):
    """Random search with successive halving: every trained arm gets the same number of trials and the same budget.

    Trial 0 is the arm as written; the others are drawn at random from the space. Trials use separate seeds and prompts
    and run in rounds; each round drops the worst. The trial with the best score becomes the arm. `tune=8` is short for
    trials: 8.
    """

    trials: Annotated[int, Field(ge=2)] = 8
    """Configurations per arm, including the arm as written."""
    space: Space = Field(default=_RATE)
    """Values per setting: {factor: 10}, {low: 0.01, high: 0.1, scale: log}, or [0.01, 0.1]. Settings that an arm does
    not read are ignored for that arm; null removes a setting."""
    seeds: Annotated[list[int], Field(min_length=1)] = [1000]
    """Seeds of the trials; they must differ from the comparison's seeds."""
    budget: Positive | None = None
    """Tuning budget per arm over all trials and seeds, in the unit of the comparison's budget. null: enough to train
    the last round's trials as long as an arm."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Each round keeps one trial in this many (rounded up), and always the arm as written."""
    draw_seed: int = 0
    """Seed of the random draws from the space."""
    prompts: PromptsConfig | None = None
    """Prompts that judge the trials; null: split the held-out prompts between tuning and report."""
    prompts_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Without tune.prompts: share of the held-out prompts used for tuning, chosen by a hash of the text."""
    report_default: bool = False
    """Also run the arms as written on the reporting seeds, to measure the effect of tuning."""

    @model_validator(mode="after")
    def _check_seeds(self) -> TuneConfig:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice")
        return self

    def check_reporting_seeds(self, seeds: list[int]) -> None:
        """Check that no trial runs on a seed of the report, whose luck it would be chosen by."""
        both = sorted(set(self.seeds) & set(seeds))
        if both:
            raise ValueError(
                f"tune.seeds and seeds both have {', '.join(map(str, both))}: an arm that was tuned on a seed it is "
                "reported on was chosen by that seed's luck; choose other tune.seeds"
            )


class Overrides(Section):
    """Settings of rlhf train, by section, merged over the base."""

    data: dict[str, Any] = {}
    """See rlhf train."""
    policy: dict[str, Any] = {}
    """See rlhf train."""
    reference: dict[str, Any] = {}
    """See rlhf train."""
    teacher: dict[str, Any] = {}
    """See rlhf train."""
    critic: dict[str, Any] = {}
    """See rlhf train."""
    reward: dict[str, Any] = {}
    """See rlhf train."""
    sampling: dict[str, Any] = {}
    """See rlhf train."""
    overlap: dict[str, Any] = {}
    """See rlhf train."""
    offload: dict[str, Any] = {}
    """See rlhf train."""
    algorithm: dict[str, Any] = {}
    """See rlhf train; a preset other than the base's replaces the base's whole algorithm."""
    batch: dict[str, Any] = {}
    """See rlhf train."""
    sharding: str | dict[str, Any] = {}
    """See rlhf train."""
    schedule: dict[str, Any] = {}
    """See rlhf train; the length is set by the budget."""
    checkpoint: dict[str, Any] = {}
    """See rlhf train."""
    logging: dict[str, Any] = {}
    """See rlhf train."""
    eval: dict[str, Any] = {}
    """See rlhf train."""
    guard: dict[str, Any] = {}
    """See rlhf train."""

    def tree(self) -> dict[str, Any]:
        """Return the settings that were given, as plain data, without sections that are empty."""
        settings = self.model_dump(mode="json", exclude_unset=True)
        return {key: value for key, value in settings.items() if key in Overrides.model_fields and value != {}}


class TrainedArm(Overrides):
    """An arm that is trained: any online or offline algorithm."""

    type: Literal["train"] = "train"
    tune: ArmTuneConfig = ArmTuneConfig()
    """Changes of the tuning for this arm."""


class BestOfNArm(Section):
    """An arm without training: the best of n completions from the start model, by reward."""

    type: Literal["best_of_n"] = "best_of_n"
    n: Count = 16
    """Completions to choose from."""
    samples: Count = 64
    """Completions sampled per held-out prompt; the maximum n of the curve."""

    @model_validator(mode="after")
    def _check_samples(self) -> BestOfNArm:
        if self.samples < self.n:
            raise ValueError(f"samples is {self.samples}, but the best of {self.n} needs at least {self.n}")
        return self


Arm = Annotated[
    Annotated[TrainedArm, Tag("train")] | Annotated[BestOfNArm, Tag("best_of_n")],
    Discriminator(type_discriminator("train")),
]


class CompareConfig(Section):
    """Several algorithms from one start, on one budget, under one judge."""

    name: str = "compare"
    """The page's title."""
    base: str
    """The rlhf train configuration that every arm extends; relative to the working folder or this file."""
    out_dir: Folder = "runs/compare"
    """Folder for results.json, results.parquet, report.html, and one run folder per arm and seed."""
    lab: LabConfig | None = None
    """Use the built-in lab's start model, preference pairs and reward model."""
    start: str | None = None
    """The model that every arm starts from; null: the lab's, otherwise the base's policy.model."""
    reward_source: Annotated[Source, OneOf()] | None = None
    """The reward for online arms and best-of-n; null: the lab's, otherwise the base's."""
    judge: Annotated[Source, OneOf()] | None = None
    """The judge, which no arm is trained on; null: the base's eval.source."""
    budget: BudgetConfig
    """The budget of every trained arm."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0, 1, 2]
    """Seeds; each arm runs once per seed."""
    jobs: Count = 1
    """Concurrent runs (one arm, one seed each), each on its share of the CPU cores or on one GPU."""
    processes: Count = 1
    """Processes per trained arm, started by torchrun on this host; does not change results."""
    evaluations: Count = 10
    """Evaluations during each run if the budget is in completions; an arm's own eval.every takes precedence."""
    suites: dict[str, dict[str, Any]] = {}
    """Suites of `rlhf eval` for every final model, by name, with their settings; null removes one."""
    pairs: PairsConfig | None = None
    """Also judge the final completions pair by pair, against the start model or another arm; null: off."""
    equal_kl: Positive | None = None
    """Also compare the arms at this KL (nats); null: the largest KL that every arm reached."""
    tune: TuneConfig | None = None
    """Tune every trained arm before its run, each with the same number of trials; null: off."""
    shared: Overrides = Overrides()
    """Settings merged over the base for every arm."""
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    """The arms by name, each with its changes to the base."""
    plugins: list[str] = []
    """Your own files and modules that define losses, advantages, rewards, suites or alarms, as in [my_losses.py]."""

    @field_validator("tune", mode="before")
    @classmethod
    def _expand_trials(cls, value: object) -> object:
        """Return the section for a number of trials alone: tune=8."""
        return {"trials": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_tune(self) -> CompareConfig:
        if self.tune is None:
            return self
        self.tune.check_reporting_seeds(self.seeds)
        taken = [name for name in self.arms if f"{name}{UNTUNED}" in self.arms]
        if self.tune.report_default and taken:
            raise ValueError(
                f"arms: {taken[0]}{UNTUNED} is the name under which tune.report_default runs {taken[0]} as it is "
                "written: give the other arm another name"
            )
        return self

    @model_validator(mode="after")
    def _check_jobs(self) -> CompareConfig:
        if self.jobs > 1 and self.budget.unit == "seconds":
            raise ValueError(
                f"budget.seconds with jobs={self.jobs}: cells that run at once slow each other down, so equal seconds "
                "are not equal work; set jobs=1, or give the budget in completions, tokens or flops"
            )
        return self

    @model_validator(mode="after")
    def _check_names_and_seeds(self) -> CompareConfig:
        for name in self.arms:
            if name == START_FOLDER or not _NAME.fullmatch(name):
                raise ValueError(
                    f"arms: {name!r} cannot be the name of an arm: use letters, digits, '_', '.' and '-', "
                    f"and not {START_FOLDER!r}, which is the start model's folder"
                )
        if self.pairs is not None:
            self.pairs.check_opponents([START_FOLDER, *self.arms])
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice")
        return self


def _run_kind(value: object) -> Literal["online", "offline"]:
    return algorithm_kind(value.get("algorithm") if isinstance(value, Mapping) else getattr(value, "algorithm", None))


class TrialConfig(Section):
    """A trial of an arm's tuning, in one of its rounds."""

    number: int
    """0 is the arm as it is written."""
    round: int
    """From 1; a trial goes on in the same run folder from round to round."""
    values: dict[str, Scalar] = {}
    """Setting -> the value that was drawn."""


class CellConfig(Section):
    """One arm with one seed, as handed to the process that runs it (cell.yaml)."""

    arm: str
    """The arm's name, or `start`."""
    seed: int
    """Seed of everything random in the cell."""
    train: Annotated[
        Annotated[OnlineConfig, Tag("online")] | Annotated[OfflineConfig, Tag("offline")], Discriminator(_run_kind)
    ]
    """The run; a cell without training uses only its start model, held-out prompts, sampling and judge."""
    proxy: Annotated[Source, OneOf()] | None = None
    """The reward to train on."""
    budget: BudgetConfig | None = None
    """The budget of the run; null: nothing is trained."""
    suites: dict[str, dict[str, Any]] = {}
    """Suites to run on the final model, by name, with their settings."""
    best_of_n: BestOfNArm | None = None
    """If set, the cell samples n completions and picks the best instead of training."""
    trial: TrialConfig | None = None
    """If set, the cell is a trial of the arm's tuning, and no part of the report."""
