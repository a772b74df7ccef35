"""A row as its file has it, and what is wrong with one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class BadRow(Exception):
    """A row that cannot be used: `reason` is what rows are counted by, `detail` belongs to this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Row:
    """The columns of one row and where it stands."""

    values: dict[str, object]
    file: str
    number: int  # line of a text file, row of any other; from 1, as an editor shows it

    @property
    def place(self) -> str:
        """The place as messages show it, `file:number`."""
        return f"{Path(self.file).name}:{self.number}"
