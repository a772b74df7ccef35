"""What a reward that reads text is given, and the check on what it gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.errors import NonFiniteScores, RewardError
from rlhf.types import Completions, Scores


@runtime_checkable
class Decoder(Protocol):
    """The part of a tokenizer that rewards use."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        """One text for each list of ids."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Completions as text; one entry a row."""

    prompts: list[str]
    completions: list[str]
    references: list[dict[str, Any]]


def decode(completions: Completions, tokenizer: Decoder) -> Texts:
    """Prompts and completions as text, without special tokens and without the EOS that ended a completion.

    A prompt is the text of its row's "prompt" column where there is one, else its decoded tokens. A completion is what
    it adds to the decoded prompt: many tokenizers drop a leading space, so its tokens alone would lose one.
    """
    prompt_ids, own_ids = live_ids(completions)
    own_ids = [ids[:-1] if ended else ids for ids, ended in zip(own_ids, completions.finished.tolist(), strict=True)]
    prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    alone = tokenizer.batch_decode(own_ids, skip_special_tokens=True)
    joined_ids = [before + own for before, own in zip(prompt_ids, own_ids, strict=True)]
    joined = tokenizer.batch_decode(joined_ids, skip_special_tokens=True)
    references = [dict(reference) for reference in completions.references]
    return Texts(
        prompts=[_original(r, p) for r, p in zip(references, prompts, strict=True)],
        # A character cut in two by the prompt's end decodes differently once whole: then there is no common start.
        completions=[
            both.removeprefix(before) if both.startswith(before) else own
            for both, before, own in zip(joined, prompts, alone, strict=True)
        ],
        references=references,
    )


def checked_scores(values: object, parts: object, texts: Texts, *, who: str) -> Scores:
    """The scores `who` returned, as tensors.

    Raises:
        RewardError: not one number a completion, in the scores or in a part.
        NonFiniteScores: one that is NaN or infinite.
    """
    if not isinstance(parts, Mapping):
        raise RewardError(
            f"{who} returned parts of type {type(parts).__name__}; give a dict of name -> list of numbers"
        )
    return Scores(
        values=_numbers(values, texts.completions, who=who, what="scores"),
        parts={
            str(name): _numbers(part, texts.completions, who=who, what=f"values of part {name!r}")
            for name, part in parts.items()
        },
    )


def shown(text: str, limit: int = 200) -> str:
    """A text for an error message: quoted, and cut when long."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def live_ids(completions: Completions) -> tuple[list[list[int]], list[list[int]]]:
    """The token ids of every prompt and of every completion, its EOS included."""
    prompts = _live(completions.prompt_ids, completions.prompt_mask)
    return prompts, _live(completions.completion_ids, completions.completion_mask)


def _live(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[live].tolist() for row, live in zip(ids.cpu(), mask.cpu(), strict=True)]


def _original(reference: Mapping[str, Any], decoded: str) -> str:
    prompt = reference.get("prompt")
    return prompt if isinstance(prompt, str) else decoded


def _numbers(values: object, completions: list[str], *, who: str, what: str) -> Float[Tensor, " B"]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RewardError(f"{who} returned {type(values).__name__} for {what}; give a list of numbers")
    if len(values) != len(completions):
        at = f"; the first without one: {shown(completions[len(values)])}" if len(values) < len(completions) else ""
        raise RewardError(f"{who} returned {len(values)} {what} for {len(completions)} completions{at}")
    numbers = [_number(value) for value in values]
    bad = [i for i, number in enumerate(numbers) if not math.isfinite(number)]
    if bad:
        raise NonFiniteScores(
            f"{who} returned {len(bad)} {what} of {len(values)} that are not finite numbers; "
            f"the first is {shown(str(values[bad[0]]))}, for the completion {shown(completions[bad[0]])}"
        )
    return torch.tensor(numbers, dtype=torch.float32)


def _number(value: object) -> float:
    """The value in float32's range; NaN when it is not a number at all. numpy's and torch's scalars are numbers."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= torch.finfo(torch.float32).max else math.nan
