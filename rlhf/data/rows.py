"""The rows of a data file, and the count of those that are cut or skipped."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import DataError


class BadRow(Exception):
    """A row that cannot be used: rows are counted by `reason`; `detail` is about this row alone."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class DataRow:
    """The columns of one row, and its file and line."""

    values: dict[str, object]
    file: str
    number: int  # line of a text file, row of any other file; from 1, as editors count

    @property
    def place(self) -> str:
        """Return the location for messages, `file:number`."""
        return f"{Path(self.file).name}:{self.number}"


def place_of(text: str) -> float:
    """Compute the place of a text in [0, 1): its SHA-256 as a fraction, the same in every file and run."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:6], "big") / 2**48


def no_row_in_part(path: str, part: tuple[float, float]) -> DataError:
    """Return the error of a file whose rows are all in the other part of data.holdout."""
    low, high = part
    return DataError(
        f"{path}: no usable row is in part [{low:g}, {high:g}] of data.holdout: the file is small. Set a larger "
        "data.holdout, the path of held-out rows (data.eval_...path), or data.holdout=null"
    )


def is_in_part(text: str, part: tuple[float, float] | None) -> bool:
    """Return whether the place of a text is in a part of [0, 1); None is the whole."""
    return part is None or part[0] <= place_of(text) < part[1]


EXAMPLES = 3
SYSTEM_LEFT_OUT = "rows whose system column is left out, because their prompt stays text"
TOOLS_LEFT_OUT = "rows whose tools are left out, because their prompt stays text"
TOO_LONG_WARNING_SHARE = 0.05  # warn if a larger share of the rows is left out as too long


class RowCounts:
    """Counts of used, cut and skipped rows; the skipped ones by reason, with the first few examples of each.

    A malformed row has no prompt to tell its part by: of the parts of a data set, the one that has the row's place in
    the file counts it. `elsewhere` has the rows of the other parts.
    """

    def __init__(self, source: str, *, fatal: bool = False, part: tuple[float, float] | None = None) -> None:
        self.source = source
        self.fatal = fatal
        self.part = part
        self.elsewhere = None if part is None else RowCounts(source)
        self.used = 0
        self.cut = 0
        self.too_long = 0
        self.digest: str | None = None  # of the used rows, once all are read
        self.notes: list[str] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.remarks: dict[str, int] = defaultdict(int)
        self._examples: dict[str, list[str]] = defaultdict(list)

    @property
    def skipped(self) -> int:
        """Return how many rows were skipped, for any reason."""
        return sum(self.counts.values())

    @property
    def skipped_everywhere(self) -> int:
        """Return how many rows were skipped in all parts, as far as this one has read them."""
        return self.skipped + (0 if self.elsewhere is None else self.elsewhere.skipped)

    def add(self, row: DataRow, reason: str, detail: str = "", *, is_placed: bool = False) -> None:
        """Skip a malformed row.

        Args:
            is_placed: its prompt was read, and is in the part.

        Raises:
            DataError: malformed rows are fatal.
        """
        if self.fatal:
            raise DataError(
                f"{row.place}: {BadRow(reason, detail)}. "
                "Fix the row, or let bad_rows=skip count such rows and go on without them."
            )
        is_here = is_placed or is_in_part(row.place, self.part)
        counts = self if is_here or self.elsewhere is None else self.elsewhere
        counts.skip(row, reason, detail)

    def skip(self, row: DataRow, reason: str, detail: str = "") -> None:
        """Skip a row that is not malformed, for example one that is too long; never fatal."""
        self.counts[reason] += 1
        if len(self._examples[reason]) < EXAMPLES:
            self._examples[reason].append(f"{row.place} ({detail})" if detail else row.place)

    def merge(self, other: RowCounts) -> None:
        """Add the counts of rows that come after these, with as many of their examples as there is room for."""
        self.used, self.cut, self.too_long = (
            self.used + other.used,
            self.cut + other.cut,
            self.too_long + other.too_long,
        )
        for reason, count in other.counts.items():
            self.counts[reason] += count
            self._examples[reason] = [*self._examples[reason], *other._examples[reason]][:EXAMPLES]
        for remark, count in other.remarks.items():
            self.remarks[remark] += count
        for text in other.notes:
            self.note(text)

    def note(self, text: str) -> None:
        """Record a remark about the whole data set for the summary, once."""
        if text not in self.notes:
            self.notes.append(text)

    def count(self, remark: str) -> None:
        """Count a row that is used, but not exactly as it was given."""
        self.remarks[remark] += 1

    def reasons(self) -> str:
        """Format the skip reasons, most frequent first, each with its count and first rows."""
        parts = []
        for reason, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            ellipsis = ", ..." if count > len(self._examples[reason]) else ""
            parts.append(f"{count:,} {reason} [{', '.join(self._examples[reason])}{ellipsis}]")
        return "; ".join(parts)

    def summary(self) -> str:
        """Summarize in one line how many rows were used, cut and skipped, and why."""
        text = f"{self.source}: {self.used:,} {'row' if self.used == 1 else 'rows'} used"
        if self.cut:
            text += f" ({self.cut:,} of them cut to length)"
        if self.skipped:
            text += f", {self.skipped:,} skipped: {self.reasons()}"
        if self.too_long > TOO_LONG_WARNING_SHARE * (self.used + self.skipped):
            text += (
                f". Warning: {self.too_long:,} of {self.used + self.skipped:,} rows are too long: raise the limit, or "
                "cut them with too_long=truncate"
            )
        remarks = [f"{count:,} {remark}" for remark, count in self.remarks.items()]
        return ". ".join([text, *remarks, *self.notes])

    def require_rows(self) -> None:
        """Check that at least one row was used.

        Raises:
            DataError: no row was used.
        """
        if self.used:
            return
        if self.elsewhere is not None:
            self.merge(self.elsewhere)
        if not self.skipped:
            raise DataError(f"{self.source}: no rows at all")
        raise DataError(f"{self.source}: no usable rows; {self.skipped:,} skipped: {self.reasons()}")
