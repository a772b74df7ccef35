"""Rows of question sets: read, checked, and counted where they cannot be used."""

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
    """A usable row: its contents in the form that its suite reads, and the row itself."""

    found: T
    row: Row

    @property
    def file(self) -> str:
        """Return the name of the row's file, without folder and suffixes."""
        return Path(self.row.file).name.partition(".")[0]


def read_items(
    config: DatasetConfig, read: Callable[[Mapping[str, object]], T], *, columns: tuple[str, ...], what: str
) -> tuple[list[Item[T]], Skips]:
    """Read the usable rows of a data set, at most `config.limit`, and count the skipped ones.

    Args:
        config: the data set.
        read: parses the columns of a row; raises BadRow for an unusable one.
        columns: columns that at least one row must have.
        what: what the rows are called in messages.

    Raises:
        DataError: there is no file or no usable row, or a column is missing.
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
            skips.leave_out(item.row, bad.reason, bad.detail)
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
