"""rlhf sample and rlhf chat: completions of prompts, and a conversation in the terminal or through a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.text import Text

from rlhf.api.checks import ChatOptions, SampleOptions
from rlhf.commands.notices import warn_of_rounding
from rlhf.config.data import ChatFormat, PromptsConfig
from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.data.prompts import prompt_pipeline
from rlhf.errors import DataError, UserError
from rlhf.factory.sampler import GREEDY, NO_TEMPLATE, Completer, Conversation, Drawing, published_drawing
from rlhf.models.backbone import context_length
from rlhf.models.folders import digest_of_model
from rlhf.references import CONVERSATION, MESSAGES, own_prompt
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.fingerprint import combine_digests
from rlhf.tracking.progress import printable
from rlhf.types import Completions, Prompts

PROMPTS_AT_ONCE = 64  # of a file: an interruption loses the completions of at most these
TAKEN = {"completions", "chosen", "rejected", "messages", "conversations", MESSAGES, CONVERSATION}  # not kept of a row


def run_sample(
    path: str, prompts: list[str], options: SampleOptions, *, sampling: SamplingConfig, console: Console
) -> None:
    """Print completions of each prompt by a model, from a run or a model folder.

    Raises:
        UserError: the model cannot be loaded, or a prompt is too long for it.
    """
    completer = _load(path, options, sampling)
    samples = completer.sample(
        prompts, count=options.count, key=derive_seed(options.seed, "sample"), greedy=options.greedy
    )
    for row, (text, finished) in enumerate(_texts(completer, samples)):
        if row % options.count == 0:
            console.print(Text(printable(prompts[row // options.count]), style="bold"), soft_wrap=True)
        unfinished = "" if finished else " …"
        console.print(Text(f"  → {printable(text.strip())}{unfinished}"), soft_wrap=True)


def write_samples(
    path: str, data: PromptsConfig, out: Path, options: SampleOptions, *, sampling: SamplingConfig, console: Console
) -> None:
    """Write completions of the prompts of a data set to a JSONL file, which `rlhf label` and SFT read.

    A line has `prompt` (a text or messages), `completion`, `finished` (false: cut at `sampling.max_new_tokens`) and the
    other columns of the prompt's row. Draws depend on the seed and the prompt's place in the data set alone. Until the
    last line is there, the file has another name: its own, a digest of what the completions depend on, and `.part`. The
    same call goes on from it after an interruption.

    Raises:
        UserError: the model or the data cannot be read, or the file cannot be written.
    """
    completer = _load(path, options, sampling)
    prompts = prompt_pipeline(
        data,
        completer.tokenizer,
        chat_template=_chat(path, options),
        context=context_length(completer.model),
        max_new_tokens=sampling.max_new_tokens,
    ).load()
    told = prompts.skips.summary().replace("data.chat_template=none", "--raw")
    console.print(Text(told), soft_wrap=True)
    made_of = [digest_of_model(path) or path, repr((options, sampling, _chat(path, options))), repr(prompts.references)]
    part = out.with_name(f"{out.name}.{combine_digests([*made_of, str(prompts.skips.digest)])[:12]}.part")
    key = derive_seed(options.seed, "sample")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _alone(part), part.open("a+b") as file:
            batches = _whole_batches(file, PROMPTS_AT_ONCE * options.count)
            if batches:
                console.print(Text(f"going on from {sum(map(len, batches)):,} completions in {part}"), soft_wrap=True)
            for batch in islice(prompts.batches(PROMPTS_AT_ONCE), len(batches), None):
                samples = completer.sampler.sample(batch, key=key, group_size=options.count, greedy=options.greedy)
                batches.append([*_lines(completer, batch, samples, options.count)])
                file.writelines(line.encode() for line in batches[-1])
                file.flush()
            if out.exists():
                raise UserError(f"{out} is there by now: the completions are in {part}")
            part.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    rows = [json.loads(line) for batch in batches for line in batch]
    cut = sum(not row["finished"] for row in rows)
    console.print(
        Text(f"{len(rows):,} completions written to {out}; {cut:,} were cut at {sampling.max_new_tokens} tokens"),
        soft_wrap=True,
    )


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Keep other processes from writing the same file.

    Raises:
        UserError: another one does.
    """
    lock = part.with_name(f"{part.name}.lock")
    try:
        with FileLock(lock, blocking=False):
            yield
    except Timeout:
        raise UserError(f"another process writes {part}: wait for it, or name another --out") from None
    lock.unlink(missing_ok=True)


def _whole_batches(file: BinaryIO, rows: int) -> list[list[str]]:
    """Read the batches of `rows` lines that an interrupted call wrote, and remove the rest from the file."""
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]  # the last may be cut within a character
    batches = [lines[start : start + rows] for start in range(0, len(lines) - rows + 1, rows)]
    file.truncate(sum(map(len, chain(*batches))))
    return [[line.decode() for line in batch] for batch in batches]


def _lines(completer: Completer, prompts: Prompts, samples: Completions, count: int) -> Iterator[str]:
    """Yield the line of each completion, `count` of a prompt."""
    for row, (text, finished) in enumerate(_texts(completer, samples)):
        columns = prompts.references[row // count]
        kept = {name: value for name, value in columns.items() if name not in TAKEN}
        line = {**kept, "prompt": own_prompt(columns), "completion": text, "finished": finished}
        yield json.dumps(line, ensure_ascii=False, default=str) + "\n"


def _load(path: str, options: SampleOptions, sampling: SamplingConfig) -> Completer:
    warn_of_rounding(path)
    return Completer(path, sampling, chat=_chat(path, options))


def _chat(path: str, options: SampleOptions) -> ChatFormat:
    """Return the chat format of a run, or the one without a template for raw prompts."""
    return NO_TEMPLATE if options.raw else load_chat_format(path)


def _texts(completer: Completer, samples: Completions) -> Iterator[tuple[str, bool]]:
    """Yield the text of each completion, and whether it ended by itself."""
    rows = zip(samples.completion_ids, samples.completion_mask, samples.finished.tolist(), strict=True)
    return ((completer.text(ids, mask), finished) for ids, mask, finished in rows)


TEMPERATURE, TOP_P = 0.7, 0.95  # of an answer, if only the other one is given
HELP = "/reset begins again, /quit ends; Ctrl-C stops an answer"


def run_chat(path: str, options: ChatOptions, *, sampling: SamplingConfig) -> None:
    """Answer each line that is typed or piped in, until the end of the input or /quit.

    Args:
        path: a run folder, a model folder or a hub id.
        sampling: the longest answer (see checks.check_chat).

    Raises:
        UserError: the model has no chat template or cannot be loaded.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stdout.write(f"loading {path} ...\n")
    conversation = _open(path, options, sampling)
    if interactive:
        sys.stdout.write(f"{HELP}\nAnswers: {describe_drawing(conversation.drawing)}\n")
    for line in _read_lines(interactive=interactive):
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/reset":
                conversation.reset()
            case text if text.startswith("/") and " " not in text:
                sys.stdout.write(f"{text}? {HELP}\n")
            case text:
                _answer(conversation, text)
    if interactive:
        sys.stdout.write("\n")


def _open(path: str, options: ChatOptions, sampling: SamplingConfig) -> Conversation:
    if options.seed is not None:
        torch.manual_seed(options.seed)
    warn_of_rounding(path)
    model = Completer(path, sampling, chat=load_chat_format(path))
    if model.encoder.template.source is None:
        raise UserError(
            f"{path} has no chat template, so no conversation is possible: "
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


def _read_lines(*, interactive: bool) -> Iterator[str]:
    """Yield the lines of the input; an interrupt at the prompt (Ctrl-C) ends it, like the end of file.

    Raises:
        DataError: the input is not UTF-8.
    """
    read_line: Callable[[], str] = (lambda: input("> ") + "\n") if interactive else sys.stdin.readline
    while True:
        try:
            line = read_line()
            line.encode("utf-8")  # a byte that was kept as a surrogate
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeError as error:
            raise DataError("the input is not UTF-8: convert it first") from error
        if not line:
            return
        yield line


def _answer(conversation: Conversation, text: str) -> None:
    def write(chunk: str) -> None:
        sys.stdout.write(printable(chunk))
        sys.stdout.flush()

    try:
        complete = conversation.ask(text, write)
    except DataError as error:
        sys.stdout.write(f"{error}: /reset begins again\n")
        return
    sys.stdout.write("\n" if complete else " …\n")
    sys.stdout.flush()
