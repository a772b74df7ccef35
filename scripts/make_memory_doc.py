"""Write docs/memory.md from its template, `rlhf plan` and the results of benchmarks/plan.py and of runs on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from doc_links import fill_template  # noqa: E402

from rlhf.config.files import merge  # noqa: E402
from rlhf.config.load import reward_model_config, train_config  # noqa: E402
from rlhf.config.sections import RunConfiguration  # noqa: E402
from rlhf.planning.layout import Lengths  # noqa: E402
from rlhf.planning.plan import Machine, make_plan  # noqa: E402

PAGE = ROOT / "docs" / "memory.md"
RESULTS = ROOT / "benchmarks" / "results"
MEASURED_MODEL = "SmolLM2-135M"
MODELS = {
    "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
    "Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B",
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
}
ALGORITHMS = ("sft", "reward model", "dpo", "grpo", "ppo")
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": {"r": 16}},
    "LoRA over bfloat16": {"lora": {"r": 16}, "weights": "bfloat16"},
    "QLoRA": {"lora": {"r": 16}, "weights": "nf4"},
}
SMALL = "QLoRA on a 16 GB card"
SMALL_SETTINGS: dict[str, Any] = {"sampling": {"copy_weights": False, "batch_size": 16}, "offload": {"optimizer": True}}
SMALL_CARD = 16e9
TOKENS = Lengths(prompt=512, completion=512)


def configuration(algorithm: str, model: str, way: dict[str, Any]) -> RunConfiguration:
    """Return the run of a cell: 64 rows a step, 4 rows a micro-batch, activations recomputed."""
    trained = {"model": model, "gradient_checkpointing": True, **way}
    tree: dict[str, Any] = {"batch": {"prompts_per_step": 64, "micro_batch_size": 4}, "schedule": {"steps": 100}}
    pairs = {"preferences": {"path": "pairs.jsonl"}}
    if algorithm == "reward model":
        tree["batch"]["micro_batch_size"] = 2  # pairs
        return reward_model_config({**tree, "model": trained, "data": pairs})
    tree |= {"policy": trained, "algorithm": {"preset": algorithm}}
    if algorithm == "sft":
        return train_config({**tree, "data": {"sft": {"path": "texts.jsonl"}}})
    if algorithm == "dpo":
        tree["batch"]["micro_batch_size"] = 2
        return train_config({**tree, "data": pairs})
    tree["batch"]["prompts_per_step"] = 16
    tree |= {
        "data": {"prompts": {"path": "prompts.jsonl"}},
        "sampling": {"max_new_tokens": 512, "completions_per_prompt": 4},
        "reward": {"source": {"type": "function", "target": "rewards.py:score"}},
    }
    if algorithm == "ppo":
        tree["critic"] = {"init": "policy", "gradient_checkpointing": True, **way}
    return train_config(tree)


def cell(algorithm: str, model: str, way: dict[str, Any]) -> str:
    """Return the GB that the process needs."""
    plan = make_plan(configuration(algorithm, model, way), Machine(device="cuda"), TOKENS)
    return _written(plan.needed)


def _written(size: float) -> str:
    value = size / 1e9
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def small_cell(algorithm: str, model: str) -> str:
    """Return the GB that the process needs with adapters over nf4 and all that saves memory in a rollout."""
    if algorithm not in ("grpo", "ppo"):
        return "as above"
    config = configuration(algorithm, model, WAYS["QLoRA"])
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree["batch"]["micro_batch_size"] = 1
    changed = train_config(merge(tree, SMALL_SETTINGS))
    return _written(make_plan(changed, Machine(device="cuda", memory=SMALL_CARD), TOKENS).needed)


def read(name: str, key: str) -> list[dict[str, Any]]:
    """Return the runs of a file of results."""
    runs: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))[key]
    return runs


def rows(points: set[str]) -> Iterator[str]:
    """Yield the rows of the large table, with a mark at each of the measured points."""
    for name, model in MODELS.items():
        for kind, way in WAYS.items():
            marked = [a for a in ALGORITHMS if name == MEASURED_MODEL and f"{a}, {kind}" in points]
            cells = (cell(each, model, way) + ("†" if each in marked else "") for each in ALGORITHMS)
            yield f"| {name if kind == 'full' else ''} | {kind} | {' | '.join(cells)} |"
        cells = (small_cell(algorithm, model) for algorithm in ALGORITHMS)
        yield f"|  | {SMALL} | {' | '.join(cells)} |"


def measured(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of the runs that were measured."""
    for row in runs:
        numbers = f"{row['planned_mb']:.0f} | {row['allocated_mb']:.0f} | {100 * row['error']:+.0f} %"
        yield f"| {row['name']} | {numbers} | {row['resident_mb']:.0f} |"


def measured_on_a_gpu(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of the runs on a GPU, with the phase of the measured peak."""
    for row in runs:
        numbers = f"{row['planned_gb']:.2f} | {row['measured_gb']:.2f} | {100 * row['error']:+.0f} %"
        yield f"| {row['run']} | {numbers} | {row['measured_phase']} |"


def within(runs: list[dict[str, Any]]) -> list[str]:
    """Count the runs whose plan is within 10 % of the measurement."""
    return [str(sum(abs(row["error"]) <= 0.1 for row in runs))]


def page() -> str:
    """Build the Markdown of docs/memory.md."""
    validated, points = read("plan.json", "validated"), read("table_points.json", "runs")
    on_gpu = read("plan_h200.json", "runs")
    return fill_template(
        "memory.md",
        gpu_measured=measured_on_a_gpu(on_gpu),
        gpu_runs=[str(len(on_gpu))],
        gpu_within=within(on_gpu),
        rows=rows({row["name"] for row in points}),
        points=measured(points),
        points_count=[str(len(points))],
        points_within=within(points),
        measured=measured(validated),
        runs=[str(len(validated))],
        within=within(validated),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
