"""Tokenizers, one for each habit that tokenizers have, and a way to write data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from made_tokenizers import CHATML, WITH_BOS, byte_tokenizer
from transformers import PreTrainedTokenizerBase

from rlhf.data.tokenizer import load_tokenizer


@pytest.fixture
def chatml() -> PreTrainedTokenizerBase:
    """No BOS; EOS ends a turn, as in Qwen's chat models; pad of its own."""
    tokenizer = byte_tokenizer(eos="<|im_end|>", pad="<|pad|>", extra=("<|im_start|>",))
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def llama_like() -> PreTrainedTokenizerBase:
    """Puts BOS before every text, and its chat template writes BOS too."""
    tokenizer = byte_tokenizer(bos="<s>", pad="<pad>", adds="<s> $A")
    tokenizer.chat_template = WITH_BOS
    return tokenizer


@pytest.fixture
def plain() -> PreTrainedTokenizerBase:
    """Puts BOS before every text; has no template."""
    return byte_tokenizer(bos="<s>", pad="<pad>", adds="<s> $A")


@pytest.fixture
def stories(shared: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a real model, which has BOS = EOS and puts a space before every text."""
    return load_tokenizer(str(shared / "models/stories260K/hf"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSONL, or a text unchanged; gives the path."""

    def put(rows: list[object] | str, name: str = "rows.jsonl") -> str:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return put
