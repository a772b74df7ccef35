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
    """The policy's loss: sft, or a preference loss (dpo, robust_dpo, ipo, hinge, slic, simpo, orpo, kto)."""

    @property
    def name(self) -> str:
        """Return the preset's name, or the loss's type if no preset is named."""
        return self.preset or self.loss.type

    def check_sizes(self, prompts_per_step: int) -> None:
        """Check that the loss can work with this many rows in a step."""
        self.loss.check_sizes(prompts_per_step)
