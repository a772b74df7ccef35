"""rlhf sample: talk to a trained model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf.build.completer import Completer
from rlhf.config.load import read_yaml, validate
from rlhf.config.sections import SamplingConfig
from rlhf.runtime.progress import printable
from rlhf.runtime.seeding import derive


def run_sample(
    path: str, prompts: list[str], *, count: int, seed: int, greedy: bool, sampling: SamplingConfig, console: Console
) -> None:
    """Print `count` completions of each prompt by the model of a run, or in a model folder."""
    completer = Completer(path, sampling)
    drawn = completer.sample(prompts, count=count, key=derive(seed, "sample"), greedy=greedy)
    for row in range(len(drawn)):
        if row % count == 0:
            console.print(Text(printable(prompts[row // count]), style="bold"), soft_wrap=True)
        text = completer.text(drawn.completion_ids[row], drawn.completion_mask[row])
        unfinished = "" if drawn.finished[row] else " …"
        console.print(Text(f"  → {printable(text.strip())}{unfinished}"), soft_wrap=True)


def sampling_of(path: str, max_new_tokens: int | None, temperature: float | None) -> SamplingConfig:
    """The run's own sampling settings, where `path` is a run, with what the user says on top."""
    run = Path(path) / "config.yaml"
    settings = dict(read_yaml(path).get("sampling", {})) if run.is_file() else {}
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    if temperature is not None:
        settings["temperature"] = temperature
    return validate(SamplingConfig, settings)
