"""What flows: Prompts -> Completions -> Rollout -> Experience, and what the offline losses read.

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
    """Rows of equal standing. Tensors have the rows on axis 0; tuples have one entry a row; the rest is shared."""

    def __len__(self) -> int:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor | tuple):
                return len(value)
        raise TypeError(f"{type(self).__name__} has no per-row field")

    def rows(self: B, index: Tensor | slice) -> B:
        """The rows that `index` (integers, or a slice) names, in that order."""
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
        """Consecutive parts of at most `size` rows, the rows first put in `order`."""
        order = torch.arange(len(self)) if order is None else order
        for start in range(0, len(order), size):
            yield self.rows(order[start : start + size])

    def live_tokens(self) -> Int[Tensor, " B"]:
        """How many tokens each row has, prompt and completions; the two sides of a pair count their prompt once."""
        masks = [getattr(self, f.name) for f in fields(self) if f.name.endswith("_mask") and f.name != "loss_mask"]
        counts = torch.stack([mask.sum(dim=1) for mask in masks])
        return counts.sum(dim=0)

    def to(self: B, device: torch.device | str) -> B:
        """The same batch with its tensors on `device`."""
        moved = {
            f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def portions(sizes: Int[Tensor, " B"], limit: int) -> list[Int[Tensor, " part"]]:
    """Consecutive rows, as many at a time as have no more than `limit` together; at least one."""
    found: list[Tensor] = []
    rows: list[int] = []
    filled = 0
    for row, size in enumerate(sizes.tolist()):
        if rows and filled + size > limit:
            found.append(torch.tensor(rows))
            rows, filled = [], 0
        rows.append(row)
        filled += size
    return [*found, torch.tensor(rows)] if rows else found


def concat(batches: Sequence[B]) -> B:
    """One batch of the rows of all `batches`; `[B, P]` fields are left-padded and `[B, T]` ones right-padded to fit."""
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
    """A `kind` made of the fields of `batch` and the `new` ones: the next stage of the pipeline."""
    return kind(**{f.name: getattr(batch, f.name) for f in fields(batch)}, **new)


@dataclass(frozen=True, kw_only=True)
class Prompts(Batch):
    """What is sampled from."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    row_ids: Int[Tensor, " B"]  # the row's number within the step, over all processes: randomness belongs to it
    references: tuple[Mapping[str, Any], ...]  # what a function reward may need: the other columns of the row


@dataclass(frozen=True, kw_only=True)
class Completions(Prompts):
    """What the sampler produced. Rows of one prompt are contiguous, `group_size` at a time."""

    completion_ids: Int[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]  # True up to and including EOS
    sampler_logprobs: Float[Tensor, "B T"]  # as the sampler computed them; for the mismatch metric
    finished: Bool[Tensor, " B"]  # ended by EOS, not by length
    group_size: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One number a completion, and the named parts it is made of (for logging only)."""

    values: Float[Tensor, " B"]
    parts: Mapping[str, Float[Tensor, " B"]]


@dataclass(frozen=True, kw_only=True)
class Rollout(Completions):
    """What the frozen models say of it, before any update."""

    scores: Float[Tensor, " B"]  # one number a completion, after shaping
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion (ReMax); zero where none was sampled
    logprobs: Float[Tensor, "B T"]  # log pi_old: the policy at the start of this step; nats
    ref_logprobs: Float[Tensor, "B T"]  # of the policy itself when there is no reference: zero KL
    values: Float[Tensor, "B T"]  # V of the state in which token t is chosen; zero when there is no critic


@dataclass(frozen=True, kw_only=True)
class Experience(Rollout):
    """Credit assigned: what the update reads."""

    loss_mask: Bool[Tensor, "B T"]  # what is learned from: completion_mask less what the algorithm leaves out
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
    loss_mask: Bool[Tensor, "B T"]  # True where learned from; a subset of completion_mask


@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Batch):
    """Two completions of one prompt, the first preferred. B pairs; the two sides may differ in T."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    chosen_ids: Int[Tensor, "B Tc"]
    chosen_mask: Bool[Tensor, "B Tc"]
    rejected_ids: Int[Tensor, "B Tr"]
    rejected_mask: Bool[Tensor, "B Tr"]
    chosen_learned: Bool[Tensor, "B Tc"]  # what the assistant says of it: all but the user's turns in between
    rejected_learned: Bool[Tensor, "B Tr"]
    margins: Float[Tensor, " B"]  # by how much chosen is to be preferred; zero when the data do not say


@dataclass(frozen=True, kw_only=True)
class AnnotatedPairs(PreferencePairs):
    """With what the reference says of both sides: log-probabilities summed over tokens; 0 where a loss has none."""

    chosen_ref_logprobs: Float[Tensor, " B"]
    rejected_ref_logprobs: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class SampledPairs(AnnotatedPairs):
    """Drawn from the policy that learns from them: with what it said of both sides when it drew them."""

    chosen_old_logprobs: Float[Tensor, "B T"]
    rejected_old_logprobs: Float[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True)
class Labelled(Demonstrations):
    """Completions with a verdict on each, for losses that need no pairs (KTO)."""

    desirable: Bool[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class AnnotatedLabelled(Labelled):
    """With what the reference says of them: log-probabilities summed over tokens."""

    ref_logprobs: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class BaselinedLabelled(AnnotatedLabelled):
    """With the baseline of the whole minibatch at every row, so that a micro-batch of them is complete."""

    baselines: Float[Tensor, " B"]  # KTO's z0: nats
