"""Write docs/hyperparameters.md from its template, configs/recipes and the models' shapes."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "zoo"), str(ROOT)]

from doc_links import fill_template  # noqa: E402
from recipe_models import KINDS, MEASURED, MODELS, RecipeModel, gigabytes, parameters, recipe  # noqa: E402

from rlhf.config.sections import RewardModelConfig  # noqa: E402

PAGE = ROOT / "docs" / "hyperparameters.md"
RESULTS = ROOT / "benchmarks" / "results"


def page() -> str:
    """Build the Markdown of docs/hyperparameters.md."""
    return fill_template("hyperparameters.md", measured=_measured(), settings=_settings(), memory=map(_memory, MODELS))


def _measured() -> Iterator[str]:
    runs = json.loads((RESULTS / "recipes_smollm2.json").read_text(encoding="utf-8"))
    for kind in MEASURED:
        if kind == "rm":
            run = runs["rm"]
            judged, minutes, memory = _report_card(run["report_card"]), run["minutes"], run["peak_memory_gb"]
        else:
            arm = _arm(kind)
            judged, minutes = _ifeval(arm), arm["costs"]["seconds"] / 60
            memory = arm["peak_memory_mb"] / 1000
        curves = ", ".join(_first_to_last(*curve) for curve in runs[kind]["curves"].items())
        curves += " (in float32)" if runs[kind].get("dtype") == "float32" else ""
        yield f"| `{kind}.yaml` | {curves} | {judged} | {minutes:.0f} | {memory:.1f} |"


def _arm(name: str) -> dict[str, Any]:
    """Return the measurements of a recipe in a comparison."""
    other = {"sft": "_first", "online_dpo": "_online_dpo"}.get(name, "")
    file = RESULTS / f"compare_smollm2{other}.json"
    arm: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["arms"][name]
    return arm


def _first_to_last(name: str, points: list[list[float]]) -> str:
    count = max(1, len(points) // 5)
    first, last = (statistics.fmean(value for _, value in part) for part in (points[:count], points[-count:]))
    return f"`{name}` {first:.2f} → {last:.2f}"


def _ifeval(arm: dict[str, Any]) -> str:
    gain = arm["suites"]["ifeval"]["prompt_strict"]["gain"]
    value, low, high = (100 * gain[key] for key in ("value", "low", "high"))
    return f"IFEval {value:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _report_card(card: dict[str, float]) -> str:
    interval = f"[{card['accuracy_low']:.3f}, {card['accuracy_high']:.3f}]"
    return f"accuracy {card['accuracy']:.3f} {interval} on {card['n']} pairs; bag of words {card['bag_of_words']:.3f}"


def _memory(model: RecipeModel) -> str:
    cells = " | ".join(f"{gigabytes(model, kind):.1f}" for kind in KINDS)
    return f"| `{model.name}` | {parameters(model):,} | {cells} |"


def _settings() -> Iterator[str]:
    yield "| recipe | model | `lr` | `micro_batch_size` |\n|---|---|---|---|"
    for model in MODELS[1:]:
        for kind in KINDS:
            config = recipe(model, kind)
            trained = config.model if isinstance(config, RewardModelConfig) else config.policy
            name = f"`{model.name}/{kind}.yaml`"
            yield f"| {name} | {model.hub} | {trained.lr:.1e} | {config.batch.micro_batch_size} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
