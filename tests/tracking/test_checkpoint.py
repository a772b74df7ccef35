"""Checkpoints are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.errors import CheckpointError
from rlhf.tracking.checkpoint import MANIFEST, Checkpoints, find_damage


def writer(text: str) -> object:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


def newest(checkpoints: Checkpoints) -> tuple[Path | None, list[str]]:
    notes: list[str] = []
    return checkpoints.latest_intact(notes.append), notes


def test_the_newest_is_found_and_the_oldest_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 2000000):
        checkpoints.save(step, writer(str(step)))
    assert [path.name for path in checkpoints.all()] == ["step-000010", "step-2000000"]
    path, notes = newest(checkpoints)
    assert path is not None
    assert (path / "model" / "weights").read_text() == "2000000"
    assert notes == []


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest(Checkpoints(tmp_path / "none", keep=1)) == (None, [])


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest", "half manifest"])
def test_a_damaged_one_is_passed_over_aloud(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, writer("one"))
    last = checkpoints.save(2, writer("two"))
    weights, manifest = last / "model" / "weights", last / MANIFEST
    match damage:
        case "truncate":
            weights.write_text("tw")
        case "flip":
            weights.write_text("twp")
        case "delete":
            weights.unlink()
        case "manifest":
            manifest.unlink()
        case "half manifest":
            manifest.write_text(manifest.read_text()[:20])
    path, notes = newest(checkpoints)
    assert path is not None
    assert path.name == "step-000001"
    assert len(notes) == 1
    assert "step-000002 is damaged" in notes[0]


def test_none_whole_is_an_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.save(1, writer("one")) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged"):
        newest(checkpoints)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    kept = checkpoints.save(1, writer("one"))

    def full_disk(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(2, full_disk)
    assert checkpoints.all() == [kept]
    assert find_damage(kept) is None
    assert list(tmp_path.iterdir()) == [kept]


def test_what_a_killed_writer_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / ".writing-step-000003").mkdir(parents=True)
    assert checkpoints.all() == []
    assert checkpoints.save(3, writer("three")).is_dir()
