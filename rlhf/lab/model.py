"""The lab's language model: a Llama small enough to be trained from scratch on a laptop in a minute."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rlhf.lab.tokenizer import MAX_LENGTH

Size = Literal["nano", "tiny", "small"]


@dataclass(frozen=True)
class Shape:
    """Layers and widths of a Llama."""

    layers: int
    hidden: int
    heads: int
    intermediate: int


SHAPES = MappingProxyType(
    {
        "nano": Shape(layers=2, hidden=32, heads=2, intermediate=64),
        "tiny": Shape(layers=2, hidden=128, heads=4, intermediate=344),
        "small": Shape(layers=4, hidden=192, heads=6, intermediate=512),
    }
)
"""The model sizes by name; nano is for tests, tiny for the quickstart."""


def lab_model_config(
    vocab_size: int, *, pad_token_id: int, bos_token_id: int, eos_token_id: int, size: Size = "tiny"
) -> LlamaConfig:
    """Return the configuration of a Llama of this size, with tied embeddings, for the lab's tokenizer."""
    shape = SHAPES[size]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        initializer_range=shape.hidden**-0.5,  # the usual 0.02 suits wide models; at these widths it slows the start
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )


def untrained_model(config: LlamaConfig, seed: int) -> PreTrainedModel:
    """Build the model with weights drawn from `seed`, without advancing torch's global random generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
