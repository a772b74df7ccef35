"""Prompts to sample completions for, and the stream of them that a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import ChatFormat, PromptsConfig
from rlhf.data.conversation import Prompt
from rlhf.data.dialects import PROMPTS, PromptText
from rlhf.data.encode import Encoder, make_encoder
from rlhf.data.lengths import Limit, cut_start
from rlhf.data.load import Ids, Usable, check_ids, encoded_rows
from rlhf.data.pad import left_pad
from rlhf.data.row import BadRow, Row
from rlhf.data.skips import Skips
from rlhf.data.stream import BatchStream
from rlhf.errors import DataError
from rlhf.types import Prompts

MESSAGES = "prompt_messages"  # the column of a reference with the prompt as messages, where it is a conversation


@dataclass(frozen=True)
class PromptSet:
    """Encoded prompts; each reference is the row's columns, with the prompt's text under `prompt`."""

    ids: tuple[list[int], ...]
    references: tuple[Mapping[str, object], ...]
    pad_id: int
    skips: Skips

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompts as text."""
        return tuple(str(reference["prompt"]) for reference in self.references)

    def collate(self, indices: Sequence[int]) -> Prompts:
        """These prompts as one batch, numbered from 0."""
        return self._prompts(indices, range(len(indices)))

    def all(self) -> Prompts:
        """All prompts as one batch."""
        return self.collate(range(len(self)))

    def batches(self, size: int) -> Iterator[Prompts]:
        """All prompts in order, `size` at a time, each numbered by its place in the set."""
        for start in range(0, len(self), size):
            indices = range(start, min(start + size, len(self)))
            yield self._prompts(indices, indices)

    def _prompts(self, indices: Sequence[int], numbers: Sequence[int]) -> Prompts:
        ids, mask = left_pad([self.ids[i] for i in indices], self.pad_id)
        return Prompts(
            prompt_ids=ids,
            prompt_mask=mask,
            row_ids=torch.tensor(list(numbers), dtype=torch.long),
            references=tuple(self.references[i] for i in indices),
        )


class PromptStream(BatchStream[Prompts]):
    """Endless shuffled prompts: the batch of a step depends on the seed and the step alone."""

    def __init__(self, prompt_set: PromptSet, prompts_per_step: int, seed: int) -> None:
        super().__init__(prompt_set, prompts_per_step, seed)


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | ChatFormat,
    context: int | None = None,
    max_new_tokens: int = 0,
) -> PromptSet:
    """Load the prompts of a data set, encoded; with `max_new_tokens` more tokens each fits the model's `context`."""
    encoder = make_encoder(tokenizer, chat_template)
    skips = Skips(config.path, fatal=config.bad_rows == "error")
    limit = _limit(config, context, max_new_tokens)

    def fit(usable: Usable[PromptText], ids: Ids) -> Ids | None:
        fitted = _fitted(usable.row, ids, encoder, config.first_tokens, limit, skips)
        return None if fitted is None else Ids(fitted, (), whole=fitted == ids.prompt)

    rows = list(encoded_rows(config, PROMPTS, encoder, skips, fit=fit, turns=config.first_tokens is None))
    return PromptSet(
        tuple(ids.prompt for _, ids in rows),
        tuple(_reference(usable, ids, encoder) for usable, ids in rows),
        encoder.pad_id,
        skips,
    )


def _fitted(
    row: Row, encoded: Ids, encoder: Encoder, first_tokens: int | None, limit: Limit, skips: Skips
) -> list[int] | None:
    """The ids that are the prompt: the first of a text, and no more than the limit; None where the row is left out."""
    check_ids(encoded)
    head = encoder.head(encoded.prompt)
    ids = encoded.prompt if first_tokens is None else encoded.prompt[: head + first_tokens]
    excess = limit.excess(row, len(ids), skips)
    if not excess:
        return None if excess is None else ids
    cut = cut_start(ids, excess, head)
    if cut is None:
        skips.leave_out(row, limit.reason, "nothing of it would be left")
    else:
        skips.cut += 1
    return cut


def _limit(config: PromptsConfig, context: int | None, max_new_tokens: int) -> Limit:
    """Return the limit of the configuration, or what the model's context leaves beside the new tokens."""
    if context is None or context - max_new_tokens >= config.max_prompt_tokens:
        return Limit(config.max_prompt_tokens, "max_prompt_tokens", config.too_long)
    if context <= max_new_tokens:
        raise DataError(
            f"sampling.max_new_tokens of {max_new_tokens:,} leaves no room for a prompt: the model's context is "
            f"{context:,}. Set sampling.max_new_tokens to less."
        )
    room = f"what sampling.max_new_tokens={max_new_tokens} leaves of the model's context of {context:,}"
    return Limit(context - max_new_tokens, room, config.too_long)


def _reference(usable: Usable[PromptText], ids: Ids, encoder: Encoder) -> Mapping[str, object]:
    """Return the row's columns, the prompt's text (of a cut one, what is left of it), and its messages."""
    text = usable.text.prompt if ids.whole else encoder.decode(ids.prompt[encoder.head(ids.prompt) :])
    columns = {**usable.found.reference, "prompt": text}
    return {**columns, MESSAGES: list(usable.text.messages)} if usable.text.messages and ids.whole else columns


def encode_conversations(prompts: Sequence[Prompt], encoder: Encoder) -> Prompts:
    """Encode prompts, texts or conversations, as one batch."""
    try:
        rendered = [encoder.render(prompt) for prompt in prompts]
    except BadRow as bad:
        raise DataError(f"{bad}. Leave the template out with --raw.") from bad
    references = tuple({"prompt": text.prompt} for text in rendered)
    ids = tuple(encoder.prompts(rendered))
    return PromptSet(ids, references, encoder.pad_id, Skips("the command line", fatal=True)).all()
