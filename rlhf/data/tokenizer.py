"""Locate models and tokenizers (folder, GGUF file or hub id), load tokenizers as published, apply chat templates."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_python import PythonBackend, Trie

from rlhf.data.paths import looks_local, missing
from rlhf.data.templates import Rendered, Template, choose_template, render
from rlhf.errors import DataError, ModelError, install_hint

ADAPTER = "adapter_config.json"
TOKENIZER_FILES = (  # of all tokenizer classes of transformers; a folder has those of its class
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "tekken.json",
)
_SHOWN = 8  # at most this many file names of a folder in a message


@dataclass(frozen=True)
class ModelLocation:
    """What `from_pretrained` takes: a folder or hub id, and the name of the GGUF file in the folder, if it is one."""

    name: str
    gguf: str | None = None

    @property
    def path(self) -> str:
        """Return the folder, file or hub id, for messages."""
        return self.name if self.gguf is None else str(Path(self.name) / self.gguf)

    @property
    def is_local(self) -> bool:
        """Return whether this is a folder on this machine."""
        return Path(self.name).is_dir()

    @property
    def is_adapter(self) -> bool:
        """Return whether the folder holds an adapter over another model."""
        return self.is_local and (Path(self.name) / ADAPTER).is_file()

    def kwargs(self) -> dict[str, str]:
        """Return the keyword arguments of `from_pretrained` besides the name."""
        return {} if self.gguf is None else {"gguf_file": self.gguf}


def locate_model(path: str) -> ModelLocation:
    """Locate the model that `path` names.

    Raises:
        ModelError: there is no such folder or file, it holds no model, or the package to read it is not installed.
    """
    location = _locate(path)
    folder = Path(location.name)
    if location.gguf is None and location.is_local and not location.is_adapter and not _has_config(folder):
        raise ModelError(_no_model_message(path, folder))
    return location


def locate_tokenizer(path: str) -> ModelLocation:
    """Locate the tokenizer that `path` names; an adapter without its own uses the one of its base model.

    Raises:
        ModelError: there is no such folder or file, or it holds no tokenizer.
    """
    location = _locate(path)
    folder = Path(location.name)
    if location.gguf is not None or not location.is_local or _has_tokenizer(folder):
        return location
    if location.is_adapter:
        return locate_tokenizer(base_of_adapter(folder))
    if not _has_config(folder):
        raise ModelError(_no_model_message(path, folder))
    raise ModelError(
        f"{path}: no tokenizer could be loaded from here: the folder has neither tokenizer.json nor another "
        "tokenizer's files; name a folder that has them with policy.tokenizer"
    )


def base_of_adapter(folder: Path) -> str:
    """Read the base model of an adapter from its configuration.

    Raises:
        ModelError: the configuration cannot be read or names no base model.
    """
    try:
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base = settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER}: not the configuration of an adapter: {error}") from error
    if not isinstance(base, str) or not base:
        raise ModelError(f"{folder / ADAPTER} names no base_model_name_or_path: write the folder of its base there")
    return base


def _locate(path: str) -> ModelLocation:
    expanded = Path(path).expanduser()
    if expanded.is_file():
        if expanded.suffix != ".gguf":
            raise ModelError(f"{path} is a file: give the model's folder, a hub id or a .gguf file")
        return _gguf_location(expanded)
    if expanded.is_dir():
        files = sorted(expanded.glob("*.gguf"))
        if not files or _has_config(expanded) or (expanded / ADAPTER).is_file():
            return ModelLocation(str(expanded))
        if len(files) > 1:
            raise ModelError(f"{path} holds {len(files)} .gguf files ({_format_names(files)}): name one of them")
        return _gguf_location(files[0])
    if looks_local(path, (".gguf",)):
        raise ModelError(missing(path))
    return ModelLocation(path)


def _gguf_location(file: Path) -> ModelLocation:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{file}: reading a GGUF file needs the package gguf: {install_hint('gguf')}")
    return ModelLocation(str(file.parent), file.name)


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_tokenizer(folder: Path) -> bool:
    names = [name for name in TOKENIZER_FILES if not name.startswith("chat_template")]
    return any((folder / name).is_file() for name in names) or any(folder.glob("*.tiktoken"))


def _no_model_message(path: str, folder: Path) -> str:
    files = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    content = f"it holds {_format_names(files)}" if files else "it is empty"
    return (
        f"{path} is no model folder: it has no config.json ({content}). "
        "Give a folder written by save_pretrained, a .gguf file, a run folder or a hub id"
    )


def _format_names(files: list[Path]) -> str:
    names = [file.name for file in files]
    return ", ".join([*names[:_SHOWN], *(["…"] if len(names) > _SHOWN else [])])


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
    for token in appended_tokens(tokenizer):
        del vocabulary[token]
    return vocabulary


def appended_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Map each padding token appended after the vocabulary to its id: models often have no embedding for it."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    candidates = {tokenizer.pad_token}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and ADDED_TO_GGUF not in backend.get_vocab(with_added_tokens=False):
        candidates.add(ADDED_TO_GGUF)
    candidates -= {tokenizer.eos_token, tokenizer.bos_token}
    from_last = sorted(vocabulary, key=vocabulary.__getitem__, reverse=True)
    return {token: vocabulary[token] for token in takewhile(candidates.__contains__, from_last)}


def tokenizer_of_text(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that encodes the appended tokens as ordinary text; every other text gets the same ids.

    It is `tokenizer` itself where nothing is appended, and otherwise a copy without these tokens.
    """
    appended = appended_tokens(tokenizer)
    if not appended:
        return tokenizer
    reader = copy.deepcopy(tokenizer)
    if isinstance(reader, PreTrainedTokenizerFast):
        reader._tokenizer = _without_tokens(reader.backend_tokenizer, appended)
    elif isinstance(reader, PythonBackend):
        for token, token_id in appended.items():
            reader._added_tokens_encoder.pop(token, None)
            reader._added_tokens_decoder.pop(token_id, None)
        if reader.pad_token in appended:
            reader.pad_token = reader.eos_token  # special tokens of that name are left whole
        reader.tokens_trie = Trie()
        reader._update_trie()
    return reader


def _without_tokens(backend: Tokenizer, tokens: Collection[str]) -> Tokenizer:
    """Copy a tokenizer without its last tokens, so that all others keep their ids."""
    settings = json.loads(backend.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in tokens]
    vocabulary = settings["model"]["vocab"]
    settings["model"]["vocab"] = (
        {token: token_id for token, token_id in vocabulary.items() if token not in tokens}
        if isinstance(vocabulary, dict)
        else [entry for entry in vocabulary if entry[0] not in tokens]
    )
    return Tokenizer.from_str(json.dumps(settings))


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
    "appended_tokens",
    "choose_template",
    "load_tokenizer",
    "pad_id",
    "render",
    "shares_vocabulary",
    "text_vocabulary",
    "tokenizer_of_text",
    "vocabulary_digest",
]
