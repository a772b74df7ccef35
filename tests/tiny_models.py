"""Models of a few thousand parameters, made in memory, with a tokenizer and batches to match."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rlhf.sampling.generate import HFSampler
from rlhf.types import Completions, Prompts

VOCAB = 23
PAD, BOS, EOS = 0, 1, 2

_LLAMA_LIKE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # random models of the usual 0.02 are so nearly uniform that errors hide
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "mistral": {**_LLAMA_LIKE, "sliding_window": 4},
    "gemma": _LLAMA_LIKE,
    "phi": {k: v for k, v in _LLAMA_LIKE.items() if k not in {"head_dim", "num_key_value_heads"}},
    "phi3": {  # 6 of 8 numbers of a head are rotated
        **{k: v for k, v in _LLAMA_LIKE.items() if k != "head_dim"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    },
    "olmo2": _LLAMA_LIKE,
    "gemma3_text": {
        **_LLAMA_LIKE,
        "query_pre_attn_scalar": 12,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3},
}


def tiny(
    family: str = "llama", *, vocab: int = VOCAB, dtype: torch.dtype = torch.float64, **config: Any
) -> PreTrainedModel:
    """A random model of the family, in evaluation mode; the same at each call."""
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    torch.manual_seed(0)
    made = AutoConfig.for_model(family, vocab_size=vocab, **{**FAMILIES.get(family, _LLAMA_LIKE), **tokens, **config})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=dtype)
    return model.eval()


def tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words t3, t4, ... between spaces; <pad>, <s> and </s> are special."""
    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {f"t{i}": i for i in range(3, vocab)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def saved(model: PreTrainedModel, folder: Path) -> str:
    """The model in a folder; its path."""
    model.save_pretrained(folder)
    tokenizer(model.config.vocab_size).save_pretrained(folder)
    return str(folder)


def padded(rows: Sequence[Sequence[int]], *, left: bool, fill: int = PAD) -> tuple[Tensor, Tensor]:
    """Ids and mask of ragged rows."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(row, dtype=torch.long)
        mask[i, where] = True
    return ids, mask


def prompts_of(rows: Sequence[Sequence[int]], *, fill: int = PAD) -> Prompts:
    """Prompts of these ids; row ids count from 0."""
    ids, mask = padded(rows, left=True, fill=fill)
    return Prompts(
        prompt_ids=ids, prompt_mask=mask, row_ids=torch.arange(len(rows)), references=tuple({} for _ in rows)
    )


def completions_of(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, fill: int = PAD
) -> Completions:
    """Completions of these ids, finished if they end with EOS; `fill` is under the masks."""
    asked = prompts_of(prompts, fill=fill)
    ids, mask = padded(completions, left=False, fill=fill)
    return Completions(
        prompt_ids=asked.prompt_ids,
        prompt_mask=asked.prompt_mask,
        row_ids=asked.row_ids,
        references=asked.references,
        completion_ids=ids,
        completion_mask=mask,
        sampler_logprobs=torch.zeros(ids.shape),
        finished=torch.tensor([bool(row) and row[-1] == EOS for row in completions]),
        group_size=1,
    )


PROMPTS = [[BOS, 5, 7, 9, 11], [BOS, 4], [BOS, 6, 8, PAD, EOS, 3, 12], [8]]
COMPLETIONS = [[3, 14, EOS], [15, 9, 2, 6, 5, EOS], [PAD], [10, 10, 7, EOS]]


def ragged(*, fill: int = PAD) -> Completions:
    """Rows of unequal prompts and completions, special tokens inside them, one completion of a single token."""
    return completions_of(PROMPTS, COMPLETIONS, fill=fill)


def sampler_of(
    model: PreTrainedModel, config: Any, *, eos_ids: tuple[int, ...] = (EOS,), pad_id: int = PAD
) -> HFSampler:
    """The plain sampler on the CPU."""
    return HFSampler(model, config, eos_ids=eos_ids, pad_id=pad_id, dtype="float32", device=torch.device("cpu"))
