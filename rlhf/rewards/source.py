"""The interface of every reward: completions in, scores out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.types import Completions, Scores


@runtime_checkable
class RewardSource(Protocol):
    """Anything that scores completions."""

    def __call__(self, completions: Completions) -> Scores:
        """Score each completion with one finite number, on the CPU.

        Raises:
            RewardError: the scores are NaN or infinite, of the wrong length, or could not be obtained.
        """
