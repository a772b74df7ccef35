"""Reference log-probabilities on disk: the parts of a key, and the fate of a file that is not whole."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from rlhf.section import cache_folder
from rlhf.training.reference import ReferenceCache, cache_key, rows_fingerprint

VALUES = torch.tensor([-1.5, -2.25, -1e4], dtype=torch.float64)


def test_what_is_kept_comes_back_bitwise(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path / "deep" / "folder")
    assert cache.read("key", count=3) is None
    cache.write("key", VALUES)
    values = cache.read("key", count=3)
    assert values is not None
    assert values.dtype == torch.float64
    assert torch.equal(values, VALUES)
    assert cache.read("another", count=3) is None
    assert cache.notes == []
    assert [file.name for file in cache.folder.iterdir()] == ["key.safetensors"]  # nothing is left aside


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-4])
    elif how == "bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_text("something else altogether, and long enough")


@pytest.mark.parametrize("how", ["cut", "bit", "empty", "other"])
def test_a_damaged_file_is_noted_and_not_believed(tmp_path: Path, how: str) -> None:
    cache = ReferenceCache(tmp_path)
    cache.write("key", VALUES)
    damaged(cache.path("key"), how)
    assert cache.read("key", count=3) is None
    assert len(cache.notes) == 1
    assert "key.safetensors is damaged" in cache.notes[0]
    cache.write("key", VALUES)
    assert cache.read("key", count=3) is not None


def test_a_file_of_another_length_is_not_believed(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path)
    cache.write("key", VALUES)
    assert cache.read("key", count=4) is None
    assert "instead of 4" in cache.notes[0]


def test_a_folder_that_cannot_be_written_to_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ReferenceCache(tmp_path / "file" / "reference")
    cache.write("key", VALUES)
    assert len(cache.notes) == 1
    assert "set run.cache_dir to a folder that can be written to" in cache.notes[0]


def test_all_that_changes_the_numbers_changes_the_key() -> None:
    parts = {"weights": "w", "rows": "r", "dtype": "float32", "temperature": 1.0}
    others = {"weights": "v", "rows": "s", "dtype": "bfloat16", "temperature": 0.7}
    keys = [cache_key(**parts)] + [cache_key(**{**parts, name: value}) for name, value in others.items()]
    assert len(set(keys)) == 5
    assert cache_key(**parts) == keys[0]


def test_rows_are_told_apart() -> None:
    """Also if their ids, one behind the other, are the same."""
    rows = [
        ([[1, 2]], [[3]]),
        ([[1]], [[2, 3]]),
        ([[12]], [[3]]),
        ([[1, 2], [4]], [[3], [5]]),
        ([[4], [1, 2]], [[5], [3]]),
        ([[1, 2], []], [[3], [4, 5]]),
    ]
    digests = [rows_fingerprint(prompts, completions) for prompts, completions in rows]
    assert all(a != b for a, b in combinations(digests, 2))
    assert rows_fingerprint(*rows[3]) == digests[3]
    masked = [rows_fingerprint(*rows[3], learned) for learned in ([[True], [True]], [[True], [False]])]
    assert len({digests[3], *masked}) == 3


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_folder(str(tmp_path), {"XDG_CACHE_HOME": "/elsewhere"}) == tmp_path
    assert cache_folder(None, {"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/rlhf")
    assert cache_folder(None, {}) == Path("~/.cache/rlhf").expanduser()
