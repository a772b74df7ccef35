"""Load tokenizers as they were published, and apply chat templates once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.location import locate_tokenizer
from rlhf.data.templates import Rendered, Template, choose_template, render
from rlhf.errors import DataError, ModelError

ADDED_TO_GGUF = "<|endoftext|>"  # appended by transformers where a GGUF file has no such token, nor an embedding for it


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, GGUF file or hub id, as it was published; it must have an EOS.

    Raises:
        ModelError: there is none.
        DataError: it has no EOS.
    """
    location = locate_tokenizer(path)
    _check_tokenizer_file(Path(location.name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            location.name, trust_remote_code=trust_remote_code, **location.kwargs()
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{path}: no tokenizer could be loaded from here: {reason}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ModelError(f"{path}: its tokenizer is empty: tokenizer.json is missing or has no vocabulary")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{path}: the tokenizer has no end-of-sequence token, so that no completion could ever end. "
            'Name one of its tokens in tokenizer_config.json, as in "eos_token": "</s>".'
        )
    return tokenizer


def _check_tokenizer_file(folder: Path) -> None:
    written = folder / "tokenizer.json"
    if not written.is_file():
        return
    try:
        parts = json.loads(written.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{written}: not a tokenizer: {error}") from error
    if not isinstance(parts, dict) or "model" not in parts:
        raise ModelError(f"{written}: not a tokenizer: it describes no model")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Choose the id that fills rows: the tokenizer's pad token, or its EOS where it has none the model must know.

    Any id will do, for masks go by length. A pad token that was appended behind the vocabulary is passed over: models
    are published without an embedding for it.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if isinstance(pad, int) and pad in text_vocabulary(tokenizer).values():
        return pad
    if not isinstance(eos, int):
        raise DataError("the tokenizer has no end-of-sequence token, so that no completion could ever end")
    return eos


def text_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Map every token that text can produce to its id: all but a pad token appended behind the others."""
    vocabulary: dict[str, int] = dict(tokenizer.get_vocab())
    unwritten = {tokenizer.pad_token}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and ADDED_TO_GGUF not in backend.get_vocab(with_added_tokens=False):
        unwritten.add(ADDED_TO_GGUF)
    unwritten -= {tokenizer.eos_token, tokenizer.bos_token}
    for token in sorted(vocabulary, key=vocabulary.__getitem__, reverse=True):
        if token not in unwritten:
            break
        del vocabulary[token]
    return vocabulary


def shares_vocabulary(writer: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase) -> bool:
    """Tell whether every token that `writer` makes of text is the token of the same id to `reader`."""
    known = reader.get_vocab()
    return all(known.get(token) == number for token, number in text_vocabulary(writer).items())


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest (SHA-256) every token that text can produce, with its id: equal where ids mean the same."""
    known = sorted((number, token) for token, number in text_vocabulary(tokenizer).items())
    return hashlib.sha256(json.dumps(known, ensure_ascii=True).encode()).hexdigest()


__all__ = [
    "Rendered",
    "Template",
    "choose_template",
    "load_tokenizer",
    "pad_id",
    "render",
    "shares_vocabulary",
    "text_vocabulary",
    "vocabulary_digest",
]
