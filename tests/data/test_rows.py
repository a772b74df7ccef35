from __future__ import annotations

import pytest

from rlhf.data.rows import DataRow, RowCounts
from rlhf.errors import DataError


def row(number: int) -> DataRow:
    return DataRow({}, "data/p.jsonl", number)


def test_the_summary_has_every_reason_with_its_first_three_rows() -> None:
    skips = RowCounts("p.jsonl")
    skips.used = 1482
    skips.add(row(3), "not JSON", "Expecting value")
    for number in (17, 18, 19, 20):
        skips.add(row(number), "empty completion")
    skips.cut = 2
    skips.note("Mind the gap")
    skips.note("Mind the gap")
    assert skips.skipped == 5
    assert skips.summary() == (
        "p.jsonl: 1,482 rows used (2 of them cut to length), 5 skipped: "
        "4 empty completion [p.jsonl:17, p.jsonl:18, p.jsonl:19, ...]; 1 not JSON [p.jsonl:3 (Expecting value)]. "
        "Mind the gap"
    )


def test_bad_rows_are_fatal_if_wanted_and_long_ones_are_not_bad() -> None:
    skips = RowCounts("p.jsonl", fatal=True)
    skips.skip(row(2), "longer than max_tokens of 5 tokens", "9")
    with pytest.raises(DataError, match=r"p.jsonl:4: margin is not a number: 'x'. Fix the row"):
        skips.add(row(4), "margin is not a number", "'x'")


def test_no_rows_and_no_usable_rows_are_errors() -> None:
    skips = RowCounts("p.jsonl")
    with pytest.raises(DataError, match=r"p.jsonl: no rows at all"):
        skips.require_rows()
    skips.add(row(1), "empty prompt")
    with pytest.raises(DataError, match=r"no usable rows; 1 skipped: 1 empty prompt \[p.jsonl:1\]"):
        skips.require_rows()
    skips.used = 1
    skips.require_rows()
    assert skips.summary() == "p.jsonl: 1 row used, 1 skipped: 1 empty prompt [p.jsonl:1]"
