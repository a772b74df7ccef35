"""rlhf sample: completions of prompts, printed."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.text import Text

from rlhf.commands.checks import SampleOptions
from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.factory.sampler import NO_TEMPLATE, Completer
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.progress import printable


def run_sample(
    path: str, prompts: list[str], options: SampleOptions, *, sampling: SamplingConfig, console: Console
) -> None:
    """Print completions of each prompt by a model, from a run or a model folder.

    Raises:
        UserError: the model cannot be loaded.
    """
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
    torch.manual_seed(options.seed)
    return [
        completer.stream(completer.to_prompt(text), lambda _: None, top_p=options.top_p, greedy=options.greedy)
        for text in prompts
        for _ in range(options.count)
    ]
