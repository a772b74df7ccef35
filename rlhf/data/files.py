"""Read rows from files, folders and the Hugging Face hub: all of them, or a few at a time from any place.

Text files (JSON, JSONL, CSV; each also .gz) are parsed here, so that a malformed line costs one row and is reported
with its line number, and so that a CSV cell keeps its text ("007", ""). Parquet files, folders written by
`save_to_disk` and hub data sets are read with `datasets`.

A place is a `Cursor`, and reading from places takes memory that does not grow with the data. Reading on from the cursor
that the last read returned continues the open file; any other cursor opens the file there: a JSONL file at a byte, a
Parquet file at a row group, data sets of `datasets` at a row.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import io
import json
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf.config.data import DatasetConfig
from rlhf.data.paths import SUFFIXES, looks_local, missing
from rlhf.data.rows import DataRow, RowCounts
from rlhf.errors import DataError
from rlhf.tracking.fingerprint import content_digest

_SHARD = re.compile(r"-(\d+)-of-(\d+)(?=\.|$)")  # of train-00000-of-00002.parquet
_SPLIT_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval"}


def unreadable_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean unreadable rows. An `except` clause asks only when one was raised.

    With Arrow, `datasets` takes 80 MB and a second: it is imported only if rows are not JSON lines, or unreadable.
    """
    import pyarrow
    from datasets.exceptions import DatasetsError

    return (OSError, EOFError, ValueError, RuntimeError, zlib.error, DatasetsError, pyarrow.ArrowException)


def load_rows(config: DatasetConfig, skips: RowCounts | None = None) -> list[DataRow]:
    """Load all rows of a data set and rename its columns; malformed rows go to `skips`, or are fatal without it.

    Raises:
        DataError: the data set is missing or unreadable, or a column to rename does not exist.
    """
    skips = RowCounts(config.path, fatal=True) if skips is None else skips
    path = Path(config.path).expanduser()
    if path.is_dir():
        rows = list(_folder_rows(path, config.split, skips))
    elif path.is_file():
        rows = list(_file_rows(path, skips))
    elif looks_local(config.path, SUFFIXES):
        raise DataError(missing(config.path))
    else:
        rows = list(_hub_rows(config.path, config.split))
    return _rename_columns(rows, config.columns)


def count_rows(config: DatasetConfig) -> int:
    """Count the rows of a data set, the malformed ones included.

    Raises:
        DataError: as `load_rows`.
    """
    skips = RowCounts(config.path)
    return len(load_rows(config, skips)) + skips.skipped


def _rename_columns(rows: list[DataRow], columns: dict[str, str]) -> list[DataRow]:
    if not columns or not rows:
        return rows
    check_columns(rows, columns)
    return [rename_row(row, columns) for row in rows]


def check_columns(rows: list[DataRow], columns: dict[str, str]) -> None:
    """Check that every file has each column to rename, in at least one row.

    Raises:
        DataError: a file has no such column.
    """
    columns_by_file: dict[str, set[str]] = {}
    for row in rows:
        columns_by_file.setdefault(row.file, set()).update(row.values)
    for file, names in columns_by_file.items():
        for ours, theirs in columns.items():
            if theirs not in names:
                raise DataError(
                    f"{file}: columns says {ours}: {theirs}, but there is no column {theirs!r}; "
                    f"there are: {', '.join(sorted(names)) or 'none'}"
                )


def rename_row(row: DataRow, columns: dict[str, str]) -> DataRow:
    """Rename the columns of a row: our name -> the file's. A column of the file that has our name is left out."""
    unchanged = {name: value for name, value in row.values.items() if name not in {*columns, *columns.values()}}
    renamed = {ours: row.values[theirs] for ours, theirs in columns.items() if theirs in row.values}
    return DataRow(unchanged | renamed, row.file, row.number)


def file_format(path: Path) -> str | None:
    """Return the format that a file's name says it has (one of KINDS), or None for any other file."""
    return next((suffix.split(".")[1] for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _folder_rows(folder: Path, split: str, skips: RowCounts) -> Iterator[DataRow]:
    if is_saved_folder(folder):
        yield from _numbered_rows(load_saved(folder, split), str(folder))
        return
    files = split_files(folder, split)
    for note in missing_shards(files):
        skips.note(note)
    for path in files:
        yield from _file_rows(path, skips)


def read_files(path: Path, split: str) -> list[Path]:
    """Return the files from which the rows of a data set on this machine are read; none if there is no such path.

    Raises:
        DataError: a folder has no files of this split.
    """
    if not path.is_dir():
        return [path] if path.is_file() else []
    if not is_saved_folder(path):
        return split_files(path, split)
    part = path / split if (path / "dataset_dict.json").is_file() else path
    try:
        return [part / file["filename"] for file in json.loads((part / "state.json").read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read as a folder of save_to_disk: {one_line(error)}") from error


def split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of `split` in a folder or its `data` folder: `train.jsonl.gz`, `train-00000-of-00002.parquet`.

    A folder in which no file is named after a split is one data set, if all its files have one format.

    Raises:
        DataError: there are no data files, none of this split, or its files are of several formats.
    """
    files = _data_files(folder.iterdir()) or _data_files(folder.glob("data/*"))
    if not files:
        raise DataError(f"{folder}: no data files in this folder; readable are {', '.join(SUFFIXES)}")
    split_files = [p for p in files if _stem(p) == split.lower()]
    if not split_files:
        _check_undivided(files, folder, split)
    _check_one_form(split_files or files, folder)
    return split_files or files


def _data_files(paths: Iterable[Path]) -> list[Path]:
    return sorted(p for p in paths if p.is_file() and file_format(p))


def _check_undivided(files: list[Path], folder: Path, split: str) -> None:
    """Check that files of which none is named after `split` are one data set.

    Raises:
        DataError: some are named after other splits.
    """
    if any(_SPLIT_NAMES.intersection(re.split(r"[-_.]", _stem(p))) for p in files):
        raise DataError(
            f"{folder}: no file of the split {split!r}; there are: {_names(files)}. Set split, or path to a file."
        )


def _check_one_form(files: list[Path], folder: Path) -> None:
    """Check that files do not hold the same rows twice.

    Raises:
        DataError: they have several formats, or one is there twice, compressed and plain.
    """
    if len({file_format(p) for p in files}) > 1 or len({p.name.removesuffix(".gz") for p in files}) < len(files):
        raise DataError(
            f"{folder}: several kinds of files, which may hold the same rows twice: {_names(files)}. "
            "Set path to one file."
        )


def _names(files: list[Path]) -> str:
    return ", ".join(p.name for p in files[:12])


def _stem(path: Path) -> str:
    """Return the lower-case file name without its suffix and shard number."""
    name = path.name.lower()
    suffix = next(suffix for suffix in SUFFIXES if name.endswith(suffix))
    return re.sub(r"-\d+-of-\d+$", "", name.removesuffix(suffix))


def missing_shards(files: Iterable[Path]) -> list[str]:
    """Return a warning for each data set of which, by the names of its files, shards are missing."""
    shards: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := _SHARD.search(file.name):
            shards.setdefault((file.name[: match.start()], int(match[2])), set()).add(int(match[1]))
    return [
        f"Warning: the folder has {len(there)} of the {count} files {name}-*-of-{count:05}: the rows of the others are "
        "missing"
        for (name, count), there in shards.items()
        if len(there) < count
    ]


def _file_rows(path: Path, skips: RowCounts) -> Iterator[DataRow]:
    try:
        match file_format(path):
            case "jsonl":
                yield from _jsonl_rows(path, skips)
            case "json":
                yield from _json_rows(path, skips)
            case "csv":
                yield from _csv_rows(path, skips)
            case "parquet":
                yield from _parquet_rows(path)
            case _:
                raise DataError(f"{path}: not a kind of file that can be read; readable are {', '.join(SUFFIXES)}")
    except unreadable_errors() as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def is_saved_folder(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_saved(folder: Path, split: str) -> Any:
    """Load a folder of `save_to_disk`, memory-mapped, as a `datasets.Dataset`.

    Raises:
        DataError: it cannot be read, or has no such split.
    """
    import datasets

    errors: tuple[type[Exception], ...] = (*unreadable_errors(), KeyError, TypeError)
    try:
        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DataError(f"{folder}: no split {split!r}; there are: {', '.join(saved)}")
            saved = saved[split]
    except errors as error:
        raise DataError(f"{folder}: cannot be read as a folder of save_to_disk: {one_line(error)}") from error
    return saved


def _hub_rows(name: str, split: str) -> Iterator[DataRow]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
        yield from _numbered_rows(rows, f"{name}[{split}]")
    except unreadable_errors() as error:
        raise DataError(
            f"{name}: there is no such file or folder here, and as a data set of the hub it could not be loaded: "
            f"{one_line(error)}"
        ) from error


def _parquet_rows(path: Path) -> Iterator[DataRow]:
    import datasets
    import pyarrow.parquet

    if pyarrow.parquet.read_metadata(path).num_rows == 0:  # an empty shard, which `datasets` cannot read
        return
    try:
        stream = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True)
        yield from _numbered_rows(stream, str(path))
    except (KeyError, TypeError) as error:  # column names that Arrow returns in another form
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def arrow_row(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of an Arrow table without the nulls inside its columns.

    Arrow gives the structs of a column one type, so that a tool call has a null for each argument of the other rows'
    tools.
    """
    return {name: _without_nulls(value) for name, value in row.items()}


def given_rows(rows: Iterable[Any]) -> Iterable[Any]:
    """Return rows that are given as objects as they are; of a data set of `datasets`, each as `arrow_row`."""
    if not hasattr(rows, "column_names"):
        return rows
    return (arrow_row(row) if isinstance(row, Mapping) else row for row in rows)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _numbered_rows(rows: Iterable[Any], file: str) -> Iterator[DataRow]:
    for number, values in enumerate(rows, start=1):
        yield DataRow(arrow_row(values), file, number)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.lower().endswith(".gz") else data


def _jsonl_rows(path: Path, skips: RowCounts) -> Iterator[DataRow]:
    # Only "\n" ends a line of JSONL: str.splitlines() would also split inside a text, for example at U+2028.
    for number, line in enumerate(_read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield from json_row(line, DataRow({}, str(path), number), skips)


def json_row(line: bytes, empty_row: DataRow, skips: RowCounts) -> Iterator[DataRow]:
    """Yield the row in a line of JSON, unless it is malformed, which goes to `skips`."""
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # invalid UTF-8 and invalid JSON are both ValueErrors
        skips.add(empty_row, "not JSON", one_line(error))
        return
    yield from _object_row(values, empty_row, skips)


def _object_row(values: object, empty_row: DataRow, skips: RowCounts) -> Iterator[DataRow]:
    if isinstance(values, dict):
        yield DataRow(values, empty_row.file, empty_row.number)
    else:
        skips.add(empty_row, "not a JSON object", f"a {type(values).__name__}")


def _json_rows(path: Path, skips: RowCounts) -> Iterator[DataRow]:
    data = _read_bytes(path)
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # Many files named .json hold one object per line.
        if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            yield from _jsonl_rows(path, skips)
            return
        raise DataError(f"{path}: not JSON: {one_line(error)}") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: a JSON data set is an array of objects, [{{...}}, ...]; this is a single value")
    for number, values in enumerate(items, start=1):
        yield from _object_row(values, DataRow({}, str(path), number), skips)


def _csv_rows(path: Path, skips: RowCounts) -> Iterator[DataRow]:
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: cannot be read: line {line} is not UTF-8; save the file as UTF-8") from error
    csv.field_size_limit(2**31 - 1)  # the default refuses cells of more than 128 KiB, such as long transcripts
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1  # where the row starts: a quoted cell may span several lines
        try:
            cells = next(reader, None)
        except csv.Error as error:
            reason = f"check the quotes: {one_line(error)}"
            # A quote that is not closed takes the lines after it: each of them is a row that is lost.
            for lost in range(number, reader.line_num + 1):
                skips.add(DataRow({}, str(path), lost), "not CSV", reason if lost == number else "")
            continue
        if cells is None:
            return
        if not cells:  # an empty line
            continue
        if header is None:
            header = cells
            if len(set(header)) < len(header):
                raise DataError(f"{path}: two columns have the same name: {', '.join(header)}")
        elif len(cells) == len(header):
            yield DataRow(dict(zip(header, cells, strict=True)), str(path), number)
        else:
            mismatch = f"{len(cells)} cells where the header has {len(header)}"
            skips.add(DataRow({}, str(path), number), "not as wide as the header", mismatch)


STREAMABLE = ("jsonl", "parquet")
HEAD = 1_000  # rows of a file that decide on its format and columns
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Cursor:
    """A place in a data set: a file, and the place in it."""

    file: int = 0  # number of the file
    offset: int = 0  # bytes of a JSONL file (decompressed), rows of any other
    number: int = 0  # lines or rows of the file before this place


class JsonlReader:
    """Reads lines of JSON, plain or gzipped; memory holds the lines of one read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedIOBase | None = None
        self._offset = 0

    def read(self, offset: int, number: int, count: int, skips: RowCounts) -> tuple[list[DataRow], int, int]:
        """Read `count` lines, fewer at the end; blank ones are not rows, and malformed ones go to `skips`.

        Returns:
            The rows, and the offset and the number after them.
        """
        file = self._at(offset)
        rows: list[DataRow] = []
        for line in islice(file, count):
            number, self._offset = number + 1, self._offset + len(line)
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                rows.extend(json_row(text.rstrip(b"\n"), DataRow({}, str(self.path), number), skips))
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


class TableReader:
    """Reads rows of a table from a number on; memory holds the rows of one read and the table's buffers."""

    def __init__(self, name: str, rows_from: Callable[[int], Iterator[Mapping[str, object]]]) -> None:
        self.name, self.rows_from = name, rows_from
        self._rows: Iterator[Mapping[str, object]] = iter(())
        self._offset = -1

    def read(self, offset: int, number: int, count: int, skips: RowCounts) -> tuple[list[DataRow], int, int]:
        """Read `count` rows, as a `JsonlReader` reads lines."""
        del skips  # every row of a table is one
        if self._offset != offset:
            self._rows, self._offset = self.rows_from(offset), offset
        values = list(islice(self._rows, count))
        self._offset += len(values)
        rows = [DataRow(arrow_row(row), self.name, number + i) for i, row in enumerate(values, start=1)]
        return rows, self._offset, number + len(values)


def parquet_rows(path: Path, offset: int) -> Iterator[Mapping[str, object]]:
    """Yield the rows of a Parquet file from a number on; row groups before it are not read."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
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
        self._reader: tuple[int, JsonlReader | TableReader] | None = None

    def read(self, cursor: Cursor, count: int, skips: RowCounts) -> tuple[list[DataRow], Cursor | None]:
        """Read `count` lines or rows of one file, or the rest of it.

        Returns:
            The readable rows with their columns renamed, and the place after them; None at the end of the data set.

        Raises:
            DataError: a file cannot be read, or has no column to rename; a malformed row if these are fatal.
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

    def head(self, file: int) -> list[DataRow]:
        """Read the first rows of a file, through a reader of its own; malformed ones are left out."""
        return [rename_row(row, self.config.columns) for row in self._head(file)]

    def _head(self, file: int) -> list[DataRow]:
        name, _ = self.files[file]
        with _readable(name):
            return self._new_reader(file).read(0, 0, HEAD, RowCounts(name))[0]

    def fingerprint(self) -> list[list[object]]:
        """Return the names and sizes of the files, by which a change between two runs is noticed."""
        return [[name, source.stat().st_size if isinstance(source, Path) else 0] for name, source in self.files]

    def digest(self) -> str:
        """Compute a digest of the files' content; of rows of the hub that are not on this machine, of their name."""
        digest = hashlib.sha256()
        for name, source in self.files:
            place = source if isinstance(source, Path) else Path(name)
            digest.update((content_digest(place) if place.exists() else name).encode())
        return digest.hexdigest()

    def _read_file(self, cursor: Cursor, count: int, skips: RowCounts) -> tuple[list[DataRow], int, int]:
        if self._reader is None or self._reader[0] != cursor.file:
            self._reader = (cursor.file, self._new_reader(cursor.file))
        with _readable(self.files[cursor.file][0]):
            return self._reader[1].read(cursor.offset, cursor.number, count, skips)

    def _new_reader(self, file: int) -> JsonlReader | TableReader:
        name, source = self.files[file]
        if not isinstance(source, Path):  # of `datasets`: memory-mapped, or downloaded as it is read
            return TableReader(name, lambda offset: iter(source.skip(offset)))
        if file_format(source) == "jsonl":
            return JsonlReader(source)
        return TableReader(name, partial(parquet_rows, source))

    def _check_columns(self, file: int) -> None:
        if self.config.columns and file not in self._checked:
            check_columns(self._head(file), self.config.columns)
            self._checked.add(file)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Make a failure to read a DataError that names the file."""
    try:
        yield
    except unreadable_errors() as error:
        raise DataError(f"{name}: cannot be read: {one_line(error)}") from error


def _open(config: DatasetConfig) -> list[tuple[str, Any]]:
    """Return the names and the files of a data set, or of one that `datasets` reads its name and rows."""
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
    import datasets

    with _readable(config.path):
        rows = datasets.load_dataset(config.path, split=config.split, streaming=True)
    return [(f"{config.path}[{config.split}]", rows)]
