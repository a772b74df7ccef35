"""A row as read from its file, and the error for a row that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class BadRow(Exception):
    """A row that cannot be used: rows are counted by `reason`; `detail` is about this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """The columns of one row, and its file and line."""

    values: dict[str, object]
    file: str
    number: int  # line of a text file, row of any other file; from 1, as editors count

    @property
    def place(self) -> str:
        """Return the location for messages, `file:number`."""
        return f"{Path(self.file).name}:{self.number}"
