"""Ordinary model folders of the zoo's families: tiny random weights, and a tokenizer with the family's habits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from families import Family, Tokens
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WORDS = ("good", "bad", "red", "blue", "one", "two", "user", "assistant", "system", "Hello")  # of one token each


def write_folder(family: Family, folder: Path) -> Path:
    """Write config.json, generation_config.json, weights and tokenizer files as a published folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = vocabulary(family.tokens)
    model = random_model(family, ids)
    model.save_pretrained(folder)
    ends = [ids[token] for token in family.ends]
    generation = {"eos_token_id": ends if len(ends) > 1 else ends[0], **family.generation}
    for name, token in (("bos_token_id", family.tokens.bos), ("pad_token_id", family.tokens.pad)):
        if token is not None and name not in generation:
            generation[name] = ids[token]
    _write(folder / "generation_config.json", {**generation, "transformers_version": "4.40.0"})
    tokenizer(family.tokens, ids).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(family))
    return folder


def random_model(family: Family, ids: dict[str, int]) -> PreTrainedModel:
    """Make the family's model with seeded weights in the dtype of its files; no norm's weight is one."""
    tokens = family.tokens
    special = {f"{name}_token_id": ids[token] if token else None for name, token in _named(tokens).items()}
    special.pop("unk_token_id", None)
    torch.manual_seed(0)
    size = len(ids) + tokens.spare_rows
    config = AutoConfig.for_model(family.model_type, vocab_size=size, **{**family.config, **special})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(getattr(torch, family.dtype))


def vocabulary(tokens: Tokens) -> dict[str, int]:
    """Number all tokens: special ones, bytes or characters, whole words, special ones."""
    space = _space(tokens)
    pieces = [*(word[:end] for word in WORDS for end in range(2, len(word) + 1)), *(space + word for word in WORDS)]
    if tokens.pieces == "bytes":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        letters = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *map(chr, range(33, 127))]
    return {name: i for i, name in enumerate(dict.fromkeys([*tokens.first, *letters, *pieces, *tokens.last]))}


def tokenizer(tokens: Tokens, ids: dict[str, int]) -> Tokenizer:
    """Make the tokenizer: byte-level, or with marked spaces and bytes for unknown characters."""
    special = (*tokens.first, *tokens.last)
    vocab = {name: i for name, i in ids.items() if name not in tokens.last}
    merges = [(word[:end], word[end]) for word in WORDS for end in range(1, len(word))]
    merges += [(_space(tokens), word) for word in WORDS]
    if tokens.pieces == "bytes":
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        made = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token=tokens.unk, byte_fallback=True, fuse_unk=True)
        )
        spaces = [normalizers.Replace(" ", "▁")]
        after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if tokens.pieces == "llama":
            spaces.insert(0, normalizers.Prepend("▁"))
            after.append(decoders.Strip(" ", 1, 0))
        made.normalizer, made.decoder = normalizers.Sequence(spaces), decoders.Sequence(after)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if tokens.adds_bos:
        bos = tokens.bos
        assert bos is not None
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids[bos])]
        )
    return made


def _tokenizer_config(family: Family) -> dict[str, Any]:
    tokens = family.tokens
    named = {f"{name}_token": token for name, token in _named(tokens).items() if token is not None}
    settings: dict[str, Any] = {
        "tokenizer_class": tokens.tokenizer_class,
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if tokens.tokenizer_class != "PreTrainedTokenizerFast":
        settings |= {"add_bos_token": tokens.adds_bos, "add_eos_token": False}
    if family.template is not None:
        settings["chat_template"] = family.template
    return settings


def _named(tokens: Tokens) -> dict[str, str | None]:
    return {"bos": tokens.bos, "eos": tokens.eos, "pad": tokens.pad, "unk": tokens.unk}


def _space(tokens: Tokens) -> str:
    return "Ġ" if tokens.pieces == "bytes" else "▁"


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
