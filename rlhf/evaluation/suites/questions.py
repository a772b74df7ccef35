"""Rows of question sets: read, checked, counted where they cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rlhf.config.data import DatasetConfig
from rlhf.data.files import load_rows
from rlhf.data.row import BadRow, Row
from rlhf.data.skips import Skips
from rlhf.errors import DataError
from rlhf.evaluation.suites.subject import Subject

T = TypeVar("T")
NEW = "sampling.max_new_tokens"


@dataclass(frozen=True)
class Item(Generic[T]):
    """A usable row in the form its suite reads, and the file it is from."""

    found: T
    row: Row

    @property
    def file(self) -> str:
        """The name of its file, without folder and suffixes."""
        return Path(self.row.file).name.partition(".")[0]


def read_items(
    config: DatasetConfig, read: Callable[[Mapping[str, object]], T], *, columns: tuple[str, ...], what: str
) -> tuple[list[Item[T]], Skips]:
    """The usable rows of a data set, at most `config.limit` of them, and what became of the others.

    Args:
        config: the data set.
        read: a row's columns as the suite reads them; raises BadRow.
        columns: that at least one row must have.
        what: what the rows are called, for messages.

    Raises:
        DataError: no file, no usable row, or the columns of something else.
    """
    skips = Skips(config.path, fatal=config.bad_rows == "error")
    rows = load_rows(config, skips)
    names = {name for row in rows for name in row.values}
    missing = [name for name in columns if name not in names]
    if rows and missing:
        raise DataError(
            f"{config.path}: these are no {what}: there is no column {missing[0]!r} "
            f"(there are: {', '.join(sorted(names)) or 'none'}). Columns with other names can be renamed: "
            f"'dataset.columns={{{missing[0]}: their name}}'"
        )
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


def without(items: list[Item[T]], skips: Skips, why: Callable[[Item[T]], BadRow | None]) -> list[Item[T]]:
    """The items less those that `why` gives a reason to leave out, which are counted.

    Raises:
        DataError: none is left.
    """
    kept = []
    for item in items:
        bad = why(item)
        if bad is None:
            kept.append(item)
        else:
            skips.leave_out(item.row, bad.reason, bad.detail)
    skips.used = len(kept)
    skips.require_rows()
    return kept


def too_long(subject: Subject, tokens: int, room: int, *, of: str) -> BadRow | None:
    """Why a prompt of `tokens` tokens cannot be used, where with `room` more, `of` something, it is too long."""
    if subject.context is None or tokens + room <= subject.context:
        return None
    return BadRow(f"longer than the model's context of {subject.context:,} tokens", f"{tokens:,}, and {room:,} of {of}")
