"""Model folders as people publish them: with dropout, generation settings, a template, shards, and no pad token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stored_templates import chat_template
from tiny_models import BOS, EOS, VOCAB, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

TURN_END = 3  # <end_of_turn>, which the generation settings name beside the EOS
TEMPLATE = chat_template("published")


@dataclass(frozen=True)
class Kind:
    """One way to publish a model."""

    family: str = "llama"
    dtype: torch.dtype = torch.bfloat16
    pad: str | None = None  # the tokenizer's
    config: Mapping[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


KINDS = {
    "llama, tied, several EOS, no pad": Kind(config={"tie_word_embeddings": True}),
    "llama, untied, shards": Kind(shard="4KB", pad="</s>"),
    "gpt2, dropout, pad is EOS": Kind(
        "gpt2", torch.float32, "</s>", {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    ),
    "qwen2, float16, pad of its own": Kind("qwen2", torch.float16, "<unk>", {"attention_dropout": 0.1}),
}


def publish(kind: Kind, folder: Path) -> Path:
    """Write the folder."""
    model = tiny(kind.family, dtype=kind.dtype, eos_token_id=[EOS, TURN_END], **{"pad_token_id": None, **kind.config})
    model.save_pretrained(folder, max_shard_size=kind.shard)
    settings = {
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, TURN_END],
    }
    write(folder / "generation_config.json", settings)
    published_tokenizer(kind.pad).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "LICENSE").write_text("Do as you like.\n", encoding="utf-8")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):  # nobody's files look like ours
        path = folder / name
        write(path, json.loads(path.read_text(encoding="utf-8")))
    return folder


def published_tokenizer(pad: str | None = None) -> PreTrainedTokenizerFast:
    """Words between spaces; <unk>, <s>, </s> and <end_of_turn> are special."""
    words = {"<unk>": 0, "<s>": BOS, "</s>": EOS, "<end_of_turn>": TURN_END} | {f"t{i}": i for i in range(4, VOCAB)}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    named = {"pad_token": pad} if pad else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    return tokenizer


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in a hand that is not ours."""
    path.write_text(json.dumps(content, indent=4, sort_keys=True), encoding="utf-8")


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def store_tied_head(folder: Path) -> None:
    """Store the head of a tied model beside its embedding, like many checkpoints."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})


def store_norms_wide(folder: Path) -> None:
    """Store the norms of a bfloat16 model in float32."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({k: w.float() if "norm" in k else w for k, w in weights.items()}, path, {"format": "pt"})
