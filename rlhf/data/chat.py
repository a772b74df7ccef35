"""Load tokenizers as they were published, and apply chat templates once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.conversation import Message, Prompt
from rlhf.data.location import locate_tokenizer
from rlhf.data.paths import missing
from rlhf.data.row import BadRow
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


@dataclass(frozen=True)
class Template:
    """How conversations become text: a Jinja source, or none; `turns`: text prompts become a user's turn too."""

    source: str | None
    turns: bool
    choice: str  # what data.chat_template says


def choose_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> Template:
    """The template `data.chat_template` means: the tokenizer's own (auto), none, or that of a file."""
    if choice == "none":
        return Template(None, False, choice)
    if choice == "auto":
        own = tokenizer.chat_template  # some have several, by name
        return Template(own.get("default") if isinstance(own, dict) else own, False, choice)
    path = Path(choice).expanduser()
    if not path.is_file():
        raise DataError(f"data.chat_template: {missing(choice)}; it is auto, none, or the path of a Jinja file")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template: {choice} cannot be read: {error}") from error
    return Template(source, True, choice)


@dataclass(frozen=True)
class Rendered:
    """A prompt and its completions as text, whose concatenation is what the model reads."""

    prompt: str
    completions: tuple[str, ...]
    templated: bool  # then the template has written the special tokens


def render(
    tokenizer: PreTrainedTokenizerBase, template: Template, prompt: Prompt, completions: Sequence[str]
) -> Rendered:
    """A prompt and completions as text. The template is applied once, to the conversation with each completion in it.

    What the template writes after the prompt is the completion, its end-of-turn marks included.
    """
    if isinstance(prompt, str):
        return Rendered(prompt, tuple(completions), templated=False)
    before = _apply(tokenizer, template, prompt, answer=True)
    if not before:
        raise BadRow("the chat template makes nothing of the prompt")
    after = []
    for completion in completions:
        whole = _apply(tokenizer, template, [*prompt, {"role": "assistant", "content": completion}], answer=False)
        if not whole.startswith(before):
            raise BadRow("the chat template writes the prompt differently once it is answered")
        if not whole[len(before) :].strip():
            raise BadRow("the chat template makes nothing of the completion")
        after.append(whole[len(before) :])
    return Rendered(before, tuple(after), templated=True)


def _apply(tokenizer: PreTrainedTokenizerBase, template: Template, conversation: list[Message], *, answer: bool) -> str:
    if template.source is None:
        why = "data.chat_template is none" if template.choice == "none" else "the tokenizer has no chat template"
        raise DataError(
            f"The rows are conversations, and {why}. Set data.chat_template to the path of a Jinja file, "
            "or give rows with a plain-text prompt (for transcripts: prompt, chosen and rejected as text)."
        )
    try:
        written = tokenizer.apply_chat_template(
            conversation, chat_template=template.source, tokenize=False, add_generation_prompt=answer
        )
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"data.chat_template={template.choice}: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # a template raises to refuse a conversation
        raise BadRow("the chat template refuses the conversation", str(error)[:100]) from error
    assert isinstance(written, str)
    return written


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest (SHA-256) every token that text can produce, with its id: equal where ids mean the same."""
    known = sorted((number, token) for token, number in text_vocabulary(tokenizer).items())
    return hashlib.sha256(json.dumps(known, ensure_ascii=True).encode()).hexdigest()
