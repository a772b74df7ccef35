"""The interface of samplers: prompts to completions."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.types import Completions, Prompts


@runtime_checkable
class Sampler(Protocol):
    """Samples completions from the policy with its current weights."""

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample `group_size` completions of each prompt; the rows of one prompt are contiguous.

        A completion depends on `key` (rlhf.runtime.seeding.derive), its row id and the weights, and on nothing else:
        neither on its batch nor on its rank. `greedy` takes the most likely token instead of sampling.
        """
