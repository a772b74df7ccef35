"""The protocol of reward sources, the texts that most of them read, a judge that only watches, and scores over ranks.

In a distributed run every rank gets the same scores as a single process would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.masked import Mean
from rlhf.data.channels import final_answer, writes_channels
from rlhf.errors import NonFiniteScores, RewardError
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.seeding import generator
from rlhf.tracking.metrics import Metrics
from rlhf.types import Completions, Scores


@runtime_checkable
class RewardSource(Protocol):
    """Anything that scores completions."""

    def __call__(self, completions: Completions) -> Scores:
        """Score each completion with one finite number, on the CPU.

        Raises:
            RewardError: the scores are NaN or infinite, of the wrong length, or could not be obtained.
        """


@runtime_checkable
class BatchDecoder(Protocol):
    """The part of a tokenizer that rewards use."""

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        """Decode each list of token ids to a text."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts, completions and references as text; one entry per row."""

    prompts: list[str]
    completions: list[str]
    references: list[dict[str, Any]]


def decode(completions: Completions, tokenizer: BatchDecoder) -> Texts:
    """Decode prompts and completions to text, without special tokens and without the final EOS of a completion.

    A prompt is the text of its row's "prompt" column if there is one, else its decoded tokens. A completion is what it
    adds to the decoded prompt: many tokenizers drop a leading space, so its tokens decoded alone would lose one. Of a
    completion in channels it is the final answer.
    """
    prompt_ids, completion_ids = unpadded_ids(completions)
    completion_ids = [
        ids[:-1] if ended else ids for ids, ended in zip(completion_ids, completions.finished.tolist(), strict=True)
    ]
    prompts = tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
    alone = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    joined_ids = [before + after for before, after in zip(prompt_ids, completion_ids, strict=True)]
    joined = tokenizer.batch_decode(joined_ids, skip_special_tokens=True)
    references = [dict(reference) for reference in completions.references]
    # A character split by the prompt's end decodes differently once complete: then the texts share no start.
    answers = [
        text.removeprefix(before) if text.startswith(before) else completion
        for text, before, completion in zip(joined, prompts, alone, strict=True)
    ]
    if writes_channels(tokenizer):
        answers = [final_answer(tokenizer, ids) for ids in completion_ids]
    return Texts(
        prompts=[_original_prompt(r, p) for r, p in zip(references, prompts, strict=True)],
        completions=answers,
        references=references,
    )


def checked_scores(values: object, parts: object, texts: Texts, *, who: str, may_abstain: bool = False) -> Scores:
    """Convert the scores and parts that `who` returned to float32 tensors.

    With `may_abstain`, None and NaN mean that the source does not apply to the completion, and become NaN.

    Raises:
        RewardError: the scores or a part are not one number per completion.
        NonFiniteScores: a number is NaN, infinite, or outside of float32's range.
    """
    if not isinstance(parts, Mapping):
        raise RewardError(
            f"{who} returned parts of type {type(parts).__name__}; give a dict of name -> list of numbers"
        )
    return Scores(
        values=_to_tensor(values, texts.completions, who=who, what="scores", may_abstain=may_abstain),
        parts={
            str(name): _to_tensor(
                part, texts.completions, who=who, what=f"values of part {name!r}", may_abstain=may_abstain
            )
            for name, part in parts.items()
        },
    )


def quoted(text: str, limit: int = 200) -> str:
    """Quote a text for an error message, cut to `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def unpadded_ids(completions: Completions) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of every prompt and every completion without padding, EOS included."""
    prompts = _unpadded(completions.prompt_ids, completions.prompt_mask)
    return prompts, _unpadded(completions.completion_ids, completions.completion_mask)


def _unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[live].tolist() for row, live in zip(ids.cpu(), mask.cpu(), strict=True)]


def _original_prompt(reference: Mapping[str, Any], decoded: str) -> str:
    prompt = reference.get("prompt")
    return prompt if isinstance(prompt, str) else decoded


def _to_tensor(
    values: object, completions: list[str], *, who: str, what: str, may_abstain: bool
) -> Float[Tensor, " B"]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RewardError(f"{who} returned {type(values).__name__} for {what}; give a list of numbers")
    if len(values) != len(completions):
        detail = (
            f"; the first without one: {quoted(completions[len(values)])}" if len(values) < len(completions) else ""
        )
        raise RewardError(f"{who} returned {len(values)} {what} for {len(completions)} completions{detail}")
    numbers = [_to_float(value) for value in values]
    bad = [
        i
        for i, number in enumerate(numbers)
        if not math.isfinite(number) and not (may_abstain and _is_missing(values[i]))
    ]
    if bad:
        raise NonFiniteScores(
            f"{who} returned {len(bad)} {what} of {len(values)} that are not finite numbers; "
            f"the first is {quoted(str(values[bad[0]]))}, for the completion {quoted(completions[bad[0]])}"
            + ABSTENTION_HINT * (values[bad[0]] is None)
            + STRING_HINT * isinstance(values[bad[0]], str)
        )
    return torch.tensor(numbers, dtype=torch.float32)


ABSTENTION_HINT = "; only a source in an ensemble may leave a completion to the others by returning None"

STRING_HINT = " (it is a string: return numbers, as in float(score))"


def _is_missing(value: object) -> bool:
    """Check whether a value says "does not apply": None or NaN."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def _to_float(value: object) -> float:
    """Convert a number to float; return NaN for a non-number or a value outside of float32's range.

    numpy's and torch's scalars are numbers.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= torch.finfo(torch.float32).max else math.nan


class ShardedReward:
    """Wraps a source that scores each completion independently: every rank scores its share of the batch."""

    def __init__(self, source: RewardSource, ranks: Distributed) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score this rank's share of the completions and gather the scores of all ranks."""
        names: list[str] = []

        def score(share: Completions) -> tuple[Tensor, ...]:
            scores = self.ranks.all_succeed(lambda: self.source(share))
            names[:] = sorted(scores.parts)
            return (scores.values, *(scores.parts[name] for name in names))

        values, *parts = self.ranks.map_rows_to_tensors(completions, score)
        return Scores(values=values, parts=dict(zip(names, parts, strict=True)))


class MainRankReward:
    """Wraps a source that may look at the whole batch or must be asked once: rank 0 asks it and broadcasts the scores.

    A Python function or a server sees the same batch as in a single-process run, so its scores cannot depend on the
    number of ranks.
    """

    def __init__(self, source: RewardSource, ranks: Distributed) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions on rank 0 and broadcast the scores to all ranks."""

        def ask() -> tuple[Tensor, dict[str, Tensor]]:
            scores = self.source(completions)
            return scores.values, dict(scores.parts)

        values, parts = self.ranks.on_main(ask)
        assert isinstance(values, torch.Tensor)
        return Scores(values=values, parts=parts)


def watch_metrics(proxy: Float[Tensor, " N"], watched: Float[Tensor, " N"]) -> dict[str, Mean]:
    """Compare the scores that are trained on with those of the watching judge, on the same completions.

    watch/score is the judge's mean, watch/gap the proxy's mean less the judge's, and watch/correlation Pearson's
    correlation of the two, where both vary. The gap means something if both are on one scale, such as that of
    calibrated reward models; how it changes does in any case.
    """
    proxy, watched = proxy.double(), watched.double()
    metrics = {"watch/score": Mean.of(watched), "watch/gap": Mean.of(proxy - watched)}
    if len(proxy) > 1 and bool(proxy.min() < proxy.max()) and bool(watched.min() < watched.max()):
        metrics["watch/correlation"] = Mean(float(torch.corrcoef(torch.stack([proxy, watched]))[0, 1]), 1.0)
    return metrics


@dataclass(frozen=True, kw_only=True)
class WatchingJudge:
    """Scores `rows` completions of every `every`-th step; `warn` receives a message when it could not."""

    source: RewardSource
    rows: int
    every: int
    seed: int
    warn: Callable[[str], None]

    def __call__(self, completions: Completions, scores: Scores, step: int) -> Metrics:
        """Compute the metrics of a step; empty if it is not watched.

        The completions are drawn by the seed and the step alone, so that a resumed run watches the same ones. They are
        compared by the score before shaping. Where the judge fails, training goes on and watch/failed is 1.
        """
        if step % self.every:
            return Metrics()
        order = torch.randperm(len(completions), generator=generator(self.seed, "watch", step))
        index = order[: self.rows].sort().values
        metrics = Metrics()
        try:
            watched = self.source(_ungrouped(completions, index)).values
        except RewardError as error:
            self.warn(f"warning: reward.watch could not score step {step}: {error}")
            metrics.add("watch/failed", 1.0)
            return metrics
        metrics.add("watch/failed", 0.0)
        metrics.update(watch_metrics(scores.parts.get("raw", scores.values)[index], watched))
        return metrics


def _ungrouped(completions: Completions, index: Tensor) -> Completions:
    """Select rows, which are then no longer whole groups of a prompt."""
    return replace(completions.rows(index), group_size=1)
