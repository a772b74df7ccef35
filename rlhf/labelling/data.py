"""Completions grouped by prompt, and pairs that people have labelled, as they are read from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config.data import DatasetConfig
from rlhf.data.conversation import THOUGHTS, Message, Prompt, as_text, some_text
from rlhf.data.files import load_rows
from rlhf.data.formats import DEMONSTRATIONS, PAIRS, PROMPTS, RowFormats, is_transcript
from rlhf.data.rows import SYSTEM_LEFT_OUT, BadRow, DataRow, RowCounts
from rlhf.errors import DataError

KWISE = "completions"  # the column with the completions of a prompt as a list
FEWEST = 2  # completions that can be compared
BEYOND_TEXT = "tools, tool calls, thoughts or several turns: rlhf label reads answers of one turn of text"


@dataclass(frozen=True)
class LabelGroup:
    """A prompt and its different completions, in the order in which the file has them."""

    prompt: Prompt
    completions: tuple[str, ...]
    columns: tuple[Mapping[str, Any], ...] = ()  # the row of each completion, for reward functions

    @property
    def prompt_text(self) -> str:
        """Return the prompt as a judge reads it: its text, the one user message, or each message after its role."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return str(self.prompt[0]["content"])
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """Return the prompt as messages, for models with a chat template; None for a transcript."""
        if not isinstance(self.prompt, str):
            return self.prompt
        return None if is_transcript(self.prompt) else [{"role": "user", "content": self.prompt}]

    def digest(self, *, columns: bool) -> str:
        """Return a digest of prompt and completions, and of the other columns too if `columns` says so."""
        read = [self.prompt, self.completions, *([self.columns] if columns else [])]
        text = json.dumps(read, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def read_groups(config: DatasetConfig) -> tuple[list[LabelGroup], RowCounts]:
    """Read completions grouped by prompt, in the order of first appearance.

    A row has a prompt and `completions` (a list), a prompt and one completion (rows of the same prompt are a group),
    or is a preference pair, whose sides are then two completions. Completions that a prompt has twice count once.

    Raises:
        DataError: the file cannot be read, or no prompt has two different completions.
    """
    counts = RowCounts(config.path, fatal=config.bad_rows == "error")
    rows = load_rows(config, counts)
    grouped: dict[str, tuple[Prompt, dict[str, Mapping[str, Any]]]] = {}
    for row, prompt, texts in _rows(rows, counts):
        key = json.dumps(prompt, sort_keys=True, ensure_ascii=False)
        group = grouped.setdefault(key, (prompt, {}))
        for text in texts:
            group[1].setdefault(text, row.values)
        counts.used += 1
    groups = [LabelGroup(prompt, tuple(texts), tuple(texts.values())) for prompt, texts in grouped.values()]
    single = sum(len(group.completions) < FEWEST for group in groups)
    if single:
        counts.note(f"{single:,} prompts with a single completion are left out")
    groups = [group for group in groups if len(group.completions) >= FEWEST]
    counts.require_rows()
    if not groups:
        raise DataError(f"{config.path}: no prompt has two different completions, so there is nothing to compare")
    return groups[: config.limit], counts


def _rows(rows: Sequence[DataRow], counts: RowCounts) -> Iterator[tuple[DataRow, Prompt, list[str]]]:
    """Yield each usable row with its prompt and its completions."""
    columns = {name for row in rows for name in row.values}
    if KWISE in columns:
        return _read(PROMPTS, rows, counts)
    return _read(PAIRS if {"chosen", "rejected"} <= columns else DEMONSTRATIONS, rows, counts)


def _read(
    formats: RowFormats[Any], rows: Sequence[DataRow], counts: RowCounts
) -> Iterator[tuple[DataRow, Prompt, list[str]]]:
    for row, parsed in formats.read(rows, counts, turns=_becomes_turn):
        try:
            texts = [_text(side) for side in parsed.completions] or _listed(row.values.get(KWISE))
            if parsed.tools:
                raise BadRow(BEYOND_TEXT)
        except BadRow as bad:
            counts.add(row, bad.reason, bad.detail)
            continue
        if isinstance(parsed.prompt, str) and row.values.get("system"):
            counts.count(SYSTEM_LEFT_OUT)
        yield row, parsed.prompt, texts


def _becomes_turn(values: Mapping[str, object]) -> bool:
    """Return whether a text prompt becomes a user's turn: a question, an instruction, or one with a system prompt."""
    return values.get("prompt") is None or bool(values.get("system"))


def _text(side: str | Sequence[Message]) -> str:
    """Return the text of a completion.

    Raises:
        BadRow: it is more than that.
    """
    if isinstance(side, str):
        return side
    if len(side) > 1 or not {"tool_calls", *THOUGHTS}.isdisjoint(side[0]):
        raise BadRow(BEYOND_TEXT)
    return str(side[0]["content"])


def _listed(value: object) -> list[str]:
    if not isinstance(value, list):
        raise BadRow(f"{KWISE} is not a list")
    return [some_text(as_text(text, KWISE), KWISE) for text in value]


def read_human_pairs(config: DatasetConfig) -> tuple[list[LabelGroup], RowCounts]:
    """Read pairs that people have labelled: groups of two, the preferred side first.

    Raises:
        DataError: the file cannot be read, or has no usable pair.
    """
    counts = RowCounts(config.path, fatal=config.bad_rows == "error")
    groups = []
    for row, prompt, sides in _read(PAIRS, load_rows(config, counts), counts):
        groups.append(LabelGroup(prompt, tuple(sides), (row.values,) * len(sides)))
        counts.used += 1
    counts.require_rows()
    return groups[: config.limit], counts
