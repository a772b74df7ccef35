"""Locate models and tokenizers (folder, GGUF file or hub id), load them as published, and encode, cut and pad texts.

A prompt begins with the special tokens that the tokenizer itself puts first (BOS, if it has one): never twice, and
never with an EOS at the end. A completion ends with one special token: the template's end-of-turn token, else EOS.
A text that spells a padding token appended after the vocabulary is ordinary text: models have no embedding for it.
The concatenated ids decode to the concatenated texts: a tokenizer that puts a space before any text (SentencePiece)
must not do so where the prompt ends and the completion begins.

Masks are computed from lengths, never from ids: the pad token may be a real token of a text.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_python import PythonBackend, Trie

from rlhf.config.data import ChatFormat
from rlhf.data.conversation import Message, Prompt, mark, segments, to_next_mark
from rlhf.data.paths import looks_local, missing
from rlhf.data.rows import DataRow, RowCounts
from rlhf.data.templates import Rendered, Template, Tools, choose_template, is_written_out, render, turn_end_id
from rlhf.errors import DataError, ModelError, install_hint
from rlhf.model_files import ADAPTER
from rlhf.types import Completions

TOKENIZER_FILES = (  # of all tokenizer classes of transformers; a folder has the files of its class
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
    """The arguments of `from_pretrained`: a folder or hub id, and for a GGUF file its name in the folder."""

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
        ModelError: the configuration cannot be read, or names no base model or the adapter's own folder.
    """
    try:
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base = settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER}: not the configuration of an adapter: {error}") from error
    if not isinstance(base, str) or not base:
        raise ModelError(f"{folder / ADAPTER} names no base_model_name_or_path: write the folder of its base there")
    if Path(base).resolve() == folder.resolve():
        raise ModelError(f"{folder / ADAPTER}: base_model_name_or_path is the adapter itself: write its base there")
    return base


def adapts_classifier(folder: Path) -> bool:
    """Return whether the adapter in `folder` belongs to a sequence classifier."""
    settings: dict[str, object] = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    return settings.get("task_type") == "SEQ_CLS"


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


CUT_OFF = (struct.error, IndexError)
"""The errors of reading a GGUF file whose header ends too early."""


def cut_off_reason(error: Exception) -> str:
    """Describe an error of reading a GGUF file whose header ends too early; empty for any other error."""
    return "the file is cut off or damaged: download or copy it again" if isinstance(error, CUT_OFF) else ""


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
    except Exception as error:  # tokenizers raises Exception itself
        reason = cut_off_reason(error) or " ".join(str(error).split())[:300]
        is_newer = "did not match any variant" in reason
        hint = ". A newer version may have written it: pip install -U transformers tokenizers" if is_newer else ""
        raise ModelError(f"{path}: no tokenizer could be loaded from here: {reason}{hint}") from error
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
    if isinstance(pad, int) and pad not in appended_tokens(tokenizer).values():
        return pad
    if not isinstance(eos, int):
        raise DataError("the tokenizer has no end-of-sequence token, so that no completion could ever end")
    return eos


def text_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Map every token that text can produce to its id, leaving out padding tokens appended after the vocabulary."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    appended = _appended(tokenizer, vocabulary)
    return {token: token_id for token, token_id in vocabulary.items() if token not in appended}


def appended_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Map each padding token appended after the vocabulary to its id: models often have no embedding for it."""
    return _appended(tokenizer, tokenizer.get_vocab())


def _appended(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> dict[str, int]:
    candidates = {tokenizer.pad_token}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.model.token_to_id(ADDED_TO_GGUF) is None:
        candidates.add(ADDED_TO_GGUF)
    candidates -= {tokenizer.eos_token, tokenizer.bos_token}
    from_last = sorted(vocabulary, key=vocabulary.__getitem__, reverse=True)
    return {token: vocabulary[token] for token in takewhile(candidates.__contains__, from_last)}


def tokenizer_of_text(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that encodes the appended tokens as ordinary text; every other text gets the same ids.

    It is `tokenizer` itself if nothing is appended, and otherwise a copy without these tokens.
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


BYTE_END = "<|end of the completion|>"  # ends a completion of the byte tokenizer


@cache
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes, for a reward source that reads texts of no policy.

    No reward model shares its vocabulary, so each reads the texts by its own tokenizer and chat template.
    """
    tokens = [BYTE_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=BYTE_END)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """Pad rows on the left, so that all end in the last column; return `(ids, mask)`."""
    return _pad(rows, pad_id, left=True)


def right_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Pad rows on the right, so that all start in the first column; return `(ids, mask)`."""
    return _pad(rows, pad_id, left=False)


def right_pad_flags(rows: Sequence[Sequence[bool]]) -> Bool[Tensor, "B T"]:
    """Pad rows of flags on the right with False."""
    flags, live = _pad([[int(flag) for flag in row] for row in rows], 0, left=False)
    return flags.bool() & live


def as_completions(
    prompts: Sequence[Sequence[int]],
    ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    references: Sequence[Mapping[str, Any]] | None = None,
    finished: bool = False,
) -> Completions:
    """Return completions of prompts, one each, as a sampler would; no `references`: empty ones."""
    prompt_ids, prompt_mask = left_pad(prompts, pad_id)
    completion_ids, completion_mask = right_pad(ids, pad_id)
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        row_ids=torch.arange(len(prompts)),
        references=tuple({} for _ in prompts) if references is None else tuple(references),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        sampler_logprobs=torch.zeros(completion_ids.shape),
        finished=torch.full((len(prompts),), finished),
        group_size=1,
    )


def _pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        live = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, live] = torch.tensor(row, dtype=torch.long)
        mask[i, live] = True
    return ids, mask


@dataclass(frozen=True)
class LengthLimit:
    """The most tokens a row may have, the name of the setting behind that number, and what happens to a longer row."""

    tokens: int
    name: str
    too_long: Literal["skip", "truncate", "error"]

    def tokens_to_cut(self, row: DataRow, tokens: int, skips: RowCounts) -> int | None:
        """Return how many tokens to cut: 0 if the row fits, None if it was recorded in `skips` and left out.

        Raises:
            DataError: the row is too long and `too_long` is "error".
        """
        if tokens <= self.tokens:
            return 0
        match self.too_long:
            case "truncate":
                return tokens - self.tokens
            case "skip":
                skips.too_long += 1
                skips.skip(row, self.reason, f"{tokens:,}")
                return None
            case "error":
                raise DataError(
                    f"{row.place}: {tokens:,} tokens, which is {self.reason}. Raise the limit, or set too_long to "
                    "skip or truncate."
                )

    @property
    def reason(self) -> str:
        """Return the reason given for a longer row."""
        return f"longer than {self.name} of {self.tokens:,} tokens"


def length_limit(max_tokens: int, context: int | None, too_long: Literal["skip", "truncate", "error"]) -> LengthLimit:
    """Build the limit from the configuration, or from the model's context if that is shorter."""
    if context is not None and context < max_tokens:
        return LengthLimit(context, "the model's context", too_long)
    return LengthLimit(max_tokens, "max_tokens", too_long)


def truncate_start(ids: list[int], excess: int, head: int) -> list[int] | None:
    """Drop `excess` tokens after the first `head` special ones, which stay; return None if nothing would be left."""
    kept = ids[head + excess :]
    return [*ids[:head], *kept] if kept and excess >= 0 else None


# Put before a completion, so that a tokenizer's addition to the start of a text is not added to the completion.
_STARTS = ("\n", ".", ":", "a", "1")
_PROBES = ("x", " x", "x y", "\nx", '"x')


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and a chat template, with the tokenizer's treatment of the start of a text, as far as known."""

    tokenizer: PreTrainedTokenizerBase
    reader: PreTrainedTokenizerBase  # encodes text: without tokens that models have no embedding for
    template: Template
    prefix: tuple[int, ...]  # the special tokens that the tokenizer puts before every text
    start: str  # encoded before a completion and then dropped from the ids; empty if not needed
    eos_id: int
    pad_id: int
    special_ids: frozenset[int]
    stop_ids: tuple[int, ...]  # EOS, and the template's end-of-turn token if that is another one

    def render(
        self, prompt: Prompt, completions: Sequence[str | Sequence[Message]] = (), *, tools: Tools = ()
    ) -> Rendered:
        """Render a prompt and its completions as text."""
        return render(self.tokenizer, self.template, prompt, completions, tools=tools)

    def is_written_out(self, text: str) -> bool:
        """Return whether a text has the template's turns written out already."""
        bos = self.tokenizer.bos_token
        return is_written_out(text, self.template, bos if isinstance(bos, str) else None)

    def prompts(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Encode each prompt; an empty one has no ids if the tokenizer puts no special token first."""
        rows = self._tokenize([r.prompt for r in rendered])
        return [ids if r.templated else self._add_prefix(ids) for r, ids in zip(rendered, rows, strict=True)]

    def completions(self, rendered: Sequence[Rendered], which: int) -> list[list[int]]:
        """Encode completion number `which` of each row, ending with the template's end-of-turn token or EOS."""
        texts = [r.completions[which] for r in rendered]
        prompted = [i for i, r in enumerate(rendered) if r.prompt]
        ids = self._tokenize(texts)  # without a prompt a completion is encoded like any other text
        if self.start:
            for i, row in zip(prompted, self._tokenize_continuations([texts[i] for i in prompted]), strict=True):
                ids[i] = ids[i] if row is None else row
        return [self._terminate(r, row) for r, row in zip(rendered, ids, strict=True)]

    def turns(self, rendered: Rendered, which: int) -> tuple[list[int], list[bool]]:
        """Encode completion number `which` turn by turn; return its ids and which of them the assistant wrote."""
        text, spans = rendered.completions[which], rendered.learned[which]
        parts = segments(len(text), spans)
        pieces = [text[start:end] for (start, end), _ in parts]
        ids = self._tokenize(pieces)
        if self.start:
            ids = [a if b is None else b for a, b in zip(ids, self._tokenize_continuations(pieces), strict=True)]
        learned = [inside for row, (_, inside) in zip(ids, parts, strict=True) for _ in row]
        joined = [token for row in ids for token in row]
        terminated = self._terminate(rendered, joined)
        return terminated, [*learned[: len(terminated)], *[True] * (len(terminated) - len(learned))]

    def _terminate(self, rendered: Rendered, ids: list[int]) -> list[int]:
        if ids and ids[-1] in (self.special_ids if rendered.templated else self.stop_ids):
            return ids
        # Without a prompt, a BOS spelled out at the start of the text is dropped: the prompt ids are that BOS already.
        return self._append_eos(ids if rendered.prompt or rendered.templated else ids[self.head(ids) :])

    def text(self, text: str) -> list[int]:
        """Encode a text as it is, without the tokenizer's special tokens around it."""
        return self._tokenize([text])[0]

    def continuation(self, text: str) -> list[int]:
        """Encode a text that continues another one, without the tokenizer's addition to the start of a text."""
        if not self.start:
            return self.text(text)
        (ids,) = self._tokenize_continuations([text])
        return self.text(text) if ids is None else ids

    def prompt_with(self, rendered: Rendered, marked: str, contents: Sequence[str]) -> list[int]:
        """Encode a prompt as `written` does."""
        ids = self.written(rendered.prompt, marked, contents, starts=True)
        return ids if rendered.templated else self._add_prefix(ids)

    def written(self, text: str, marked: str, contents: Sequence[str], *, starts: bool = False) -> list[int]:
        """Encode the template's text for messages; special tokens that a content of theirs spells are ordinary text.

        Args:
            text: the text.
            marked: the template's text for the same messages with `mark(i)` in place of content i.
            contents: of the messages.
            starts: whether the text continues no other.
        """
        ids: list[int] = []
        for number, content in enumerate(contents):
            before, is_there, rest = marked.partition(mark(number))
            if not is_there:  # the template leaves it out
                continue
            forms = (content, content.strip(), json.dumps(content, ensure_ascii=False)[1:-1])  # as templates write it
            after = to_next_mark(rest)
            form = next((form for form in forms if text.startswith(before + form + after)), None)
            if form is None:  # the template changes it
                break
            ids += self._piece(before, starts and not ids) + self.without_specials(form)
            text, marked = text[len(before + form) :], rest
        return ids + self._piece(text, starts and not ids)

    def _piece(self, text: str, starts: bool) -> list[int]:
        if not text:
            return []
        return self.text(text) if starts else self.continuation(text)

    def spells_specials(self, contents: Sequence[str]) -> bool:
        """Return whether one of the texts spells a special token."""
        return any(token in content for content in contents for token in self.template.specials)

    def without_specials(self, text: str) -> list[int]:
        """Encode a text that continues another one; special tokens that it spells out are ordinary text."""
        head, whole = (
            list(self.reader(part, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])
            for part in (self.start, self.start + text)
        )
        return whole[len(head) :] if whole[: len(head)] == head else self.text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, special tokens included."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def is_seam_exact(self, rendered: Rendered, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Return whether prompt and completion ids decode to the same text as the two texts encoded together."""
        joint = self._tokenize([rendered.prompt + rendered.completions[0]])[0]
        whole = joint if rendered.templated else self._add_prefix(joint)
        head = self.head(whole)  # kept away from _append_eos, because BOS may be EOS
        end = whole[head:] if rendered.templated and whole[-1] in self.special_ids else self._append_eos(whole[head:])
        return self.decode([*prompt, *completion]) == self.decode([*whole[:head], *end])

    def head(self, ids: Sequence[int]) -> int:
        """Count the ids at the start that are the tokenizer's prefix of special tokens: all of it or 0."""
        return len(self.prefix) if tuple(ids[: len(self.prefix)]) == self.prefix else 0

    def _add_prefix(self, ids: list[int]) -> list[int]:
        return ids if self.prefix and self.head(ids) else [*self.prefix, *ids]

    def _append_eos(self, ids: list[int]) -> list[int]:
        if self.eos_id not in ids:
            return [*ids, self.eos_id]
        end = len(ids) - ids[::-1].index(self.eos_id)  # many templates write a line break after their EOS
        return ids[:end] if not self.decode(ids[end:]).strip() else [*ids, self.eos_id]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return _tokenize(self.reader, texts)

    def _tokenize_continuations(self, texts: list[str]) -> list[list[int] | None]:
        head = self._tokenize([self.start])[0]
        rows = self._tokenize([self.start + text for text in texts])
        # None if the tokenizer merged the start with the text: then a space may appear between prompt and completion.
        return [row[len(head) :] if row[: len(head)] == head else None for row in rows]


def make_encoder(tokenizer: PreTrainedTokenizerBase, chat_template: str | ChatFormat) -> Encoder:
    """Build the encoder of a tokenizer; `chat_template` is the value of `data.chat_template`, or a whole ChatFormat.

    Raises:
        DataError: the tokenizer has no EOS, or the template cannot be used.
    """
    eos_id = tokenizer.eos_token_id
    if not isinstance(eos_id, int):
        raise DataError("the tokenizer needs an EOS: see load_tokenizer")
    template = choose_template(tokenizer, chat_template)
    special_ids = [tokenizer.convert_tokens_to_ids(special) for special in template.specials]
    turn_end = turn_end_id(tokenizer, template)
    reader = tokenizer_of_text(tokenizer)
    return Encoder(
        tokenizer,
        reader,
        template,
        _find_prefix(reader),
        _find_start(reader),
        eos_id,
        pad_id(tokenizer),
        frozenset(token_id for token_id in special_ids if isinstance(token_id, int)),
        tuple(dict.fromkeys([eos_id, turn_end if turn_end is not None else eos_id])),
    )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | ChatFormat, others: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the sorted ids that end a completion: `others` (the model's own), EOS, and the template's end of turn."""
    turn_end = turn_end_id(tokenizer, choose_template(tokenizer, chat_template))
    return tuple(sorted({*others, *(n for n in (tokenizer.eos_token_id, turn_end) if isinstance(n, int))}))


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _find_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Find the special tokens that the tokenizer puts before every text."""
    for probe in ("a", "x y", "0", "the"):
        bare = _tokenize(tokenizer, [probe])[0]
        full = list(tokenizer(probe, verbose=False)["input_ids"])
        for offset in range(len(full) - len(bare) + 1):
            if bare and full[offset : offset + len(bare)] == bare:
                return tuple(full[:offset])
    return ()


def _find_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """Find a text to put before completions so that they are encoded as continuations; empty if none is needed."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def preserves_text(start: str) -> bool:
        head, before = _tokenize(tokenizer, [start, "b"]) if start else ([], _tokenize(tokenizer, ["b"])[0])
        rows = _tokenize(tokenizer, [start + probe for probe in _PROBES])
        return all(
            row[: len(head)] == head and decode([*before, *row[len(head) :]]) == decode(before) + probe
            for row, probe in zip(rows, _PROBES, strict=True)
        )

    return next((start for start in ("", *_STARTS) if preserves_text(start)), "")
