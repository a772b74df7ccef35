"""Completions that end before a stop text, as if the model had ended there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf.data.chat import Rendered
from rlhf.data.pad import right_pad
from rlhf.evaluation.suites.subject import Subject
from rlhf.rewards.texts import decode
from rlhf.types import Completions


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop texts in it."""
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def cut_completions(completions: Completions, subject: Subject, stops: Sequence[str]) -> tuple[Completions, int]:
    """The completions, those with a stop text in them cut before it and ended by EOS; and how many were cut.

    Their `sampler_logprobs` are zero.
    """
    texts = decode(completions, subject.encoder.tokenizer)
    live = [
        row[mask].tolist() for row, mask in zip(completions.completion_ids, completions.completion_mask, strict=True)
    ]
    shorter = [i for i, text in enumerate(texts.completions) if cut(text, stops) != text]
    if not shorter:
        return completions, 0
    for i in shorter:
        rendered = Rendered(texts.prompts[i], (cut(texts.completions[i], stops),), templated=False)
        live[i] = subject.encoder.completions([rendered], 0)[0]
    ended = torch.zeros(len(completions), dtype=torch.bool)
    ended[shorter] = True
    return with_completions(completions, live, subject, finished=completions.finished | ended), len(shorter)


def with_completions(
    prompts: Completions, ids: Sequence[list[int]], subject: Subject, *, finished: torch.Tensor
) -> Completions:
    """The prompts of a batch with other completions, given as token ids."""
    completion_ids, mask = right_pad(ids, subject.encoder.pad_id)
    return Completions(
        prompt_ids=prompts.prompt_ids,
        prompt_mask=prompts.prompt_mask,
        row_ids=prompts.row_ids,
        references=prompts.references,
        completion_ids=completion_ids,
        completion_mask=mask,
        sampler_logprobs=torch.zeros(completion_ids.shape),
        finished=finished,
        group_size=prompts.group_size,
    )
