"""A real model folder whose next word depends on the last word alone, by a table: every log-probability is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
EOS = "<eos>"
Table = Mapping[str, Mapping[str, float]]


def bigram_model(folder: Path, words: Sequence[str], table: Table) -> Path:
    """P(next | last) = table[last][next]; what a row leaves over is shared by all other words, nearly nothing at least.

    A Llama of one layer that adds nothing, with one-hot embeddings: its normalized hidden state is sqrt(V) times the
    last word's one-hot vector, and its head holds the logarithms of the table.
    """
    names = [*SPECIAL, *words]
    numbers = {name: i for i, name in enumerate(names)}
    size = len(names)
    logits = torch.zeros(size, size)  # of the next word, a row for each last word
    for last, i in numbers.items():
        given = table.get(last, {})
        rest = max(1 - sum(given.values()), 1e-9) / max(size - len(given), 1)
        logits[i] = torch.tensor([math.log(given.get(name, rest)) for name in names])
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(logits.T / size**0.5)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token=EOS, unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
