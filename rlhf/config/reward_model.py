"""The sections that only a reward-model run has: its loss, its calibration, its ensemble."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf.config.algorithm import NonNegative
from rlhf.config.base import Section
from rlhf.config.data import Count, Size

Varied = Literal["head", "order", "pairs"]


class RewardModelLoss(Section):
    """The Bradley-Terry loss, with the optional margin and centering of reward_model.losses."""

    use_margin: bool = False
    """Subtract the data's margin column from the score difference (Touvron et al. 2023, eq. 2)."""
    centering: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near zero (Eisenstein et al. 2023); 0.01 is usual."""


class CalibrationConfig(Section):
    """The shift and scale stored in the model, which give scores mean 0 and std 1 on reference completions."""

    data: Literal["chosen", "both", "none"] = "both"
    """Which completions of the training pairs to calibrate on; none: leave scores as they are."""
    limit: Count = 1024
    """How many completions to calibrate on."""


class EnsembleConfig(Section):
    """Several reward models from one run, which differ in what `vary` names. `ensemble=4` is short for size: 4."""

    size: Annotated[int, Field(ge=1)] = 1
    """Members; 1: a single reward model, and no ensemble."""
    backbone: Literal["shared", "separate"] = "shared"
    """shared: heads on one backbone, trained and scored in one forward pass; separate: whole reward models, trained one
    after another into members/0, members/1, ... of the run folder."""
    vary: list[Varied] | None = None
    """What members differ in. head: the seed of the head's first weights; order: the order of the pairs (separate
    backbones only); pairs: each learns from a bootstrap resample of its own. null: [head, pairs] if the backbone is
    shared, otherwise [head, order]."""
    member: Size | None = None
    """The member that this run trains, of separate backbones, counted from 0; null: all of them. For training members
    on several machines."""

    @property
    def varied(self) -> frozenset[Varied]:
        """Return what members differ in."""
        if self.vary is not None:
            return frozenset(self.vary)
        return frozenset(("head", "pairs") if self.backbone == "shared" else ("head", "order"))

    @property
    def is_shared(self) -> bool:
        """Return whether the run trains several heads on one backbone."""
        return self.size > 1 and self.backbone == "shared"

    def number(self, what: Varied) -> int | None:
        """Return the number of the member that this run trains if members differ in `what`; else None."""
        return self.member if what in self.varied else None

    @model_validator(mode="after")
    def _check_members(self) -> EnsembleConfig:
        if self.is_shared and "order" in self.varied:
            raise ValueError("vary has order: heads on one backbone see the same batches; use pairs, or separate")
        if self.size > 1 and not self.varied:
            raise ValueError("vary is empty: all members would be the same")
        if self.member is not None and (self.backbone == "shared" or self.member >= self.size):
            raise ValueError(f"member is {self.member}: needs backbone=separate and a size above it")
        return self
