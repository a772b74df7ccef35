"""The offline loop, one optimizer step per batch of fixed data, and the losses over pairs and labelled completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.masked import Mean
from rlhf.algorithms.kto import mismatched_partners
from rlhf.algorithms.offline_loss import LabelLoss, PairLoss
from rlhf.batching import Batch, concat, extend, widen
from rlhf.config.run import ScheduleConfig
from rlhf.config.sections import BatchConfig
from rlhf.data.pairs import CompletionRows
from rlhf.errors import DataError, RewardError
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.models.lora import Dropout
from rlhf.models.policy_models import Ema, Models
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.metrics import Metrics
from rlhf.training.micro_batches import count_tokens
from rlhf.training.session import Session
from rlhf.training.step import Loss, LossBatch, optimizer_step
from rlhf.types import (
    AnnotatedLabelledCompletions,
    AnnotatedPairs,
    BaselinedLabelledCompletions,
    Demonstrations,
    PreferencePairs,
    Side,
)
from rlhf.user_code import check_values

MAIN_LOSSES = ("loss/sft", "loss/preference", "loss/rm")
GRADIENT_PASS = "a forward and backward pass"


@dataclass(frozen=True, kw_only=True)
class OfflineRun:
    """The collaborators of an offline run, made by rlhf.factory."""

    batch: BatchConfig
    schedule: ScheduleConfig
    session: Session
    data: Callable[[int], Batch]  # the rows of a step, with the figures of the whole minibatch that its loss needs
    loss: Loss
    trained: TrainableModel
    ema: Ema | None
    sources: Callable[[int], tuple[str, ...]] | None = None  # the source of each row of a step, if there are several
    export: Callable[[Path], None]  # writes the trained model as a standard model folder
    seed: int = 0  # of the run: the source of dropout's draws


def train_offline(run: OfflineRun) -> None:
    """Run the remaining training steps.

    Raises:
        RewardError: the teacher of the loss does not answer; the run is saved as it was before the step.
        DataError: a streamed file has a malformed row that is fatal, or cannot be read; the run is saved likewise.
    """
    rows = adaptive_micro_batch(run.batch, run.session)
    drops = Dropout(run.trained.module)
    for step in run.session.steps():
        try:
            with run.session.recorder.phase("data"):
                batch = run.data(step)
        except DataError as error:  # of a streamed file
            raise run.session.explain_update(error, changed=False) from error
        factor = lr_factor(
            step,
            steps=run.session.total_steps,
            warmup_steps=run.schedule.warmup_steps,
            decay=run.schedule.decay,
        )
        drawn = drops.drawn(derive_seed(run.seed, "dropout", step, run.session.ranks.rank))
        try:
            with run.session.recorder.phase("update"), weights_cast_once(), drawn:
                metrics = optimizer_step(
                    loss_batches(run, batch, step),
                    [run.trained],
                    micro_batch_size=rows,
                    lr_factor=factor * run.session.state.lr_scale,
                    ranks=run.session.ranks,
                )
        except RewardError as error:  # of a teacher
            raise run.session.explain_update(error, changed=False) from error
        run.session.check_update(metrics)
        if run.ema is not None:
            run.ema.update()
        run.session.report(with_skip_counts(metrics, run.session), tokens=count_tokens(batch))


def loss_batches(run: OfflineRun, batch: Batch, step: int) -> list[LossBatch]:
    """Return the rows of a step with their loss: apart for each source, if there are several, to measure its loss.

    The denominators are of the whole minibatch, so the gradient is the same as for the rows together.
    """
    if run.sources is None:
        return [LossBatch(batch, run.loss)]
    names, denominators = run.sources(step), run.loss.denominators(batch)
    return [
        LossBatch(
            batch.rows(torch.tensor([row for row, other in enumerate(names) if other == name])),
            SourceLoss(run.loss, denominators, name),
        )
        for name in sorted(set(names))
    ]


class SourceLoss:
    """A loss on the rows of one source of a minibatch, whose mean is also a metric of the source's."""

    def __init__(self, loss: Loss, denominators: dict[str, float], source: str) -> None:
        """Set the loss, its denominators on the whole minibatch, and the name of the source."""
        self.loss, self.source = loss, source
        self._denominators = denominators

    def denominators(self, batch: Batch) -> dict[str, float]:
        """Return the denominators of the whole minibatch."""
        return self._denominators

    def terms(self, micro: Batch) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss's terms and metrics, and the source's mean loss."""
        terms, metrics = self.loss.terms(micro)
        main = {f"source/loss/{self.source}": metrics[name] for name in MAIN_LOSSES if name in metrics}
        return terms, metrics | main


def with_skip_counts(metrics: Metrics, session: Session) -> Mapping[str, float]:
    """Return the values of a step's metrics, with the run's counts of skipped optimizer steps."""
    return metrics.values() | {
        "skipped/nonfinite": float(session.state.skipped),
        "skipped/zero_gradient": float(session.state.idle),
    }


def adaptive_micro_batch(
    batch: BatchConfig, session: Session, *, times: int = 1, what: str = GRADIENT_PASS
) -> AdaptiveMicroBatch:
    """Make the adaptive micro-batch size: `times` the configured one, lowered with a warning when memory runs out."""
    size = batch.micro_batch_tokens or batch.micro_batch_size
    return AdaptiveMicroBatch(
        size * times, tokens=batch.micro_batch_tokens is not None, what=what, note=session.recorder.note
    )


ROUNDINGS = 8  # a log-probability is the difference of two numbers, each of several operations
PREFERENCE_TERM = "preference"  # name of the loss term whose gradient reaches the policy, for Engine.train

TokenLogprobs = Callable[[Demonstrations], Tensor]
"""Returns a model's log-probabilities of completion tokens: [B, T], zero outside the mask."""


def stack_sides(pairs: PreferencePairs) -> Demonstrations:
    """Stack the chosen sides, then the rejected ones, as 2B rows for one forward pass."""
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


def sum_logprobs(logprobs: Float[Tensor, "B T"], learned: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum the log-probabilities of each completion, in float64: the losses use differences of large sums."""
    return widen(torch.where(learned, logprobs, 0.0)).sum(dim=1)


class PairwiseLoss:
    """A loss that compares the two sides of a pair; a rlhf.training.step.Loss over AnnotatedPairs."""

    def __init__(self, models: Models, loss: PairLoss) -> None:
        self.models = models
        self.loss = loss
        self.row_values: dict[str, Tensor] = {}  # of each pair of the latest call of `terms`

    def denominators(self, batch: AnnotatedPairs) -> dict[str, float]:
        """Return the number of pairs in the minibatch, the denominator of the loss."""
        return {PREFERENCE_TERM: float(len(batch))}

    def terms(self, micro: AnnotatedPairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss, summed over the pairs of `micro`, and its metrics."""
        rows = stack_sides(micro).to(self.models.device)  # joined on the host, where the layout of the rows is computed
        pairs = micro.to(self.models.device)
        return self.compare(pairs, rows, self.models.policy_tokens(rows).logprobs)

    def compare(
        self, pairs: AnnotatedPairs, rows: Demonstrations, logprobs: Float[Tensor, "B2 T"]
    ) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss and its metrics from the policy's log-probabilities of `rows`, the `stack_sides(pairs)`."""
        chosen, rejected = _sides(pairs, rows, logprobs)
        per_pair = check_values(self.loss.per_pair(chosen, rejected), len(pairs), f"{self.loss.type}: per_pair")
        with torch.no_grad():
            rewards = self.loss.reward(chosen), self.loss.reward(rejected)
            measured = self.loss.measure(chosen, rejected)
        gaps = rewards[0] - rewards[1]
        wins = wins_of(gaps, self._rounding(chosen, logprobs.dtype) + self._rounding(rejected, logprobs.dtype))
        self.row_values = {"loss": per_pair.detach(), "accuracy": wins}
        metrics = {
            "loss/preference": Mean.of(per_pair),
            "preference/accuracy": Mean.of(wins),
            "preference/margin": Mean.of(gaps),
            "preference/chosen_reward": Mean.of(rewards[0]),
            "preference/rejected_reward": Mean.of(rewards[1]),
            "preference/chosen_logprob": Mean.of(chosen.logprobs),
            "preference/rejected_logprob": Mean.of(rejected.logprobs),
        }
        return {PREFERENCE_TERM: per_pair.sum()}, metrics | {name: Mean.of(of) for name, of in measured.items()}

    @torch.no_grad()
    def _rounding(self, side: Side, dtype: torch.dtype) -> Float[Tensor, " B"]:
        """Compute how far rounding of the log-probabilities may move the reward of a side."""
        moved = replace(side, logprobs=side.logprobs + rounding_of(side.logprobs, side.lengths, dtype))
        return (self.loss.reward(moved) - self.loss.reward(side)).abs()


def rounding_of(logprobs: Float[Tensor, " B"], lengths: Tensor, dtype: torch.dtype) -> Float[Tensor, " B"]:
    """Compute a bound of the rounding of sums of log-probabilities that were computed per token in `dtype`."""
    return ROUNDINGS * torch.finfo(dtype).eps * (logprobs.detach().abs() + lengths)


def wins_of(gaps: Float[Tensor, " B"], rounding: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return 1 for a gap above 0, 0 for one below, and 1/2 for a tie: a gap within `rounding`."""
    return torch.where(gaps.abs() <= rounding, 0.5, torch.heaviside(gaps, torch.full_like(gaps, 0.5)))


def _sides(pairs: AnnotatedPairs, rows: Demonstrations, logprobs: Float[Tensor, "B2 T"]) -> tuple[Side, Side]:
    totals = sum_logprobs(logprobs, rows.loss_mask).chunk(2)
    lengths = rows.loss_mask.sum(dim=1).to(totals[0].dtype).chunk(2)
    ref_logprobs = pairs.chosen_ref_logprobs, pairs.rejected_ref_logprobs
    first, second = (
        Side(logprobs=total, ref_logprobs=ref.to(total.dtype), lengths=length)
        for total, ref, length in zip(totals, ref_logprobs, lengths, strict=True)
    )
    return first, second


class LabelledLoss:
    """A loss over labelled completions (KTO); a training.step.Loss over BaselinedLabelledCompletions.

    `with_baseline` makes them of a whole minibatch.
    """

    def __init__(self, models: Models, loss: LabelLoss, *, rows_per_pass: int, context: int | None) -> None:
        """Set the rows of a pass without gradient (only memory depends on it) and the models' context, in tokens."""
        self.models = models
        self.loss = loss
        self.rows_per_pass = rows_per_pass
        self.context = context
        self.row_values: dict[str, Tensor] = {}  # as in PairwiseLoss

    @torch.no_grad()
    def with_baseline(self, batch: AnnotatedLabelledCompletions) -> BaselinedLabelledCompletions:
        """Add the current policy's baseline to every row of the minibatch, by one more pass of policy and reference.

        As a part of the batch, it does not depend on how the batch is later split into micro-batches. A prompt with
        another prompt's completion may be too long for the models; the completion is then truncated at the context.
        """
        prompts = [tuple(ids[mask].tolist()) for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
        partners = torch.tensor(mismatched_partners(prompts), dtype=torch.long)
        mask = batch.completion_mask[partners] & self._has_room(batch)
        others = Demonstrations(
            prompt_ids=batch.prompt_ids,
            prompt_mask=batch.prompt_mask,
            completion_ids=batch.completion_ids[partners],
            completion_mask=mask,
            loss_mask=mask & batch.loss_mask[partners],
        )
        (ratios,) = self.models.engine.ranks.map_rows_to_tensors(others, self._log_ratios)
        baseline = self.loss.baseline(ratios)
        return extend(BaselinedLabelledCompletions, batch, baselines=baseline.expand(len(batch)).clone())

    def _log_ratios(self, rows: Demonstrations) -> tuple[Tensor, ...]:
        ratios = []
        for part in rows.split(self.rows_per_pass):
            batch = part.to(self.models.device)
            policy, reference = self.models.policy_tokens(batch).logprobs, self.models.reference_logprobs(batch)
            ratios.append((sum_logprobs(policy, batch.loss_mask) - sum_logprobs(reference, batch.loss_mask)).cpu())
        return (torch.cat(ratios),)

    def _has_room(self, batch: Demonstrations) -> Bool[Tensor, "B T"]:
        """Flag the completion positions that fit into the context after each row's prompt."""
        if self.context is None:
            return torch.ones_like(batch.completion_mask)
        room = self.context - batch.prompt_mask.sum(dim=1)
        return torch.arange(batch.completion_ids.shape[1]) < room[:, None]

    def denominators(self, batch: BaselinedLabelledCompletions) -> dict[str, float]:
        """Return the number of completions in the minibatch, desirable or not: the denominator of the loss."""
        return {PREFERENCE_TERM: float(len(batch))}

    def terms(self, micro: BaselinedLabelledCompletions) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss, summed over the completions of `micro`, and its metrics by label."""
        rows = micro.to(self.models.device)
        tokens = self.models.policy_tokens(rows).logprobs
        logprobs = sum_logprobs(tokens, rows.loss_mask)
        log_ratios, desirable = logprobs - rows.ref_logprobs.to(logprobs.dtype), rows.desirable
        per_completion = self.loss.per_completion(log_ratios, desirable, rows.baselines.to(logprobs.dtype))
        check_values(per_completion, len(rows), f"{self.loss.type}: per_completion")
        rewards = self.loss.reward(log_ratios)
        above_baseline = log_ratios.detach() - rows.baselines
        rounding = rounding_of(logprobs, rows.loss_mask.sum(dim=1), tokens.dtype)
        wins = wins_of(torch.where(desirable, above_baseline, -above_baseline), rounding)
        self.row_values = {"loss": per_completion.detach(), "accuracy": wins}
        metrics = {
            "loss/preference": Mean.of(per_completion),
            "preference/accuracy": Mean.of(wins),
            "preference/chosen_reward": Mean.of(rewards, desirable),
            "preference/rejected_reward": Mean.of(rewards, ~desirable),
            "preference/chosen_logprob": Mean.of(logprobs, desirable),
            "preference/rejected_logprob": Mean.of(logprobs, ~desirable),
            "preference/baseline": Mean.of(rows.baselines),
        }
        missing = [side for side, label in (("chosen", True), ("rejected", False)) if label not in micro.desirable]
        return {PREFERENCE_TERM: per_completion.sum()}, {
            name: mean for name, mean in metrics.items() if not any(f"/{side}_" in name for side in missing)
        }


@torch.no_grad()
def completion_logprobs(
    rows: CompletionRows,
    token_logprobs: TokenLogprobs,
    *,
    rows_per_pass: int,
    device: torch.device,
    ranks: Distributed = SINGLE_PROCESS,
    shares_prompts: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Float[Tensor, " N"]:
    """Compute every completion's log-probability, summed over its tokens; rows of similar length share a pass.

    The passes are dealt to the ranks in turn, and all ranks make equally many.

    Args:
        rows: the prompts and completions.
        token_logprobs: computes log-probabilities per token; its rows may be padded.
        rows_per_pass: completions per forward pass.
        device: of the forward passes.
        ranks: the processes among which the passes are dealt.
        shares_prompts: the model computes the equal prompts of a pass once; rows of the same prompt share a pass.
        progress: is told the share of the passes that are done, before each.
    """
    totals = torch.zeros(len(rows), dtype=torch.float64)
    order = rows.by_prompt() if shares_prompts else rows.by_length()
    parts = [order[start : start + rows_per_pass] for start in range(0, len(order), rows_per_pass)]
    for first in range(0, len(parts), ranks.world):
        progress(first / len(parts))
        is_mine = first + ranks.rank < len(parts)
        part = parts[first + ranks.rank if is_mine else first]
        batch = rows.collate(part).to(device)
        logprobs = sum_logprobs(token_logprobs(batch), batch.loss_mask).cpu().double()
        if is_mine:
            totals[torch.tensor(part)] = logprobs
    return torch.stack(ranks.gather(totals)).sum(dim=0)  # each entry comes from one rank and is 0 on the others
