"""Shapes of published models, of folders, and of unknown models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf.planning.shapes import PUBLISHED, Shape, published_shape, read_shape, shape_of_config

PARAMETERS = {  # as the hub counts them in the files of each model; of Gemma 3 4B the text model
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "google/gemma-3-1b": 999_885_952,
    "google/gemma-3-4b": 3_880_263_168,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    assert PUBLISHED[name].parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "google/gemma-3-1b-it", "x/Llama-3.2-1B-Instruct"])
def test_variants_of_a_published_model_have_its_shape(name: str) -> None:
    assert published_shape(name) in PUBLISHED.values()
    assert published_shape("some/other-model") is None


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3_text"])
def test_the_parameters_of_a_family_are_those_that_transformers_makes(family: str) -> None:
    widths = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "tie_word_embeddings": family == "gemma3_text",
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **widths)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(json.loads(config.to_json_string(use_diff=False)))
    assert shape is not None
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


def test_a_folder_has_the_shape_of_its_configuration_and_the_dtype_of_its_files(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape == Shape(
        family="llama",
        hidden=32,
        layers=2,
        heads=4,
        groups=2,
        head_dim=8,
        intermediate=48,
        vocabulary=64,
        tied=True,
        stored="bfloat16",
        context=config.max_position_embeddings,
    )
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    assert read_shape(str(tmp_path / "adapter")) == shape
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / "model" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "adapter")})
    )
    assert read_shape(str(tmp_path / "run")) == shape


def test_what_is_not_known_is_none_and_another_family_is_made_on_the_meta_device(tmp_path: Path) -> None:
    assert read_shape(str(tmp_path)) is None
    assert read_shape("no/such-model") is None
    AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=64).save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) is None
    made = read_shape(str(tmp_path), may_make=True)
    assert made is not None
    assert (made.hidden, made.layers, made.heads) == (32, 2, 4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert made.parameters == sum(weight.numel() for weight in model.parameters())


def test_adapters_have_rank_times_inputs_and_outputs() -> None:
    shape = PUBLISHED["HuggingFaceTB/SmolLM2-135M"]
    attention = (576 + 576) + (192 + 576) + (192 + 576) + (576 + 576)
    mlp = 3 * (1536 + 576)
    assert shape.adapters(16, "all-linear") == 30 * 16 * (attention + mlp)
    assert shape.adapters(8, ["q_proj", "model.layers.0.self_attn.v_proj"]) == 30 * 8 * ((576 + 576) + (192 + 576))
