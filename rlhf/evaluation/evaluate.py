"""Is it better? Held-out completions, their scores by the judge and by the trained-on reward, their cost in KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlhf.algo.kl import kl_estimate
from rlhf.masked import Mean
from rlhf.models.bundle import Models
from rlhf.rewards.source import RewardSource
from rlhf.rollout import annotate
from rlhf.runtime.metrics import Metrics
from rlhf.runtime.ranks import ALONE, Ranks
from rlhf.runtime.step import Loss
from rlhf.sampling.sampler import Sampler
from rlhf.types import Batch, Completions, Prompts, Rollout, Scores, concat


@dataclass(frozen=True)
class PolicyEvaluation:
    """What evaluation found: the metrics, and the completions they are of, scored by the judge."""

    metrics: dict[str, float]
    rollout: Rollout
    scores: Scores


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
    rows_per_pass: int,
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
        rows_per_pass: rows per forward pass; memory only.
    """
    with models.engine.whole(models.policy):
        completions = concat([sampler.sample(batch, key=key, group_size=1) for batch in prompts])
    scores = judge(completions)
    rollout = annotate(completions, scores, models, rows_per_pass=rows_per_pass)
    metrics = _describe(rollout, models)
    if proxy is not None:
        metrics["eval/proxy"] = float(proxy(completions).values.double().mean())
    if greedy:
        with models.engine.whole(models.policy):
            best = concat([sampler.sample(batch, key=key, group_size=1, greedy=True) for batch in prompts])
        metrics["eval/score_greedy"] = float(judge(best).values.double().mean())
    return PolicyEvaluation(metrics, rollout, scores)


def _describe(rollout: Rollout, models: Models) -> dict[str, float]:
    scores, mask = rollout.scores.double(), rollout.completion_mask
    metrics = {
        "eval/score": float(scores.mean()),
        "eval/score_std": float(scores.std(correction=0)),
        "eval/length": Mean.of(mask.sum(dim=1)).value,
        "eval/finished": Mean.of(rollout.finished).value,
        "eval/distinct_2": distinct_n(completion_tokens(rollout), 2),
        "eval/entropy": Mean.of(-rollout.logprobs, mask).value,
    }
    if models.has_reference:
        kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1").double().sum(dim=1)
        metrics["eval/kl"] = float(kl.mean())
        metrics["eval/kl_se"] = float(kl.std(correction=0) / len(kl) ** 0.5)
    return metrics


def completion_tokens(completions: Completions) -> list[list[int]]:
    """The live token ids of every completion."""
    lengths = completions.completion_mask.sum(dim=1).tolist()
    return [row[:length].tolist() for row, length in zip(completions.completion_ids, lengths, strict=True)]


def distinct_n(sequences: Iterable[Sequence[int]], n: int) -> float:
    """Distinct n-grams over all n-grams of all sequences (Li et al. 2016); NaN when there are none."""
    grams = [tuple(seq[i : i + n]) for seq in sequences for i in range(len(seq) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")


@torch.no_grad()
def evaluate_loss(
    batches: Iterable[Batch], loss: Loss, rename: Mapping[str, str], ranks: Ranks = ALONE
) -> dict[str, float]:
    """The observed means of a loss over held-out batches, under their names for evaluation.

    Every process takes its turn at the batches, and all of them pass over as many.
    """
    metrics = Metrics()
    for batch, counts in _turns(batches, ranks):
        _, observed = loss.terms(batch)
        if counts:
            metrics.update({rename[name]: mean for name, mean in observed.items() if name in rename})
    together = Metrics()
    for means in ranks.gather(metrics.means()):
        together.update(means)
    return together.values()


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


EvaluateStep = Callable[[int], dict[str, float]]
