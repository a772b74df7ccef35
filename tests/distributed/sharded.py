"""The runs of the table in docs/distributed.md, how they are launched, and what must be equal."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from job import run_one
from runs import make_model, offline_tree, pairs_file, ppo_tree, prompts_file, write_rows, written
from safetensors.torch import load_file

from rlhf.config.load import merge
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.scalar_head import load_scalar_head

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ("sft", "rm", "ppo", "grpo", "dpo")
Tree = dict[str, Any]

STEPS = 6
LIMIT = 1e-6  # |w - w'| / |w| after so many steps in float32
# 9 rows in minibatches of 5 and 4, in passes of 2: over two processes shares and passes are ragged.
ONLINE = {"prompts_per_step": 9, "epochs": 2, "minibatches": 2, "micro_batch_size": 2}


def case(name: str, folder: Path) -> Tree:
    """The settings of a run of 6 steps; its files are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not model.is_dir():
        make_model(model)
    return {"sft": _sft, "rm": _rm, "dpo": _dpo, "kto": _kto}.get(name, _online)(name, folder)


def _common(folder: Path) -> Tree:
    return {"schedule": {"steps": STEPS}, "checkpoint": {"every": 3, "keep": 9}, "eval": {"every": 3}}


def _online(name: str, folder: Path) -> Tree:
    tree = ppo_tree(folder, policy={"lr": 1e-3}, critic={"lr": 1e-3}, batch=ONLINE, **_common(folder))
    return merge(tree, _variants(folder)[name])


def _variants(folder: Path) -> dict[str, Tree]:
    """What differs from plain PPO."""
    groups = {"sampling": {"completions_per_prompt": 3}, "batch": {"prompts_per_step": 3}}
    return {
        "ppo": {},
        "grpo": {"algorithm": {"preset": "grpo"}, **groups},  # 9 rows in groups of 3: they straddle processes
        "ppo_lora": {"policy": {"lora": {"r": 2}}},
        "ppo_shared": {"critic": {"shared": True}},
        "ppo_ema": {"policy": {"ema_decay": 0.5}},
        "ppo_checkpointing": {"policy": {"gradient_checkpointing": True}},
        "ppo_warmup": {"critic": {"warmup_steps": 2}, "algorithm": {"target_kl": 0.001}},
        "ppo_one_row": {"batch": {"prompts_per_step": 8, "minibatches": 8, "epochs": 1}},  # a process has no row
        "ppo_ptx": {"algorithm": {"ptx_coef": 0.5}, "data": {"sft": {"path": str(_sft_file(folder))}}},
        "ppo_rm": {"reward": {"source": _reward_model(folder)}},
        "remax": {"algorithm": {"preset": "remax"}, "batch": {"epochs": 1, "minibatches": 1}},
        "online_dpo": {"algorithm": {"preset": "online_dpo"}, **groups},
        "rejection_sampling": {"algorithm": {"preset": "rejection_sampling"}, **groups},
        "dapo": {"algorithm": {"preset": "dapo", "refill_rounds": 2}, **groups},
    }


def _reward_model(folder: Path) -> Tree:
    path = folder / "reward"
    if not path.is_dir():
        tokenizer = load_tokenizer(str(folder / "model"))
        load_scalar_head(str(folder / "model"), tokenizer, new_head="normal").save(tokenizer, path)
    return {"type": "model", "path": str(path), "micro_batch_size": 3}


def _sft_file(folder: Path) -> Path:
    return write_rows(folder / "sft.jsonl", [{"prompt": p, "completion": c} for p, c in written(5, 60)])


def _sft(_: str, folder: Path) -> Tree:
    tree = offline_tree(folder, "dpo", policy={"lr": 1e-3}, **_common(folder))
    tree["data"] = {"sft": {"path": str(_sft_file(folder))}, "eval_sft": {"path": str(_sft_file(folder))}}
    tree["algorithm"] = {"preset": "sft"}
    tree["batch"] = {"prompts_per_step": 9, "micro_batch_size": 2}
    del tree["eval"]["source"]
    return tree


def _dpo(preset: str, folder: Path) -> Tree:
    changes = {"policy": {"lr": 1e-3}, "batch": {"prompts_per_step": 9, "micro_batch_size": 2}}
    return offline_tree(folder, preset, **changes, **_common(folder))


_kto = _dpo


def _rm(_: str, folder: Path) -> Tree:
    prompts_file(folder)
    return {
        "run": {"out_dir": str(folder / "run"), "device": "cpu"},
        "data": {
            "preferences": {"path": str(pairs_file(folder))},
            "eval_preferences": {"path": str(pairs_file(folder, count=40, seed=1))},
        },
        "model": {"model": str(folder / "model"), "lr": 1e-3},
        "batch": {"prompts_per_step": 9, "micro_batch_size": 2},
        **_common(folder),
    }


def needs(mode: str) -> None:
    """Skip where the mode is one of DeepSpeed's and it is not there."""
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: bash scripts/setup.sh dev deepspeed")


def at(tree: Tree, out: Path, *, sharding: str | Tree = "none", **changes: Any) -> Tree:
    """The same run in another folder, under another sharding."""
    return merge(tree, {"run": {"out_dir": str(out)}, "sharding": sharding, **changes})


def launch(trees: Sequence[Tree], folder: Path, *, processes: int, timeout_s: float = 300.0) -> None:
    """Run them, one after another, in so many processes; one alone is started without a launcher.

    What needs no process group is run right here: importing everything takes longer than the runs.
    """
    if processes == 1 and all(tree["sharding"]["mode"] in ("none", "ddp") for tree in trees):
        for tree in trees:
            run_one(tree)
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(trees)))
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*command, str(JOB), str(plan)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def environment() -> dict[str, str]:
    """That of a launch: this checkout first, one thread, no GPU."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    new = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | new


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    """Every trained weight at the run's end: of the export and of the last checkpoint."""
    newest = max((out / "checkpoints").glob("step-*"))
    found = {}
    for folder in (out / "model", newest / "model", newest / "critic"):
        for file in sorted(folder.glob("*.safetensors")):
            found |= {f"{folder.name}/{file.name}/{key}": value for key, value in load_file(file).items()}
    trainer = torch.load(newest / "trainer.pt", weights_only=True)
    found |= {f"shared_head/{k}": v for k, v in trainer.get("shared_head", {}).items()}
    found |= {f"ema/{k}": v for k, v in trainer.get("ema", {}).items()}
    assert found
    return found


def distance(a: Path, b: Path) -> float:
    """|w_a - w_b| / |w_a| over all trained weights of two runs."""
    left, right = final_weights(a), final_weights(b)
    assert left.keys() == right.keys()
    gap = sum(float(((left[key] - right[key]).double() ** 2).sum()) for key in left)
    return (gap / sum(float((left[key].double() ** 2).sum()) for key in left)) ** 0.5


def samples(out: Path) -> list[tuple[object, ...]]:
    """What was sampled: step, row, prompt, completion."""
    if not (out / "samples.jsonl").is_file():
        return []
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return [(row["step"], row["split"], row["row"], row["prompt"], row["completion"]) for row in rows]


def metrics(out: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
