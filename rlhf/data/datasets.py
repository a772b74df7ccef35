"""Load the usable rows of a data file, and draw shuffled batches of them, epoch after epoch."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from rlhf.batching import Batch
from rlhf.config.data import DatasetConfig, TrainableDataConfig
from rlhf.data.conversation import Prompt
from rlhf.data.files import load_rows
from rlhf.data.formats import ASSISTANT, Completion, RowFormats, is_transcript
from rlhf.data.rows import SYSTEM_LEFT_OUT, TOOLS_LEFT_OUT, BadRow, DataRow, RowCounts, is_in_part, no_row_in_part
from rlhf.data.templates import Rendered
from rlhf.data.tokenizer import Encoder
from rlhf.errors import DataError

B_co = TypeVar("B_co", bound=Batch, covariant=True)


@runtime_checkable
class RowSet(Protocol[B_co]):
    """A data set that can collate any of its rows into a batch."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def collate(self, indices: list[int]) -> B_co:
        """Collate the rows at `indices` into one batch, in that order."""


@lru_cache(maxsize=64)  # an epoch of each source of a mixture, and the next
def _permutation(n: int, seed: int, epoch: int) -> Sequence[int]:
    # For a given seed Python guarantees the same random() sequence across versions, but not the same shuffle().
    draw = random.Random(f"{seed}/{epoch}").random
    keys = [draw() for _ in range(n)]
    return array("q", sorted(range(n), key=keys.__getitem__))  # 8 bytes a row; integers of Python take 36


def epoch_order(n: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the row indices of batch `step` (from 1) when n rows are shuffled again in every epoch.

    Batch k is positions [(k-1)·batch_size, k·batch_size) of the endless sequence of epochs, so a batch may
    cross the end of an epoch, and any n consecutive positions from a multiple of n hold every row once.
    """
    assert min(n, batch_size, step) > 0
    start = (step - 1) * batch_size
    return [_permutation(n, seed, position // n)[position % n] for position in range(start, start + batch_size)]


def rows_read(n: int, batch_size: int, seed: int, steps: int) -> list[int]:
    """Return the indices, in order, of the rows that the first `steps` batches of `epoch_order` hold."""
    if steps * batch_size >= n:
        return list(range(n))
    return sorted(_permutation(n, seed, 0)[: steps * batch_size])


def sequential_batches(rows: RowSet[B_co], size: int) -> Iterator[B_co]:
    """Yield every row once, in data set order, in batches of at most `size`."""
    for start in range(0, len(rows), size):
        yield rows.collate(list(range(start, min(start + size, len(rows)))))


class BatchStream(Generic[B_co]):
    """Endless shuffled batches of a data set, each computed from the seed and the step number alone."""

    def __init__(self, rows: RowSet[B_co], rows_per_step: int, seed: int) -> None:
        self.rows = rows
        self.rows_per_step = rows_per_step
        self.seed = seed

    @property
    def steps_per_epoch(self) -> float:
        """Return how many steps it takes to read every row once."""
        return len(self.rows) / self.rows_per_step

    def reseeded(self, seed: int) -> BatchStream[B_co]:
        """Return a stream of the same rows in another order."""
        return BatchStream(self.rows, self.rows_per_step, seed)

    def batch(self, step: int) -> B_co:
        """Return the batch of step `step`, counted from 1."""
        return self.part(step, range(self.rows_per_step))

    def part(self, step: int, places: range) -> B_co:
        """Return the rows at some places of the batch of a step."""
        order = epoch_order(len(self.rows), self.rows_per_step, self.seed, step)
        return self.rows.collate([order[place] for place in places])


CHUNK = 512  # rows tokenized in one call
_TEXT_PROMPTS = ("prompt", "instruction", "question")
SEAMS = 16  # rows for which the seam between prompt and completion is checked


@runtime_checkable
class HasPrompt(Protocol):
    """Anything a row can be parsed into: it has a prompt."""

    @property
    def prompt(self) -> Prompt:
        """Return the prompt: text, or a conversation."""

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools that the assistant may call."""

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the completions that follow the prompt."""


T = TypeVar("T", bound=HasPrompt)


@dataclass(frozen=True)
class PreparedRow(Generic[T]):
    """A usable row in three forms: as read, parsed for its use, and rendered as text."""

    row: DataRow
    parsed: T
    text: Rendered


@dataclass(frozen=True)
class EncodedRow:
    """The token ids of a prompt and of its completions."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    whole: bool = True  # no part of the row was cut off
    learned: tuple[list[bool], ...] = ()  # for each completion, which tokens the assistant wrote; empty: all


Entry = tuple[PreparedRow[T], EncodedRow]
Render = Callable[[T], list[Rendered]]
Fit = Callable[[PreparedRow[T], EncodedRow, RowCounts], EncodedRow | None]
S = TypeVar("S")


@dataclass(frozen=True)
class RowPipeline(Generic[T, S]):
    """How the rows of one use become a data set: parsed, rendered as text, encoded, fitted to a length, put together.

    Attributes:
        config: the section; if it has a part, only rows whose place (`place_of`) is in it are used.
        use: the use of the rows, which determines the formats they may have.
        encoder: renders and encodes the rows.
        fit: makes encoded rows fit their limit; raises BadRow for an unusable row, returns None for one it left out.
        collect: makes the data set of encoded rows, with the counts of those that were cut and skipped.
        render: renders a parsed row as text, perhaps as several rows; None: one row of prompt and completions.
        turns: text prompts become user turns if there is a chat template.
    """

    config: TrainableDataConfig
    use: RowFormats[T]
    encoder: Encoder
    fit: Fit[T]
    collect: Callable[[Sequence[Entry[T]], RowCounts], S]
    render: Render[T] | None = None
    turns: bool = True

    @property
    def makes_turns(self) -> bool:
        """Return whether text prompts become user turns."""
        return self.encoder.template.turns and self.turns

    def load(self) -> S:
        """Load and encode the usable rows of the section, at most its limit.

        Raises:
            DataError: the data set cannot be read, no row was used, or no prompt has one of the hints.
        """
        entries, skips = self.load_entries(self.config)
        return self.collect(entries, skips)

    def load_entries(self, config: DatasetConfig) -> tuple[list[Entry[T]], RowCounts]:
        """Load and encode the usable rows of a data set, and count the others."""
        if not config.path:
            raise DataError("these rows are read whole and from one place: set path, not sources")
        skips = RowCounts(config.path, fatal=config.bad_rows == "error", part=self.config.part)
        rows = load_rows(config, skips)
        given = len(rows) + skips.skipped_everywhere
        read = self.use.read(rows, skips, turns=self.makes_turns)
        entries = list(self.encode(read, skips, limit=config.limit))
        if not skips.used and self.config.part is not None and given > skips.skipped_everywhere:
            raise no_row_in_part(config.path, self.config.part)
        skips.require_rows()
        skips.digest = digest_of(entries)
        return entries, skips

    def encode(self, read: Iterator[tuple[DataRow, T]], skips: RowCounts, *, limit: int | None) -> Iterator[Entry[T]]:
        """Yield the usable ones of some parsed rows with their token ids, at most `limit`."""
        encoder = self.encoder
        chosen = ((row, parsed) for row, parsed in read if is_in_part(_key(parsed), self.config.part))
        rows = _render_rows(chosen, encoder, skips, self.render or _default_render(encoder))
        while chunk := list(islice(rows, _next_chunk_size(limit, skips.used))):
            for usable, ids in zip(chunk, _encode(encoder, [u.text for u in chunk]), strict=True):
                try:
                    fitted = self.fit(usable, ids, skips)
                except BadRow as bad:
                    skips.add(usable.row, bad.reason, bad.detail, is_placed=True)
                    continue
                if fitted is None:
                    continue
                _check_seam(encoder, skips, usable.text, ids)
                skips.used += 1
                yield usable, fitted


def _key(parsed: HasPrompt) -> str:
    """Return the text that places a row: its prompt, a conversation's first user turn, or, with neither, its text.

    So all rows of a prompt, and all turns of a conversation or a transcript, have one place.
    """
    if isinstance(parsed.prompt, str):
        prompt = parsed.prompt.partition(ASSISTANT)[0] if is_transcript(parsed.prompt) else parsed.prompt
        return prompt or str(getattr(parsed, "completion", ""))
    turns = [message for message in parsed.prompt if message.get("role") == "user"] or list(parsed.prompt)
    return str(turns[0].get("content")) if turns else ""


def digest_of(entries: Iterable[Entry[Any]]) -> str:
    """Compute the SHA-256 digest of encoded rows: the text and token ids of each, and their order."""
    digest = hashlib.sha256()
    for usable, ids in entries:
        digest.update(repr(usable.parsed).encode("utf-8", "backslashreplace"))
        for tokens in (ids.prompt, *ids.completions):
            digest.update(b"%d:" % len(tokens) + array("q", tokens).tobytes())
        for flags in ids.learned:
            digest.update(bytes(flags))
    return digest.hexdigest()


def _next_chunk_size(limit: int | None, used: int) -> int:
    """Return how many rows to read next; rows beyond the limit are not read, so they are not counted as skipped."""
    return CHUNK if limit is None else min(CHUNK, limit - used)


def _encode(encoder: Encoder, texts: list[Rendered]) -> list[EncodedRow]:
    sides = [encoder.completions(texts, which) for which in range(len(texts[0].completions))]
    prompts = encoder.prompts(texts)
    rows = [EncodedRow(prompt, tuple(side[i] for side in sides)) for i, prompt in enumerate(prompts)]
    return [_encode_turns(encoder, text, ids) if text.learned else ids for text, ids in zip(texts, rows, strict=True)]


def _encode_turns(encoder: Encoder, text: Rendered, ids: EncodedRow) -> EncodedRow:
    sides = [encoder.turns(text, which) for which in range(len(text.completions))]
    return EncodedRow(ids.prompt, tuple(row for row, _ in sides), learned=tuple(learned for _, learned in sides))


def _default_render(encoder: Encoder) -> Callable[[HasPrompt], list[Rendered]]:
    return lambda text: [encoder.render(text.prompt, text.completions, tools=text.tools)]


def _render_rows(
    read: Iterator[tuple[DataRow, T]], encoder: Encoder, skips: RowCounts, render: Callable[[T], list[Rendered]]
) -> Iterator[PreparedRow[T]]:
    for row, parsed in read:
        item = _keep_formatted_prompt(row, parsed, encoder, skips)
        try:
            texts = render(item)
        except BadRow as bad:
            skips.add(row, bad.reason, bad.detail, is_placed=True)
            continue
        _note_treatment(row, item.prompt, texts, encoder, skips)
        yield from (PreparedRow(row, item, text) for text in texts)


def _keep_formatted_prompt(row: DataRow, parsed: T, encoder: Encoder, skips: RowCounts) -> T:
    """Restore a text prompt that has the template's turns written out already: it is not to be templated again."""
    prompt = row.values.get("prompt")
    if isinstance(parsed.prompt, str) or not isinstance(prompt, str):
        return parsed
    if not encoder.is_written_out(prompt):
        return parsed
    skips.count("text prompts have the chat template's turns written out already, and stay as they are")
    item: Any = parsed  # every parsed row is a dataclass, which replace() needs
    return cast(T, replace(item, prompt=prompt))


def _note_treatment(
    row: DataRow, prompt: Prompt, texts: Sequence[Rendered], encoder: Encoder, skips: RowCounts
) -> None:
    """Record in `skips` how rows like this one are treated, each remark once."""
    if encoder.template.choice == "auto" and has_text_prompt(row.values) and not isinstance(prompt, str):
        skips.note(
            "Text prompts become user turns by the tokenizer's chat template; "
            "data.chat_template=none keeps them as they are"
        )
    if encoder.template.source is not None and isinstance(prompt, str) and is_transcript(prompt):
        skips.note("Transcripts stay text: the chat template is not used for them")
    if isinstance(prompt, str) and row.values.get("system"):
        skips.count(SYSTEM_LEFT_OUT)
    if isinstance(prompt, str) and row.values.get("tools") not in (None, "", []):
        skips.count(TOOLS_LEFT_OUT)
    if len(texts) > 1:
        skips.count("conversations taken apart, a row for each turn: the chat template rewrites earlier turns")
    if any(text.learned and text.learned[0][-1][1] < len(text.completions[0]) for text in texts):
        skips.count("rows whose end of turn is not learned: the chat template has it after its {% generation %} block")
    for name in texts[0].ignored:
        skips.count(f"rows whose {name} the chat template does not write")


def has_text_prompt(values: Mapping[str, object]) -> bool:
    """Return whether the prompt of a row is a text, which a chat template makes a user turn of."""
    return any(isinstance(values.get(name), str) for name in _TEXT_PROMPTS)


def check_ids(ids: EncodedRow) -> None:
    """Check that the prompt has a token, and every completion a token besides its EOS.

    Raises:
        BadRow: one of them has none.
    """
    if not ids.prompt:
        raise BadRow("empty prompt, and the tokenizer puts no token before a text")
    if any(len(completion) < 2 for completion in ids.completions):
        raise BadRow("the tokenizer makes nothing of the completion")


def _check_seam(encoder: Encoder, skips: RowCounts, text: Rendered, ids: EncodedRow) -> None:
    if skips.used < SEAMS and ids.completions and not encoder.is_seam_exact(text, ids.prompt, ids.completions[0]):
        skips.note(
            "Prompts and completions, encoded apart, do not decode to the text they are together: this tokenizer "
            "changes the text where they meet"
        )
