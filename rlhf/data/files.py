"""Read rows from files, folders and the Hugging Face hub.

Text files (JSON, JSONL, CSV; each also .gz) are parsed here, so that a malformed line costs one row and is reported
with its line number, and so that a CSV cell keeps its text ("007", ""). Parquet files, folders written by
`save_to_disk` and hub data sets are read with `datasets`.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from rlhf.config.data import DatasetConfig
from rlhf.data.paths import SUFFIXES, looks_local, missing
from rlhf.data.rows import Row, RowCounts
from rlhf.errors import DataError

_SPLIT_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval"}
UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, DatasetsError)  # what `datasets` and pyarrow raise


def load_rows(config: DatasetConfig, skips: RowCounts | None = None) -> list[Row]:
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


def _rename_columns(rows: list[Row], columns: dict[str, str]) -> list[Row]:
    if not columns or not rows:
        return rows
    check_columns(rows, columns)
    return [rename_row(row, columns) for row in rows]


def check_columns(rows: list[Row], columns: dict[str, str]) -> None:
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


def rename_row(row: Row, columns: dict[str, str]) -> Row:
    """Rename the columns of a row: our name -> the file's."""
    unchanged = {name: value for name, value in row.values.items() if name not in columns.values()}
    renamed = {ours: row.values[theirs] for ours, theirs in columns.items() if theirs in row.values}
    return Row(unchanged | renamed, row.file, row.number)


def file_format(path: Path) -> str | None:
    """Return the format that a file's name says it has (one of KINDS), or None for any other file."""
    return next((suffix.split(".")[1] for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _folder_rows(folder: Path, split: str, skips: RowCounts) -> Iterator[Row]:
    if is_saved_folder(folder):
        yield from _numbered_rows(load_saved(folder, split), str(folder))
        return
    for path in split_files(folder, split):
        yield from _file_rows(path, skips)


def split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of `split` in a folder or its `data` folder: `train.jsonl.gz`, `train-00000-of-00002.parquet`.

    A folder in which no file is named after a split is one data set, if all its files have one format.

    Raises:
        DataError: there are no data files, none of this split, or files of several formats.
    """
    files = _data_files(folder.iterdir()) or _data_files(folder.glob("data/*"))
    if not files:
        raise DataError(f"{folder}: no data files in this folder; readable are {', '.join(SUFFIXES)}")
    split_files = [p for p in files if _stem(p) == split.lower()]
    if not split_files:
        _check_undivided(files, folder, split)
    return split_files or files


def _data_files(paths: Iterable[Path]) -> list[Path]:
    return sorted(p for p in paths if p.is_file() and file_format(p))


def _check_undivided(files: list[Path], folder: Path, split: str) -> None:
    """Check that files of which none is named after `split` are one data set.

    Raises:
        DataError: some are named after other splits, or they have several formats.
    """
    names = ", ".join(p.name for p in files[:12])
    if any(_SPLIT_NAMES.intersection(re.split(r"[-_.]", _stem(p))) for p in files):
        raise DataError(f"{folder}: no file of the split {split!r}; there are: {names}. Set split, or path to a file.")
    if len({file_format(p) for p in files}) > 1:
        raise DataError(f"{folder}: several kinds of files and none named {split}: {names}. Set path to one file.")


def _stem(path: Path) -> str:
    """Return the lower-case file name without its suffix and shard number."""
    name = path.name.lower()
    suffix = next(suffix for suffix in SUFFIXES if name.endswith(suffix))
    return re.sub(r"-\d+-of-\d+$", "", name.removesuffix(suffix))


def _file_rows(path: Path, skips: RowCounts) -> Iterator[Row]:
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
    except (*UNREADABLE, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def is_saved_folder(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def load_saved(folder: Path, split: str) -> datasets.Dataset:
    """Load a folder of `save_to_disk`, memory-mapped.

    Raises:
        DataError: it cannot be read, or has no such split.
    """
    try:
        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DataError(f"{folder}: no split {split!r}; there are: {', '.join(saved)}")
            saved = saved[split]
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise DataError(f"{folder}: cannot be read as a folder of save_to_disk: {one_line(error)}") from error
    return saved


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    try:
        rows = datasets.load_dataset(name, split=split)
        yield from _numbered_rows(rows, f"{name}[{split}]")
    except UNREADABLE as error:
        raise DataError(
            f"{name}: there is no such file or folder here, and as a data set of the hub it could not be loaded: "
            f"{one_line(error)}"
        ) from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        stream = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True)
        yield from _numbered_rows(stream, str(path))
    except (KeyError, TypeError) as error:  # column names that Arrow returns in another form
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _numbered_rows(rows: datasets.Dataset | datasets.IterableDataset, file: str) -> Iterator[Row]:
    for number, values in enumerate(rows, start=1):
        yield Row(dict(values), file, number)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.lower().endswith(".gz") else data


def _jsonl_rows(path: Path, skips: RowCounts) -> Iterator[Row]:
    # Only "\n" ends a line of JSONL: str.splitlines() would also split inside a text, for example at U+2028.
    for number, line in enumerate(_read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield from json_row(line, Row({}, str(path), number), skips)


def json_row(line: bytes, empty_row: Row, skips: RowCounts) -> Iterator[Row]:
    """Yield the row in a line of JSON, unless it is malformed, which goes to `skips`."""
    try:
        values = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # invalid UTF-8 and invalid JSON are both ValueErrors
        skips.add(empty_row, "not JSON", one_line(error))
        return
    yield from _object_row(values, empty_row, skips)


def _object_row(values: object, empty_row: Row, skips: RowCounts) -> Iterator[Row]:
    if isinstance(values, dict):
        yield Row(values, empty_row.file, empty_row.number)
    else:
        skips.add(empty_row, "not a JSON object", f"a {type(values).__name__}")


def _json_rows(path: Path, skips: RowCounts) -> Iterator[Row]:
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
        yield from _object_row(values, Row({}, str(path), number), skips)


def _csv_rows(path: Path, skips: RowCounts) -> Iterator[Row]:
    text = _read_bytes(path).decode("utf-8-sig")
    csv.field_size_limit(2**31 - 1)  # the default refuses cells of more than 128 KiB, such as long transcripts
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1  # where the row starts: a quoted cell may span several lines
        try:
            cells = next(reader, None)
        except csv.Error as error:
            skips.add(Row({}, str(path), number), "not CSV", one_line(error))
            continue
        if cells is None:
            return
        if header is None:
            header = cells
            if len(set(header)) < len(header):
                raise DataError(f"{path}: two columns have the same name: {', '.join(header)}")
        elif len(cells) == len(header):
            yield Row(dict(zip(header, cells, strict=True)), str(path), number)
        elif cells:
            mismatch = f"{len(cells)} cells where the header has {len(header)}"
            skips.add(Row({}, str(path), number), "not as wide as the header", mismatch)
