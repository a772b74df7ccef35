"""Degrade completions to probe a reward model: one that prefers the degraded copies will be exploited by a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Bool, Int
from torch import Tensor

from rlhf.data.pad import right_pad

Degrade = Callable[[list[int]], list[int]]


def repeated(content: list[int]) -> list[int]:
    """Return the text twice in a row."""
    return content + content


def halved(content: list[int]) -> list[int]:
    """Return the first half of the text, rounded up."""
    return content[: (len(content) + 1) // 2]


PROBES: dict[str, Degrade] = {"repeated": repeated, "halved": halved}


def degraded(
    ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], how: Degrade, *, eos_ids: Sequence[int]
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """Degrade each completion's text but keep its ending: an EOS stays the last token and is not repeated."""
    rows = []
    for row, live in zip(ids, mask, strict=True):
        content = row[live].tolist()
        ending = [content.pop()] if content and content[-1] in eos_ids else []
        rows.append(how(content) + ending)
    return right_pad(rows, pad_id=0)
