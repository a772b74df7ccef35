"""Stop texts: cut completions before them, as if the model had ended there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf.data.chat import Rendered
from rlhf.data.pad import right_pad
from rlhf.evaluation.suites.subject import Subject
from rlhf.rewards.texts import decode
from rlhf.types import Completions


def cut(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the first stop text in it."""
    ends = [start for stop in stops if stop and (start := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def cut_completions(completions: Completions, subject: Subject, stops: Sequence[str]) -> tuple[Completions, int]:
    """Cut completions before their first stop text and end them with EOS; return all of them and how many were cut.

    If any was cut, the `sampler_logprobs` of all of them are zero.
    """
    texts = decode(completions, subject.encoder.tokenizer)
    ids = [
        row[mask].tolist() for row, mask in zip(completions.completion_ids, completions.completion_mask, strict=True)
    ]
    shortened = [i for i, text in enumerate(texts.completions) if cut(text, stops) != text]
    if not shortened:
        return completions, 0
    for i in shortened:
        rendered = Rendered(texts.prompts[i], (cut(texts.completions[i], stops),), templated=False)
        ids[i] = subject.encoder.completions([rendered], 0)[0]
    ended = torch.zeros(len(completions), dtype=torch.bool)
    ended[shortened] = True
    return with_completions(completions, ids, subject, finished=completions.finished | ended), len(shortened)


def with_completions(
    prompts: Completions, ids: Sequence[list[int]], subject: Subject, *, finished: torch.Tensor
) -> Completions:
    """Replace the completions of a batch by others, given as token ids; `sampler_logprobs` are zero."""
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
