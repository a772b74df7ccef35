"""The configuration of tuning in a comparison: how many trials each arm gets, what they vary, and on what they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from rlhf.config.algorithm import Positive
from rlhf.config.base import Section
from rlhf.config.data import PromptsConfig

Scalar = bool | int | float | str | None


class Factor(Section):
    """Values around the arm's own, log-uniform between value / factor and value · factor."""

    factor: Annotated[float, Field(gt=1)]
    """The ratio of the largest value to the arm's own, and of the arm's own to the smallest."""


class Range(Section):
    """Values between two ends; a setting that is a whole number gets whole numbers."""

    low: float
    """The smallest value."""
    high: float
    """The largest value."""
    scale: Literal["log", "linear"] = "log"
    """log: as many values below the geometric mean of the ends as above it; linear: below and above their mean."""

    @model_validator(mode="after")
    def _check_ends(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}: low has to be the smaller")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low is {self.low:g}, which has no logarithm: set scale=linear, or a low above 0")
        return self


class Choices(Section):
    """Values from a list, each as likely; the list alone is the short form."""

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
    """What is different in one arm's tuning."""

    space: Space = {}
    """Setting -> its values, merged over the comparison's tune.space; null leaves a setting out."""


class TuneConfig(Section):
    """Tuning: every trained arm gets the same number of trials and the same budget for them; a number is its trials.

    Trial 0 is the arm as it is written. The others are drawn at random from the space. They run on seeds and prompts of
    their own, in rounds: after each, the worst are dropped (successive halving). What scores best becomes the arm.
    """

    trials: Annotated[int, Field(ge=2)] = 8
    """Configurations tried for each arm, its own included."""
    space: Space = Field(default=_RATE)
    """Setting -> its values: {factor: 10}, {low: 0.01, high: 0.1, scale: log}, or [0.01, 0.1]. Settings that an arm
    does not read are left out of its space. null leaves a setting out."""
    seeds: Annotated[list[int], Field(min_length=1)] = [1000]
    """Seeds of the trials; none of them may be a seed that the arms are reported on."""
    budget: Positive | None = None
    """What the tuning of one arm may spend, over all trials and seeds, in the unit of the comparison's budget. null: so
    much that the trials of the last round are trained as long as an arm."""
    keep: Annotated[int, Field(ge=2)] = 2
    """After each round one of so many trials goes on (rounded up); the arm as it is written always does."""
    draw_seed: int = 0
    """Seed of the draws from the space."""
    prompts: PromptsConfig | None = None
    """Prompts on which trials are judged; null: the held-out prompts are split, and the arms judged on the others."""
    prompts_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Without prompts: the share of the held-out prompts for tuning, chosen by a hash of their text."""
    report_default: bool = False
    """Also run the arms as they are written on the reporting seeds, to measure what tuning changed."""

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
