"""Runs whose completions a server draws: the same numbers as in this process, through any fault of the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import largest_difference, make_model, ppo_tree, trained, weights
from servers import listening, served, service_of
from torch import Tensor

from rlhf.algorithms.gae import Gae
from rlhf.types import Rollout

SERVER = ("server/",)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without the metrics of servers."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(SERVER)} for line in lines]


def tree_of(folder: Path, model: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return ppo_tree(folder, policy={"model": str(model)}, eval={"every": 4}, **changes)


PRESETS = {
    "ppo": ["algorithm.preset=ppo"],
    "remax": ["algorithm.preset=remax", "batch.epochs=1", "batch.minibatches=1"],
    "lora": ["algorithm.preset=grpo", "sampling.completions_per_prompt=4", "policy.lora.r=2", "policy.lr=0.1"],
    "ahead": ["algorithm.preset=ppo", "overlap.ahead=true"],
    "top-p": ["algorithm.preset=grpo", "sampling.completions_per_prompt=4", "sampling.top_p=0.8", "sampling.top_k=6"],
    "three ahead": [
        "algorithm.preset=grpo",
        "sampling.completions_per_prompt=4",
        "overlap={ahead: true, ahead_steps: 3}",
    ],
}


@pytest.mark.parametrize("name", quick(PRESETS, ["lora", "three ahead"]))
def test_a_served_run_is_the_run_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "model")
    here = trained(tree_of(tmp_path / "here", model), *PRESETS[name])
    with listening(service_of(model)) as url:
        there = trained(tree_of(tmp_path / "there", model, sampling=served(url)), *PRESETS[name])
    assert largest_difference(weights(here.models.policy), weights(there.models.policy)) == 0.0
    assert metrics(tmp_path / "here") == metrics(tmp_path / "there")
    samples = [(tmp_path / name / "run" / "samples.jsonl").read_bytes() for name in ("here", "there")]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("behind", [1, 2])
def test_v_trace_of_a_server_s_older_samples_is_the_one_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    traced: list[tuple[Tensor, Tensor]] = []  # advantages and returns of each step of both runs
    drift, correction = list[float](), list[float]()
    compute = Gae.compute_stale

    def noted(gae: Gae, rollout: Rollout, rewards: Tensor, **caps: float) -> tuple[Tensor, Tensor]:
        traced.append(compute(gae, rollout, rewards, **caps))
        ratios = rollout.logprobs - rollout.sampler_logprobs
        drift.append(ratios[rollout.action_mask].abs().max().item())
        correction.append((traced[-1][1] - gae.compute(rollout, rewards)[1]).abs().max().item())
        return traced[-1]

    monkeypatch.setattr(Gae, "compute_stale", noted)
    model = make_model(tmp_path / "model")
    overlap = {"ahead": True, "ahead_steps": behind, "trace_cap": 1.0}
    here = trained(tree_of(tmp_path / "here", model, overlap=overlap), "eval.every=0")
    with listening(service_of(model)) as url:
        tree = tree_of(tmp_path / "there", model, overlap=overlap, sampling=served(url))
        there = trained(tree, "eval.every=0")
    ages = [row["overlap/age"] for row in metrics(tmp_path / "there")[1:]]
    assert ages == [min(step, behind) for step in range(4)]
    assert (
        [number > 0.01 for number in drift[4:]] == [number > 0.01 for number in correction[4:]] == [False, *[True] * 3]
    )
    for ours, theirs in zip(traced[:4], traced[4:], strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert largest_difference(weights(here.models.policy), weights(there.models.policy)) == 0.0
    assert metrics(tmp_path / "here") == metrics(tmp_path / "there")


def test_runs_share_a_folder_for_weights_with_each_other_and_with_other_files(tmp_path: Path) -> None:
    """A run deletes its own old pushes, and nothing else: no push of another run, and no folder of the user."""
    model, shared = make_model(tmp_path / "model"), tmp_path / "shared"
    kept = [shared / "data" / "set.jsonl", shared / ".hidden" / "notes"]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.write_text("x")
    (tmp_path / "seen").symlink_to(shared)
    versions = {}
    for name in ("one", "two"):
        service = service_of(model)
        with listening(service) as url:
            sampling = served(url, weights_dir=str(shared), weights_dir_on_server=str(tmp_path / "seen"))
            run = trained(tree_of(tmp_path / name, model, sampling=sampling), "schedule.steps=3", "eval.every=0")
        assert run.servers is not None
        versions[run.servers.folders.root] = run.servers.version
        assert service.version == run.servers.version
    assert all(file.is_file() for file in kept)
    assert len(versions) == 2, "each run has a folder of its own"
    for root, version in versions.items():
        newest = root / (root / "VERSION").read_text().strip()
        assert json.loads((newest / "push.json").read_text())["version"] == version
