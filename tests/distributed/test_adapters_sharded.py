"""Adapters of every role over a stored base, in two processes as in one: the rows on processes of docs/adapters.md.

One launch of two processes makes all the runs; each test reads the results of one of them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from job import run_one
from runs import pairs_file
from sharded import Tree, at, case, distance, launch, samples
from test_same_run_sharded import assert_same

from rlhf.config.files import merge

LORA = {"lora": {"r": 2}}
BRIEF = {"schedule": {"steps": 2}, "checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 0}}
STORED = ("nf4", "bfloat16", "int8")
CELLS = [
    *[(f"ppo-{kind}", "ddp") for kind in STORED],
    *[(f"{name}-nf4", "ddp") for name in ("rm", "dpo", "sft")],
    *[("ppo-auto", mode) for mode in ("ddp", "zero2", "zero3")],
]
NAMES = list(dict.fromkeys(name for name, _ in CELLS))


def adapted(name: str, folder: Path) -> Tree:
    """A run of two steps whose models are adapters; PPO has one for the policy, the critic and the reward model."""
    trainer, _, kind = name.partition("-")
    tree = merge(case(trainer, folder / "data" / trainer), BRIEF)
    role = {**LORA, "weights": kind}
    if trainer == "ppo":
        source = {"type": "model", "path": str(folder / "reward" / "model"), "weights": kind, "micro_batch_size": 3}
        tree["reward"] = {"source": source}
        tree["data"]["eval_prompts"] = None
        unclipped = {"value_loss": {"clip_eps": None}}  # rounding may turn a token over at the kink of the clip
        critic = {**role, "init": "policy"}
        return merge(tree, {"policy": role, "critic": critic, "batch": {"epochs": 1}, "algorithm": unclipped})
    return merge(tree, {"model" if trainer == "rm" else "policy": {**role, "export": "both"}})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_process: None) -> Path:
    """Every run in one process, then all in two."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("adapters")
    case("ppo", folder / "data" / "ppo")
    reward = merge(case("rm", folder / "data" / "rm"), BRIEF)
    pairs_file(folder / "data" / "rm", count=36)
    model = {"model": str(folder / "data" / "ppo" / "model"), **LORA, "weights": "nf4", "export": "adapter"}
    run_one(at(merge(reward, {"model": model}), folder / "reward"))
    trees = {name: adapted(name, folder) for name in NAMES}
    launch([at(tree, folder / "one" / name) for name, tree in trees.items()], folder / "one", processes=1)
    cells = [cell for cell in CELLS if cell[1] == "ddp" or importlib.util.find_spec("deepspeed") is not None]
    two = [at(trees[name], folder / mode / name, sharding=mode) for name, mode in cells]
    cut = at(trees["ppo-nf4"], folder / "cut", sharding="ddp", begin_as=str(folder / "ddp" / "ppo-nf4"))
    launch([*two, cut], folder / "two", processes=2, launcher=False, timeout_s=900.0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CELLS)
def test_two_processes_train_the_adapters_of_one(runs: Path, name: str, mode: str) -> None:
    if mode.startswith("zero"):
        pytest.importorskip("deepspeed")
    assert_same(runs / "one" / name, runs / mode / name, name, mode)


@pytest.mark.slow
def test_adapters_over_nf4_continue_as_themselves_in_two_processes(runs: Path) -> None:
    whole, cut = runs / "ddp" / "ppo-nf4", runs / "cut"
    assert distance(whole, cut) == 0.0
    assert samples(whole) == samples(cut)
