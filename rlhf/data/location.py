"""Resolve a model path: a folder, a GGUF file, an adapter over a base model, or a hub id."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from rlhf.data.paths import looks_local, missing
from rlhf.errors import ModelError

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
        raise ModelError(
            f"{file}: reading a GGUF file needs the package gguf: python -m pip install gguf "
            "(or, in a checkout, python -m pip install -e '.[gguf]')"
        )
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
