"""How often the host waits for the device, and how many kernels a decoded token takes: numbers that may only go down.

They stand in ratchet.json. A change that lowers one lowers it there too; one that raises it has to be undone.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_runs
import pytest
import runs
import torch
from device_runs import offline_tree, online_tree
from pretend import PretendDevice
from quick import quick
from tiny_models import completions_of, prompts_of, tiny

from rlhf.config.files import merge
from rlhf.config.sections import SamplingConfig
from rlhf.models.backbone import autocast
from rlhf.models.logprobs import completion_outputs
from rlhf.sampling.fast.engine import FastSampler
from rlhf.training import offline, online
from rlhf.training.step import optimizer_step

ALLOWED: dict[str, float] = json.loads(Path(__file__).with_name("ratchet.json").read_text(encoding="utf-8"))


def check(name: str, actual: float, places: Counter[Any] | None = None) -> None:
    """Compare a count with the ratchet."""
    where = "".join(f"\n  {count} x {place}" for place, count in (places or Counter()).most_common(8))
    assert actual <= ALLOWED[name], f"{name}: {actual}, and at most {ALLOWED[name]} are allowed (ratchet.json).{where}"
    assert actual == ALLOWED[name], f"{name} is down to {actual} from {ALLOWED[name]}: set it in ratchet.json"


def counted_steps(
    tree: dict[str, Any], folder: Path, pretend: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Counter[Any], Counter[Any], Counter[int]]]:
    """Train, and return each optimizer step's waits, blocking copies and casts by weight."""
    counts: list[tuple[Counter[Any], Counter[Any], Counter[int]]] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        pretend.clear()
        metrics = optimizer_step(*args, **kwargs)
        counts.append((Counter(pretend.waits), Counter(pretend.blocking), Counter(pretend.weight_casts)))
        return metrics

    for module in (online, offline):
        monkeypatch.setattr(module, "optimizer_step", counted)
    whole = device_runs.on("cuda", tree, folder)
    (runs.trained if "prompts" in whole["data"] else runs.trained_offline)(whole)
    return counts


TREES: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "sft": offline_tree,
    "dpo": offline_tree,
    "grpo": online_tree,
    "ppo": online_tree,
}


@pytest.mark.parametrize("name", quick(TREES, ["sft", "dpo", "ppo"]))
def test_waits_of_an_optimizer_step(
    name: str, tmp_path: Path, pretend: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.make_model(tmp_path / "model")
    tree = merge(TREES[name](tmp_path, name), {"schedule": {"steps": 1}, "batch": {"micro_batch_size": 2}})
    if TREES[name] is online_tree:  # nothing but the optimizer's steps is counted
        tree = merge(tree, {"data": {"eval_prompts": None}, "batch": {"prompts_per_step": 4 if name == "grpo" else 8}})
    waits, blocking, _ = counted_steps(tree, tmp_path, pretend, monkeypatch)[-1]
    check(f"{name}: waits of an optimizer step, all micro-batches", sum(waits.values()), waits)
    check(f"{name}: blocking copies of an optimizer step, all micro-batches", sum(blocking.values()), blocking)
    assert pretend.problems == []


def test_each_weight_is_cast_once_in_an_optimizer_step(
    tmp_path: Path, pretend: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.make_model(tmp_path / "model")
    tree = merge(offline_tree(tmp_path, "sft"), {"schedule": {"steps": 1}, "policy": {"dtype": "bfloat16"}})
    waits, blocking, casts = counted_steps(tree, tmp_path, pretend, monkeypatch)[0]
    assert casts
    assert (sum(waits.values()), sum(blocking.values())) == (1, 0), (waits, blocking)
    check("sft: casts of a weight in an optimizer step", max(casts.values()))


def sampler_of(layers: int, dtype: str, *, length: int = 40) -> FastSampler:
    model = copy.deepcopy(tiny("qwen2", dtype=torch.float32, num_hidden_layers=layers)).to("cuda")
    return FastSampler(
        model,
        SamplingConfig(max_new_tokens=length, batch_size=8),
        eos_ids=(),
        pad_id=0,
        dtype=dtype,
        device=torch.device("cuda"),
    )


def test_waits_and_captures_of_a_rollout(pretend: PretendDevice) -> None:
    sampler, prompts = sampler_of(2, "float32"), prompts_of([[1, 5, 7, 9], [1, 4, 3]])
    sampler.sample(prompts, key=1, group_size=8)  # the first one tries the decoder and records
    pretend.clear()
    sampler.sample(prompts, key=2, group_size=8)  # two runs of 8 rows through 8 slots: 80 tokens deep
    assert sampler.uses == "recorded"
    check("waits of a rollout of 80 steps", sum(pretend.waits.values()), pretend.waits)
    check("blocking copies of a rollout", sum(pretend.blocking.values()), pretend.blocking)
    check("captures of a second rollout", pretend.captures)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_a_layer_and_token(dtype: str, pretend: PretendDevice) -> None:
    nodes = []
    for layers in (1, 2):
        sampler_of(layers, dtype, length=4).sample(prompts_of([[1, 5, 7], [1, 4]]), key=1, group_size=2)
        nodes.append(pretend.nodes)
    check(f"{dtype}: kernels of a layer and token", nodes[1] - nodes[0])


def test_attention_of_shared_prompts_is_one_kernel_a_layer(pretend: PretendDevice) -> None:
    model = copy.deepcopy(tiny("llama", dtype=torch.float32)).to("cuda")
    rows = completions_of([[1, 5, 7, 9]] * 4, [[4, 5], [6, 2], [7], [7, 8, 9]]).to(torch.device("cuda"))
    fields = rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask
    with autocast("bfloat16", torch.device("cuda")):
        for _ in range(2):  # the first pass tries the ways out
            pretend.clear()
            completion_outputs(model, *fields, temperature=1.0)
    name = "bfloat16: attention kernels of a layer where prompts are shared"
    check(name, sum(pretend.attention.values()) / 2, pretend.attention)


def test_the_page_has_the_numbers_of_the_ratchet() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu_first_run.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert {row[0]: float(row[2]) for row in rows if row[0] in ALLOWED} == ALLOWED
