"""Read the rows of a data set a few at a time, from any place in it, at a memory that does not grow with it.

A place is a `Cursor`. Reading on from the cursor that the last read returned continues the open file; any other cursor
opens the file there: a JSONL file at a byte, a Parquet file at a row group, data sets of `datasets` at a row.
"""

from __future__ import annotations

import gzip
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import datasets
import pyarrow
import pyarrow.parquet

from rlhf.config.data import DatasetConfig
from rlhf.data.files import (
    UNREADABLE,
    check_columns,
    file_format,
    is_saved_folder,
    json_row,
    load_saved,
    one_line,
    rename_row,
    split_files,
)
from rlhf.data.paths import SUFFIXES, looks_local, missing
from rlhf.data.rows import Row, RowCounts
from rlhf.errors import DataError

STREAMABLE = ("jsonl", "parquet")
HEAD = 1_000  # rows of a file that decide on its format and columns
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Cursor:
    """A place in a data set: a file, and the place in it."""

    file: int = 0  # number of the file
    offset: int = 0  # bytes of a JSONL file (decompressed), rows of any other
    number: int = 0  # lines or rows of the file before this place


@runtime_checkable
class Reader(Protocol):
    """Reads the rows of one file from a place on."""

    def read(self, offset: int, number: int, count: int, skips: RowCounts) -> tuple[list[Row], int, int]:
        """Read `count` lines or rows, fewer at the end; return the readable rows, and the next offset and number."""
        ...


class JsonlReader:
    """Reads lines of JSON, plain or gzipped; memory holds the lines of one read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedIOBase | None = None
        self._offset = 0

    def read(self, offset: int, number: int, count: int, skips: RowCounts) -> tuple[list[Row], int, int]:
        """Read `count` lines; blank ones are not rows, and malformed ones go to `skips`."""
        file = self._at(offset)
        rows: list[Row] = []
        for line in islice(file, count):
            number, self._offset = number + 1, self._offset + len(line)
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                rows.extend(json_row(text.rstrip(b"\n"), Row({}, str(self.path), number), skips))
        return rows, self._offset, number

    def _at(self, offset: int) -> BufferedIOBase:
        """Return the open file at a byte of its (decompressed) content."""
        if self._file is None:
            self._file, self._offset = _open_bytes(self.path), 0
            weakref.finalize(self, self._file.close)
        if self._offset != offset:
            self._file.seek(offset)
            self._offset = offset
        return self._file


def _open_bytes(path: Path) -> BufferedIOBase:
    return gzip.GzipFile(path) if path.name.lower().endswith(".gz") else path.open("rb")


class ParquetReader:
    """Reads rows of a Parquet file; memory holds the rows of one read and what Arrow buffers of a row group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: Iterator[Mapping[str, object]] | None = None
        self._offset = -1

    def read(self, offset: int, number: int, count: int, skips: RowCounts) -> tuple[list[Row], int, int]:
        """Read `count` rows."""
        del skips  # every row of a table is one
        if self._rows is None or self._offset != offset:
            self._rows, self._offset = self._from(offset), offset
        values = list(islice(self._rows, count))
        self._offset += len(values)
        rows = [Row(dict(row), str(self.path), number + i) for i, row in enumerate(values, start=1)]
        return rows, self._offset, number + len(values)

    def _from(self, offset: int) -> Iterator[Mapping[str, object]]:
        """Yield the rows from a number on; row groups before it are not read."""
        with pyarrow.parquet.ParquetFile(self.path, pre_buffer=False) as file:
            first, skipped = 0, 0
            while first < file.num_row_groups and skipped + file.metadata.row_group(first).num_rows <= offset:
                skipped += file.metadata.row_group(first).num_rows
                first += 1
            groups = list(range(first, file.num_row_groups))
            drop = offset - skipped
            for batch in file.iter_batches(batch_size=256, row_groups=groups, use_threads=False):
                rows = batch.to_pylist()
                yield from rows[drop:]
                drop = max(0, drop - len(rows))


class DatasetsReader:
    """Reads rows of a folder of save_to_disk (memory-mapped) or of a data set of the hub (downloaded as it is read)."""

    def __init__(self, rows: datasets.Dataset | datasets.IterableDataset, name: str) -> None:
        self.rows, self.name = rows, name
        self._iterator: Iterator[Mapping[str, object]] | None = None
        self._offset = -1

    def read(self, offset: int, number: int, count: int, skips: RowCounts) -> tuple[list[Row], int, int]:
        """Read `count` rows."""
        del skips  # every row of a table is one
        if self._iterator is None or self._offset != offset:
            self._iterator, self._offset = iter(self.rows.skip(offset)), offset
        values = list(islice(self._iterator, count))
        self._offset += len(values)
        rows = [Row(dict(row), self.name, number + i) for i, row in enumerate(values, start=1)]
        return rows, self._offset, number + len(values)


class LazyDataset:
    """The rows of one data set in order, read from a cursor on, with columns renamed as in the configuration."""

    def __init__(self, config: DatasetConfig) -> None:
        """Find the files.

        Raises:
            DataError: the data set is missing, or of a kind that cannot be streamed.
        """
        self.config = config
        self.files = _open(config)
        self._checked: set[int] = set()
        self._reader: tuple[int, Reader] | None = None

    def read(self, cursor: Cursor, count: int, skips: RowCounts) -> tuple[list[Row], Cursor | None]:
        """Read `count` lines or rows of one file, or what is left of it.

        Returns:
            The readable rows with their columns renamed, and the place after them; None at the end of the data set.

        Raises:
            DataError: a file cannot be read, or has no column to rename; a malformed row where these are fatal.
        """
        if cursor.file >= len(self.files):
            return [], None
        rows, offset, number = self._read_file(cursor, count, skips)
        self._check_columns(cursor.file)
        renamed = [rename_row(row, self.config.columns) for row in rows] if self.config.columns else rows
        if number - cursor.number < count:
            following = Cursor(cursor.file + 1)
            return renamed, following if following.file < len(self.files) else None
        return renamed, replace(cursor, offset=offset, number=number)

    def head(self, file: int) -> list[Row]:
        """Read the first rows of a file, through a reader of its own; malformed ones are left out."""
        name, _ = self.files[file]
        with _readable(name):
            rows, _, _ = self._new_reader(file).read(0, 0, HEAD, RowCounts(name))
        return [rename_row(row, self.config.columns) for row in rows]

    def fingerprint(self) -> list[list[object]]:
        """Return the names and sizes of the files, by which a change between two runs is noticed."""
        return [[name, source.stat().st_size if isinstance(source, Path) else 0] for name, source in self.files]

    def _read_file(self, cursor: Cursor, count: int, skips: RowCounts) -> tuple[list[Row], int, int]:
        if self._reader is None or self._reader[0] != cursor.file:
            self._reader = (cursor.file, self._new_reader(cursor.file))
        with _readable(self.files[cursor.file][0]):
            return self._reader[1].read(cursor.offset, cursor.number, count, skips)

    def _new_reader(self, file: int) -> Reader:
        name, source = self.files[file]
        if not isinstance(source, Path):
            return DatasetsReader(source, name)
        return JsonlReader(source) if file_format(source) == "jsonl" else ParquetReader(source)

    def _check_columns(self, file: int) -> None:
        if self.config.columns and file not in self._checked:
            name, _ = self.files[file]
            with _readable(name):
                rows, _, _ = self._new_reader(file).read(0, 0, HEAD, RowCounts(name))
            check_columns(rows, self.config.columns)
            self._checked.add(file)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Make a failure to read a DataError that names the file."""
    try:
        yield
    except (*UNREADABLE, zlib.error, pyarrow.ArrowException) as error:
        raise DataError(f"{name}: cannot be read: {one_line(error)}") from error


def _open(config: DatasetConfig) -> list[tuple[str, Any]]:
    """Return the names and the files of a data set, or the data set of `datasets` that it is."""
    path = Path(config.path).expanduser()
    if path.is_dir() and is_saved_folder(path):
        return [(str(path), load_saved(path, config.split))]
    if path.is_dir() or path.is_file():
        files = split_files(path, config.split) if path.is_dir() else [path]
        for file in files:
            if file_format(file) not in STREAMABLE:
                raise DataError(
                    f"{file}: cannot be streamed; JSONL (also .gz) and Parquet files can, and folders of save_to_disk. "
                    "Convert it, or set stream=false"
                )
        return [(str(file), file) for file in files]
    if looks_local(config.path, SUFFIXES):
        raise DataError(missing(config.path))
    with _readable(config.path):
        rows = datasets.load_dataset(config.path, split=config.split, streaming=True)
    return [(f"{config.path}[{config.split}]", rows)]
