"""Stage 3: log-probabilities and values of the completions under the frozen models, before any update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.kl import kl_estimate
from rlhf.config.sections import OldLogProbs
from rlhf.models.bundle import Models
from rlhf.models.low import weights_cast_once
from rlhf.types import Completions, Rollout, Scores, extend

COMPARED = 2  # rows per step whose log-probs the trainer computes too, to compare with the sampler's
AGREE = {torch.float64: 1e-9}  # nats; below it a token's two log-probs differ by rounding only
AGREE_ELSE = 1e-4


@torch.no_grad()
def annotate(
    completions: Completions,
    scores: Scores,
    models: Models,
    *,
    cut: Callable[[Completions], Sequence[Tensor]],
    baselines: Float[Tensor, " B"] | None = None,
    old_log_probs: OldLogProbs = "trainer",
) -> Rollout:
    """Compute log-probs under the policy and the reference, and values; all on the CPU, like the completions.

    Without a reference model its log-probs are the policy's (zero KL); without a critic the values are zero, and so are
    the baselines if none are given. `cut` splits the rows into micro-batches; `old_log_probs` says whether the policy's
    log-probs are computed or the sampler's are used.
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

    logprobs, ref_logprobs, values = models.engine.ranks.spread_tensors(completions, work)
    return extend(
        Rollout,
        completions,
        scores=scores.values.to(logprobs.dtype),
        baselines=(torch.zeros_like(scores.values) if baselines is None else baselines).to(logprobs.dtype),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
    )


@torch.no_grad()
def takes_sampler_logprobs(completions: Completions, models: Models, old_log_probs: OldLogProbs) -> bool:
    """Decide whether the sampler's log-probs serve as the policy's in this step.

    auto: yes if they equal the trainer's up to rounding. Both use the same weights, temperature and (except in
    bfloat16) the same arithmetic; the first rows are recomputed to confirm it. The decision depends on the step alone,
    so it is the same on every rank and after a restart.
    """
    if old_log_probs != "auto":
        return old_log_probs == "sampler"
    if models.dtype == "bfloat16" or models.shared_head is not None:
        return False
    probe = completions.rows(slice(0, COMPARED)).to(models.device)
    trainer = models.policy_tokens(probe).logprobs
    difference = torch.where(probe.completion_mask, trainer - probe.sampler_logprobs, 0.0).abs().max()
    return bool(difference <= AGREE.get(trainer.dtype, AGREE_ELSE))


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
                "parts": {name: float(value[row]) for name, value in (parts or {}).items()},
                "kl": float(sequence_kl[row]),
                "length": length,
                "finished": bool(rollout.finished[row]),
            }
        )
    return records


def _live_prompt(rollout: Rollout, row: int) -> list[int]:
    ids: list[int] = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
    return ids
