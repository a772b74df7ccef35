"""Spans of a text: which characters of a conversation are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]  # start and end character, the end not included


@dataclass(frozen=True)
class CompletionText:
    """The text of the turns that follow a prompt, and the spans of it to train on."""

    before: str
    text: str
    learned: tuple[Span, ...]

    @property
    def is_learned_whole(self) -> bool:
        """Return whether all of the text is trained on."""
        return self.learned == ((0, len(self.text)),)

    def starting_at(self, start: int) -> CompletionText:
        """Return the same turns with the text beginning at character `start` of the conversation.

        The added text becomes part of the first span.
        """
        added = self.before[start:]
        (first, end), *others = self.learned
        learned = ((first, end + len(added)), *((a + len(added), b + len(added)) for a, b in others))
        return CompletionText(self.before[:start], added + self.text, learned)


def segments(length: int, spans: Sequence[Span]) -> list[tuple[Span, bool]]:
    """Cut a text of `length` characters where spans begin and end; return each part and whether it is inside a span."""
    cuts = sorted({0, length, *(edge for span in spans for edge in span)})
    return [((a, b), any(start <= a and b <= end for start, end in spans)) for a, b in pairwise(cuts) if b > a]
