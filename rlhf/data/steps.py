"""Rows with step labels: a prompt, the steps of a solution, and of each step whether it is right.

    {"prompt": "2 + 3 * 4 = ?", "completions": ["3 * 4 = 12", "2 + 12 = 14"], "labels": [true, true]}

The columns are as in TRL's stepwise rows. A label is true or false, or a probability from 0 to 1, such as the share
of continuations that end at the right answer (Wang et al. 2024, Math-Shepherd).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import PreferencesConfig
from rlhf.data.conversation import as_text
from rlhf.data.files import load_rows
from rlhf.data.rows import BadRow, DataRow, RowCounts, is_in_part, no_row_in_part
from rlhf.data.tokenizer import left_pad, length_limit, pad_id, right_pad, right_pad_flags, tokenizer_of_text
from rlhf.errors import DataError
from rlhf.types import LabelledSteps


@dataclass(frozen=True)
class StepText:
    """A solution in steps, with the label of each."""

    prompt: str
    steps: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True)
class EncodedSteps:
    """The token ids of a solution, and the ends of its steps."""

    prompt: list[int]
    completion: list[int]
    ends: list[int]  # the position in the completion of the last token of the separator behind each step


class StepEncoder:
    """Encodes a prompt and its steps, each followed by the separator: for training and for grading."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
        """Encode with a tokenizer.

        Raises:
            DataError: the separator has no token.
        """
        self.tokenizer = tokenizer_of_text(tokenizer)
        self.separator = self._encode(separator)
        if not self.separator:
            raise DataError(f"the separator of steps {separator!r} has no token of the model's tokenizer: set another")

    def encode(self, prompt: str, steps: Sequence[str]) -> EncodedSteps:
        """Encode a solution; the prompt gets the tokenizer's token of the beginning, if it has one."""
        start = self.tokenizer.bos_token_id
        ids: list[int] = []
        ends: list[int] = []
        for step in steps:
            ids += [*self._encode(step), *self.separator]
            ends.append(len(ids) - 1)
        return EncodedSteps([*([] if start is None else [start]), *self._encode(prompt)], ids, ends)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@dataclass(frozen=True)
class StepSet:
    """Encoded solutions with their labels."""

    rows: tuple[EncodedSteps, ...]
    texts: tuple[StepText, ...]
    pad_id: int
    skips: RowCounts

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: Sequence[int]) -> LabelledSteps:
        """Collate the rows at `indices` into one batch."""
        rows, texts = [self.rows[i] for i in indices], [self.texts[i] for i in indices]
        prompt_ids, prompt_mask = left_pad([row.prompt for row in rows], self.pad_id)
        completion_ids, completion_mask = right_pad([row.completion for row in rows], self.pad_id)
        ends = [set(row.ends) for row in rows]
        flags = [[place in own for place in range(len(row.completion))] for row, own in zip(rows, ends, strict=True)]
        labels = torch.zeros(completion_ids.shape)
        for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
            labels[number, row.ends] = torch.tensor(text.labels)
        return LabelledSteps(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            loss_mask=right_pad_flags(flags),
            labels=labels,
        )


def load_steps(
    config: PreferencesConfig, tokenizer: PreTrainedTokenizerBase, *, separator: str, context: int | None = None
) -> StepSet:
    """Load and encode the rows with step labels of a data set, each within `config.max_tokens` and `context` tokens.

    A row that is too long loses its last steps if `config.too_long` is truncate.

    Raises:
        DataError: the data set cannot be read, or no row is usable.
    """
    encoder = StepEncoder(tokenizer, separator)
    skips = RowCounts(config.path, fatal=config.bad_rows == "error", part=config.part)
    limit = length_limit(config.max_tokens, context, config.too_long)
    rows: list[EncodedSteps] = []
    texts: list[StepText] = []
    apart = 0  # rows of the other part
    digest = hashlib.sha256()
    for row in load_rows(config, skips):
        if config.limit is not None and len(rows) == config.limit:
            break
        try:
            text = read_steps(row, separator)
        except BadRow as bad:
            skips.add(row, bad.reason, bad.detail)
            continue
        if not is_in_part(text.prompt, config.part):
            apart += 1
            continue
        encoded = encoder.encode(text.prompt, text.steps)
        excess = limit.tokens_to_cut(row, len(encoded.prompt) + len(encoded.completion), skips)
        if excess is None:
            continue
        if excess:
            kept = sum(end < len(encoded.completion) - excess for end in encoded.ends)
            if not kept:
                skips.skip(row, limit.reason, "no step would be left")
                continue
            text = StepText(text.prompt, text.steps[:kept], text.labels[:kept])
            encoded = encoder.encode(text.prompt, text.steps)
            skips.cut += 1
        digest.update(repr((text, encoded)).encode("utf-8", "backslashreplace"))
        skips.used += 1
        rows.append(encoded)
        texts.append(text)
    if apart and not rows and config.part is not None:
        raise no_row_in_part(config.path, config.part)
    skips.require_rows()
    skips.digest = digest.hexdigest()
    return StepSet(tuple(rows), tuple(texts), pad_id(tokenizer), skips)


def read_steps(row: DataRow, separator: str) -> StepText:
    """Read a row with the columns prompt, completions and labels.

    Raises:
        BadRow: a column is missing or has other values, or the separator would split a step.
    """
    prompt, steps, labels = (row.values.get(name) for name in ("prompt", "completions", "labels"))
    if not isinstance(prompt, str) or not prompt:
        raise BadRow("without a text in the column prompt")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise BadRow("without a list of steps in the column completions")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise BadRow("without one label for each step in the column labels")
    steps = [as_text(step, "completions").strip() for step in steps]
    if any(separator in step for step in steps):
        raise BadRow(f"with process.separator ({separator!r}) within a step, which would be read as two")
    return StepText(as_text(prompt, "prompt"), tuple(steps), tuple(_read_label(label) for label in labels))


def _read_label(label: object) -> float:
    if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
        raise BadRow("with a label that is neither true, false nor from 0 to 1", repr(label))
    return float(label)


def check_kinds(rows: StepSet) -> None:
    """Check that there are right and wrong steps to tell apart.

    Raises:
        DataError: all labels are the same.
    """
    if len({label for text in rows.texts for label in text.labels}) == 1:
        raise DataError(f"{rows.skips.source}: all steps have the same label, so there is nothing to tell apart")
