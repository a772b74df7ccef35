"""Parts of tensors are read from safetensors files with the numbers of the whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.errors import ModelError
from rlhf.models.weight_files import INDEX, NamedTensors, WeightFiles, read_headers

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(10, dtype=torch.bfloat16).view(2, 5),
    "c": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    """The weights in two files with an index."""
    save_file({"a": WEIGHTS["a"]}, tmp_path / "one.safetensors")
    save_file({name: WEIGHTS[name] for name in "bc"}, tmp_path / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    return WeightFiles(tmp_path, read_headers(tmp_path))


@pytest.mark.parametrize("name, start, stop", [("a", 0, 12), ("a", 5, 6), ("a", 3, 11), ("b", 4, 10), ("b", 7, 7)])
def test_a_part_is_that_of_the_flattened_tensor(files: WeightFiles, name: str, start: int, stop: int) -> None:
    part = files.read(name, start, stop)
    assert part.dtype == WEIGHTS[name].dtype
    assert torch.equal(part, WEIGHTS[name].flatten()[start:stop])


def test_parts_of_all_ranks_are_the_tensor(files: WeightFiles) -> None:
    assert torch.equal(torch.cat([files.read("a", i, i + 4) for i in (0, 4, 8)]).view(3, 4), WEIGHTS["a"])


def test_tensors_by_shorter_names_have_their_shapes(tmp_path: Path) -> None:
    save_file({f"policy/exp_avg/{name}": value for name, value in WEIGHTS.items()}, tmp_path / "model.safetensors")
    tensors = NamedTensors(WeightFiles(tmp_path, read_headers(tmp_path)), "policy/exp_avg/")
    assert set(tensors) == set(WEIGHTS)
    assert len(tensors) == 3
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)
    assert not NamedTensors(WeightFiles(tmp_path, read_headers(tmp_path)), "critic/")


def test_a_file_that_is_cut_off_is_named(files: WeightFiles, tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ModelError, match=r"two\.safetensors ends before the weight"):
        [files.read(name) for name in "bc"]


def test_where_a_file_of_the_index_is_missing_there_is_nothing(files: WeightFiles, tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").unlink()
    assert read_headers(tmp_path) == {}
