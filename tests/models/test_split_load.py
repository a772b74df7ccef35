"""Models that can be loaded in parts, and the reasons against others; tests/distributed compares both ways."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import saved, tiny
from transformers import PreTrainedModel

from rlhf.models.backbone import load_causal_lm
from rlhf.models.weight_files import WeightFiles, load_split, read_headers
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.engine import Engine

T = TypeVar("T")


class Recording(Engine):
    """An engine that reads every weight whole, like the engine of one process."""

    def partition(self, module: torch.nn.Module, read: object) -> None:
        assert callable(read)
        names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        self.read = {name: read(name, 0, module.get_parameter(name).numel()) for name in names}


def engine() -> Recording:
    return Recording(torch.device("cpu"))


def split(folder: str, model: PreTrainedModel, by: Engine, *new: str) -> PreTrainedModel | None:
    return load_split(lambda: type(model)(model.config), Path(folder), by, new=new)


def test_every_weight_is_read_once_a_tied_one_too(tmp_path: Path) -> None:
    model = tiny()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    by = engine()
    loaded = split(saved(model, tmp_path), model, by)
    assert loaded is not None
    assert by.notes == []
    assert by.read.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(by.read[name], weight.flatten()) for name, weight in model.named_parameters())
    assert not loaded.training
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer)


def test_a_new_head_gets_memory_and_is_not_read(tmp_path: Path) -> None:
    model, by = tiny(), engine()
    folder = saved(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors")
    loaded = split(folder, model, by, "lm_head.weight")
    assert loaded is not None
    assert "lm_head.weight" not in by.read
    assert not loaded.get_parameter("lm_head.weight").is_meta
    assert loaded.get_parameter("model.norm.weight").is_meta


@pytest.mark.parametrize("change, reason", [("missing", "0 times"), ("shape", "another shape"), ("dtype", "int64")])
def test_what_the_files_lack_is_named_and_the_model_loaded_whole(tmp_path: Path, change: str, reason: str) -> None:
    model, by = tiny(), engine()
    folder, name = saved(model, tmp_path), "model.norm.weight"
    weights = load_file(tmp_path / "model.safetensors")
    changed = {"missing": None, "shape": weights[name][:-1].clone(), "dtype": weights[name].long()}[change]
    kept = {key: value for key, value in (weights | {name: changed}).items() if value is not None}
    save_file(kept, tmp_path / "model.safetensors")
    assert split(folder, model, by) is None
    assert name in by.notes[0]
    assert reason in by.notes[0]
    assert "loaded whole by every process" in by.notes[0]


def test_a_model_without_safetensors_files_is_loaded_whole(tmp_path: Path) -> None:
    by = engine()
    assert split(str(tmp_path), tiny(), by) is None
    assert load_split(tiny, None, by) is None
    assert all("no safetensors files" in note for note in by.notes)


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    """Adapters are initialized after it, and get the same numbers whether their base was loaded whole or in parts."""
    model = tiny(dtype=torch.float32)
    folder = saved(model, tmp_path)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert split(folder, model, engine()) is not None
    assert torch.equal(torch.get_rng_state(), before)
    load_causal_lm(folder)
    assert torch.equal(torch.get_rng_state(), before)


class WithoutFiles(Distributed):
    """Two ranks, of which the other has not got the files."""

    def gather(self, value: T) -> list[T]:
        return [value, "not here"]  # type: ignore[list-item]


def test_where_one_rank_cannot_read_its_part_none_does(tmp_path: Path) -> None:
    model, by = tiny(), Recording(torch.device("cpu"), ranks=WithoutFiles(0, 2))
    assert split(saved(model, tmp_path), model, by) is None
    assert "not here" in by.notes[0]


def test_names_of_files_without_an_index(tmp_path: Path) -> None:
    saved(tiny(), tmp_path)
    assert "model.norm.weight" in WeightFiles(tmp_path, read_headers(tmp_path))
