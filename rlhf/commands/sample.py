"""rlhf sample: talk to a trained model."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from rlhf.build.context import model_folder
from rlhf.config.load import read_yaml
from rlhf.config.sections import SamplingConfig
from rlhf.data.chat import load_tokenizer
from rlhf.data.prompts import encode_texts
from rlhf.models.backbone import eos_ids, fit_vocabulary, freeze, load_causal_lm
from rlhf.runtime.progress import printable
from rlhf.runtime.seeding import derive
from rlhf.sampling.hf import HFSampler


def run_sample(
    path: str, prompts: list[str], *, count: int, seed: int, greedy: bool, sampling: SamplingConfig, console: Console
) -> None:
    """Print `count` completions of each prompt by the model of a run, or in a model folder."""
    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    model = load_causal_lm(folder)
    fit_vocabulary(model, tokenizer, folder)
    freeze(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampler = HFSampler(
        model.to(device),
        sampling,
        eos_ids=eos_ids(model, tokenizer),
        pad_id=int(tokenizer.pad_token_id),
        dtype="float32",
        device=device,
    )
    drawn = sampler.sample(
        encode_texts(prompts, tokenizer), key=derive(seed, "sample"), group_size=count, greedy=greedy
    )
    for row in range(len(drawn)):
        text = tokenizer.decode(drawn.completion_ids[row][drawn.completion_mask[row]], skip_special_tokens=True)
        if row % count == 0:
            console.print(Text(printable(prompts[row // count]), style="bold"), soft_wrap=True)
        mark = "" if drawn.finished[row] else " …"
        console.print(Text(f"  → {printable(text.strip())}{mark}"), soft_wrap=True)


def sampling_of(path: str, max_new_tokens: int | None, temperature: float | None) -> SamplingConfig:
    """The run's own sampling settings, where `path` is a run, with what the user says on top."""
    run = Path(path) / "config.yaml"
    settings = dict(read_yaml(path).get("sampling", {})) if run.is_file() else {}
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    if temperature is not None:
        settings["temperature"] = temperature
    return SamplingConfig.model_validate(settings)
