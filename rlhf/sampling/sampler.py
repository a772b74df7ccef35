"""The seam: prompts to completions."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.types import Completions, Prompts


@runtime_checkable
class Sampler(Protocol):
    """Draws completions from the policy as it is now."""

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """`group_size` completions of each prompt, rows of one prompt contiguous.

        A completion depends on `key` (rlhf.runtime.seeding.derive), its row id and the weights, and on nothing else:
        neither the batch nor the process it was drawn in.
        """
