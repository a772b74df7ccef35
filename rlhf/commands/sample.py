"""rlhf sample and rlhf chat: completions of prompts, printed, and a conversation in the terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from rich.console import Console
from rich.text import Text

from rlhf.api.checks import ChatOptions, SampleOptions
from rlhf.commands.notices import warn_of_rounding
from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.errors import DataError, UserError
from rlhf.factory.sampler import GREEDY, NO_TEMPLATE, Completer, Conversation, Drawing, published_drawing
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.progress import printable


def run_sample(
    path: str, prompts: list[str], options: SampleOptions, *, sampling: SamplingConfig, console: Console
) -> None:
    """Print completions of each prompt by a model, from a run or a model folder.

    Raises:
        UserError: the model cannot be loaded, or a prompt is too long for it.
    """
    warn_of_rounding(path)
    completer = Completer(path, sampling, chat=NO_TEMPLATE if options.raw else load_chat_format(path))
    texts = _nucleus(completer, prompts, options) if options.top_p is not None else _sample(completer, prompts, options)
    for row, (text, finished) in enumerate(texts):
        if row % options.count == 0:
            console.print(Text(printable(prompts[row // options.count]), style="bold"), soft_wrap=True)
        unfinished = "" if finished else " …"
        console.print(Text(f"  → {printable(text.strip())}{unfinished}"), soft_wrap=True)


def _sample(completer: Completer, prompts: list[str], options: SampleOptions) -> list[tuple[str, bool]]:
    """Sample with the sampler that training uses."""
    key = derive_seed(options.seed, "sample")
    samples = completer.sample(prompts, count=options.count, key=key, greedy=options.greedy)
    texts = [
        completer.text(ids, mask) for ids, mask in zip(samples.completion_ids, samples.completion_mask, strict=True)
    ]
    return list(zip(texts, samples.finished.tolist(), strict=True))


def _nucleus(completer: Completer, prompts: list[str], options: SampleOptions) -> list[tuple[str, bool]]:
    """Sample by nucleus sampling: from the most likely tokens that together have probability top_p."""
    assert options.top_p is not None
    completer.encode(prompts)  # no completion is shortened, as without top_p
    torch.manual_seed(options.seed)
    drawing = GREEDY if options.greedy else Drawing(completer.sampling.temperature, options.top_p)
    return [
        completer.stream(completer.to_prompt(text), lambda _: None, drawing)
        for text in prompts
        for _ in range(options.count)
    ]


TEMPERATURE, TOP_P = 0.7, 0.95  # of an answer, where only the other one is given
HELP = "/reset begins anew, /quit ends; Ctrl-C stops an answer"


@runtime_checkable
class LineReader(Protocol):
    """A stream of lines, such as standard input."""

    def readline(self) -> str:
        """Return the next line, or an empty string at the end of the stream."""

    def isatty(self) -> bool:
        """Return whether the stream is an interactive terminal."""


@runtime_checkable
class LineWriter(Protocol):
    """A stream that is written to, such as standard output."""

    def write(self, text: str, /) -> object:
        """Write text, which may be part of a line."""

    def flush(self) -> None:
        """Flush what was written."""


def run_chat(
    path: str,
    options: ChatOptions,
    *,
    sampling: SamplingConfig,
    read: LineReader | None = None,
    out: LineWriter | None = None,
) -> None:
    """Answer each line that is typed or piped in, until the end of the input or /quit.

    Args:
        path: a run folder, a model folder or a hub id.
        sampling: the longest answer (see checks.check_chat).
        read: where messages come from; standard input if None.
        out: where answers go; standard output if None.

    Raises:
        UserError: the model has no chat template or cannot be loaded.
    """
    read, out = read or sys.stdin, out or sys.stdout
    interactive = read.isatty()
    if interactive:
        out.write(f"loading {path} ...\n")
    conversation = _open(path, options, sampling)
    if interactive:
        out.write(f"{HELP}\nAnswers: {describe_drawing(conversation.drawing)}\n")
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


def _open(path: str, options: ChatOptions, sampling: SamplingConfig) -> Conversation:
    if options.seed is not None:
        torch.manual_seed(options.seed)
    warn_of_rounding(path)
    model = Completer(path, sampling, chat=load_chat_format(path))
    if model.encoder.template.source is None:
        raise UserError(
            f"{path} has no chat template, so that there is no conversation to have: "
            f"rlhf sample {path} --prompt … continues a text"
        )
    return Conversation(model, options.system, choose_drawing(options, published_drawing(model.folder)))


def choose_drawing(options: ChatOptions, published: Drawing) -> Drawing:
    """Return how answers are drawn: by the options, or as the model was published if there are none."""
    if options.greedy:
        return GREEDY
    if options.temperature is None and options.top_p is None:
        return published
    return Drawing(
        TEMPERATURE if options.temperature is None else options.temperature,
        TOP_P if options.top_p is None else options.top_p,
    )


def describe_drawing(drawing: Drawing) -> str:
    """Describe in a few words how answers are drawn."""
    if drawing == GREEDY:
        return "the most likely token each time (--temperature draws)"
    top_k = f", top-k {drawing.top_k}" if drawing.top_k else ""
    return f"temperature {drawing.temperature:g}, top-p {drawing.top_p:g}{top_k}"


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
