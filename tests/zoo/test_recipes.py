"""The recipes load, are of the models that they name, and need the memory that docs/hyperparameters.md states."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from families import FAMILIES, ON
from recipe_models import KINDS, MEASURED, MODELS, Recipe, RecipeModel, bytes_per_parameter, parameters, recipe

from rlhf.comparison.plan import plan_cells
from rlhf.config.compare import CompareConfig
from rlhf.config.load import load_any, read_yaml, unread_warnings
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "llama_3.2_1b": 1_235_814_400,
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_shapes_have_the_published_number_of_parameters(model: RecipeModel) -> None:
    assert parameters(model) == PUBLISHED[model.name]


@pytest.mark.parametrize(
    ("model", "kind"),
    [(model, kind) for model in MODELS for kind in (MEASURED if model is MODELS[0] else KINDS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_recipe_reads_all_it_sets_and_writes_into_its_own_folder(model: RecipeModel, kind: str) -> None:
    config = recipe(model, kind)
    assert unread_warnings(config) == []
    name = "reward_model" if kind == "rm" else kind
    assert config.run.out_dir == f"runs/{model.name}/{name}"


@pytest.mark.parametrize("model", MODELS[1:], ids=lambda model: model.name)
def test_each_stage_starts_from_the_one_before(model: RecipeModel) -> None:
    for kind in KINDS:
        assert start_of(recipe(model, kind)) == (model.hub if kind in ("sft", "grpo") else f"runs/{model.name}/sft")
    assert recipe(model, "ppo").reward.source.path == f"runs/{model.name}/reward_model"  # type: ignore[union-attr]


def start_of(config: Recipe) -> str:
    return config.model.model if isinstance(config, RewardModelConfig) else config.policy.model


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "ppo", "online_dpo"])
def test_smollm2s_recipes_are_what_the_comparison_measured(kind: str) -> None:
    """Statements of docs/results.md about an arm hold for the recipe of its name."""
    longest = "_online_dpo" if kind == "online_dpo" else ""  # with more completions than the other arms
    config = load_any(ROOT / "configs" / "real" / f"compare_smollm2{longest}.yaml")
    assert isinstance(config, CompareConfig)
    arm = next(cell.config.train for cell in plan_cells(config, beside=ROOT).cells if cell.config.arm == kind)
    own = recipe(MODELS[0], kind)
    assert isinstance(own, OnlineConfig | OfflineConfig)
    for section in ("policy", "algorithm", "batch", "schedule", "reward", "sampling"):
        if isinstance(own, OnlineConfig) or section not in ("reward", "sampling"):
            assert getattr(own, section) == getattr(arm, section), section
    for rows in ("prompts", "preferences", "sft"):
        assert getattr(own.data, rows) == getattr(arm.data, rows), rows


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_family_has_the_fast_ways(model: RecipeModel) -> None:
    (family,) = (family for family in FAMILIES if family.name == model.family)
    assert {family.fast.chunked, family.fast.packed, family.fast.written_out} == {ON}


def test_the_bytes_of_a_parameter_worked_by_hand() -> None:
    """16 of a trained model; a frozen reference 4, a reward model 4, a critic 16 more."""
    assert {kind: bytes_per_parameter(recipe(MODELS[1], kind)) for kind in KINDS} == {
        "sft": 16,
        "rm": 16,
        "dpo": 16,
        "ppo": 40,
        "grpo": 20,
    }


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location(
        "make_hyperparameters_doc", ROOT / "scripts" / "make_hyperparameters_doc.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "hyperparameters.md").read_text(encoding="utf-8") == module.page()


def test_a_file_may_extend_another(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("policy: {model: m, lr: 0.1}\nschedule: {epochs: 2}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\npolicy: {lr: 0.5}\nschedule: {steps: 3}\n")
    (tmp_path / "c.yaml").write_text("extends: b.yaml\nrun: {seed: 1}\n")
    assert read_yaml(tmp_path / "c.yaml") == {
        "policy": {"model": "m", "lr": 0.5},
        "schedule": {"steps": 3},
        "run": {"seed": 1},
    }
    (tmp_path / "a.yaml").write_text("extends: c.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        read_yaml(tmp_path / "c.yaml")
    (tmp_path / "a.yaml").write_text("extends: [b.yaml]\n")
    with pytest.raises(ConfigError, match="names one file"):
        read_yaml(tmp_path / "a.yaml")
