"""The lab's tokenizer (byte-level BPE) and Llama, small enough to train from scratch on a laptop in a minute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
"""The special tokens, with ids 0, 1 and 2. A byte-level vocabulary needs no <unk>."""

VOCAB_SIZE = 1024
"""The vocabulary size: enough for every frequent word of the lab to be a single token."""

MAX_LENGTH = 128
"""Context of the lab's models, in tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens, which adds no special tokens and decodes without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


Size = Literal["nano", "tiny", "small"]


@dataclass(frozen=True)
class LlamaSize:
    """Layers and widths of a Llama."""

    layers: int
    hidden: int
    heads: int
    intermediate: int


SHAPES = MappingProxyType(
    {
        "nano": LlamaSize(layers=2, hidden=32, heads=2, intermediate=64),
        "tiny": LlamaSize(layers=2, hidden=128, heads=4, intermediate=344),
        "small": LlamaSize(layers=4, hidden=192, heads=6, intermediate=512),
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
