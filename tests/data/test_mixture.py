"""Mixed and streamed rows: their order, the file of each, and the state that a checkpoint has to keep."""

from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from runs import write_rows
from tiny_models import tokenizer

from rlhf.config.data import SftConfig
from rlhf.data.mixture import KEPT_BLOCKS, MixedStream, StreamedSource
from rlhf.data.pairs import DemonstrationSet, demonstration_pipeline
from rlhf.errors import DataError
from rlhf.factory.data import open_mixture

TOKENIZER = tokenizer()


def texts(start: int, count: int) -> list[dict[str, str]]:
    """Rows whose completion is one word, t3 to t22, and whose prompt numbers them."""
    return [{"prompt": "t3 t4", "completion": f"t{5 + i % 17} t{5 + i // 17}"} for i in range(start, start + count)]


def opened(size: int = 4, *, seed: int = 0, **section: Any) -> MixedStream[Any, DemonstrationSet]:
    config = SftConfig.model_validate(section)
    pipeline = demonstration_pipeline(config, TOKENIZER, chat_template="none")
    return open_mixture(config, pipeline, seed=seed, name="sft", rows_per_step=size)


def drawn(stream: MixedStream[Any, DemonstrationSet], steps: Sequence[int]) -> list[str]:
    return [text.completion for step in steps for text in stream.rows(step).texts]


def observed(stream: MixedStream[Any, DemonstrationSet], step: int) -> tuple[list[str], dict[str, float]]:
    return drawn(stream, [step]), stream.metrics(step)


def write(folder: Path, kind: str, rows: Sequence[Mapping[str, str]]) -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=3)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        write_rows(path, rows)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_stream_is_every_row_once_an_epoch_in_blocks_of_the_buffer(tmp_path: Path, kind: str) -> None:
    rows = texts(0, 23)
    stream = opened(path=write(tmp_path, kind, rows), stream=True, shuffle_buffer=5)
    epochs = drawn(stream, range(1, 24))  # 92 rows: four epochs
    wanted = [row["completion"] for row in rows]
    for epoch in range(4):
        got = epochs[23 * epoch : 23 * (epoch + 1)]
        assert Counter(got) == Counter(wanted)
        for block in range(0, 23, 5):
            assert Counter(got[block : block + 5]) == Counter(wanted[block : block + 5])
    assert len({tuple(epochs[23 * e : 23 * (e + 1)]) for e in range(4)}) == 4
    assert epochs[:23] != wanted


def test_the_files_of_a_folder_are_one_stream_whatever_their_block(tmp_path: Path) -> None:
    for part in range(3):
        write_rows(tmp_path / f"train-{part:05d}-of-00003.jsonl", texts(7 * part, 7))
    stream = opened(path=str(tmp_path), stream=True, shuffle_buffer=4)
    assert Counter(drawn(stream, range(1, 7))[:21]) == Counter(row["completion"] for row in texts(0, 21))


def test_the_first_rows_are_a_whole_epoch_whatever_the_size_of_a_step(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", texts(0, 13))
    assert [len(opened(size, path=path).first(100)) for size in (4, 23)] == [13, 13]
    assert len(opened(4, path=path, stream=True).first(20)) == 20


def test_batches_do_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl.gz", texts(0, 40))
    section = {"path": path, "stream": True, "shuffle_buffer": 6}
    in_order = {step: drawn(opened(**section), [step]) for step in (1, 7, 13, 24)}
    stream = opened(**section)
    for step in (13, 1, 24, 7, 7, 13):
        assert drawn(stream, [step]) == in_order[step]
    assert drawn(opened(**section, seed=1), [7]) != in_order[7]


def test_a_restored_stream_reads_on_without_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "jsonl", texts(0, 200))
    section = {"path": path, "stream": True, "shuffle_buffer": 8}
    whole = opened(**section)
    wanted = [observed(whole, step) for step in range(1, 41)]
    state = json.loads(json.dumps(whole.state(40)))
    resumed = opened(**section)
    assert resumed.restore(state) == []
    reads: list[int] = []
    read = StreamedSource._read
    monkeypatch.setattr(StreamedSource, "_read", lambda self, start: (reads.append(start.number), read(self, start))[1])
    after = [observed(resumed, step) for step in range(41, 120)]
    assert reads[0] == 20  # row 160
    assert after == [observed(whole, step) for step in range(41, 120)]
    assert wanted[0] == observed(opened(**section), 1)


def test_missing_shards_of_a_stream_are_told_once(tmp_path: Path) -> None:
    Path(write(tmp_path, "jsonl", texts(0, 20))).rename(tmp_path / "train-00001-of-00002.jsonl")
    stream = opened(path=str(tmp_path), stream=True, shuffle_buffer=8)
    notes: list[str] = []
    stream.report_to(notes.append)
    drawn(stream, range(1, 12))
    assert sum("the folder has 1 of the 2 files train-*-of-00002" in note for note in notes) == 1


def test_the_end_of_a_restored_stream_is_told_with_all_of_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", [*texts(0, 20), {"prompt": "t3", "completion": " "}, *texts(20, 20)])
    section = {"path": path, "stream": True, "shuffle_buffer": 8}
    whole = opened(**section)
    drawn(whole, range(1, 8))
    resumed, notes = opened(**section), []
    resumed.restore(whole.state(7))
    resumed.report_to(notes.append)
    drawn(resumed, range(8, 12))
    assert notes == [f"sft: {path}: 40 rows used, 1 skipped. Read to its end"]


def test_memory_holds_a_few_blocks(tmp_path: Path) -> None:
    stream = opened(path=write(tmp_path, "jsonl", texts(0, 300)), stream=True, shuffle_buffer=10)
    (source,) = stream.sources.values()
    assert isinstance(source, StreamedSource)
    for step in range(1, 160):
        stream.rows(step)
        assert len(source._blocks) <= KEPT_BLOCKS
        assert len(source._starts) <= 8


def test_memory_does_not_grow_with_the_rows_that_were_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": "t3 t4", "completion": "t5 t6"}] * 4_000
    stream = opened(50, path=write(tmp_path, "jsonl", rows), stream=True, shuffle_buffer=500)
    tracemalloc.start()
    try:
        sizes = []
        for step in range(1, 81):
            stream.rows(step)
            if step % 10 == 0:  # at the end of a block: as many rows are in memory each time
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(sizes[4:]) - sizes[3] < 15_000  # bytes; the orders of the four blocks in between are 60,000


def test_a_changed_file_is_noticed_and_counted_from_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", texts(0, 30))
    section = {"path": path, "stream": True, "shuffle_buffer": 4}
    stream = opened(**section)
    drawn(stream, [1, 2, 3])
    state = stream.state(3)
    write(tmp_path, "jsonl", texts(0, 31))
    (warning,) = opened(**section).restore(state)
    assert "sft" in warning


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_rows_are_counted_by_source_and_reported(tmp_path: Path, stream: bool) -> None:
    lines = [json.dumps(row) for row in texts(0, 12)]
    lines.insert(3, "{not json")
    lines.insert(7, json.dumps({"prompt": "t3", "completion": " "}))
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    good = write_rows(tmp_path / "good.jsonl", texts(0, 12))
    sources = {"good": {"path": str(good)}, "bad": {"path": str(tmp_path / "bad.jsonl")}}
    section = {"sources": sources, "stream": stream, **({"shuffle_buffer": 5} if stream else {})}
    mixed, notes = opened(**section), []
    mixed.report_to(notes.append)
    drawn(mixed, range(1, 9))  # 16 of each
    metrics = mixed.metrics(8)
    assert metrics == {
        "source/rows/good": 16.0,
        "source/rows/bad": 16.0,
        "source/skipped/good": 0.0,
        "source/skipped/bad": 2.0,
    }
    assert any("bad.jsonl:4" in note and "not JSON" in note for note in notes) == stream
    section["sources"] = {"good": sources["good"], "bad": {**sources["bad"], "bad_rows": "error"}}
    with pytest.raises(DataError, match=r"bad\.jsonl:4"):
        drawn(opened(**section), [1, 2, 3])


def test_a_batch_has_the_quota_of_each_source_and_the_order_of_one_does_not_depend_on_the_others(
    tmp_path: Path,
) -> None:
    a, b, c = (write_rows(tmp_path / f"{n}.jsonl", texts(40 * i, 40)) for i, n in enumerate("abc"))
    two = {"a": {"path": str(a), "weight": 3}, "b": {"path": str(b)}}
    pair, triple = opened(8, sources=two), opened(8, sources={**two, "c": {"path": str(c), "weight": 4}})
    for step in range(1, 6):
        assert Counter(pair.names(step)) == {"a": 6, "b": 2}
        assert Counter(triple.names(step)) == {"a": 3, "b": 1, "c": 4}
    only_a = [
        [
            text
            for step in range(1, 20)
            for text, name in zip(drawn(s, [step]), s.names(step), strict=True)
            if name == "a"
        ]
        for s in (pair, triple)
    ]
    assert only_a[0][: len(only_a[1])] == only_a[1]
    assert Counter(only_a[0][:40]) == Counter(row["completion"] for row in texts(0, 40))


@pytest.mark.parametrize("stream", [False, True])
def test_the_run_ends_before_a_source_would_begin_again(tmp_path: Path, stream: bool) -> None:
    small, large = write_rows(tmp_path / "s.jsonl", texts(0, 6)), write_rows(tmp_path / "l.jsonl", texts(0, 90))
    sources = {"small": {"path": str(small)}, "large": {"path": str(large)}}
    assert [opened(sources=sources, stream=stream, at_end="stop").has_batch(step) for step in (1, 3, 4)] == [
        True,
        True,
        False,
    ]
    assert opened(sources=sources, stream=stream).has_batch(400)


def test_limits_and_columns_are_each_sources_own_and_else_the_sections(tmp_path: Path) -> None:
    rows = [{"q": row["prompt"], "a": row["completion"]} for row in texts(0, 20)]
    other = write_rows(tmp_path / "other.jsonl", rows)
    plain = write_rows(tmp_path / "plain.jsonl", texts(0, 20))
    for stream in (False, True):
        mixed = opened(
            sources={
                "plain": {"path": str(plain), "limit": 3},
                "other": {"path": str(other), "columns": {"prompt": "q", "completion": "a"}},
            },
            limit=5,
            stream=stream,
            **({"shuffle_buffer": 2} if stream else {}),
        )
        mixed.rows(6)
        assert [len(source) for source in mixed.sources.values()] == [3, 5]


def test_what_cannot_be_streamed_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\nt3,t4\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.csv.*stream=false"):
        opened(path=str(tmp_path / "a.csv"), stream=True)
    with pytest.raises(DataError, match="no such file"):
        opened(path=str(tmp_path / "none.jsonl"), stream=True)
    write_rows(tmp_path / "empty.jsonl", [{"prompt": "", "completion": ""}])
    with pytest.raises(DataError, match="no usable rows"):
        opened(path=str(tmp_path / "empty.jsonl"), stream=True).rows(1)
