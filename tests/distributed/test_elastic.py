"""A checkpoint of N processes under one sharding is continued by M processes under another, as if uninterrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from sharded import LIMIT, at, case, distance, launch, metrics, needs, samples
from transformers import AutoModelForCausalLM

NAMES = ("ppo", "ppo_lora", "ppo_ema", "ppo_shared", "dpo", "rm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then",
    [
        (("zero3", 2), ("none", 1)),
        (("none", 1), ("zero3", 2)),
        (("zero2", 2), ("zero3", 1)),
        (("zero3", 3), ("zero1", 2)),
        (("ddp", 2), ("zero2_offload", 2)),
    ],
)
def test_another_number_of_processes_and_another_stage_continue(
    tmp_path: Path, first: tuple[str, int], then: tuple[str, int]
) -> None:
    for mode, _ in (first, then):
        needs(mode)
    trees = {name: case(name, tmp_path / name) for name in NAMES}
    launch([at(tree, tmp_path / "whole" / n) for n, tree in trees.items()], tmp_path / "whole", processes=1)
    out = tmp_path / "resumed"
    halves = [at(tree, out / n, sharding=first[0], stop_after=3) for n, tree in trees.items()]
    launch(halves, tmp_path / "first", processes=first[1])
    launch([at(tree, out / n, sharding=then[0]) for n, tree in trees.items()], tmp_path / "then", processes=then[1])
    for name in NAMES:
        assert distance(tmp_path / "whole" / name, out / name) < LIMIT, name
        assert samples(tmp_path / "whole" / name) == samples(out / name), name
        assert len(metrics(tmp_path / "whole" / name)) == len(metrics(out / name)), name


@pytest.mark.slow
def test_a_sharded_run_continues_as_itself_bitwise(tmp_path: Path) -> None:
    needs("zero3")
    tree = case("ppo", tmp_path / "ppo")
    launch([at(tree, tmp_path / "whole", sharding="zero3")], tmp_path / "a", processes=2)
    half = at(tree, tmp_path / "cut", sharding="zero3", stop_after=3)
    launch([half], tmp_path / "b", processes=2)
    launch([at(tree, tmp_path / "cut", sharding="zero3")], tmp_path / "c", processes=2)
    assert distance(tmp_path / "whole", tmp_path / "cut") == 0.0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


@pytest.mark.slow
def test_what_a_sharded_run_exports_is_an_ordinary_folder(tmp_path: Path) -> None:
    needs("zero3")
    for name in ("ppo", "ppo_lora"):
        launch([at(case(name, tmp_path / name), tmp_path / "z" / name, sharding="zero3")], tmp_path / "z", processes=2)
        launch([at(case(name, tmp_path / name), tmp_path / "n" / name)], tmp_path / "n", processes=1)
        one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / k / name / "model") for k in ("n", "z"))
        for key, value in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-4, atol=1e-6)
        assert other.generation_config.eos_token_id == one.generation_config.eos_token_id
        shutil.rmtree(tmp_path / "z" / name)
