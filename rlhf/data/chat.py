"""Tokenizers made fit for training, and chat templates applied once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.paths import looks_local, missing
from rlhf.data.templates import Rendered, Template, choose_template, render
from rlhf.errors import DataError, ModelError

PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, with an EOS and with a pad token that is neither EOS nor BOS.

    Where we had to add the pad token, the model needs a row more: see `embedding_rows`.
    """
    _check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
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
    ensure_pad(tokenizer)
    return tokenizer


def _check_folder(path: str) -> None:
    folder = Path(path).expanduser()
    if not folder.exists() and looks_local(path):
        raise ModelError(missing(path))
    written = folder / "tokenizer.json"
    if not written.is_file():
        return
    try:
        parts = json.loads(written.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{written}: not a tokenizer: {error}") from error
    if not isinstance(parts, dict) or "model" not in parts:
        raise ModelError(f"{written}: not a tokenizer: it describes no model")


def ensure_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give the tokenizer a pad token of its own where it has none, or only its EOS or BOS; True if its vocabulary grew.

    Padding with EOS would hide real ends wherever something goes by token ids. We never do: masks go by length.
    """
    taken = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in taken:
        return False
    size = len(tokenizer)
    name = next(n for n in PAD_NAMES if n not in (tokenizer.eos_token, tokenizer.bos_token))
    tokenizer.add_special_tokens({"pad_token": name})
    return len(tokenizer) > size


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Choose the id that fills rows: the tokenizer's pad token, else its EOS. Any id will do: masks go by length."""
    number = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if not isinstance(number, int):
        raise DataError("the tokenizer has no end-of-sequence token, so that no completion could ever end")
    return number


def embedding_rows(tokenizer: PreTrainedTokenizerBase, rows: int, *, model: str) -> int:
    """How many rows the embedding of `model` must have, now `rows`: one more where we added the pad token.

    Raises:
        ModelError: the tokenizer has tokens the model has never heard of: it was made for another model.
    """
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed <= rows:
        return rows
    added = tokenizer.pad_token_id == needed - 1 and tokenizer.pad_token in PAD_NAMES
    if added and needed - 1 <= rows:
        return needed
    raise ModelError(
        f"{model}: the tokenizer has {needed:,} tokens and the model only {rows:,}: they do not belong together. "
        "Give the model and the tokenizer of one folder."
    )


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of every token with its id, the pad token left out: equal where ids mean the same."""
    known = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token != tokenizer.pad_token)
    return hashlib.sha256(json.dumps(known, ensure_ascii=True).encode()).hexdigest()


__all__ = [
    "Rendered",
    "Template",
    "choose_template",
    "embedding_rows",
    "ensure_pad",
    "load_tokenizer",
    "pad_id",
    "render",
    "vocabulary_digest",
]
