"""The runs of the table in docs/distributed.md, how they are launched, and which results must be equal."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from job import run_one
from runs import make_model, offline_tree, pairs_file, ppo_tree, prompts_file, write_rows, written
from safetensors.torch import load_file
from warm_start import warm

from rlhf.config.files import merge
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.scalar_head import load_scalar_head
from rlhf.training.checkpoints import load_trainer_state

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ("sft", "rm", "ppo", "grpo", "dpo")
Tree = dict[str, Any]

EPISODES = {"target": f"{Path(__file__).parents[1] / 'environments' / 'word_games.py'}:Colors", "max_turns": 3}
PLAYED: Tree = {"reward": {"source": {"type": "environment"}}, "environment": EPISODES}
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
    kinds = {"sft": _sft, "sft_mixed": _sft_mixed, "rm": _rm, "dpo": _dpo, "kto": _kto, "distill_sft": _distill_sft}
    return kinds.get(name, _online)(name, folder)


def _common(folder: Path) -> Tree:
    return {"schedule": {"steps": STEPS}, "checkpoint": {"every": 3, "keep": 9}, "eval": {"every": 3}}


def _online(name: str, folder: Path) -> Tree:
    tree = ppo_tree(folder, policy={"lr": 1e-3}, critic={"lr": 1e-3}, batch=ONLINE, **_common(folder))
    return merge(tree, _variants(folder)[name])


def _variants(folder: Path) -> dict[str, Tree]:
    """The differences from plain PPO."""
    groups = {"sampling": {"completions_per_prompt": 3}, "batch": {"prompts_per_step": 3}}
    return {
        "ppo": {},
        "grpo": {"algorithm": {"preset": "grpo"}, **groups},  # 9 rows in groups of 3: they straddle processes
        "ppo_lora": {"policy": {"lora": {"r": 2}}},
        "ppo_shared": {"critic": {"shared": True}},
        "ppo_ema": {"policy": {"ema_decay": 0.5}},
        "ppo_checkpointing": {"policy": {"gradient_checkpointing": True}},
        "ppo_warmup": {"critic": {"warmup_steps": 2, "epochs": 3}, "algorithm": {"target_kl": 0.001}},
        "ppo_one_row": {"batch": {"prompts_per_step": 8, "minibatches": 8, "epochs": 1}},  # a process has no row
        "ppo_mixed": {"data": {"prompts": {"path": "", **_mixed(prompts_file(folder))}}},
        "ppo_ptx": {"algorithm": {"ptx_coef": 0.5}, "data": {"sft": {"path": str(_sft_file(folder))}}},
        "ppo_rm": {"reward": {"source": _reward_model(folder)}},
        "remax": {"algorithm": {"preset": "remax"}, "batch": {"epochs": 1, "minibatches": 1}},
        "distill": {"algorithm": {"preset": "distill", "policy_loss": {"divergence": "jsd"}}, **_teacher(folder)},
        "opd": {"algorithm": {"preset": "opd"}, "batch": {"epochs": 1, "minibatches": 1}, **_teacher(folder)},
        "ppo_episodes": PLAYED,
        "grpo_episodes": {**PLAYED, "algorithm": {"preset": "grpo"}, **groups},
        "online_dpo": {"algorithm": {"preset": "online_dpo"}, **groups},
        "rejection_sampling": {"algorithm": {"preset": "rejection_sampling"}, **groups},
        "dapo": {"algorithm": {"preset": "dapo", "refill_rounds": 2}, **groups},
    }


def _teacher(folder: Path) -> Tree:
    if not (folder / "teacher").is_dir():
        make_model(folder / "teacher", seed=3)
    return {"teacher": {"model": str(folder / "teacher")}}


def _distill_sft(_: str, folder: Path) -> Tree:
    return {**_sft("sft", folder), "algorithm": {"preset": "distill_sft"}, **_teacher(folder)}


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


def _sft_mixed(_: str, folder: Path) -> Tree:
    return merge({**_sft("sft", folder), "data": {}}, {"data": {"sft": _mixed(_sft_file(folder))}})


def _mixed(file: Path) -> Tree:
    """Two streamed sources, 7 to 1, of the lines of a file; some steps have one row of the second, or none."""
    lines = file.read_text(encoding="utf-8").splitlines()
    sources = {}
    for name, part, weight in (("large", lines[:-3], 7), ("small", lines[-3:], 1)):
        path = file.with_name(f"{file.stem}-{name}.jsonl")
        path.write_text("\n".join(part) + "\n", encoding="utf-8")
        sources[name] = {"path": str(path), "weight": weight}
    return {"sources": sources, "stream": True, "shuffle_buffer": 5}


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
    """Skip if the mode is one of DeepSpeed's and it is not installed."""
    if mode.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed, as it is on Linux by bash scripts/setup.sh dev")


def at(tree: Tree, out: Path, *, sharding: str | Tree = "none", **changes: Any) -> Tree:
    """The same run in another folder, under another sharding."""
    return merge(tree, {"run": {"out_dir": str(out)}, "sharding": sharding, **changes})


def launch(
    trees: Sequence[Tree], folder: Path, *, processes: int, timeout_s: float = 300.0, launcher: bool = True
) -> None:
    """Run them, one after another, in so many processes; one alone is started without a launcher.

    Runs without a process group are made right here: importing everything takes longer than the runs. `launcher=False`
    does without torchrun, whose own process imports torch too, and starts both warm (see warm_start.py).
    """
    if processes == 1 and all(tree["sharding"]["mode"] in ("none", "ddp") for tree in trees):
        for tree in trees:
            run_one(tree)
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps(list(trees)))
    command = [sys.executable, str(JOB), str(plan)]
    if processes == 1:
        _wait([_start(command, environment(), folder / "log")], timeout_s)
    elif launcher:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}"]
        _wait([_start([sys.executable, *torchrun, *command[1:]], environment(), folder / "log")], timeout_s)
    else:
        with warm():
            start_ranks([sys.executable, "-m", "job", str(plan)], folder, processes=processes, timeout_s=timeout_s)


def start_ranks(command: Sequence[str], folder: Path, *, processes: int, timeout_s: float = 300.0) -> None:
    """Run a command in so many processes that know of each other, without torchrun; their logs are in `folder`."""
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    started = [_start(command, environment() | rank, folder / f"log-{rank['RANK']}") for rank in ranks]
    _wait(started, timeout_s)


Started = tuple[subprocess.Popen[bytes], Path]


def _start(command: Sequence[str], env: Mapping[str, str], log: Path) -> Started:
    with log.open("wb") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=file), log


def _wait(started: Sequence[Started], timeout_s: float) -> None:
    """Wait until all have ended well, or one has failed; their output explains a failure."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.poll() is None for process, _ in started):
        if any(process.returncode for process, _ in started):
            break
        time.sleep(0.05)
    codes = [process.poll() for process, _ in started]
    for process, _ in started:
        process.kill()
        process.wait()
    texts = [f"exit code {code}:\n{log.read_text()[-6000:]}" for code, (_, log) in zip(codes, started, strict=True)]
    assert codes == [0] * len(codes), "\n".join(texts)


def environment() -> dict[str, str]:
    """A launch's environment: this checkout first, one thread, no GPU; nothing is compiled, no compiler is imported."""
    paths = [str(ROOT), str(JOB.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    new = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    new["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed's optimizers would import it, for seconds
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")} | new


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    """Every trained weight at the run's end: of the export and of the last checkpoint."""
    newest = max((out / "checkpoints").glob("step-*"))
    weights = {}
    for folder in (out / "model", newest / "model", newest / "critic"):
        for file in sorted(folder.glob("*.safetensors")):
            weights |= {f"{folder.name}/{key}": value for key, value in load_file(file).items()}
    trainer = load_trainer_state(newest)
    weights |= {f"shared_head/{k}": v for k, v in trainer.get("shared_head", {}).items()}
    weights |= {f"ema/{k}": v for k, v in trainer.get("ema", {}).items()}
    for name in set(trainer) & {"policy", "critic", "model"}:
        for key, named in trainer[name]["moments"].items():
            weights |= {f"{name}/{key}/{k}": v for k, v in named.items()}
    assert weights
    return weights


def distance(a: Path, b: Path) -> float:
    """|w_a - w_b| / |w_a| over all trained weights of two runs."""
    left, right = final_weights(a), final_weights(b)
    assert left.keys() == right.keys()
    gap = sum(float(((left[key] - right[key]).double() ** 2).sum()) for key in left)
    return (gap / sum(float((left[key].double() ** 2).sum()) for key in left)) ** 0.5


def samples(out: Path) -> list[tuple[object, ...]]:
    """The samples: step, row, prompt, completion."""
    if not (out / "samples.jsonl").is_file():
        return []
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return [(row["step"], row["split"], row["row"], row["prompt"], row["completion"]) for row in rows]


def metrics(out: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
