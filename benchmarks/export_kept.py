"""Measure how much of a run's training the exported weights keep: as exported, and as it would be in bfloat16.

    python scripts/get_smollm2.py
    python benchmarks/export_kept.py --model models/smollm2-135m-instruct --steps 4 40 \
        --json benchmarks/results/export_kept.json
    python benchmarks/export_kept.py --model models/smollm2-135m-instruct --steps 400 --one-update \
        --json benchmarks/results/export_kept.json

PPO, GRPO, DPO and the reward model run with the shipped configurations, learning rates and schedules included, on a
model published in bfloat16. Reduced are batches (8 prompts for PPO; 2 prompts of 4 completions for GRPO; 2 pairs),
completions (4 tokens), evaluation and checkpoints in between. With --one-update a step has one epoch and one minibatch
of a quarter of these rows, so that 400 steps take minutes (PPO does not whiten advantages then: two completions are too
few). The reward of PPO and GRPO is a function of the text.
Results are added to the JSON file run by run, so that the command can be repeated with other --algorithms and --steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

import rlhf
from rlhf.tracking.exported import read_export

CONFIGS = {
    "ppo": ("configs/ppo.yaml", "ppo"),
    "grpo": ("configs/ppo.yaml", "grpo"),
    "grpo, lr 1e-5": ("configs/ppo.yaml", "grpo"),
    "dpo": ("configs/dpo.yaml", "dpo"),
    "reward model": ("configs/reward_model.yaml", None),
}
WORDS = ("river", "stone", "bright", "quiet", "seven", "green", "letter", "window", "paper", "cold", "apple", "garden")
PROMPTS, PAIRS, NEW_TOKENS = 64, 64, 4


def score(completions: list[str]) -> list[float]:
    """Score a text by its share of vowels, so that completions differ in score."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]


def sentence(draw: random.Random, length: int) -> str:
    """Draw a short text."""
    return " ".join(draw.choice(WORDS) for _ in range(length))


def data() -> tuple[list[str], list[dict[str, str]]]:
    """Draw the prompts and the pairs, always the same ones."""
    draw = random.Random(0)
    prompts = [f"Write about the {sentence(draw, 3)}." for _ in range(PROMPTS)]
    pairs = [
        {"prompt": f"Write about the {sentence(draw, 3)}.", "chosen": sentence(draw, 4), "rejected": sentence(draw, 4)}
        for _ in range(PAIRS)
    ]
    return prompts, pairs


def train(name: str, model: str, steps: int, one_update: bool, folder: Path) -> rlhf.RunResult:
    """Run one algorithm."""
    config, algorithm = CONFIGS[name]
    prompts, pairs = data()
    where: dict[str, Any] = {"config": config, "folder": folder, "quiet": True}
    cut: dict[str, Any] = {
        "run.device": "cpu",
        "batch.prompts_per_step": 8 if algorithm == "ppo" else 2,
        "schedule.steps": steps,
        "schedule.epochs": None,
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    if one_update:
        cut["batch.prompts_per_step"] = 2 if algorithm == "ppo" else 1
    if algorithm in (None, "dpo"):
        cut["data.eval_preferences"] = None
        if algorithm is None:
            return rlhf.reward_model(model, pairs, **where, **cut)
        return rlhf.train(model, algorithm, preferences=pairs, **where, **cut)
    cut |= {"sampling.max_new_tokens": NEW_TOKENS, "data.eval_prompts": None}
    cut |= {"critic.init": "policy"} if algorithm == "ppo" else {"sampling.completions_per_prompt": 4}
    if one_update:
        cut |= {"batch.epochs": 1, "batch.minibatches": 1}
        cut |= {"algorithm.advantage.whiten": False} if algorithm == "ppo" else {"sampling.completions_per_prompt": 2}
    if "lr 1e-5" in name:
        cut["policy.lr"] = 1e-5
    return rlhf.train(model, algorithm, prompts=prompts, reward=score, **where, **cut)


def measure(name: str, model: str, steps: int, one_update: bool) -> dict[str, Any]:
    """Run one algorithm in a folder of its own and read its export."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = train(name, model, steps, one_update, Path(folder) / "run")
        record = read_export(result.folder)
        config = yaml.safe_load(result.folder.joinpath("config.yaml").read_text(encoding="utf-8"))
    assert record is not None
    rate = config["model" if name == "reward model" else "policy"]["lr"]
    as_bfloat16 = record.start_dtype_keeps if record.start_dtype == "bfloat16" else record.change_kept
    return {
        "algorithm": name,
        "config": CONFIGS[name][0],
        "steps": steps,
        "learning_rate": float(rate),
        "updates_per_step": config["batch"].get("epochs", 1) * config["batch"].get("minibatches", 1),
        "kept_in_bfloat16": as_bfloat16,
        "kept_by_the_export": record.change_kept,
        "exported_in": record.dtype,
        "seconds": round(time.perf_counter() - start, 1),
        "record": asdict(record),
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="models/smollm2-135m-instruct", help="a model published in bfloat16")
    parser.add_argument("--algorithms", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--steps", nargs="+", type=int, default=[4, 40])
    parser.add_argument("--one-update", action="store_true", help="one epoch and one minibatch a step")
    parser.add_argument("--json", type=Path, help="file to add the results to")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.is_file():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    console = Console()
    for steps in options.steps:
        for name in options.algorithms:
            row = measure(name, options.model, steps, options.one_update)
            rows = [old for old in rows if (old["algorithm"], old["steps"]) != (name, steps)] + [row]
            kept, rate = (row["kept_in_bfloat16"], row["kept_by_the_export"]), row["learning_rate"]
            console.print(f"{name}, {steps} steps at {rate:g}: bfloat16 would keep {kept[0]:.1%}, ", end="")
            console.print(f"the export ({row['exported_in']}) keeps {kept[1]:.1%}; {row['seconds']:.0f} s")
            if options.json is not None:
                content = {
                    "model": Path(options.model).name,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                }
                options.json.write_text(json.dumps({**content, "runs": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
