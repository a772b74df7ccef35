"""The questions of a suite, read from its rows, and a model's sampled answers to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf.config.data import DatasetConfig
from rlhf.data.files import load_rows
from rlhf.data.rows import BadRow, Row, RowCounts
from rlhf.errors import DataError
from rlhf.evaluation.evaluate import completion_tokens, distinct_n
from rlhf.rewards.source import RewardSource
from rlhf.suites.figures import Estimate, mean_estimate, share_estimate
from rlhf.suites.subject import Subject
from rlhf.types import Completions

T = TypeVar("T")
MAX_NEW_TOKENS_KEY = "sampling.max_new_tokens"


@dataclass(frozen=True)
class Item(Generic[T]):
    """A usable row: its contents in the form that its suite reads, and the row itself."""

    value: T
    row: Row

    @property
    def file(self) -> str:
        """Return the name of the row's file, without folder and suffixes."""
        return Path(self.row.file).name.partition(".")[0]


def read_items(
    config: DatasetConfig, read: Callable[[Mapping[str, object]], T], *, columns: tuple[str, ...], what: str
) -> tuple[list[Item[T]], RowCounts]:
    """Read the usable rows of a data set, at most `config.limit`, and count the skipped ones.

    Args:
        config: the data set.
        read: parses the columns of a row; raises BadRow for an unusable one.
        columns: columns that at least one row must have.
        what: what the rows are called in messages.

    Raises:
        DataError: there is no file or no usable row, or a column is missing.
    """
    skips = RowCounts(config.path, fatal=config.bad_rows == "error")
    rows = load_rows(config, skips)
    if rows:
        _check_columns(config.path, rows, columns, what)
    items: list[Item[T]] = []
    for row in rows:
        if config.limit is not None and len(items) >= config.limit:
            break
        try:
            items.append(Item(read(row.values), row))
        except BadRow as bad:
            skips.add(row, bad.reason, bad.detail)
    skips.used = len(items)
    skips.require_rows()
    return items, skips


def _check_columns(path: str, rows: Sequence[Row], columns: Sequence[str], what: str) -> None:
    """Check that each of the columns is in at least one row.

    Raises:
        DataError: a column is in none.
    """
    names = {name for row in rows for name in row.values}
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"{path}: these are no {what}: there is no column {missing[0]!r} "
            f"(there are: {', '.join(sorted(names)) or 'none'}). Columns with other names can be renamed: "
            f"'dataset.columns={{{missing[0]}: their name}}'"
        )


def exclude(items: list[Item[T]], skips: RowCounts, why: Callable[[Item[T]], BadRow | None]) -> list[Item[T]]:
    """Drop, and count, the items for which `why` returns a reason.

    Raises:
        DataError: no item is left.
    """
    kept = []
    for item in items:
        bad = why(item)
        if bad is None:
            kept.append(item)
        else:
            skips.skip(item.row, bad.reason, bad.detail)
    skips.used = len(kept)
    skips.require_rows()
    return kept


def too_long(subject: Subject, tokens: int, room: int, *, of: str) -> BadRow | None:
    """Return the reason to leave out a prompt that exceeds the model's context; None if it fits.

    Args:
        subject: the model.
        tokens: the length of the prompt.
        room: how many tokens must fit after it.
        of: what those tokens are, for the message.
    """
    if subject.context is None or tokens + room <= subject.context:
        return None
    return BadRow(f"longer than the model's context of {subject.context:,} tokens", f"{tokens:,}, and {room:,} of {of}")


Pick = Callable[[Completions], Tensor]
"""Returns the row index of the completion to keep for each question."""


@dataclass(frozen=True)
class Answers:
    """A model's answers, one for each question."""

    texts: list[str]
    lengths: list[float]
    truncated: list[bool]
    distinct_2: float

    def figures(self, *, seed: int) -> list[Estimate]:
        """Compute the mean length, the share of truncated answers and the distinct bigrams."""
        return [
            mean_estimate("length", self.lengths, "tokens of an answer, EOS included", seed=seed),
            share_estimate(
                "truncated", list(map(float, self.truncated)), "answers that reached sampling.max_new_tokens"
            ),
            Estimate(
                "distinct_2", self.distinct_2, None, None, len(self.texts), "none", "distinct bigrams of all answers"
            ),
        ]


def drop_too_long(subject: Subject, items: list[Item[T]], skips: RowCounts, text: Callable[[T], str]) -> list[Item[T]]:
    """Drop, and count, the questions that do not fit into the model's context with an answer.

    Raises:
        DataError: no question is left.
    """
    room = subject.sampling.max_new_tokens

    def reason(item: Item[T]) -> BadRow | None:
        return too_long(
            subject,
            len(subject.encoder.prompts([subject.render_question(text(item.value))])[0]),
            room,
            of=MAX_NEW_TOKENS_KEY,
        )

    return exclude(items, skips, reason)


def sample_answers(
    subject: Subject, questions: Sequence[str], *, key: int, greedy: bool, count: int = 1, pick: Pick | None = None
) -> Answers:
    """Answer every question once; with `pick`, sample `count` answers and keep the one that it picks."""
    prompts = [subject.render_question(question) for question in questions]
    ids = subject.encoder.prompts(prompts)
    texts = [rendered.prompt for rendered in prompts]
    completions = subject.sample(ids, texts, key=key, count=count, greedy=greedy and count == 1)
    if count > 1:
        assert pick is not None, "several answers, and nothing picks one"
        completions = completions.rows(pick(completions))
    tokens = completion_tokens(completions)
    return Answers(
        texts=subject.texts(completions),
        lengths=[float(len(row)) for row in tokens],
        truncated=[not finished for finished in completions.finished.tolist()],
        distinct_2=distinct_n(tokens, 2),
    )


def pick_best(source: RewardSource, rows: Sequence[Mapping[str, object]], count: int) -> Pick:
    """Make a `Pick` that keeps the answer that `source` scores highest; the source reads the row of the question."""

    def pick(completions: Completions) -> Int[Tensor, " Q"]:
        references = tuple(dict(row) for row in rows for _ in range(count))
        scores = source(replace(completions, references=references)).values.view(-1, count)
        return scores.argmax(dim=1) + torch.arange(len(scores)) * count

    return pick
