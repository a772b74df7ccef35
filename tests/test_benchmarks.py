"""The benchmarks run, at toy size; how fast is for benchmarks/ to say."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TRAINERS = ("sft", "reward", "dpo", "grpo", "rloo", "ppo")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("peers.work", "peers.ours", "side_by_side", "floor", "scaling", "gpu")
    found = {name: importlib.import_module(name) for name in names}
    yield found
    for name in (*names, "peers", "peers.runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def sizes(modules: dict[str, ModuleType]) -> Any:
    return modules["peers.work"].Sizes(
        rows=4, prompts=2, group=2, ppo_prompts=16, ppo_epochs=2, ppo_minibatches=2, new_tokens=4
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_our_side_does_the_work_that_the_peer_does(
    tmp_path: Path, modules: dict[str, ModuleType], sizes: Any, trainer: str
) -> None:
    work, ours = modules["peers.work"], modules["peers.ours"]
    parameters = work.make_work(tmp_path, "toy", 3, sizes)
    assert parameters > 1e5
    job = work.Job(trainer, 3, str(tmp_path), sizes=sizes, threads=torch.get_num_threads())
    job.write(tmp_path / "job.json")
    assert work.Job.read(str(tmp_path / "job.json")) == job
    found = ours.run(job, tmp_path / "run")
    assert len(found["steps"]) == 2
    assert all(seconds > 0 for seconds in found["steps"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 3
    if trainer in ("grpo", "rloo"):
        assert lines[-1]["policy/optimizer_steps"] == 1
        assert lines[-1]["completion/count"] == 3 * sizes.prompts * sizes.group
    if trainer == "ppo":
        assert lines[-1]["policy/optimizer_steps"] == sizes.ppo_epochs * sizes.ppo_minibatches
        assert lines[-1]["completion/count"] == 3 * sizes.ppo_prompts
    for name in modules["floor"].floors(trainer, "toy", sizes, 4) if trainer not in ("dpo", "rloo") else ():
        assert any(name in each for each in found["phases"]), name


def test_a_floor_by_hand(modules: dict[str, ModuleType], sizes: Any) -> None:
    floor, work = modules["floor"], modules["peers.work"]
    layers, width, _, vocabulary = work.SHAPES["toy"]
    body, head = floor.products("toy")
    assert (body, head) == (layers * (4 * width**2 + 3 * width * 192), width * vocabulary)
    update = floor.floors("sft", "toy", sizes, 4)["update"]
    tokens, side = 4 * (40 + 56), 4 * 56
    assert update.flops == 6 * (tokens * body + side * head)
    rates = floor.Rates(few=1e9, many=2e9, memory=1e6)
    assert floor.Floor(4e9, 5e6).seconds(rates) == 5.0
    assert floor.Floor(4e9, 1e6).seconds(rates) == 2.0
    assert floor.Floor(4e9, 1e6, few_rows=True).seconds(rates) == 4.0


def test_ratios_are_of_the_medians_of_each_round(modules: dict[str, ModuleType], sizes: Any) -> None:
    side, work = modules["side_by_side"], modules["peers.work"]
    job = work.Job("dpo", 4, "", sizes=sizes)

    def found(steps: list[float], **more: Any) -> dict[str, Any]:
        return {"steps": steps, "phases": [{"update": 1.0}], "tokens": [10.0], "peak_rss_mb": 100.0, **more}

    rounds = [(found([1.0, 2.0, 9.0], reference=16.0), found([6.0])), (found([1.0], reference=0.0), found([4.0]))]
    summary = side.summarize("dpo", rounds, job)
    assert summary["ratio_range"] == [6.0 / 3.0, 4.0]  # 2 s a step; the reference of its 4 pairs of 64: 1 s
    assert summary["ratio"] == statistics.median([2.0, 4.0])
    row = side.row("dpo", summary, "tiny")
    assert "| dpo | 3.00 [2.00, 4.00] | 1.8 |" in row
    assert row.count("|") == side.HEAD.splitlines()[0].count("|") == side.HEAD.splitlines()[1].count("|")
    assert "| 7 / 3 |" in row  # 10 tokens in 3 s and in 1 s, the medians 2 and 5 s; both sides' are the same
    assert side.split("dpo", summary) == "dpo: ours update 1.000, the rest 1.000; TRL update 1.000, the rest 4.000"


def test_an_exponent(modules: dict[str, ModuleType]) -> None:
    assert modules["scaling"].exponent([(1.0, 3.0), (2.0, 12.0), (4.0, 48.0)]) == pytest.approx(2.0)


@pytest.mark.slow
def test_gpu_benchmark_runs_on_a_cpu_at_toy_size(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--toy", "--threads", "1", "--json", str(out)])
    modules["gpu"].main()
    results = json.loads(out.read_text())
    assert set(results) == {"about", "rollout", "update", "grpo", "ppo"}
    assert results["update"]["share"] > 0


@pytest.mark.parametrize("name", ["sampler", "forward"])
def test_ours_beside_the_plain_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module(name)
    rest = {"sampler": ["--lengths", "fixed", "--threads", "1"], "forward": ["--no-memory", "--case", "grpo"]}[name]
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [name, "--size", "toy", "--rounds", "1", "--json", str(out), *rest])
    module.main()
    assert "toy" in out.read_text()
    assert capsys.readouterr().out
