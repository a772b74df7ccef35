"""rlhf sample: completions of prompts, printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from rlhf.config.load import read_yaml, validate
from rlhf.config.sections import SamplingConfig
from rlhf.errors import UserError
from rlhf.factory.sampler import NO_TEMPLATE, Completer, chat_format_of
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.progress import printable


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How many completions of each prompt are sampled, and how."""

    count: int = 1
    seed: int = 0
    greedy: bool = False
    top_p: float | None = None  # None: from the full distribution, as in training
    raw: bool = False  # no chat template


def run_sample(
    path: str, prompts: list[str], options: SampleOptions, *, sampling: SamplingConfig, console: Console
) -> None:
    """Print completions of each prompt by a model, from a run or a model folder.

    Raises:
        UserError: an option is invalid, or the model cannot be loaded.
    """
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError("--top-p is above 0 and at most 1")
    completer = Completer(path, sampling, chat=NO_TEMPLATE if options.raw else chat_format_of(path))
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
    torch.manual_seed(options.seed)
    return [
        completer.stream(completer.to_prompt(text), lambda _: None, top_p=options.top_p, greedy=options.greedy)
        for text in prompts
        for _ in range(options.count)
    ]


def sampling_of(path: str, max_new_tokens: int | None, temperature: float | None) -> SamplingConfig:
    """Return the sampling settings of the run in `path`, or the defaults, with the given values on top."""
    run = Path(path) / "config.yaml"
    settings = dict(read_yaml(path).get("sampling", {})) if run.is_file() else {}
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    if temperature is not None:
        settings["temperature"] = temperature
    return validate(SamplingConfig, settings)
