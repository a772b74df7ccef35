"""Write docs/recipes.md from configs/recipes and the models' shapes: `python scripts/make_recipes_doc.py`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "zoo"), str(ROOT)]

from recipe_models import KINDS, MEASURED, MODELS, RecipeModel, gigabytes, parameters, recipe  # noqa: E402

from rlhf.config.sections import RewardModelConfig  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"

RESULTS = ROOT / "benchmarks" / "results"

INTRODUCTION = """\
# Recipes

Configurations for four models that many people begin with, in `configs/recipes`: one folder a model, one file a stage.
SmolLM2's were trained to their end on two CPU cores, and what came of them is below. The others are larger; they were
[only dry-run](#larger-models).

## SmolLM2-135M-Instruct

The prompts are instructions whose constraints a program can check. That program is the reward of PPO, GRPO and online
DPO. It also ranks the model's own answers into the pairs that DPO reads, and SFT learns the chosen sides of these. The
reward model learns something else, from human preferences: HH-RLHF's harmlessness.

```
source .venv/bin/activate
bash scripts/setup.sh ifeval
python scripts/get_smollm2.py
python scripts/make_instructions.py runs/instructions/train.jsonl --rows 4000
python scripts/make_instructions.py runs/instructions/eval.jsonl --rows 64 --skip 100000
python scripts/sample_pairs.py configs/recipes/smollm2_135m/ppo.yaml runs/instructions/pairs.jsonl \\
  --prompts 256 --completions 4 --min-gap 0.2

rlhf train configs/recipes/smollm2_135m/sft.yaml
rlhf train configs/recipes/smollm2_135m/dpo.yaml
rlhf train configs/recipes/smollm2_135m/grpo.yaml
rlhf train configs/recipes/smollm2_135m/ppo.yaml
rlhf train configs/recipes/smollm2_135m/online_dpo.yaml
rlhf rm    configs/recipes/smollm2_135m/rm.yaml
```

What to expect: time and memory are of training on one core with bfloat16 products, beside other work; a CPU
without them computes in float32, and says so. All but the reward model are arms of
[the comparison](results.md#a-real-chat-model-on-instructions-that-a-program-can-check), which says what they write,
and on how many seeds (GRPO's second one gained nothing, PPO's the same). Online DPO samples 4,096 completions, the
others 1,024; its gain is of two seeds. Curves are of one seed; "first" and "last" are means over a fifth of the steps.

| recipe | curve: first → last | judged | minutes | memory, GB |
|---|---|---|---|---|
"""

CURVES = """
![The curves of these runs](images/recipes_smollm2.svg)

Every value is in `benchmarks/results/recipes_smollm2.json`, which
`python benchmarks/recipe_curves.py dpo=runs/smollm2_135m/dpo …` makes from the folders of the runs.

## Larger models

**None of these was trained.** All are parsed and dry-run on the model's published shapes: the model is made without
memory, its parameters are counted, and the memory below follows from what the run holds. Learning rates are starting
values after [hyperparameters](hyperparameters.md), not results. The reward model and PPO start from the SFT run:

```
rlhf train configs/recipes/qwen2.5_0.5b/sft.yaml data.sft.path=…
rlhf rm    configs/recipes/qwen2.5_0.5b/rm.yaml  data.preferences.path=… data.eval_preferences.path=…
rlhf train configs/recipes/qwen2.5_0.5b/dpo.yaml data.preferences.path=… data.eval_preferences.path=…
rlhf train configs/recipes/qwen2.5_0.5b/ppo.yaml data.prompts.path=… data.eval_prompts.path=…
rlhf train configs/recipes/qwen2.5_0.5b/grpo.yaml
```

The larger models' files extend those of Qwen2.5-0.5B: `extends: ../qwen2.5_0.5b/grpo.yaml` takes all settings of that
file, and the file's own go over them. Any configuration can do that; the path is relative to the file that says so.
"""

MEMORY = """
## Memory

Weights, gradients and AdamW's moments in GiB (2³⁰ bytes), calculated: 16 bytes a parameter of a trained model and 4
of a frozen one, for weights are in float32 (`dtype: bfloat16` is the arithmetic's). Activations and the sampler's cache
come on top; they grow with `micro_batch_size` and `sampling.batch_size`, which change no result. PPO trains a critic
as large as the policy, but for SmolLM2's, which is a head on the policy: `critic.shared=true` saves 16 of the 40 bytes,
and here there is no reward model either.

| model | parameters | SFT | reward model | DPO | PPO | GRPO |
|---|---|---|---|---|---|---|
"""

FAST = """
What of the fast ways each family supports is in [models](models.md): SmolLM2, Qwen2.5 and Llama 3 are in its table.

`python scripts/make_recipes_doc.py` makes this page.
"""


def page() -> str:
    """Build the Markdown of docs/recipes.md."""
    measured = "".join(f"{row}\n" for row in _measured())
    memory = "".join(f"{_memory(model)}\n" for model in MODELS)
    return "\n".join([INTRODUCTION + measured + CURVES, *_settings(), MEMORY.lstrip("\n") + memory + FAST])


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
    """Return what a comparison measured of a recipe."""
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
