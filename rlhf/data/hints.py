"""Prompts with a hint in them: the texts of a row's columns, put into its prompt as algorithm.rescue says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf.config.rescue import Hint
from rlhf.data.conversation import Prompt
from rlhf.data.datasets import EncodedRow, PreparedRow
from rlhf.data.formats import ASSISTANT, PromptText, is_transcript
from rlhf.data.rows import BadRow, RowCounts
from rlhf.data.tokenize import Encoder
from rlhf.errors import DataError

NO_HINT: list[int] = []  # the ids of a prompt that a hint cannot be put into: its row has none, or it gets too long


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
    """Encode every row's prompt with each of the hints; NO_HINT where a row cannot have it, which `skips` counts.

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
    text = hint_text(usable.parsed.reference, hint.column)
    prompt = None if text is None or not ids.whole else with_hint(usable.parsed.prompt, hint, text)
    if prompt is None:
        skips.count(f"prompts that cannot be given the hint {hint.column!r}: no text, or the prompt was cut")
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
