"""Load tokenizers as they were published, and compare their vocabularies; chat templates are re-exported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.location import locate_tokenizer
from rlhf.data.templates import Rendered, Template, choose_template, render
from rlhf.errors import DataError, ModelError

ADDED_TO_GGUF = (
    "<|endoftext|>"  # appended by transformers to a GGUF file's vocabulary that lacks it, and has no embedding
)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, GGUF file or hub id, as it was published.

    Raises:
        ModelError: no tokenizer could be loaded, or its vocabulary is empty.
        DataError: the tokenizer has no end-of-sequence token (EOS).
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
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a tokenizer: {error}") from error
    if not isinstance(settings, dict) or "model" not in settings:
        raise ModelError(f"{file}: not a tokenizer: it describes no model")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id used for padding: the tokenizer's pad token if models have an embedding for it, otherwise EOS.

    Any id would do, because masks are computed from lengths. A pad token appended after the vocabulary is not used:
    models are often published without an embedding for it.

    Raises:
        DataError: the tokenizer has neither.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if isinstance(pad, int) and pad in text_vocabulary(tokenizer).values():
        return pad
    if not isinstance(eos, int):
        raise DataError("the tokenizer has no end-of-sequence token, so that no completion could ever end")
    return eos


def text_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Map every token that text can produce to its id, leaving out padding tokens appended after the vocabulary."""
    vocabulary: dict[str, int] = dict(tokenizer.get_vocab())
    appended = {tokenizer.pad_token}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and ADDED_TO_GGUF not in backend.get_vocab(with_added_tokens=False):
        appended.add(ADDED_TO_GGUF)
    appended -= {tokenizer.eos_token, tokenizer.bos_token}
    for token in sorted(vocabulary, key=vocabulary.__getitem__, reverse=True):
        if token not in appended:
            break
        del vocabulary[token]
    return vocabulary


def shares_vocabulary(writer: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase) -> bool:
    """Return whether every token that `writer` produces from text has the same id in `reader`."""
    reader_ids = reader.get_vocab()
    return all(reader_ids.get(token) == token_id for token, token_id in text_vocabulary(writer).items())


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Compute the SHA-256 digest of the tokens that text can produce and their ids; equal if the ids mean the same."""
    entries = sorted((token_id, token) for token, token_id in text_vocabulary(tokenizer).items())
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()


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
