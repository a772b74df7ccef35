"""Preference losses over models: log-probabilities of whole completions, policy against reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.preference_loss import (
    PreferenceLoss,
    dpo,
    hinge,
    ipo,
    kto,
    kto_baseline,
    mismatched,
    orpo,
    robust_dpo,
    simpo,
    slic,
)
from rlhf.config.algorithm import (
    DpoLoss,
    HingeLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PairLossConfig,
    RobustDpoLoss,
    SimpoLoss,
    SlicLoss,
)
from rlhf.data.annotated import CompletionRows
from rlhf.masked import Mean
from rlhf.models.bundle import Models
from rlhf.runtime.ranks import ALONE, Ranks
from rlhf.types import (
    AnnotatedLabelled,
    AnnotatedPairs,
    BaselinedLabelled,
    Batch,
    Completions,
    Demonstrations,
    PreferencePairs,
    concat,
    extend,
)

TERM = "preference"  # what Engine.train is told: the loss term whose gradient reaches the policy

TokenLogprobs = Callable[[Demonstrations], Tensor]
"""What a model says of completion tokens: [B, T], zero outside the mask."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One completion of each pair, as numbers."""

    logprobs: Float[Tensor, " B"]  # log pi, summed over tokens
    ref_logprobs: Float[Tensor, " B"]
    lengths: Float[Tensor, " B"]

    @property
    def log_ratios(self) -> Float[Tensor, " B"]:
        """h = log pi - log pi_ref."""
        return self.logprobs - self.ref_logprobs

    @property
    def mean_log_ratios(self) -> Float[Tensor, " B"]:
        """h per token."""
        return self.log_ratios / self.lengths

    @property
    def mean_logprobs(self) -> Float[Tensor, " B"]:
        """m = log pi per token."""
        return self.logprobs / self.lengths


def pair_loss(config: PairLossConfig, chosen: Side, rejected: Side) -> PreferenceLoss:
    """The loss that `config` names: the only dispatch on a preference loss."""
    h = chosen.log_ratios, rejected.log_ratios
    match config:
        case DpoLoss():
            return dpo(*h, beta=config.beta, label_smoothing=config.label_smoothing)
        case RobustDpoLoss():
            return robust_dpo(*h, beta=config.beta, label_smoothing=config.label_smoothing)
        case IpoLoss(normalize="length"):
            return ipo(chosen.mean_log_ratios, rejected.mean_log_ratios, beta=config.beta)
        case IpoLoss():
            return ipo(*h, beta=config.beta)
        case HingeLoss():
            return hinge(*h, beta=config.beta, margin=config.margin)
        case SlicLoss():
            return slic(chosen.logprobs, rejected.logprobs, margin=config.margin, nll_coef=config.nll_coef)
        case SimpoLoss():
            return simpo(chosen.mean_logprobs, rejected.mean_logprobs, beta=config.beta, gamma=config.gamma)
        case OrpoLoss():
            return orpo(chosen.mean_logprobs, rejected.mean_logprobs, coef=config.coef)


def both_sides(pairs: PreferencePairs) -> Demonstrations:
    """2B rows for one forward pass: the chosen sides, then the rejected ones."""
    sides = (
        (pairs.chosen_ids, pairs.chosen_mask, pairs.chosen_learned),
        (pairs.rejected_ids, pairs.rejected_mask, pairs.rejected_learned),
    )
    return concat(
        [
            Demonstrations(
                prompt_ids=pairs.prompt_ids,
                prompt_mask=pairs.prompt_mask,
                completion_ids=ids,
                completion_mask=mask,
                loss_mask=learned,
            )
            for ids, mask, learned in sides
        ]
    )


def summed(logprobs: Float[Tensor, "B T"], learned: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Add up the log-probabilities of each completion in float64: differences of large sums are what counts."""
    return torch.where(learned, logprobs, 0.0).double().sum(dim=1)


class PairwiseLoss:
    """A loss that compares the two sides of a pair; a rlhf.runtime.step.Loss over AnnotatedPairs."""

    def __init__(self, models: Models, config: PairLossConfig) -> None:
        self.models = models
        self.config = config

    def norms(self, batch: AnnotatedPairs) -> dict[str, float]:
        """The number of pairs in the minibatch."""
        return {TERM: float(len(batch))}

    def terms(self, micro: AnnotatedPairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """The loss summed over the pairs of `micro`, and what both sides are worth."""
        pairs = micro.to(self.models.device)
        rows = both_sides(pairs)
        return self.compare(pairs, rows, self.models.policy_tokens(rows).logprobs)

    def compare(
        self, pairs: AnnotatedPairs, rows: Demonstrations, logprobs: Float[Tensor, "B2 T"]
    ) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """The same from what the policy says of `rows`, which are `both_sides(pairs)`."""
        chosen, rejected = _sides(pairs, rows, logprobs)
        found = pair_loss(self.config, chosen, rejected)
        gaps = (found.chosen_reward - found.rejected_reward).detach()
        observed = {
            "loss/preference": Mean.of(found.per_pair),
            "preference/accuracy": Mean.of(torch.heaviside(gaps, torch.full_like(gaps, 0.5))),  # a tie wins half
            "preference/margin": Mean.of(gaps),
            "preference/chosen_reward": Mean.of(found.chosen_reward),
            "preference/rejected_reward": Mean.of(found.rejected_reward),
            "preference/chosen_logprob": Mean.of(chosen.logprobs),
            "preference/rejected_logprob": Mean.of(rejected.logprobs),
        }
        return {TERM: found.per_pair.sum()}, observed


def _sides(pairs: AnnotatedPairs, rows: Demonstrations, logprobs: Float[Tensor, "B2 T"]) -> tuple[Side, Side]:
    totals = summed(logprobs, rows.loss_mask).chunk(2)
    lengths = rows.loss_mask.sum(dim=1).to(totals[0].dtype).chunk(2)
    references = pairs.chosen_ref_logprobs, pairs.rejected_ref_logprobs
    first, second = (
        Side(logprobs=said, ref_logprobs=ref.to(said.dtype), lengths=length)
        for said, ref, length in zip(totals, references, lengths, strict=True)
    )
    return first, second


class LabelledLoss:
    """KTO; a rlhf.runtime.step.Loss over BaselinedLabelled, which `with_baseline` makes of a whole minibatch."""

    def __init__(self, models: Models, config: KtoLoss, *, rows_per_pass: int, context: int | None) -> None:
        """`rows_per_pass`: rows of a pass without gradient, memory only; `context`: tokens that a model can read."""
        self.models = models
        self.config = config
        self.rows_per_pass = rows_per_pass
        self.context = context

    @torch.no_grad()
    def with_baseline(self, batch: AnnotatedLabelled) -> BaselinedLabelled:
        """The minibatch with z0 of the policy as it is now, at every row: one more pass of policy and reference.

        It is part of the batch, so the micro-batches it is later cut into cannot change it. A prompt and another's
        completion may together be too long for the models; then the completion is read as far as the context goes.
        """
        prompts = [tuple(ids[mask].tolist()) for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
        partners = torch.tensor(mismatched(prompts), dtype=torch.long)
        mask = batch.completion_mask[partners] & self._has_room(batch)
        others = Demonstrations(
            prompt_ids=batch.prompt_ids,
            prompt_mask=batch.prompt_mask,
            completion_ids=batch.completion_ids[partners],
            completion_mask=mask,
            loss_mask=mask & batch.loss_mask[partners],
        )
        (ratios,) = self.models.engine.ranks.spread_tensors(others, self._log_ratios)
        baseline = kto_baseline(ratios)
        return extend(BaselinedLabelled, batch, baselines=baseline.expand(len(batch)).clone())

    def _log_ratios(self, rows: Demonstrations) -> tuple[Tensor, ...]:
        ratios = []
        for part in rows.split(self.rows_per_pass):
            some = part.to(self.models.device)
            said, reference = self.models.policy_tokens(some).logprobs, self.models.reference_logprobs(some)
            ratios.append((summed(said, some.loss_mask) - summed(reference, some.loss_mask)).cpu())
        return (torch.cat(ratios),)

    def _has_room(self, batch: Demonstrations) -> Bool[Tensor, "B T"]:
        """Where a completion token of any row would still stand within the context of this row's prompt."""
        if self.context is None:
            return torch.ones_like(batch.completion_mask)
        room = self.context - batch.prompt_mask.sum(dim=1)
        return torch.arange(batch.completion_ids.shape[1]) < room[:, None]

    def norms(self, batch: BaselinedLabelled) -> dict[str, float]:
        """The number of completions in the minibatch, desirable or not."""
        return {TERM: float(len(batch))}

    def terms(self, micro: BaselinedLabelled) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """The loss summed over the completions of `micro`, and what those of either label are worth."""
        rows = micro.to(self.models.device)
        logprobs = summed(self.models.policy_tokens(rows).logprobs, rows.loss_mask)
        log_ratios, good = logprobs - rows.ref_logprobs.to(logprobs.dtype), rows.desirable
        found = kto(
            log_ratios,
            good,
            rows.baselines.to(logprobs.dtype),
            beta=self.config.beta,
            desirable_weight=self.config.desirable_weight,
            undesirable_weight=self.config.undesirable_weight,
        )
        above = log_ratios.detach() > rows.baselines
        observed = {
            "loss/preference": Mean.of(found.per_completion),
            "preference/accuracy": Mean.of(above == good),
            "preference/chosen_reward": Mean.of(found.reward, good),
            "preference/rejected_reward": Mean.of(found.reward, ~good),
            "preference/chosen_logprob": Mean.of(logprobs, good),
            "preference/rejected_logprob": Mean.of(logprobs, ~good),
            "preference/baseline": Mean.of(rows.baselines),
        }
        return {TERM: found.per_completion.sum()}, {name: mean for name, mean in observed.items() if mean.weight}


@torch.no_grad()
def completion_logprobs(
    rows: CompletionRows, say: TokenLogprobs, *, rows_per_pass: int, device: torch.device, ranks: Ranks = ALONE
) -> Float[Tensor, " N"]:
    """The log-probability of every completion, summed over its tokens; rows of like length share a pass.

    The processes take turns at the passes, and all of them make as many.
    """
    found = torch.zeros(len(rows), dtype=torch.float64)
    order = rows.by_length()
    parts = [order[start : start + rows_per_pass] for start in range(0, len(order), rows_per_pass)]
    for first in range(0, len(parts), ranks.world):
        mine = first + ranks.rank < len(parts)
        part = parts[first + ranks.rank if mine else first]
        batch = rows.collate(part).to(device)
        said = summed(say(batch), batch.loss_mask).cpu()
        if mine:
            found[torch.tensor(part)] = said
    return torch.stack(ranks.gather(found)).sum(dim=0)  # each entry is one process's, and 0 in the others


def tokens_of(batch: Batch) -> int:
    """How many tokens a pass over the batch reads; a pair reads its prompt twice."""
    if isinstance(batch, PreferencePairs):
        return int(2 * batch.prompt_mask.sum() + batch.chosen_mask.sum() + batch.rejected_mask.sum())
    assert isinstance(batch, Demonstrations | Completions)
    return int(batch.prompt_mask.sum() + batch.completion_mask.sum())
