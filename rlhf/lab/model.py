"""The lab's language model: a Llama small enough to be trained from scratch on a laptop in a minute."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from transformers import LlamaConfig

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
        "tiny": Shape(layers=3, hidden=96, heads=4, intermediate=256),
        "small": Shape(layers=4, hidden=160, heads=5, intermediate=432),
    }
)
"""nano is for tests; tiny is the quickstart's."""


def lab_model_config(
    vocab_size: int, *, pad_token_id: int, bos_token_id: int, eos_token_id: int, size: Size = "tiny"
) -> LlamaConfig:
    """The configuration of a Llama of this size, embeddings tied, for the lab's tokenizer."""
    shape = SHAPES[size]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        initializer_range=0.08,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
