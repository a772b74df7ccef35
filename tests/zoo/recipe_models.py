"""The models of configs/recipes by their published shapes, made without memory, and the memory of their training.

The shapes are from each model's config.json on the hub, and the numbers of parameters follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.config.load import load_any
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig

Recipe = OnlineConfig | OfflineConfig | RewardModelConfig
RECIPES = Path(__file__).resolve().parents[2] / "configs" / "recipes"
KINDS = ("sft", "rm", "dpo", "ppo", "grpo")
MEASURED = (*KINDS, "online_dpo")  # of SmolLM2, whose recipes were trained
TRAINED, FROZEN = (
    16,
    4,
)  # bytes a parameter: float32 weights, and for a trained one its gradient and AdamW's two moments


@dataclass(frozen=True)
class RecipeModel:
    """A model of the recipes: its folder there, its id on the hub, its family in families.py, its shapes."""

    name: str
    hub: str
    family: str
    kind: str
    shapes: dict[str, Any]


MODELS = (
    RecipeModel(
        "smollm2_135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2",
        "llama",
        {
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    RecipeModel(
        "qwen2.5_0.5b",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "qwen2_5",
        "qwen2",
        {
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    RecipeModel(
        "qwen2.5_1.5b",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "qwen2_5",
        "qwen2",
        {
            "num_hidden_layers": 28,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    RecipeModel(
        "llama_3.2_1b",
        "meta-llama/Llama-3.2-1B-Instruct",
        "llama3",
        "llama",
        {
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
)


def parameters(model: RecipeModel) -> int:
    """Count the parameters of the model, made on the meta device: tied embeddings count once."""
    config = AutoConfig.for_model(model.kind, tie_word_embeddings=True, **model.shapes)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in made.parameters())


def recipe(model: RecipeModel, kind: str) -> Recipe:
    """Load a recipe."""
    config = load_any(RECIPES / model.name / f"{kind}.yaml")
    assert isinstance(config, Recipe)
    return config


def bytes_per_parameter(config: Recipe) -> int:
    """Count the bytes of weights, gradients and moments a parameter of the model, over the models that a run holds.

    A reference of DPO is read once, before the first step, and is the policy itself then; one of an online run stays.
    """
    if not isinstance(config, OnlineConfig):
        return TRAINED
    models = TRAINED + FROZEN * config.reference.measure
    has_critic = config.algorithm.value_loss is not None and not config.critic.shared
    return models + TRAINED * has_critic + FROZEN * (config.reward.source.type == "model")


def gigabytes(model: RecipeModel, kind: str) -> float:
    """Return the memory of weights, gradients and moments in GiB, without activations and the sampler's cache."""
    return parameters(model) * bytes_per_parameter(recipe(model, kind)) / 2**30
