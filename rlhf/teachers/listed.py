"""The likeliest tokens of a teacher as a table, from a server or a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from rlhf.algo.divergence import TeacherTokens
    from rlhf.types import Completions, Demonstrations


@dataclass(frozen=True)
class ListedTokens:
    """The K likeliest tokens of every live token of a batch; a `rlhf.teachers.teacher.Targets`."""

    ids: Int[Tensor, "M K"]
    logprobs: Float[Tensor, "M K"]

    def part(self, tokens: slice) -> TeacherTokens:
        """Return some of the tokens, with the probability of all that are not listed."""
        from rlhf.algo.divergence import TeacherTokens, rest_of

        logprobs = self.logprobs[tokens]
        return TeacherTokens(logprobs=logprobs, ids=self.ids[tokens], rest=rest_of(logprobs))


def live_rows(batch: Completions | Demonstrations) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of every prompt and completion without padding."""
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    for prompt, prompt_mask, completion, mask in zip(*(field.cpu() for field in fields), strict=True):
        yield prompt[prompt_mask].tolist(), completion[mask].tolist()
