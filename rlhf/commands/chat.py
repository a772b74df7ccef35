"""rlhf chat: a conversation with a model in the terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.errors import DataError, UserError
from rlhf.factory.sampler import Completer, Conversation
from rlhf.tracking.progress import printable

HELP = "/reset begins anew, /quit ends; Ctrl-C stops an answer"


@runtime_checkable
class LineReader(Protocol):
    """A stream of lines, such as standard input."""

    def readline(self) -> str:
        """Return the next line, or an empty string at the end of the stream."""
        ...

    def isatty(self) -> bool:
        """Return whether the stream is an interactive terminal."""
        ...


@runtime_checkable
class LineWriter(Protocol):
    """A stream that is written to, such as standard output."""

    def write(self, text: str, /) -> object:
        """Write text, which may be part of a line."""
        ...

    def flush(self) -> None:
        """Flush what was written."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The system prompt and sampling options of the answers."""

    system: str | None = None
    temperature: float = 0.7
    top_p: float = 0.95
    max_tokens: int = 512
    seed: int | None = None
    greedy: bool = False


def run_chat(path: str, options: ChatOptions, *, read: LineReader | None = None, out: LineWriter | None = None) -> None:
    """Answer each line that is typed or piped in, until the end of the input or /quit.

    Args:
        path: a run folder, a model folder or a hub id.
        options: how the model answers.
        read: where messages come from; standard input if None.
        out: where answers go; standard output if None.

    Raises:
        UserError: an option is invalid, or the model has no chat template or cannot be loaded.
    """
    read, out = read or sys.stdin, out or sys.stdout
    conversation = _open(path, options)
    interactive = read.isatty()
    if interactive:
        out.write(f"{HELP}\n")
    for line in _read_lines(read, interactive=interactive):
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                conversation.reset()
            case text if text.startswith("/") and " " not in text:
                out.write(f"{text}? {HELP}\n")
            case text:
                _answer(conversation, text, out)
    if interactive:
        out.write("\n")


def _open(path: str, options: ChatOptions) -> Conversation:
    if options.seed is not None:
        torch.manual_seed(options.seed)
    if not 0 < options.top_p <= 1 or options.temperature <= 0 or options.max_tokens < 1:
        raise UserError("--top-p is above 0 and at most 1, --temperature above 0, --max-tokens at least 1")
    sampling = SamplingConfig(max_new_tokens=options.max_tokens, temperature=options.temperature)
    model = Completer(path, sampling, chat=load_chat_format(path))
    if model.encoder.template.source is None:
        raise UserError(
            f"{path} has no chat template, so that there is no conversation to have: "
            f"rlhf sample {path} --prompt … continues a text"
        )
    return Conversation(model, options.system, options.top_p, options.greedy)


def _read_lines(read: LineReader, *, interactive: bool) -> Iterator[str]:
    """Yield the lines of the input; an interrupt at the prompt (Ctrl-C) ends it, as the end of file does."""
    read_line: Callable[[], str] = (lambda: input("> ") + "\n") if interactive and read is sys.stdin else read.readline
    while True:
        try:
            line = read_line()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        yield line


def _answer(conversation: Conversation, text: str, out: LineWriter) -> None:
    def write(chunk: str) -> None:
        out.write(printable(chunk))
        out.flush()

    try:
        complete = conversation.ask(text, write)
    except DataError as error:
        out.write(f"{error}: /reset begins anew\n")
        return
    out.write("\n" if complete else " …\n")
    out.flush()
