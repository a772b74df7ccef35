"""One run is the same in one process or several, whole or sharded: the cells of the table in docs/distributed.md.

A test is a column of the table: all its runs, one after another, in one launch (an import of everything takes longer
than a run). All are slow; the part that every run of the tests has is in test_zero_gate.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sharded import LIMIT, TRAINERS, at, case, distance, launch, metrics, needs, samples

VARIANTS = (
    "ppo_lora",
    "ppo_shared",
    "ppo_ema",
    "ppo_checkpointing",
    "ppo_warmup",
    "ppo_one_row",
    "ppo_episodes",
    "ppo_ptx",
    "ppo_mixed",
    "sft_mixed",
    "ppo_rm",
    "remax",
    "dapo",
    "kto",
    "online_dpo",
    "rejection_sampling",
    "opd",
)


def same_as_one_process(folder: Path, names: tuple[str, ...], mode: str, processes: int) -> None:
    trees = [case(name, folder / name) for name in names]
    launch([at(tree, folder / "one" / n) for n, tree in zip(names, trees, strict=True)], folder / "one", processes=1)
    many = folder / "many"
    launch([at(t, many / n, sharding=mode) for n, t in zip(names, trees, strict=True)], many, processes=processes)
    for name in names:
        assert_same(folder / "one" / name, many / name, name, mode)


def assert_same(one: Path, other: Path, name: str, mode: str) -> None:
    assert distance(one, other) < LIMIT, name
    assert samples(one) == samples(other), name
    compared_metrics(metrics(one), metrics(other), name)
    settings = sorted(path.name for path in (other / "deepspeed").glob("*.json"))
    assert bool(settings) == mode.startswith("zero"), name


def compared_metrics(one: list[dict[str, float]], other: list[dict[str, float]], name: str) -> None:
    """The same lines under the same names; and the same values, unless rounding can turn them over."""
    assert [row.keys() for row in one] == [row.keys() for row in other], name
    for key in (
        "score/mean",
        "completion/length",
        "completion/count",
        "completion/generated_tokens",
        "eval/score",
        "policy/lr",
        "loss/sft",
        "loss/rm",
    ):
        left, right = ([row[key] for row in rows if key in row] for rows in (one, other))
        assert left == pytest.approx(right, rel=1e-5, abs=1e-6), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("mode", ["none", "ddp", "zero1", "zero2", "zero3"])
def test_the_table(tmp_path: Path, mode: str, processes: int) -> None:
    needs(mode)
    same_as_one_process(tmp_path, TRAINERS, mode, processes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2"])
def test_distillation(tmp_path: Path, mode: str) -> None:
    needs(mode)
    same_as_one_process(tmp_path, ("distill", "distill_sft"), mode, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_what_else_a_run_may_do(tmp_path: Path, mode: str) -> None:
    needs(mode)
    same_as_one_process(tmp_path, VARIANTS, mode, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zero2_offload", "zero3_offload"])
def test_offload(tmp_path: Path, mode: str) -> None:
    needs(mode)
    same_as_one_process(tmp_path, ("ppo", "ppo_lora"), mode, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero2", "zero3"])
def test_three_processes_of_which_some_have_no_rows(tmp_path: Path, mode: str) -> None:
    needs(mode)
    same_as_one_process(tmp_path, ("ppo", "grpo", "ppo_one_row"), mode, 3)
