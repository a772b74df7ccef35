"""The length of a run in whole steps, and the rows that this leaves unread or repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import offline, offline_tree, write_rows

from rlhf.factory.context import uneven_epochs
from rlhf.tracking.run_folder import RunFolder


@pytest.mark.parametrize(
    ("epochs", "steps", "size", "rows", "effect"),
    [
        (1.0, 1, 64, 94, "30 of 94 rows are not read; schedule.steps=2 reads all"),
        (1.0, 1, 64, 89, "25 of 89 rows are not read; schedule.steps=2 reads all"),
        (1.0, 2, 64, 110, "18 of 110 rows are read once more"),
        (3.0, 4, 64, 94, "26 of 94 rows are read once less"),
        (1.0, 1, 64, 10, "10 rows are read 6.4 times each"),
        (1.5, 4, 50, 150, "25 of 150 rows are read once less"),
        (0.5, 1, 64, 50, "14 of 50 rows are read once more"),
    ],
)
def test_epochs_that_are_no_whole_steps_tell_which_rows_they_do_not_read_equally(
    epochs: float, steps: int, size: int, rows: int, effect: str
) -> None:
    plural = "s" if steps > 1 else ""
    expected = f"schedule.epochs={epochs:g} is {steps} step{plural} of {size} rows: {effect}"
    assert uneven_epochs(epochs, steps, size, rows=rows) == expected


@pytest.mark.parametrize(("epochs", "steps", "size", "rows"), [(1.0, 2, 47, 94), (3.0, 3, 64, 64), (0.5, 1, 64, 94)])
def test_epochs_that_read_as_many_rows_as_asked_for_tell_nothing(
    epochs: float, steps: int, size: int, rows: int
) -> None:
    assert uneven_epochs(epochs, steps, size, rows=rows) == ""


def test_a_run_notes_the_rows_that_its_epochs_do_not_read(tmp_path: Path) -> None:
    rows = [{"prompt": "red", "completion": " good"}] * 20
    data = {"sft": {"path": str(write_rows(tmp_path / "sft.jsonl", rows))}, "preferences": None}
    tree = offline_tree(tmp_path, "sft", data={**data, "eval_preferences": None}, schedule={"steps": None, "epochs": 1})
    expected = "schedule.epochs=1 is 1 step of 16 rows: 4 of 20 rows are not read"
    for schedule, count in (({}, 1), ({"epochs": None, "steps": 1}, 0)):
        out_dir = str(tmp_path / f"run{count}")
        offline({**tree, "run": {**tree["run"], "out_dir": out_dir}, "schedule": {**tree["schedule"], **schedule}})
        notes = [str(note["text"]) for note in RunFolder(out_dir).read_notes()]
        assert sum(text.startswith(expected) for text in notes) == count, notes
