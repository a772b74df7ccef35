"""The seam: completions to scores."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.types import Completions, Scores


@runtime_checkable
class RewardSource(Protocol):
    """Anything that scores completions."""

    def __call__(self, completions: Completions) -> Scores:
        """One finite number a completion, on the CPU.

        Raises:
            RewardError: the scores are NaN, Inf, of the wrong length, or could not be had.
        """
