"""The metrics of a step's experience, as named means."""

from __future__ import annotations

import torch

from rlhf.algo.advantages import uniform_groups
from rlhf.algo.kl import kl_estimate
from rlhf.algo.selection import best_and_worst
from rlhf.algo.value_loss import explained_variance
from rlhf.config.algorithm import Best, BestAndWorst, Online
from rlhf.masked import Mean, masked_mean
from rlhf.models.bundle import Models
from rlhf.runtime.metrics import Metrics
from rlhf.types import Experience, Scores


def observe(experience: Experience, scores: Scores, models: Models, *, coef: float) -> Metrics:
    """Compute the metrics of a step that do not depend on its update; `coef` is the KL coefficient of its rewards."""
    mask, values = experience.completion_mask, experience.scores.double()
    sequence_kl = kl_estimate(experience.logprobs, experience.ref_logprobs, "k1").sum(dim=1)
    mismatch = (experience.sampler_logprobs - experience.logprobs).abs()
    metrics = Metrics(
        {
            "score/mean": Mean.of(values),
            "kl/sampler_mismatch": Mean.of(mismatch, mask),
            "completion/length": Mean.of(mask.sum(dim=1)),
            "completion/finished": Mean.of(experience.finished),
            "advantage/mean": Mean.of(experience.advantages, experience.loss_mask),
            "reward/kl_penalty": Mean.of(values - experience.rewards.sum(dim=1).double()),
        }
    )
    metrics.add("score/std", float(values.std(correction=0)))
    metrics.add("advantage/std", _std(experience.advantages, experience.loss_mask))
    if "raw" in scores.parts:
        metrics.update({"score/raw": Mean.of(scores.parts["raw"])})
    for name in ("clipped", "cut"):
        if name in scores.parts:
            metrics.update({f"score/{name}": Mean.of(scores.parts[name])})
    if models.has_reference:
        metrics.update({"kl/reference": Mean.of(sequence_kl)})
    if experience.group_size > 1:
        best = values.view(-1, experience.group_size).amax(dim=1)
        metrics.update(
            {
                "score/best_of_group": Mean.of(best),
                "group/uniform": Mean.of(uniform_groups(experience.scores, experience.group_size)),
            }
        )
    if models.has_critic:
        metrics.update({"critic/value": Mean.of(experience.values, mask)})
        metrics.update({"critic/return": Mean.of(experience.returns, mask)})
        variance = explained_variance(experience.values, experience.returns, mask)
        metrics.add("critic/explained_variance", variance)
    return metrics


def observe_choice(experience: Experience, algorithm: Online) -> Metrics:
    """Compute how many of a step's completions are trained on and how they scored; empty where all of them are."""
    scores, groups = experience.scores.double(), len(experience) // experience.group_size
    metrics = Metrics()
    if algorithm.mask_truncated or algorithm.drop_uniform_groups:
        metrics.update({"completion/masked": Mean.of(~experience.loss_mask.any(dim=1))})
    match algorithm.advantage:
        case Best():
            kept = experience.loss_mask.any(dim=1)
            metrics.add("kept/count", float(kept.sum()))
            metrics.add("kept/none", float((~kept.view(groups, -1).any(dim=1)).sum()))
            metrics.update({"kept/score": Mean.of(scores, kept)})
        case BestAndWorst():
            best, worst = best_and_worst(experience.scores, experience.group_size)
            metrics.add("pair/count", float(len(best)))
            metrics.add("pair/ties", float(groups - len(best)))
            metrics.update({"pair/score_gap": Mean.of(scores[best] - scores[worst])})
        case _:
            pass
    return metrics


def _std(values: torch.Tensor, mask: torch.Tensor) -> float:
    mean = masked_mean(values, mask)
    return float(masked_mean((values - mean) ** 2, mask).sqrt())
