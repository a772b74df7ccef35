"""Small runs of every trainer for a CPU and a GPU, and the comparison between them.

The CPU's results are made before the pretend device is there: beside it every operation of torch, a CPU's too, passes
through Python.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import runs
import torch
import yaml
from pretend import PretendDevice
from trials import tried_once

from rlhf.config.files import merge
from rlhf.config.load import load_reward_model
from rlhf.factory.reward_model import build_reward_model
from rlhf.training.offline import train_offline
from rlhf.training.session import Session

Tree = dict[str, Any]

BARE = {"checkpoint": {"every": 0}, "schedule": {"steps": 2}, "eval": {"every": 0}}
ONLINE: dict[str, Tree] = {  # options that have no code in common share a run
    "ppo": {},
    "ppo, shared critic, reward in parts": {
        "critic": {"shared": True, "init": "auto"},
        "overlap": {"reward_parts": 2},
    },
    "ppo, lora": {"policy": {"lora": {"r": 2}}},
    "ppo, gradient checkpointing, ahead": {"policy": {"gradient_checkpointing": True}, "overlap": {"ahead": True}},
    "ppo, transformers, padded": {"sampling": {"backend": "hf"}, "policy": {"packing": "off"}},
    "grpo": {},
    "online_dpo": {},
    "remax": {},
}
EVALUATED = "grpo"  # the one run that evaluates
OFFLINE: dict[str, Tree] = {
    "sft": {},
    "dpo": {},
    "simpo": {},  # without a reference
    "kto": {},
}
NOT_COMPARED = ("time/", "perf/", "memory")
COUNTED = "clip_fraction"  # tokens beyond a threshold: rounding moves one over it now and then
SIGNS = "accuracy"  # of pairs, whose margins are rounding while the policy is the reference
ONE_TOKEN = 0.03  # of the tokens of such a run


def online_tree(folder: Path, name: str) -> Tree:
    """A run of two steps."""
    preset = name.split(",")[0]
    tree = merge(runs.ppo_tree(folder), BARE)
    tree["policy"]["lr"] = 1e-3
    tree["batch"]["epochs"] = 1
    if name != EVALUATED:
        tree["data"]["eval_prompts"] = None
    if preset != "ppo":
        tree["algorithm"] = {"preset": preset}
        tree.pop("critic")
        tree = merge(tree, {"sampling": {"completions_per_prompt": 1 if preset == "remax" else 4}})
    if preset == "remax":  # its loss has no ratio: one update of a sample
        tree["batch"]["minibatches"] = 1
    return merge(tree, ONLINE[name])


def offline_tree(folder: Path, name: str) -> Tree:
    """A run of two steps; its preset is the first word of the name."""
    preset = name.split(",")[0]
    tree = merge(runs.offline_tree(folder, "dpo" if preset == "sft" else preset), BARE)
    if preset == "sft":
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in runs.written(5, 60)]
        tree["algorithm"] = {"preset": "sft"}
        tree["data"] = {"sft": {"path": str(runs.write_rows(folder / "sft.jsonl", rows))}}
    elif preset == "kto":
        tree["data"] = {"preferences": {"path": str(runs.labelled_file(folder))}}
    else:
        tree["data"] = {"preferences": tree["data"]["preferences"]}
    return merge(tree, OFFLINE[name])


@contextmanager
def gpu_or_pretend() -> Iterator[PretendDevice | None]:
    """Use the GPU; the pretend one, if torch sees no other, must find nothing wrong."""
    if torch.cuda.is_available():
        yield None
        return
    importlib.import_module("peft")  # not later: on the pretend device bitsandbytes would look for CUDA's functions
    with PretendDevice() as machine:
        yield machine
    assert machine.problems == []


def on(device: str, tree: Tree, folder: Path) -> Tree:
    """The same run on a device, in a folder of its own; in float32 throughout."""
    arithmetic = {"dtype": "float32"} if "dtype" not in tree["policy"] else {}
    place = {"device": device, "out_dir": str(folder / f"run-{device}"), "tf32": False}
    return merge(tree, {"run": place, "policy": arithmetic})


def run(tree: Tree, folder: Path, device: str) -> list[dict[str, float]]:
    """Train, and return the metrics of each step."""
    whole = on(device, tree, folder)
    (runs.trained if "prompts" in whole["data"] else runs.trained_offline)(whole)
    return metrics_of(Path(whole["run"]["out_dir"]))


def reward_model(folder: Path, device: str) -> tuple[list[dict[str, float]], Session]:
    """Train a reward model for two steps, and return its metrics and its session."""
    if not (folder / "model").is_dir():
        runs.make_model(folder / "model")
    out = folder / f"rm-{device}"
    tree = {
        "run": {"out_dir": str(out), "device": device, "tf32": False},
        "data": {"preferences": {"path": str(runs.pairs_file(folder, count=60))}},
        "model": {"model": str(folder / "model"), "lr": 1e-3, "dtype": "float32"},
        "batch": {"prompts_per_step": 16, "micro_batch_size": 8},
        **BARE,
    }
    path = folder / f"rm-{device}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with tried_once():
        built = build_reward_model(load_reward_model(path, []), runs.quiet())
    train_offline(built.run)
    built.run.session.recorder.close()
    return metrics_of(out), built.run.session


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def differences(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], *, tolerance: float = 2e-4
) -> list[tuple[str, float, float]]:
    """The metrics that differ by more than rounding: relative to themselves, or to 0.001 if they are smaller."""
    assert [sorted(line) for line in ours] == [sorted(line) for line in theirs]
    return [
        (name, line[name], other[name])
        for line, other in zip(ours, theirs, strict=True)
        for name in line
        if not name.startswith(NOT_COMPARED)
        and not (name.endswith(SIGNS) and line is ours[0])
        and not _same(line[name], other[name], tolerance, slack=ONE_TOKEN if name.endswith(COUNTED) else 1e-6)
    ]


def _same(first: float | None, second: float | None, tolerance: float, *, slack: float) -> bool:
    if first is None or second is None or math.isnan(first) or math.isnan(second):
        return (first is None or math.isnan(first)) == (second is None or math.isnan(second))
    return abs(first - second) <= tolerance * max(abs(first), 1e-3) + slack
