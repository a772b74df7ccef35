"""The steps all data sets share: rows, their dialect, their text, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from rlhf.config.data import DatasetConfig
from rlhf.data.conversation import Prompt
from rlhf.data.dialects import Completion, Use, is_transcript
from rlhf.data.encode import Encoder
from rlhf.data.files import load_rows
from rlhf.data.row import BadRow, Row
from rlhf.data.skips import Skips
from rlhf.data.templates import Rendered

CHUNK = 512  # rows tokenized in one call
_TEXT_PROMPTS = ("prompt", "instruction", "question")
SEAMS = 16  # rows at which the seam between prompt and completion is looked at


@runtime_checkable
class Asks(Protocol):
    """A row in any of its forms has a prompt."""

    @property
    def prompt(self) -> Prompt:
        """Text, or a conversation."""
        ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools the assistant may call."""
        ...

    @property
    def completions(self) -> tuple[Completion, ...]:
        """What follows the prompt."""
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
    learned: tuple[list[bool], ...] = ()  # of each completion, the tokens that the assistant wrote; empty: all


Render = Callable[[T], list[Rendered]]
Fit = Callable[[Usable[T], Ids], Ids | None]


def encoded_rows(
    config: DatasetConfig,
    use: Use[T],
    encoder: Encoder,
    skips: Skips,
    *,
    fit: Fit[T],
    render: Render[T] | None = None,
    turns: bool = True,
) -> Iterator[tuple[Usable[T], Ids]]:
    """Yield the rows of a data set that are used, at most `config.limit`: read, rendered, encoded, and made to `fit`.

    `render` may make several rows of one; `turns`: text prompts become turns where there is a template.
    `fit` raises BadRow for a row that cannot be used, and returns None for one it has left out.

    Raises:
        DataError: after the last row, if none was used.
    """
    read = use.read(load_rows(config, skips), skips, turns=encoder.template.turns and turns)
    rows = _rendered(read, encoder, skips, render or _renderer(encoder))
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
    rows = [Ids(prompt, tuple(side[i] for side in sides)) for i, prompt in enumerate(prompts)]
    return [_by_turns(encoder, text, ids) if text.learned else ids for text, ids in zip(texts, rows, strict=True)]


def _by_turns(encoder: Encoder, text: Rendered, ids: Ids) -> Ids:
    sides = [encoder.turns(text, which) for which in range(len(text.completions))]
    return Ids(ids.prompt, tuple(row for row, _ in sides), learned=tuple(learned for _, learned in sides))


def _renderer(encoder: Encoder) -> Callable[[Asks], list[Rendered]]:
    return lambda text: [encoder.render(text.prompt, text.completions, tools=text.tools)]


def _rendered(
    read: Iterator[tuple[Row, T]], encoder: Encoder, skips: Skips, render: Callable[[T], list[Rendered]]
) -> Iterator[Usable[T]]:
    for row, read_row in read:
        found = _as_written(row, read_row, encoder, skips)
        try:
            texts = render(found)
        except BadRow as bad:
            skips.add(row, bad.reason, bad.detail)
            continue
        _note(row, found.prompt, texts, encoder, skips)
        yield from (Usable(row, found, text) for text in texts)


def _as_written(row: Row, found: T, encoder: Encoder, skips: Skips) -> T:
    """Leave a text prompt alone that has the template's special tokens in it already: it is written out."""
    prompt = row.values.get("prompt")
    if encoder.template.choice != "auto" or isinstance(found.prompt, str) or not isinstance(prompt, str):
        return found
    if not any(special in prompt for special in encoder.template.specials):
        return found
    skips.count("text prompts have special tokens written out already, and stay as they are")
    changed: Any = found  # every form of a row is a dataclass
    return cast(T, replace(changed, prompt=prompt))


def _note(row: Row, prompt: Prompt, texts: Sequence[Rendered], encoder: Encoder, skips: Skips) -> None:
    """Say once what was made of rows like this one."""
    given_as_text = any(isinstance(row.values.get(name), str) for name in _TEXT_PROMPTS)
    if encoder.template.choice == "auto" and given_as_text and not isinstance(prompt, str):
        skips.note(
            "Text prompts become user turns by the tokenizer's chat template; "
            "data.chat_template=none keeps them as they are"
        )
    if encoder.template.source is not None and isinstance(prompt, str) and is_transcript(prompt):
        skips.note("Transcripts stay text: the chat template is not used for them")
    if len(texts) > 1:
        skips.count("conversations taken apart, a row for each turn: the chat template rewrites earlier turns")
    for name in texts[0].ignored:
        skips.count(f"rows whose {name} the chat template does not write")


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
