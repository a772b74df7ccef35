"""A step's scored completions, what the models say of them before the update, and their metrics and samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.advantages import uniform_groups
from rlhf.algo.kl import kl_estimate
from rlhf.algo.masked import Mean, explained_variance
from rlhf.algo.selection import effective_sample_share
from rlhf.algorithms.correction import Correction
from rlhf.algorithms.online import Online
from rlhf.batching import extend
from rlhf.config.sections import OldLogProbs
from rlhf.data.prompts import SOURCE
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.models.policy_models import Models
from rlhf.tracking.metrics import Metrics
from rlhf.types import Completions, Experience, Rollout, Scores

SCORE_PARTS = ("raw", "clipped", "cut", "disagreement")  # parts that are logged as score/NAME
REFUSED = re.compile(r"[^\w .\-/]")  # in the name of a metric, by mlflow
PROBE_ROWS = 2  # rows per step whose log-probs the trainer computes too, to compare with the sampler's
LOGPROB_TOLERANCE = {torch.float64: 1e-9}  # nats; below it a token's two log-probs differ by rounding only
DEFAULT_LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A step's scored completions, and a count of those sampled besides."""

    completions: Completions
    scores: Scores
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion; zero if none was sampled
    hinted: Bool[Tensor, " B"]  # sampled with a hint in the prompt; sampler_logprobs are then those with it
    failed: Bool[Tensor, " N"]  # prompts of which no completion without a hint succeeded; none where rescue is off
    rescued: Bool[Tensor, " N"]  # those of them of which one with a hint did
    extra: int  # completions that were sampled but are not trained on
    metrics: Metrics


def live_tokens(completions: Completions) -> int:
    """Count the live tokens of prompts and completions."""
    return int(completions.prompt_mask.sum() + completions.completion_mask.sum())


@torch.no_grad()
def compute_logprobs_and_values(
    completions: Completions,
    scores: Scores,
    models: Models,
    *,
    cut: Callable[[Completions], Sequence[Tensor]],
    baselines: Float[Tensor, " B"] | None = None,
    hinted: Bool[Tensor, " B"] | None = None,
    old_log_probs: OldLogProbs = "trainer",
) -> Rollout:
    """Compute log-probs under the policy and the reference, and values; all on the CPU, like the completions.

    Without a reference model its log-probs are the policy's (zero KL); without a critic the values are zero, and so are
    the baselines if none are given; no row is `hinted` if that is not given. `cut` splits the rows into micro-batches;
    `old_log_probs` says whether the policy's log-probs are computed or the sampler's are used.
    """
    use_sampler_logprobs = takes_sampler_logprobs(completions, models, old_log_probs)

    def work(share: Completions) -> tuple[Tensor, ...]:
        with weights_cast_once():
            passes = [
                _annotate_micro_batch(
                    share.rows(rows).to(models.device), models, use_sampler_logprobs=use_sampler_logprobs
                )
                for rows in cut(share)
            ]
        return tuple(torch.cat(tensors).cpu() for tensors in zip(*passes, strict=True))

    logprobs, ref_logprobs, values = models.engine.ranks.map_rows_to_tensors(completions, work)
    return extend(
        Rollout,
        completions,
        scores=scores.values.to(logprobs.dtype),
        baselines=(torch.zeros_like(scores.values) if baselines is None else baselines).to(logprobs.dtype),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        hinted=torch.zeros_like(completions.finished) if hinted is None else hinted,
    )


@torch.no_grad()
def takes_sampler_logprobs(completions: Completions, models: Models, old_log_probs: OldLogProbs) -> bool:
    """Decide whether the sampler's log-probs serve as the policy's in this step.

    auto: yes if they equal the trainer's up to rounding. Both use the same weights, temperature and (except in
    bfloat16) the same arithmetic; the first rows are recomputed to confirm it. The decision depends on the step alone,
    so it is the same on every rank and after a restart. Yes too where the update computes its own: nothing but the
    records of samples reads these then.
    """
    if old_log_probs != "auto" or models.update_gives_old_logprobs:
        return old_log_probs != "trainer"
    if models.dtype == "bfloat16" or models.shared_head is not None:
        return False
    probe = completions.rows(slice(0, PROBE_ROWS)).to(models.device)
    trainer = models.policy_tokens(probe).logprobs
    difference = torch.where(probe.completion_mask, trainer - probe.sampler_logprobs, 0.0).abs().max()
    return bool(difference <= LOGPROB_TOLERANCE.get(trainer.dtype, DEFAULT_LOGPROB_TOLERANCE))


def _annotate_micro_batch(
    micro_batch: Completions, models: Models, *, use_sampler_logprobs: bool
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    if use_sampler_logprobs:
        logprobs, values = micro_batch.sampler_logprobs, models.values(micro_batch)
    else:
        outputs = models.outputs(micro_batch)
        logprobs, values = outputs.logprobs, outputs.values
    reference = models.reference_logprobs(micro_batch) if models.has_reference else logprobs
    logprobs = logprobs.to(reference.dtype)
    return logprobs, reference, values.to(logprobs.dtype)


def sample_records(
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str],
    *,
    step: int,
    split: str,
    limit: int,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> list[dict[str, object]]:
    """Build the records of samples.jsonl for the first `limit` completions; prompts appear as the model reads them."""
    sequence_kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1").sum(dim=1)
    records: list[dict[str, object]] = []
    for row in range(min(limit, len(rollout))):
        length = int(rollout.completion_mask[row].sum())
        prompt = rollout.references[row].get("prompt")
        records.append(
            {
                "step": step,
                "split": split,
                "row": int(rollout.row_ids[row]),
                "prompt": prompt if isinstance(prompt, str) else decode(_live_prompt(rollout, row)),
                "completion": decode(rollout.completion_ids[row, :length].tolist()),
                "score": float(rollout.scores[row]),
                "parts": {name: _number(value[row]) for name, value in (parts or {}).items()},
                "kl": float(sequence_kl[row]),
                "length": length,
                "finished": bool(rollout.finished[row]),
            }
        )
    return records


def _number(value: Tensor) -> float | None:
    """Return a part's value; None where the part does not apply, for JSON has no NaN."""
    return None if value.isnan() else float(value)


def _live_prompt(rollout: Rollout, row: int) -> list[int]:
    ids: list[int] = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
    return ids


def rollout_metrics(experience: Experience, scores: Scores, models: Models, algorithm: Online) -> Metrics:
    """Compute the metrics of a step that do not depend on its update; those of KLs leave out hinted completions."""
    mask, values = experience.completion_mask, experience.scores.double()
    metrics = Metrics(
        {
            "score/mean": Mean.of(values),
            "completion/length": Mean.of(mask.sum(dim=1)),
            "completion/finished": Mean.of(experience.finished),
            "reward/kl_penalty": Mean.of(values - experience.rewards.sum(dim=1).double()),
        }
    )
    if not models.update_gives_old_logprobs:  # else the update's pass measures them
        metrics.update(logprob_metrics(experience, models))
    metrics.update(_duplicates(experience))
    metrics.add("score/std", float(values.std(correction=0)))
    metrics.merge(_advantage_metrics(experience, algorithm))
    if "raw" in scores.parts:
        metrics.update({"score/raw": Mean.of(scores.parts["raw"])})
    for name in ("clipped", "cut", "disagreement"):
        if name in scores.parts:
            metrics.update({f"score/{name}": Mean.of(scores.parts[name])})
    metrics.merge(part_metrics(scores))
    metrics.update(_scores_by_source(experience, values))
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


def logprob_metrics(experience: Experience, models: Models) -> dict[str, Mean]:
    """Compute how far the policy's log-probs are from the sampler's and from the reference's, without hinted rows."""
    mask = experience.completion_mask & ~experience.hinted[:, None]
    mismatch = (experience.sampler_logprobs - experience.logprobs).abs()
    metrics = {"kl/sampler_mismatch": Mean.of(mismatch, mask)}
    if models.has_reference:
        sequence_kl = kl_estimate(experience.logprobs, experience.ref_logprobs, "k1").sum(dim=1)
        metrics["kl/reference"] = Mean.of(sequence_kl, ~experience.hinted)
    return metrics


def correction_metrics(experience: Experience, correction: Correction | None) -> Metrics:
    """Compute the metrics of the importance weights of sampling.correction; none without one."""
    if correction is None:
        return Metrics()
    return Metrics(correction.measure(experience.logprobs, experience.sampler_logprobs, experience.completion_mask))


def part_metrics(scores: Scores) -> Metrics:
    """Compute mean and standard deviation of each named part over the completions that it applies to (not NaN).

    Characters of a name that some tracker refuses become underscores.
    """
    metrics = Metrics()
    for part, values in scores.parts.items():
        if part in SCORE_PARTS:
            continue
        name = REFUSED.sub("_", part)
        live = values[~values.isnan()].double()
        metrics.add(f"part/{name}/applicable", len(live) / len(values))
        if len(live):
            metrics.update({f"part/{name}/mean": Mean.of(live)})
            metrics.add(f"part/{name}/std", float(live.std(correction=0)))
    return metrics


def _duplicates(experience: Experience) -> dict[str, Mean]:
    """Count the prompts that the step has twice, and the completions that different prompts share."""
    prompts = [
        tuple(ids[mask].tolist()) for ids, mask in zip(experience.prompt_ids, experience.prompt_mask, strict=True)
    ]
    texts = [
        tuple(ids[mask].tolist())
        for ids, mask in zip(experience.completion_ids, experience.completion_mask, strict=True)
    ]
    size, rows = experience.group_size, len(prompts)
    copies = Counter(prompts[::size])
    answered: dict[tuple[int, ...], set[int]] = {}
    for row, text in enumerate(texts):
        answered.setdefault(text, set()).add(row // size)
    return {
        "prompt/duplicates": Mean(float(sum(copies[prompt] > 1 for prompt in prompts[::size])), rows / size),
        "completion/duplicates": Mean(float(sum(len(answered[text]) > 1 for text in texts)), float(rows)),
    }


def _scores_by_source(experience: Experience, scores: Float[Tensor, " B"]) -> dict[str, Mean]:
    """Average the scores of the completions of each source's prompts; empty where the prompts are no mixture."""
    names = [reference.get(SOURCE) for reference in experience.references]
    return {
        f"source/score/{name}": Mean.of(scores, torch.tensor([other == name for other in names]))
        for name in dict.fromkeys(names)
        if name is not None
    }


def selection_metrics(experience: Experience, algorithm: Online) -> Metrics:
    """Compute how many of a step's completions are trained on and how they scored, and the advantage's own metrics."""
    metrics = Metrics()
    if algorithm.mask_truncated or algorithm.drop_uniform_groups:
        metrics.update({"completion/masked": Mean.of(~experience.loss_mask.any(dim=1))})
    if algorithm.rescue is not None:
        metrics.merge(_hint_metrics(experience))
    metrics.update(algorithm.advantage.measure(experience))
    return metrics


def _hint_metrics(experience: Experience) -> Metrics:
    """Compute the share of tokens that were sampled with a hint, and their importance weights."""
    live = experience.completion_mask & experience.hinted[:, None]
    metrics = Metrics({"rescue/hinted_tokens": Mean(float(live.sum()), float(experience.completion_mask.sum()))})
    if live.any():
        metrics.update({"rescue/weight": Mean.of(experience.hint_weights, live)})
        metrics.add("rescue/weight_ess", effective_sample_share(experience.hint_weights, live))
    return metrics


def _advantage_metrics(experience: Experience, algorithm: Online) -> Metrics:
    """Compute mean, standard deviation and two quantiles of the advantages before whitening."""
    raw = algorithm.advantage.before_whitening(experience)
    live = raw[experience.loss_mask].double()
    metrics = Metrics({"advantage/mean": Mean.of(live)})
    if len(live):
        low, high = live.quantile(torch.tensor([0.05, 0.95], dtype=live.dtype, device=live.device)).tolist()
        metrics.add("advantage/std", float(live.std(correction=0)))
        metrics.add("advantage/p05", low)
        metrics.add("advantage/p95", high)
    return metrics
