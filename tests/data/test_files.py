from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.config.data import DatasetConfig
from rlhf.data.files import load_rows
from rlhf.data.rows import DataRow, RowCounts
from rlhf.errors import DataError

Write = Callable[..., str]
ROWS: list[dict[str, object]] = [{"prompt": "a", "n": "1"}, {"prompt": "b\nc", "n": "2"}]


def values(path: str, **options: object) -> list[dict[str, object]]:
    return [row.values for row in load_rows(DatasetConfig(path=path, **options))]


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    datasets.disable_progress_bars()


@pytest.mark.parametrize(
    "name", ["r.jsonl", "r.json", "r.csv", "r.jsonl.gz", "r.json.gz", "r.csv.gz", "r.parquet", "r[1].parquet"]
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    texts = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
        "json": json.dumps(ROWS, indent=1),
        "csv": 'prompt,n\na,1\n"b\nc",2\n',
    }
    path = tmp_path / name
    if name.endswith("parquet"):
        datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    else:
        data = texts[name.split(".")[1]].encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert values(str(path)) == ROWS


def test_rows_are_numbered_as_an_editor_shows_them(write: Write) -> None:
    jsonl = load_rows(DatasetConfig(path=write('{"a": 1}\n\n{"a": 2}\n')))
    assert [(row.number, row.place) for row in jsonl] == [(1, "rows.jsonl:1"), (3, "rows.jsonl:3")]
    table = load_rows(DatasetConfig(path=write('a,b\n"x\ny",1\nz,2\n', "t.csv")))
    assert [row.number for row in table] == [2, 4]
    late = load_rows(DatasetConfig(path=write("\na,b\n\nx,1\n", "late.csv")))
    assert [(row.number, row.values) for row in late] == [(4, {"a": "x", "b": "1"})]


def test_an_empty_shard_has_no_rows(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.to_parquet(str(tmp_path / "train-00000-of-00002.parquet"))
    rows.select([]).to_parquet(str(tmp_path / "train-00001-of-00002.parquet"))
    assert values(str(tmp_path)) == ROWS


def test_cells_and_line_separators_within_texts_stay_as_they_are(write: Write) -> None:
    assert values(write("a,b\n007,\nNA,true\n", "t.csv")) == [{"a": "007", "b": ""}, {"a": "NA", "b": "true"}]
    assert values(write('{"a": "x\u2028y\x0cz"}\n'.replace("\x0c", "\\f"))) == [{"a": "x\u2028y\x0cz"}]


def test_malformed_lines_are_skipped_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    skips = RowCounts("bad")
    rows = load_rows(DatasetConfig(path=str(path)), skips)
    assert [row.number for row in rows] == [1, 6]
    assert dict(skips.counts) == {"not JSON": 3, "not a JSON object": 1}
    assert "bad.jsonl:2 (Expecting value" in skips.reasons()
    assert "bad.jsonl:3 (a list)" in skips.reasons()


def test_a_malformed_line_is_fatal_where_nobody_counts(write: Write) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:2: not JSON"):
        load_rows(DatasetConfig(path=write('{"a": 1}\n{"a"\n')))


def test_ragged_rows_of_a_table_are_skipped(write: Write) -> None:
    skips = RowCounts("t")
    rows = load_rows(DatasetConfig(path=write("a,b\n1,2\n3\n4,5,6\n\n7,8\n", "t.csv")), skips)
    assert [row.values["a"] for row in rows] == ["1", "7"]
    places = "t.csv:3 (1 cells where the header has 2), t.csv:4 (3 cells where the header has 2)"
    assert skips.reasons() == f"2 not as wide as the header [{places}]"


@pytest.mark.parametrize(
    "end, used, error", [("", ["1"], "unexpected end of data"), ('7,"8"\n9,0\n', ["1", "9"], "',' expected after '\"'")]
)
def test_every_line_that_an_open_quote_takes_is_counted(write: Write, end: str, used: list[str], error: str) -> None:
    skips = RowCounts("t")
    rows = load_rows(DatasetConfig(path=write('a,b\n1,2\n3,"4\n' + "5,6\n" * 10 + end, "t.csv")), skips)
    assert [row.values["a"] for row in rows] == used
    assert skips.skipped == 11 + bool(end)
    assert f"t.csv:3 (check the quotes: {error}), t.csv:4, t.csv:5, ..." in skips.reasons()


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.json", b"[1, 2", "not JSON"),
        ("a.json", b'{"a": 1}', "array of objects"),
        ("a.jsonl.gz", b"plain", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 50, mtime=0)[:-12], "cannot be read"),
        ("a.csv", b"a,b\n2,1\n\xff,1\n", "cannot be read: line 3 is not UTF-8"),
        ("a.csv", b"a,a\n1,2\n", "two columns have the same name"),
        ("a.parquet", b"junk", "cannot be read"),
        ("a.parquet", b"", "cannot be read"),
        ("a.txt", b"hello", "not a kind of file"),
        ("a.parquet.gz", b"", "not a kind of file"),
    ],
)
def test_unreadable_files_are_one_plain_error(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        load_rows(DatasetConfig(path=str(tmp_path / name)))


def test_a_json_file_may_have_an_object_a_line(write: Write) -> None:
    assert values(write('{"a": 1}\n{"a": 2}\n', "lines.json")) == [{"a": 1}, {"a": 2}]


def test_folders_have_splits(write: Write, tmp_path: Path) -> None:
    write([{"a": "test"}], "d/test.jsonl")
    write([{"a": "one"}], "d/train-00000-of-00002.jsonl")
    write([{"a": "two"}], "d/train-00001-of-00002.jsonl")
    write("about", "d/README.md")
    folder = str(tmp_path / "d")
    assert values(folder) == [{"a": "one"}, {"a": "two"}]
    assert values(folder, split="test") == [{"a": "test"}]
    with pytest.raises(DataError, match=r"no file of the split 'trian'; there are: test.jsonl, train-00000"):
        values(folder, split="trian")


def test_missing_shards_are_told(write: Write, tmp_path: Path) -> None:
    write([{"a": 1}], "d/test-00000-of-00001.jsonl")
    write([{"a": 1}], "d/train-00000-of-00003.jsonl")
    write([{"a": 2}], "d/train-00002-of-00003.jsonl")
    for split, notes in (
        ("train", ["Warning: the folder has 2 of the 3 files train-*-of-00003: the rows of the others are missing"]),
        ("test", []),
    ):
        skips = RowCounts("d")
        load_rows(DatasetConfig(path=str(tmp_path / "d"), split=split), skips)
        assert skips.notes == notes


def test_a_folder_without_splits_is_read_whole_if_of_one_kind(write: Write, tmp_path: Path) -> None:
    write([{"a": 1}], "d/x.jsonl")
    write([{"a": 2}], "d/y.jsonl.gz.not")
    write([{"a": 3}], "d/z.jsonl")
    assert values(str(tmp_path / "d")) == [{"a": 1}, {"a": 3}]
    write("a\n1\n", "d/w.csv")
    with pytest.raises(DataError, match="several kinds of files"):
        values(str(tmp_path / "d"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data files"):
        values(str(tmp_path / "empty"))


@pytest.mark.parametrize("other", ["train.csv", "train.jsonl.gz"])
def test_a_split_that_is_there_in_two_forms_is_not_read_twice(write: Write, tmp_path: Path, other: str) -> None:
    write([{"a": 1}], "d/train.jsonl")
    (tmp_path / "d" / other).write_bytes(gzip.compress(b'{"a": 1}\n') if other.endswith(".gz") else b"a\n1\n")
    with pytest.raises(DataError, match=r"the same rows twice: .*Set path to one file"):
        values(str(tmp_path / "d"))


def test_test_rows_are_never_taken_for_training(write: Write, tmp_path: Path) -> None:
    write([{"a": 1}], "d/reviews_test.jsonl")
    with pytest.raises(DataError, match="no file of the split 'train'"):
        values(str(tmp_path / "d"))


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(str(tmp_path / "two"))
    assert values(str(tmp_path / "one")) == ROWS
    assert values(str(tmp_path / "two"), split="test") == ROWS[1:]
    with pytest.raises(DataError, match="no split 'dev'; there are: train, test"):
        values(str(tmp_path / "two"), split="dev")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as a folder of save_to_disk"):
        values(str(tmp_path / "one"))


def test_columns_are_renamed(write: Write) -> None:
    path = write([{"question": "q", "answer": "a", "id": 3}])
    assert values(path, columns={"prompt": "question"}) == [{"answer": "a", "id": 3, "prompt": "q"}]
    with pytest.raises(DataError, match="no column 'qestion'; there are: answer, id, question"):
        values(path, columns={"prompt": "qestion"})


def test_a_row_without_the_renamed_column_keeps_no_other_under_our_name(write: Write) -> None:
    path = write([{"question": "q", "prompt": "a system prompt"}, {"prompt": "a system prompt", "id": 3}])
    assert values(path, columns={"prompt": "question"}) == [{"prompt": "q"}, {"id": 3}]


def test_two_columns_can_change_places(write: Write) -> None:
    path = write([{"chosen": "good", "rejected": "bad"}])
    assert values(path, columns={"chosen": "rejected", "rejected": "chosen"}) == [{"chosen": "bad", "rejected": "good"}]


def test_a_missing_file_is_told_with_near_names(write: Write, tmp_path: Path) -> None:
    write([], "d/prompts.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder: .*prompt.jsonl \(in .*d there is prompts.jsonl\)"):
        values(str(tmp_path / "d" / "prompt.jsonl"))
    with pytest.raises(DataError, match=r"no such file or folder: nowhere.csv"):
        values("nowhere.csv")


def test_what_is_no_path_is_looked_for_on_the_hub() -> None:
    with pytest.raises(DataError, match="no such file or folder here, and as a data set of the hub"):
        values("nobody-at-all/no-such-data-set")


def test_real_folders(shared: Path) -> None:
    counts = {
        "hh_rlhf_harmless": (1482, 315),
        "human_pairs": (821, 207),
        "gsm8k": (7473, 1319),
        "tinystories": (1631, 213),
    }
    for name, expected in counts.items():
        assert tuple(len(values(str(shared / "data" / name), split=s)) for s in ("train", "test")) == expected
    assert len(values(str(shared / "data/format_fixtures/alpaca_en_demo.json"))) == 999


def test_a_place_names_the_file_without_its_folder() -> None:
    assert DataRow({}, "some/where/a.jsonl", 7).place == "a.jsonl:7"


def test_a_parquet_column_that_the_reader_loses_is_one_plain_error(tmp_path: Path) -> None:
    """A name with a NUL in it comes back as another: datasets answers with a KeyError."""
    pq.write_table(pa.table({"": ["a"], "\0": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(DatasetConfig(path=str(tmp_path / "a.parquet")))
