"""Train models whose attention the fast sampler does not know, and models without a classifier in transformers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import WORDS, make_model, ppo_tree, prompts_file, quiet
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.config.load import train_config
from rlhf.errors import ModelError
from rlhf.factory.run import build_run
from rlhf.models.backbone import body_of, load_causal_lm
from rlhf.sampling.sampler import fast_unsupported_reason

SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**SIZES, **LATENT, "head_dim": 8},
    "deepseek_v3": {**SIZES, **LATENT},
    "glm4_moe_lite": {**SIZES, **LATENT},
    "llama4_text": {
        **SIZES,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 8,
    },
}


def publish(folder: Path, kind: str) -> str:
    make_model(folder)  # the tokenizer
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    quick(
        product(MODELS, ["grpo", "ppo"]), [("deepseek_v3", "ppo"), ("glm4_moe_lite", "grpo"), ("llama4_text", "grpo")]
    ),
)
def test_they_train(kind: str, algorithm: str, tmp_path: Path) -> None:
    """Latent attention ended in an error of shapes in the fast sampler, Llama 4 in an AttributeError."""
    prompts_file(tmp_path)
    changes: dict[str, Any] = {"policy": {"model": publish(tmp_path / "model", kind)}, "schedule": {"steps": 1}}
    changes |= {"critic": {"shared": True}} if algorithm == "ppo" else {"algorithm": {"preset": "grpo"}}
    changes["sampling"] = {"max_new_tokens": 6, "completions_per_prompt": 1 if algorithm == "ppo" else 2}
    run = build_run(train_config(ppo_tree(tmp_path, **changes)), quiet())
    assert run.train()
    row = run.session.recorder.folder.read_metrics()[-1]
    assert row["policy/first_ratio_deviation"] < 1e-4
    assert row["policy/grad_norm"] > 0


@pytest.mark.parametrize("kind", MODELS)
def test_the_slower_way_is_named(kind: str, tmp_path: Path) -> None:
    model = load_causal_lm(publish(tmp_path, kind))
    assert body_of(model) is model.model
    reason = fast_unsupported_reason(model)
    assert reason is not None
    cause = "layers of type" if kind == "llama4_text" else "latent attention, whose keys and values differ in width"
    assert cause in reason


def test_a_critic_that_transformers_has_no_class_for_is_one_line(tmp_path: Path) -> None:
    """The message listed the hundred classes of transformers."""
    prompts_file(tmp_path)
    changes = {"policy": {"model": publish(tmp_path / "model", "llama4_text")}, "schedule": {"steps": 1}}
    with pytest.raises(ModelError, match="has no sequence classifier for models of type llama4_text") as caught:
        build_run(train_config(ppo_tree(tmp_path, **changes)), quiet())
    assert "critic.shared=true" in str(caught.value)
    assert len(str(caught.value)) < 400
