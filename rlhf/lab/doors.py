"""A world in which GRPO is stuck at zero: doors whose codes nobody guesses, and hints that the start model can read.

The model is a bigram: a real Llama whose next word depends on the last word alone, by a table, so every probability of
the start is known. After a door, its code has probability 1e-4: groups are all zeros, with no advantage and no
gradient. After a code's hint, the code has probability 0.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
EOS = "<eos>"
Transitions = Mapping[str, Mapping[str, float]]

DOORS = tuple(f"door{i}" for i in range(4))
CODES = tuple(f"code{i}" for i in range(4))
HINTS = tuple(f"hint{i}" for i in range(4))
CHANCE = 1e-4  # probability of each word that is not a door, after a door
READS_HINT = 0.8  # probability of the code after its hint


def bigram_model(folder: Path, words: Sequence[str], table: Transitions) -> Path:
    """Write a model with P(next | last) = table[last][next]; the rest of a row is shared by all other words.

    A Llama of one layer that adds nothing, with one-hot embeddings: its normalized hidden state is sqrt(V) times the
    last word's one-hot vector, and its head holds the logarithms of the table.
    """
    names = [*SPECIAL, *words]
    numbers = {name: i for i, name in enumerate(names)}
    size = len(names)
    logits = torch.zeros(size, size)  # of the next word, a row for each last word
    for last, i in numbers.items():
        given = table.get(last, {})
        rest = max(1 - sum(given.values()), 1e-9) / max(size - len(given), 1)  # nearly nothing at least
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


def write_doors(folder: Path) -> None:
    """Write the start model (`start`) and the prompts with their codes and hints (`prompts.jsonl`) into a folder."""
    others = len(SPECIAL) + len(CODES) + len(HINTS)
    wrong = (1 - CHANCE * others) / len(DOORS)
    table: dict[str, dict[str, float]] = {door: dict.fromkeys(DOORS, wrong) for door in DOORS}
    for hint, code in zip(HINTS, CODES, strict=True):
        table[hint] = {code: READS_HINT, DOORS[0]: 1 - READS_HINT}
        table[code] = {EOS: 1.0}
    bigram_model(folder / "start", [*DOORS, *CODES, *HINTS], table)
    rows = [{"prompt": d, "code": c, "hint": h} for d, c, h in zip(DOORS, CODES, HINTS, strict=True)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def opens(*, completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """Score 1 for the door's code and nothing else, 0 otherwise: the verifiable reward of this world."""
    return [float(text.split() == [row["code"]]) for text, row in zip(completions, references, strict=True)]
