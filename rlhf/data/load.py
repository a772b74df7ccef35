"""The steps all data sets share: rows, their dialect, their text, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar, runtime_checkable

from rlhf.config.data import DatasetConfig
from rlhf.data.chat import Rendered
from rlhf.data.conversation import Prompt
from rlhf.data.dialects import Use
from rlhf.data.encode import Encoder
from rlhf.data.files import load_rows
from rlhf.data.row import BadRow, Row
from rlhf.data.skips import Skips

CHUNK = 512  # rows tokenized in one call
SEAMS = 16  # rows at which the seam between prompt and completion is looked at


@runtime_checkable
class Asks(Protocol):
    """A row in any of its forms has a prompt."""

    @property
    def prompt(self) -> Prompt:
        """Text, or a conversation."""
        ...


T = TypeVar("T", bound=Asks)


@dataclass(frozen=True)
class Usable(Generic[T]):
    """A row on its way: as it was, in the form of its use, and as text."""

    row: Row
    found: T
    text: Rendered


@dataclass(frozen=True)
class Ids:
    """The token ids of a prompt and of its completions."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    whole: bool = True  # nothing of the row's text was cut off


Fit = Callable[[Usable[T], Ids], Ids | None]


def encoded_rows(
    config: DatasetConfig,
    use: Use[T],
    encoder: Encoder,
    skips: Skips,
    *,
    completions: Callable[[T], tuple[str, ...]],
    fit: Fit[T],
) -> Iterator[tuple[Usable[T], Ids]]:
    """The rows of a data set that are used, at most `config.limit`: read, rendered, encoded, and made to `fit`.

    `fit` raises BadRow for a row that cannot be used, and returns None for one it has left out.

    Raises:
        DataError: after the last row, if none was used.
    """
    read = use.read(load_rows(config, skips), skips, turns=encoder.template.turns)
    rows = _rendered(read, encoder, skips, completions)
    while chunk := list(islice(rows, _wanted(config.limit, skips.used))):
        for usable, ids in zip(chunk, _ids(encoder, [u.text for u in chunk]), strict=True):
            try:
                fitted = fit(usable, ids)
            except BadRow as bad:
                skips.add(usable.row, bad.reason, bad.detail)
                continue
            if fitted is None:
                continue
            _check_seam(encoder, skips, usable.text, ids)
            skips.used += 1
            yield usable, fitted
    skips.require_rows()


def _wanted(limit: int | None, used: int) -> int:
    """How many rows to read next: no more than are wanted, for a row beyond the limit is neither used nor skipped."""
    return CHUNK if limit is None else min(CHUNK, limit - used)


def _ids(encoder: Encoder, texts: list[Rendered]) -> list[Ids]:
    sides = [encoder.completions(texts, which) for which in range(len(texts[0].completions))]
    prompts = encoder.prompts(texts)
    return [Ids(prompt, tuple(side[i] for side in sides)) for i, prompt in enumerate(prompts)]


def _rendered(
    read: Iterator[tuple[Row, T]], encoder: Encoder, skips: Skips, completions: Callable[[T], tuple[str, ...]]
) -> Iterator[Usable[T]]:
    for row, found in read:
        if isinstance(found.prompt, str) and encoder.template.source and not encoder.template.turns:
            skips.note(
                "The rows are plain text, so the tokenizer's chat template is not used; "
                "data.chat_template=PATH makes each prompt a user's turn"
            )
        try:
            text = encoder.render(found.prompt, completions(found))
        except BadRow as bad:
            skips.add(row, bad.reason, bad.detail)
            continue
        yield Usable(row, found, text)


def check_ids(ids: Ids) -> None:
    """A model must be given something to go on from, and be shown more than an EOS."""
    if not ids.prompt:
        raise BadRow("empty prompt, and the tokenizer puts no token before a text")
    if any(len(completion) < 2 for completion in ids.completions):
        raise BadRow("the tokenizer makes nothing of the completion")


def _check_seam(encoder: Encoder, skips: Skips, text: Rendered, ids: Ids) -> None:
    if skips.used < SEAMS and ids.completions and not encoder.seam_holds(text, ids.prompt, ids.completions[0]):
        skips.note(
            "Prompts and completions, encoded apart, do not decode to the text they are together: this tokenizer "
            "changes the text where they meet"
        )
