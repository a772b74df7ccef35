"""Write docs/recipes.md from configs/recipes and the models' shapes: `python scripts/make_recipes_doc.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "zoo"), str(ROOT)]

from recipe_models import KINDS, MODELS, RecipeModel, gigabytes, parameters, recipe  # noqa: E402

from rlhf.config.sections import RewardModelConfig  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"

INTRODUCTION = """\
# Recipes

Configurations for four models that many people begin with, in `configs/recipes`: one folder a model, one file a stage.

```
rlhf train configs/recipes/smollm2_135m/sft.yaml data.sft.path=…
rlhf rm    configs/recipes/smollm2_135m/rm.yaml  data.preferences.path=… data.eval_preferences.path=…
rlhf train configs/recipes/smollm2_135m/dpo.yaml data.preferences.path=… data.eval_preferences.path=…
rlhf train configs/recipes/smollm2_135m/ppo.yaml data.prompts.path=… data.eval_prompts.path=…
rlhf train configs/recipes/smollm2_135m/grpo.yaml
```

**No recipe was trained to its end.** All are parsed, and dry-run on the model's published shapes: the model is
made without memory, its parameters are counted, and the memory below follows from what the run holds. Learning rates
are starting values after [hyperparameters](hyperparameters.md), not results. What was measured with SmolLM2 is in
[results](results.md), with the settings of `configs/real`.

The files of the other models extend SmolLM2's: `extends: ../smollm2_135m/grpo.yaml` takes all settings of that file,
and the file's own go over them. Any configuration can do that; the path is relative to the file that says so.

`python scripts/make_recipes_doc.py` makes this page.

## Memory

Weights, gradients and AdamW's moments in GiB (2³⁰ bytes), calculated: 16 bytes a parameter of a trained model and 4
of a frozen one, for weights are in float32 (`dtype: bfloat16` is the arithmetic's). Activations and the sampler's cache
come on top; they grow with `micro_batch_size` and `sampling.batch_size`, which change no result. PPO trains a critic
as large as the policy: `critic.shared=true` saves 16 of its 40 bytes.

| model | parameters | SFT | reward model | DPO | PPO | GRPO |
|---|---|---|---|---|---|---|
"""

FAST = """
What of the fast ways each family supports is in [models](models.md): SmolLM2, Qwen2.5 and Llama 3 are in its table.
"""


def page() -> str:
    """Build the Markdown of docs/recipes.md."""
    memory = "".join(f"{_memory(model)}\n" for model in MODELS)
    return "\n".join([INTRODUCTION + memory + FAST, *_settings()])


def _memory(model: RecipeModel) -> str:
    cells = " | ".join(f"{gigabytes(model, kind):.1f}" for kind in KINDS)
    return f"| `{model.name}` | {parameters(model):,} | {cells} |"


def _settings() -> Iterator[str]:
    yield "## Settings\n"
    yield "| recipe | model | `lr` | `micro_batch_size` | status |\n|---|---|---|---|---|"
    for model in MODELS:
        for kind in KINDS:
            config = recipe(model, kind)
            trained = config.model if isinstance(config, RewardModelConfig) else config.policy
            name = f"`{model.name}/{kind}.yaml`"
            yield f"| {name} | {model.hub} | {trained.lr:.1e} | {config.batch.micro_batch_size} | only dry-run |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
