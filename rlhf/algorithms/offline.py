"""The section of an offline algorithm: a preset and the loss on fixed data."""

from __future__ import annotations

from typing import Annotated

from rlhf.algorithms.offline_loss import OfflineLoss
from rlhf.algorithms.sft import Sft
from rlhf.section import OneOf, Section


class Offline(Section):
    """An algorithm that learns from a fixed data set."""

    preset: str | None = None
    """The preset that these settings start from."""
    loss: Annotated[OfflineLoss, OneOf("sft")] = Sft()
    """The policy's loss: sft, a preference loss (dpo, robust_dpo, ipo, hinge, slic, simpo, orpo, kto), or distill_sft,
    which imitates a teacher's distributions."""

    @property
    def name(self) -> str:
        """Return the preset's name, or the loss's type if no preset is named."""
        return self.preset or self.loss.type

    @property
    def samples(self) -> bool:
        """Return False: the data are learned from, at temperature 1."""
        return False

    @property
    def reads_teacher(self) -> bool:
        """Return whether the loss reads a teacher."""
        return self.loss.reads_teacher

    @property
    def replaces_reference(self) -> bool:
        """Return False: no offline loss has a penalty to a teacher."""
        return False

    @property
    def compares_with_teacher(self) -> bool:
        """Return whether the loss compares whole distributions with the teacher's, in every pass of an update."""
        return self.loss.reads_teacher

    def check_sizes(self, prompts_per_step: int) -> None:
        """Check that the loss can work with this many rows in a step."""
        self.loss.check_sizes(prompts_per_step)
