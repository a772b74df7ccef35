"""Is it better? Held-out completions, their scores by the judge and by the trained-on reward, their cost in KL."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, inf

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.kl import kl_estimate
from rlhf.evaluation.diversity import diversity
from rlhf.masked import Mean
from rlhf.models.bundle import Models
from rlhf.rewards.source import RewardSource
from rlhf.runtime.memory import Fitting
from rlhf.runtime.metrics import Metrics
from rlhf.runtime.ranks import ALONE, Ranks
from rlhf.runtime.step import Loss
from rlhf.sampling.sampler import Sampler
from rlhf.types import Batch, Completions, Prompts, Rollout, Scores, concat, extend

LARGEST_EXPONENT = 709.0  # exp of more does not fit a float


@dataclass(frozen=True)
class PolicyEvaluation:
    """What evaluation found: the metrics, and the completions they are of, scored by the judge."""

    metrics: dict[str, float]
    rollout: Rollout
    scores: Scores
    exact_kl: Float[Tensor, " B"]  # nats, summed over the tokens of each; zero without a reference


@torch.no_grad()
def evaluate_policy(
    prompts: Sequence[Prompts],
    sampler: Sampler,
    models: Models,
    judge: RewardSource,
    *,
    proxy: RewardSource | None,
    key: int,
    greedy: bool,
    rows_per_pass: int | Fitting,
) -> PolicyEvaluation:
    """One sampled completion for each held-out prompt, the same random numbers at every evaluation.

    Args:
        prompts: batches of held-out prompts.
        sampler: of the policy.
        models: for log-probs under the policy and the reference.
        judge: whose score counts.
        proxy: the reward that is trained on, where it is not the judge.
        key: of the random numbers.
        greedy: score greedy completions too.
        rows_per_pass: rows per forward pass; memory only. They are halved where memory runs out, as in training.
    """
    passes = rows_per_pass if isinstance(rows_per_pass, Fitting) else Fitting(rows_per_pass, what="an evaluation pass")
    with models.engine.whole(models.policy):
        completions = concat([sampler.sample(batch, key=key, group_size=1) for batch in prompts])
    scores = judge(completions)
    rollout, exact_kl = _measured(completions, scores, models, passes)
    metrics = _describe(rollout)
    if models.has_reference:
        metrics |= _against_reference(rollout, exact_kl)
    if proxy is not None:
        metrics["eval/proxy"] = float(proxy(completions).values.double().mean())
    if greedy:
        with models.engine.whole(models.policy):
            best = concat([sampler.sample(batch, key=key, group_size=1, greedy=True) for batch in prompts])
        metrics["eval/score_greedy"] = float(judge(best).values.double().mean())
    return PolicyEvaluation(metrics, rollout, scores, exact_kl)


def _measured(
    completions: Completions, scores: Scores, models: Models, passes: Fitting
) -> tuple[Rollout, Float[Tensor, " B"]]:
    """The completions with their log-probabilities, and the exact KL of each, summed over its tokens.

    As `annotate` does for training, but with the KL from the same pass, and without the critic: values are 0.
    """

    def work(share: Completions, size: int) -> tuple[Tensor, ...]:
        parts = [_pass(share.rows(rows).to(models.device), models) for rows in passes.cut(share, size)]
        return tuple(torch.cat(column).cpu() for column in zip(*parts, strict=True))

    logprobs, ref_logprobs, kl = passes.run(
        lambda size: models.engine.ranks.spread_tensors(completions, lambda share: work(share, size))
    )
    values = scores.values.to(logprobs.dtype)
    rollout = extend(
        Rollout,
        completions,
        scores=values,
        baselines=torch.zeros_like(values),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=torch.zeros_like(logprobs),
    )
    return rollout, kl.double().sum(dim=1)


def _pass(part: Completions, models: Models) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    if models.has_reference:
        found = models.beside_reference(part)
        return found.logprobs, found.ref_logprobs, found.kl
    logprobs = models.policy_tokens(part).logprobs
    return logprobs, logprobs, torch.zeros_like(logprobs)


def _describe(rollout: Rollout) -> dict[str, float]:
    scores, mask = rollout.scores.double(), rollout.completion_mask
    return {
        "eval/score": float(scores.mean()),
        "eval/score_std": float(scores.std(correction=0)),
        "eval/length": Mean.of(mask.sum(dim=1)).value,
        "eval/finished": Mean.of(rollout.finished).value,
        **diversity(rollout),
        "eval/entropy": Mean.of(-rollout.logprobs, mask).value,
    }


def _against_reference(rollout: Rollout, exact_kl: Float[Tensor, " B"]) -> dict[str, float]:
    sampled = kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1").double().sum(dim=1)
    return {
        **_with_error("eval/kl", sampled),
        **_with_error("eval/kl_exact", exact_kl),
        "eval/reference_perplexity": perplexity(rollout.ref_logprobs, rollout.completion_mask),
    }


def _with_error(name: str, values: Float[Tensor, " B"]) -> dict[str, float]:
    """The mean over completions and its standard error."""
    return {name: float(values.mean()), f"{name}_se": float(values.std(correction=0) / len(values) ** 0.5)}


def perplexity(logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """exp(-sum of log-probabilities / number of tokens), both sums over the live tokens of all completions.

    Infinite where the mean is beyond what a float can hold.
    """
    mean = Mean.of(-logprobs, mask).value
    return exp(mean) if mean < LARGEST_EXPONENT else inf


@torch.no_grad()
def evaluate_loss(
    batches: Iterable[Batch], loss: Loss, rename: Mapping[str, str], ranks: Ranks = ALONE
) -> dict[str, float]:
    """The observed means of a loss over held-out batches, under their names for evaluation.

    Every process takes its turn at the batches, and all of them pass over as many. A batch that memory has no room for
    is halved, as in training.
    """
    metrics, passes = Metrics(), Fitting(sys.maxsize, what="an evaluation pass")
    for batch, counts in _turns(batches, ranks):
        passes.size = min(passes.size, len(batch))
        parts = passes.run(partial(_observed, batch, loss, passes))
        for observed in parts if counts else ():
            metrics.update({rename[name]: mean for name, mean in observed.items() if name in rename})
    together = Metrics()
    for means in ranks.gather(metrics.means()):
        together.update(means)
    return together.values()


def _observed(batch: Batch, loss: Loss, passes: Fitting, size: int) -> list[Mapping[str, Mean]]:
    return [loss.terms(batch.rows(rows))[1] for rows in passes.cut(batch, size)]


def _turns(batches: Iterable[Batch], ranks: Ranks) -> Iterator[tuple[Batch, bool]]:
    """This process's batches; in the last round it may have to repeat another's, which then counts for nothing."""
    held: list[Batch] = []
    for batch in batches:
        held.append(batch)
        if len(held) == ranks.world:
            yield held[ranks.rank], True
            held = []
    if held:
        mine = ranks.rank < len(held)
        yield held[ranks.rank if mine else 0], mine
