"""Prompts to sample completions for, and an endless stream of them that a resumed run continues exactly.

A prompt may have hints: the texts of a row's columns, put into it by algorithm.rescue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.rescue import Hint
from rlhf.config.data import ChatFormat, PromptsConfig
from rlhf.data.conversation import Prompt
from rlhf.data.datasets import BatchStream, EncodedRow, Entry, PreparedRow, RowPipeline, check_ids, has_text_prompt
from rlhf.data.formats import ASSISTANT, PROMPTS, PromptText, is_transcript
from rlhf.data.rows import BadRow, DataRow, RowCounts
from rlhf.data.tokenizer import Encoder, LengthLimit, left_pad, make_encoder, truncate_start
from rlhf.errors import DataError
from rlhf.references import CONVERSATION, MESSAGES
from rlhf.types import Prompts

SOURCE = "prompt_source"  # the reference column with the name of the source, if the prompts are a mixture
NO_HINT: list[int] = []  # the ids of a prompt that a hint cannot be put into: its row has none, or it gets too long


@dataclass(frozen=True)
class PromptSet:
    """Encoded prompts; each reference holds the row's columns, with the prompt's text under `prompt`."""

    ids: tuple[list[int], ...]
    references: tuple[Mapping[str, object], ...]
    pad_id: int
    skips: RowCounts
    hinted: tuple[tuple[list[int], ...], ...] = ()  # each prompt with each hint; no ids if it cannot have it

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the prompts as text."""
        return tuple(str(reference["prompt"]) for reference in self.references)

    def collate(self, indices: Sequence[int]) -> Prompts:
        """Collate the prompts at `indices` into one batch, numbered from 0."""
        return self._batch(indices, range(len(indices)))

    def collate_hinted(self, indices: Sequence[int], number: int) -> tuple[Prompts, Bool[Tensor, " B"]]:
        """Collate the prompts at `indices` with hint `number` (from 1) in them, and flag those that have it.

        The others stay plain. Row ids and references are as in `collate`.
        """
        ids = [self.hinted[i][number - 1] for i in indices]
        plain = self.collate(indices)
        prompt_ids, prompt_mask = left_pad(
            [row or self.ids[i] for row, i in zip(ids, indices, strict=True)], self.pad_id
        )
        hinted = replace(plain, prompt_ids=prompt_ids, prompt_mask=prompt_mask)
        return hinted, torch.tensor([bool(row) for row in ids])

    def all(self) -> Prompts:
        """Return all prompts as one batch."""
        return self.collate(range(len(self)))

    def batches(self, size: int) -> Iterator[Prompts]:
        """Yield all prompts in order, `size` at a time, each numbered by its position in the set."""
        for start in range(0, len(self), size):
            indices = range(start, min(start + size, len(self)))
            yield self._batch(indices, indices)

    def _batch(self, indices: Sequence[int], numbers: Sequence[int]) -> Prompts:
        ids, mask = left_pad([self.ids[i] for i in indices], self.pad_id)
        return Prompts(
            prompt_ids=ids,
            prompt_mask=mask,
            row_ids=torch.tensor(list(numbers), dtype=torch.long),
            references=tuple(self.references[i] for i in indices),
        )


class PromptStream(BatchStream[Prompts]):
    """Endless shuffled prompts; a batch depends only on the seed and the step number."""

    def __init__(self, prompt_set: PromptSet, prompts_per_step: int, seed: int) -> None:
        super().__init__(prompt_set, prompts_per_step, seed)


def prompt_pipeline(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
    max_new_tokens: int = 0,
    hints: Sequence[Hint] = (),
) -> RowPipeline[PromptText, PromptSet]:
    """Describe how rows become prompts, each of which leaves room for `max_new_tokens` in the model's `context`.

    Every prompt is also encoded with each of the `hints` of algorithm.rescue.

    Raises:
        DataError: `max_new_tokens` leaves no room for a prompt.
    """
    encoder = make_encoder(tokenizer, chat_template)
    limit = _limit(config, context, max_new_tokens)

    def fit(usable: PreparedRow[PromptText], ids: EncodedRow, skips: RowCounts) -> EncodedRow | None:
        if config.first_tokens is not None and usable.text.templated:
            raise BadRow("first_tokens cuts texts, and this prompt is a conversation")
        prompt_ids = _fit_prompt(usable.row, ids, encoder, config.first_tokens, limit, skips)
        return None if prompt_ids is None else EncodedRow(prompt_ids, (), whole=prompt_ids == ids.prompt)

    def collect(rows: Sequence[Entry[PromptText]], skips: RowCounts) -> PromptSet:
        return PromptSet(
            tuple(ids.prompt for _, ids in rows),
            tuple(_reference(usable, ids, encoder) for usable, ids in rows),
            encoder.pad_id,
            skips,
            encode_hints(rows, hints, encoder, max_tokens=limit.tokens, skips=skips),
        )

    return RowPipeline(config, PROMPTS, encoder, fit, collect, turns=config.first_tokens is None)


def _fit_prompt(
    row: DataRow, encoded: EncodedRow, encoder: Encoder, first_tokens: int | None, limit: LengthLimit, skips: RowCounts
) -> list[int] | None:
    """Cut the prompt to its first tokens, if so configured, and to the limit; return None if the row is left out."""
    check_ids(encoded)
    head = encoder.head(encoded.prompt)
    ids = encoded.prompt if first_tokens is None else encoded.prompt[: head + first_tokens]
    excess = limit.tokens_to_cut(row, len(ids), skips)
    if not excess:
        return None if excess is None else ids
    truncated = truncate_start(ids, excess, head)
    if truncated is None:
        skips.skip(row, limit.reason, "nothing of it would be left")
    else:
        skips.cut += 1
    return truncated


def _limit(config: PromptsConfig, context: int | None, max_new_tokens: int) -> LengthLimit:
    """Build the limit: the configured one, or the model's context less the new tokens, if that is less."""
    if context is None or context - max_new_tokens >= config.max_prompt_tokens:
        return LengthLimit(config.max_prompt_tokens, "max_prompt_tokens", config.too_long)
    if context <= max_new_tokens:
        raise DataError(
            f"sampling.max_new_tokens of {max_new_tokens:,} leaves no room for a prompt: the model's context is "
            f"{context:,}. Set sampling.max_new_tokens to less."
        )
    room = f"what sampling.max_new_tokens={max_new_tokens} leaves of the model's context of {context:,}"
    return LengthLimit(context - max_new_tokens, room, config.too_long)


def _reference(usable: PreparedRow[PromptText], ids: EncodedRow, encoder: Encoder) -> Mapping[str, object]:
    """Build a prompt's reference: the row's columns, the (truncated) text, and the messages of a whole prompt."""
    text = usable.text.prompt if ids.whole else encoder.decode(ids.prompt[encoder.head(ids.prompt) :])
    reserved = (MESSAGES, CONVERSATION)
    columns = {name: value for name, value in usable.parsed.reference.items() if name not in reserved}
    columns["prompt"] = text
    if usable.text.messages and not has_text_prompt(usable.row.values):
        columns[CONVERSATION] = True
    return {**columns, MESSAGES: list(usable.text.messages)} if usable.text.messages and ids.whole else columns


def encode_conversations(
    prompts: Sequence[Prompt], encoder: Encoder, *, cure: str = ". Leave the template out with --raw."
) -> Prompts:
    """Encode prompts, each a text or a conversation, as one batch; `cure` ends the message of a refusing template.

    Raises:
        DataError: the chat template refuses a prompt, or a prompt has no tokens.
    """
    try:
        rendered = [encoder.render(prompt) for prompt in prompts]
    except BadRow as bad:
        raise DataError(f"{bad}{cure}") from bad
    references = tuple({"prompt": text.prompt} for text in rendered)
    ids = tuple(encoder.prompts(rendered))
    if [] in ids:
        raise DataError(f"prompt {ids.index([]) + 1} has no tokens: give it a text to complete")
    return PromptSet(ids, references, encoder.pad_id, RowCounts("the command line", fatal=True)).all()


def hint_text(reference: Mapping[str, object], column: str) -> str | None:
    """Return the text that a row has in `column`, a number as text; None if it has none."""
    value = reference.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value.strip() else None


def with_hint(prompt: Prompt, hint: Hint, text: str) -> Prompt | None:
    """Add a hint to a prompt: to the last user message, before a transcript's last `Assistant:`, or to the text.

    White space at the end of a text stays there. A conversation without a user message cannot take a hint: None.
    """
    if isinstance(prompt, str):
        end = prompt.rfind(ASSISTANT.strip()) if is_transcript(prompt) else len(prompt)
        body = prompt[:end].rstrip()
        return hint.add_to(body, text) + prompt[len(body) :]
    users = [position for position, message in enumerate(prompt) if message["role"] == "user"]
    if not users:
        return None
    last = prompt[users[-1]]
    asked = {**last, "content": hint.add_to(last["content"], text)}
    return [*prompt[: users[-1]], asked, *prompt[users[-1] + 1 :]]


def encode_hints(
    rows: Sequence[tuple[PreparedRow[PromptText], EncodedRow]],
    hints: Sequence[Hint],
    encoder: Encoder,
    *,
    max_tokens: int,
    skips: RowCounts,
) -> tuple[tuple[list[int], ...], ...]:
    """Encode every row's prompt with each of the hints; NO_HINT if the row cannot have it, which `skips` counts.

    Raises:
        DataError: no row has a text in the column of one of the hints.
    """
    for hint in hints:
        if not any(hint_text(usable.parsed.reference, hint.column) for usable, _ in rows):
            raise DataError(
                f"{skips.source}: no usable row has a text in the column {hint.column!r}, which algorithm.rescue.hints "
                "names. Name a column of the data, or map one with data.prompts.columns"
            )
    return tuple(
        tuple(_encode_hint(usable, ids, hint, encoder, max_tokens, skips) for hint in hints) for usable, ids in rows
    )


def _encode_hint(
    usable: PreparedRow[PromptText], ids: EncodedRow, hint: Hint, encoder: Encoder, max_tokens: int, skips: RowCounts
) -> list[int]:
    text, plain = hint_text(usable.parsed.reference, hint.column), usable.parsed.prompt
    is_closed = not ids.whole or (isinstance(plain, str) and encoder.is_written_out(plain))
    prompt = None if text is None or is_closed else with_hint(plain, hint, text)
    if prompt is None:
        skips.count(
            f"prompts that cannot be given the hint {hint.column!r}: no text, or the prompt was cut or has the chat "
            "template's turns written out"
        )
        return NO_HINT
    try:
        asked = replace(usable.parsed, prompt=prompt)
        encoded = encoder.prompts([encoder.render(asked.prompt, tools=asked.tools)])[0]
    except BadRow:
        skips.count(f"prompts that the chat template refuses with the hint {hint.column!r}")
        return NO_HINT
    if len(encoded) > max_tokens:
        skips.count(f"prompts that are too long with the hint {hint.column!r}")
        return NO_HINT
    return encoded
