"""The part of the distributed tests that every run of the suite has: one launch of two processes makes all the runs.

Each test reads the results of one of them. Two steps a run; the whole table is in test_same_run_sharded.py, and slow:
here PPO runs in each of these modes, and a reward model, as an offline trainer, in the mode that shares out most. Two
pairs of runs here are slow too, of tied embeddings and of bfloat16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from runs import pairs_file
from safetensors import safe_open
from sharded import LIMIT, Tree, at, case, distance, launch, metrics, needs, samples
from test_same_run_sharded import assert_same
from transformers import AutoModelForCausalLM

from rlhf.config.files import merge
from rlhf.data.tokenizer import load_tokenizer
from rlhf.tracking.checkpoint import find_damage

CELLS = [("ppo", "ddp"), ("ppo", "zero2"), ("ppo", "zero3"), ("rm", "zero3")]
BRIEF = {"schedule": {"steps": 2}, "checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 0}}
# The table has runs that evaluate; two steps of PPO ask the models and sample like an evaluation.
UNEVALUATED: dict[str, Tree] = {"ppo": {"data": {"eval_prompts": None}, "batch": {"epochs": 1}}}
LIGHT = {"batch": {"epochs": 1, "minibatches": 1}}  # if two such are compared
BF16 = {"policy": {"dtype": "bfloat16"}, **LIGHT}
ALONE = ("ppo", "rm")  # run by one process too


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str, warm_process: None) -> Path:
    """The folder of the runs of the gate, which are made once, whichever workers of pytest-xdist ask for them."""
    return make_once("zero-gate", make_runs, tmp_path_factory, worker_id)


@pytest.fixture(scope="module")
def pairs_of_runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str, warm_process: None) -> Path:
    """The folder of the slow runs, in pairs that are the same to the bit."""
    return make_once("zero-pairs", make_pairs, tmp_path_factory, worker_id)


def make_once(
    name: str, make: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").is_file():
            needs("zero3")
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / "done").touch()
    return folder


def make_runs(folder: Path) -> None:
    """Every run in one process, then all in two."""
    trees = {name: brief_case(name, folder) for name in ALONE}
    launch([at(trees[name], folder / "one" / name) for name in ALONE], folder / "one", processes=1)
    two = [
        *[at(trees[name], folder / mode / name, sharding=mode) for name, mode in CELLS],
        at(trees["ppo"], folder / "cut", sharding="zero3", begin_as=str(folder / "zero3" / "ppo")),
        at(trees["ppo"], folder / "moved", sharding="zero3", begin_as=str(folder / "one" / "ppo")),
        at(trees["ppo"], folder / "layered", sharding={"mode": "zero3", "rollout": "layered"}),
    ]
    launch(two, folder / "two", processes=2, launcher=False, timeout_s=900.0)


def make_pairs(folder: Path) -> None:
    """Two processes under ZeRO-3: a model loaded in parts and whole, weights gathered in bfloat16 and in float32."""
    ppo = brief_case("ppo", folder)
    tied = at(ppo, folder / "tied" / "ppo", policy={"model": str(tied_model(folder))}, **LIGHT)
    two = [
        at(tied, folder / "tied" / "split", sharding="zero3"),
        at(tied, folder / "tied" / "whole", sharding="zero3", load_whole=True),
        at(ppo, folder / "bf16" / "low", sharding="zero3", **BF16),
        at(ppo, folder / "bf16" / "wide", sharding="zero3", gather_wide=True, **BF16),
    ]
    launch(two, folder / "two", processes=2, launcher=False, timeout_s=900.0)


def brief_case(name: str, folder: Path) -> Tree:
    """A run of two steps; a reward model is calibrated and evaluated on all its pairs, so it has few."""
    tree = merge(merge(case(name, folder / "data" / name), BRIEF), UNEVALUATED.get(name, {}))
    if name == "rm":
        data = {"preferences": (36, 0), "eval_preferences": (16, 1)}
        files = {key: pairs_file(folder / "data" / name, count=count, seed=seed) for key, (count, seed) in data.items()}
        assert {key: str(path) for key, path in files.items()} == {key: tree["data"][key]["path"] for key in data}
    return tree


def tied_model(folder: Path) -> Path:
    """The policy with its embeddings tied to its head, in bfloat16, in two files with an index."""
    path = folder / "tied" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder / "data" / "ppo" / "model")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.bfloat16().save_pretrained(path, max_shard_size="5KB")
    load_tokenizer(str(folder / "data" / "ppo" / "model")).save_pretrained(path)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def notes(out: Path) -> str:
    return (out / "notes.jsonl").read_text()


@pytest.mark.parametrize("name, mode", CELLS)
def test_a_run_of_two_processes_is_that_of_one(runs: Path, name: str, mode: str) -> None:
    assert_same(runs / "one" / name, runs / mode / name, name, mode)


@pytest.mark.parametrize("name", ["ppo", "rm"])
def test_under_zero3_no_process_loads_a_whole_model(runs: Path, name: str) -> None:
    assert "loaded whole" not in notes(runs / "zero3" / name)


@pytest.mark.slow
def test_a_model_loaded_in_parts_trains_as_one_loaded_whole_to_the_bit(pairs_of_runs: Path) -> None:
    """Tied embeddings, bfloat16 in the files, an index; policy, reference and critic with a new head."""
    split, whole = pairs_of_runs / "tied" / "split", pairs_of_runs / "tied" / "whole"
    assert "loaded whole" in notes(whole)
    assert "loaded whole" not in notes(split)
    assert distance(split, whole) == 0.0
    assert samples(split) == samples(whole)
    assert metrics(split) == metrics(whole)


def test_a_run_under_zero3_continues_as_itself_to_the_bit(runs: Path) -> None:
    whole, cut = runs / "zero3" / "ppo", runs / "cut"
    assert "continuing from" in notes(cut)
    assert distance(whole, cut) == 0.0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes()


def test_two_processes_under_zero3_continue_the_run_of_one(runs: Path) -> None:
    one, moved = runs / "one" / "ppo", runs / "moved"
    assert "continuing from" in notes(moved)
    assert distance(one, moved) < LIMIT
    assert samples(one) == samples(moved)


def test_layers_gathered_one_at_a_time_sample_what_gathered_weights_do(runs: Path) -> None:
    layered, gathered = runs / "layered", runs / "zero3" / "ppo"
    assert "sharding.rollout=layered" in notes(layered)
    assert samples(layered) == samples(gathered)
    assert distance(layered, gathered) < LIMIT


@pytest.mark.slow
def test_matrices_gathered_in_bfloat16_change_nothing_in_a_bfloat16_run(pairs_of_runs: Path) -> None:
    low, wide = pairs_of_runs / "bf16" / "low", pairs_of_runs / "bf16" / "wide"
    assert samples(low) == samples(wide)
    assert metrics(low) == metrics(wide)
    assert distance(low, wide) == 0.0


def test_each_process_writes_its_part_of_a_checkpoint(runs: Path) -> None:
    """Both parts hold about half of all numbers; no tensor is in both; the index of the model has the place of each."""
    newest = max((runs / "zero3" / "ppo" / "checkpoints").glob("step-*"))
    for pattern in ("model/model-*.safetensors", "critic/model-*.safetensors", "optimizer-*.safetensors"):
        parts = [contents(path) for path in sorted(newest.glob(pattern))]
        assert len(parts) == 2, pattern
        assert not parts[0].keys() & parts[1].keys(), pattern
        total = sum(sum(part.values()) for part in parts)
        largest = max(max(part.values()) for part in parts)
        assert all(sum(part.values()) <= total / 2 + 2 * largest for part in parts), pattern
    index = json.loads((newest / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in contents(newest / "model" / file) for name, file in index.items())
    AutoModelForCausalLM.from_pretrained(newest / "model")


def contents(path: Path) -> dict[str, int]:
    """The count of numbers in each tensor of the file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("file", ["optimizer-00002-of-00002.safetensors", "model/model-00001-of-00002.safetensors"])
def test_a_part_that_is_cut_off_is_named(runs: Path, tmp_path: Path, file: str) -> None:
    newest = max((runs / "zero3" / "ppo" / "checkpoints").glob("step-*"))
    copy = tmp_path / newest.name
    shutil.copytree(newest, copy)
    assert find_damage(copy) is None
    size = (copy / file).stat().st_size
    (copy / file).write_bytes((copy / file).read_bytes()[:-5])
    assert find_damage(copy) == f"{file} has {size - 5} bytes, not {size}"
    (copy / file).unlink()
    assert find_damage(copy) == f"{file} is missing"
