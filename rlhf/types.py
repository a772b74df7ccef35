"""The data that flow through training: Prompts -> Completions -> Rollout -> Experience, and the offline batches.

Axes: B rows, P prompt tokens (left-padded), T completion tokens (right-padded), G completions per prompt.
Every `[B, T]` tensor is aligned with `completion_ids`: entry t belongs to completion token t.
Masks are Bool and True where live. No field is Optional: without a critic the values are zero,
without a reference the KL is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

B = TypeVar("B", bound="Batch")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch: every tensor field shares dimension 0; tuples have one entry per row; other fields hold for all rows."""

    def __len__(self) -> int:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor | tuple):
                return len(value)
        raise TypeError(f"{type(self).__name__} has no per-row field")

    def rows(self: B, index: Tensor | slice) -> B:
        """Return the rows selected by `index` (integers or a slice), in that order."""
        assert isinstance(index, slice) or index.dtype == torch.long, "rows are named by integers, not by a mask"
        picked: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                picked[field.name] = value[index]
            elif isinstance(value, tuple):
                positions = range(len(value))[index] if isinstance(index, slice) else index.tolist()
                picked[field.name] = tuple(value[i] for i in positions)
        return replace(self, **picked)

    def split(self: B, size: int, order: Tensor | None = None) -> Iterator[B]:
        """Yield consecutive parts of at most `size` rows, reordering the rows by `order` first if it is given."""
        order = torch.arange(len(self)) if order is None else order
        for start in range(0, len(order), size):
            yield self.rows(order[start : start + size])

    def live_tokens(self) -> Int[Tensor, " B"]:
        """Count the live tokens of each row, prompt and completions; the prompt of a pair counts once."""
        masks = [getattr(self, f.name) for f in fields(self) if f.name.endswith("_mask") and f.name != "loss_mask"]
        counts = torch.stack([mask.sum(dim=1) for mask in masks])
        return counts.sum(dim=0)

    def to(self: B, device: torch.device | str) -> B:
        """Return the batch with its tensors on `device`."""
        moved = {
            f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def group_by_size(sizes: Int[Tensor, " B"], limit: int) -> list[Int[Tensor, " part"]]:
    """Group consecutive rows so that the sizes in a group sum to at most `limit`; a group has at least one row."""
    groups: list[Tensor] = []
    rows: list[int] = []
    filled = 0
    for row, size in enumerate(sizes.tolist()):
        if rows and filled + size > limit:
            groups.append(torch.tensor(rows))
            rows, filled = [], 0
        rows.append(row)
        filled += size
    return [*groups, torch.tensor(rows)] if rows else groups


def concat(batches: Sequence[B]) -> B:
    """Concatenate batches along dimension 0, left-padding `[B, P]` fields and right-padding `[B, T]` ones to fit."""
    first = batches[0]
    if len(batches) == 1:
        return first
    joined: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(batch, field.name) for batch in batches]
        if isinstance(values[0], tuple):
            joined[field.name] = tuple(entry for value in values for entry in value)
        elif isinstance(values[0], Tensor):
            joined[field.name] = torch.cat(_padded(values, left=field.name.startswith("prompt_")))
        else:
            assert all(value == values[0] for value in values), f"{field.name} differs between the batches: {values}"
    return replace(first, **joined)


def _padded(tensors: Sequence[Tensor], *, left: bool) -> list[Tensor]:
    if tensors[0].ndim < 2:
        return list(tensors)
    width = max(t.shape[1] for t in tensors)
    pads = [(width - t.shape[1], 0) if left else (0, width - t.shape[1]) for t in tensors]
    return [torch.nn.functional.pad(t, pad) for t, pad in zip(tensors, pads, strict=True)]


def extend(kind: type[B], batch: Batch, **new: Any) -> B:
    """Build a `kind` from the fields of `batch` and the `new` ones: the next stage of the pipeline."""
    return kind(**{f.name: getattr(batch, f.name) for f in fields(batch)}, **new)


@dataclass(frozen=True, kw_only=True)
class Prompts(Batch):
    """Prompts to sample completions from."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    row_ids: Int[Tensor, " B"]  # the row's number within the step, over all ranks: random draws are keyed by it
    references: tuple[Mapping[str, Any], ...]  # the other columns of the data row, for function rewards


@dataclass(frozen=True, kw_only=True)
class Completions(Prompts):
    """Sampled completions. The rows of one prompt are contiguous, `group_size` at a time."""

    completion_ids: Int[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]  # True up to and including EOS
    sampler_logprobs: Float[Tensor, "B T"]  # as the sampler computed them; for the mismatch metric
    finished: Bool[Tensor, " B"]  # ended by EOS, not by length
    group_size: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One score per completion, and the named parts it is made of (for logging only)."""

    values: Float[Tensor, " B"]
    parts: Mapping[str, Float[Tensor, " B"]]


@dataclass(frozen=True, kw_only=True)
class Rollout(Completions):
    """Completions with their scores, log-probabilities and values, all computed before any update."""

    scores: Float[Tensor, " B"]  # one per completion, after shaping
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion (ReMax); zero where none was sampled
    logprobs: Float[Tensor, "B T"]  # log pi_old: the policy at the start of this step; nats
    ref_logprobs: Float[Tensor, "B T"]  # the policy's own when there is no reference: zero KL
    values: Float[Tensor, "B T"]  # V of the state in which token t is chosen; zero when there is no critic


@dataclass(frozen=True, kw_only=True)
class Experience(Rollout):
    """A rollout with token rewards, advantages and returns: what the update reads."""

    loss_mask: Bool[Tensor, "B T"]  # tokens in the loss: completion_mask minus what the algorithm leaves out
    rewards: Float[Tensor, "B T"]  # score on the last token, minus the KL penalty where it is placed here
    advantages: Float[Tensor, "B T"]  # zero outside the mask
    returns: Float[Tensor, "B T"]  # the critic's target


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Batch):
    """Prompts with the completions to imitate."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    completion_ids: Int[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]  # True where live
    loss_mask: Bool[Tensor, "B T"]  # tokens in the loss; a subset of completion_mask


@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Batch):
    """Pairs of completions of one prompt, the first preferred. B pairs; the two sides may differ in T."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    chosen_ids: Int[Tensor, "B Tc"]
    chosen_mask: Bool[Tensor, "B Tc"]
    rejected_ids: Int[Tensor, "B Tr"]
    rejected_mask: Bool[Tensor, "B Tr"]
    chosen_learned: Bool[Tensor, "B Tc"]  # tokens in the loss: the assistant's, without the user's turns in between
    rejected_learned: Bool[Tensor, "B Tr"]
    margins: Float[Tensor, " B"]  # by how much chosen should win; zero when the data do not say


@dataclass(frozen=True, kw_only=True)
class AnnotatedPairs(PreferencePairs):
    """Pairs with the reference's log-probabilities of both sides, summed over tokens; 0 if the loss uses none."""

    chosen_ref_logprobs: Float[Tensor, " B"]
    rejected_ref_logprobs: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class SampledPairs(AnnotatedPairs):
    """Pairs sampled from the policy being trained, with its per-token log-probabilities of both sides at that time."""

    chosen_old_logprobs: Float[Tensor, "B T"]
    rejected_old_logprobs: Float[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True)
class LabelledCompletions(Demonstrations):
    """Completions labelled desirable or undesirable, for losses that need no pairs (KTO)."""

    desirable: Bool[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class AnnotatedLabelledCompletions(LabelledCompletions):
    """Labelled completions with the reference's log-probabilities, summed over tokens."""

    ref_logprobs: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class BaselinedLabelledCompletions(AnnotatedLabelledCompletions):
    """Labelled completions with the minibatch's baseline in every row, so that each micro-batch is self-contained."""

    baselines: Float[Tensor, " B"]  # KTO's z0: nats
