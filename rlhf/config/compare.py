"""What a comparison is: one base run, arms that differ from it, one budget, one judge."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rlhf.config.algorithm import Positive, type_or
from rlhf.config.base import Section
from rlhf.config.data import Count
from rlhf.config.reward import RewardSourceConfig
from rlhf.config.sections import TrainConfig

START = "start"  # the folder of the start model's own cells
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

BudgetUnit = Literal["completions", "tokens", "flops", "seconds"]


class BudgetConfig(Section):
    """What every trained arm may spend; exactly one of the four governs, and all four are recorded."""

    completions: Count | None = None
    """Completions sampled (online), or read from the data, two a pair (offline)."""
    tokens: Count | None = None
    """Tokens generated plus tokens that gradient passes read."""
    flops: Positive | None = None
    """Estimated floating-point operations: docs/compare.md has the formula."""
    seconds: Positive | None = None
    """Wall-clock seconds of training steps; evaluation, checkpoints and loading are not counted."""

    @model_validator(mode="after")
    def _exactly_one(self) -> BudgetConfig:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give exactly one of budget.completions, budget.tokens, budget.flops, budget.seconds")
        return self

    @property
    def unit(self) -> BudgetUnit:
        """Which of the four governs."""
        if self.completions is not None:
            return "completions"
        if self.tokens is not None:
            return "tokens"
        return "flops" if self.flops is not None else "seconds"

    @property
    def limit(self) -> float:
        """How much of it."""
        limit: float = getattr(self, self.unit)
        return float(limit)


class LabConfig(Section):
    """Where the built-in lab's start model, preference pairs and reward model are; made there if they are not."""

    folder: str = "runs/lab"
    """Holds sft/, preferences/ and rm/; a folder that `rlhf quickstart` made will do."""
    seed: int = 0
    """Of the three stages, where they are made."""


class Overrides(Section):
    """Settings of rlhf train, section by section, merged over the base; each is checked as part of the whole run."""

    data: dict[str, Any] = {}
    """See rlhf train."""
    policy: dict[str, Any] = {}
    """See rlhf train."""
    reference: dict[str, Any] = {}
    """See rlhf train."""
    critic: dict[str, Any] = {}
    """See rlhf train."""
    reward: dict[str, Any] = {}
    """See rlhf train."""
    sampling: dict[str, Any] = {}
    """See rlhf train."""
    overlap: dict[str, Any] = {}
    """See rlhf train."""
    algorithm: dict[str, Any] = {}
    """See rlhf train; another preset than the base's replaces the base's algorithm whole."""
    batch: dict[str, Any] = {}
    """See rlhf train."""
    sharding: str | dict[str, Any] = {}
    """See rlhf train."""
    schedule: dict[str, Any] = {}
    """See rlhf train; the length comes from the budget."""
    checkpoint: dict[str, Any] = {}
    """See rlhf train."""
    logging: dict[str, Any] = {}
    """See rlhf train."""
    eval: dict[str, Any] = {}
    """See rlhf train."""

    def tree(self) -> dict[str, Any]:
        """What is set, as plain data."""
        found = self.model_dump(mode="json", exclude_unset=True)
        return {key: value for key, value in found.items() if key in Overrides.model_fields}


class TrainedArm(Overrides):
    """An arm that is trained: any online or offline algorithm."""

    type: Literal["train"] = "train"


class BestOfNArm(Section):
    """An arm without training: n completions a prompt from the start model, the best by the reward is kept."""

    type: Literal["best_of_n"] = "best_of_n"
    n: Count = 16
    """Completions of which the best is kept."""
    samples: Count = 64
    """Completions drawn for each held-out prompt; the curve over n goes up to it."""

    @model_validator(mode="after")
    def _enough(self) -> BestOfNArm:
        if self.samples < self.n:
            raise ValueError(f"samples is {self.samples}, but the best of {self.n} needs at least {self.n}")
        return self


Arm = Annotated[
    Annotated[TrainedArm, Tag("train")] | Annotated[BestOfNArm, Tag("best_of_n")], Discriminator(type_or("train"))
]


class CompareConfig(Section):
    """Several algorithms from one start, on one budget, under one judge."""

    name: str = "compare"
    """The page's title."""
    base: str
    """A configuration of rlhf train that every arm starts from; found from here, or from beside this file."""
    out_dir: str = "runs/compare"
    """results.json, results.parquet, report.html, and one run folder for each arm and seed."""
    lab: LabConfig | None = None
    """Compare in the built-in lab: it gives the start model, the preference pairs and the reward model."""
    start: str | None = None
    """The model that every arm starts from; null: the lab's, else the base's policy.model."""
    reward_source: RewardSourceConfig | None = None
    """The reward that online arms are trained on and best-of-n picks by; null: the lab's, else the base's."""
    judge: RewardSourceConfig | None = None
    """Whose score counts, and which no arm is trained on; null: the base's eval.source."""
    budget: BudgetConfig
    """What every trained arm may spend."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0, 1, 2]
    """Each arm is run once for each."""
    jobs: Count = 1
    """Cells that run at once, each on its share of the processor's cores and, where there are several, on one GPU."""
    processes: Count = 1
    """Processes that each trained arm runs in, started by torchrun on this host; never changes a result."""
    evaluations: Count = 10
    """Evaluations along each run, where the budget is in completions; eval.every of an arm goes before."""
    suites: dict[str, dict[str, Any]] = {}
    """Suites of `rlhf eval` that judge every final model besides, by name, with their settings: dataset, sampling."""
    equal_kl: Positive | None = None
    """Nats at which the arms are compared besides at their end; null: the most that every arm reached."""
    shared: Overrides = Overrides()
    """Settings merged over the base for every arm."""
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    """Name -> what differs from the base."""

    @model_validator(mode="after")
    def _seconds_are_not_shared(self) -> CompareConfig:
        if self.jobs > 1 and self.budget.unit == "seconds":
            raise ValueError(
                f"budget.seconds with jobs={self.jobs}: cells that run at once slow each other down, so equal seconds "
                "are not equal work; set jobs=1, or give the budget in completions, tokens or flops"
            )
        return self

    @model_validator(mode="after")
    def _named_well(self) -> CompareConfig:
        for name in self.arms:
            if name == START or not _NAME.fullmatch(name):
                raise ValueError(
                    f"arms: {name!r} cannot be the name of an arm: use letters, digits, '_', '.' and '-', "
                    f"and not {START!r}, which is the start model's folder"
                )
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice")
        return self


class CellConfig(Section):
    """One arm with one seed, as it is handed to the process that runs it (cell.yaml)."""

    arm: str
    """The arm's name, or `start`."""
    seed: int
    """Of everything random in the cell."""
    train: TrainConfig
    """The run; of a cell that trains nothing, its start model, held-out prompts, sampling and judge."""
    proxy: RewardSourceConfig | None = None
    """The reward that is trained on."""
    budget: BudgetConfig | None = None
    """null: nothing is trained."""
    suites: dict[str, dict[str, Any]] = {}
    """Suites that judge the final model, by name, with their settings."""
    best_of_n: BestOfNArm | None = None
    """Set: this cell samples and picks."""


def completions_of(config: TrainConfig) -> int:
    """Count the completions that a step samples (online) or reads (offline: two a pair, one a row of SFT or KTO)."""
    rows = config.batch.prompts_per_step
    loss = getattr(config.algorithm, "loss", None)
    if loss is None:
        return rows * config.sampling.completions_per_prompt
    return rows if loss.type in ("sft", "kto") else 2 * rows
