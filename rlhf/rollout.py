"""Stage 3: what the frozen models say of the completions, before any update."""

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

COMPARED = 2  # rows whose log-probs the trainer computes too, at every step
AGREE = {torch.float64: 1e-9}  # nats; a token's log-probs differ by rounding only
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
    """Log-probs under the policy and the reference, and values; all on the CPU, as the completions are.

    Without a reference its log-probs are the policy's (zero KL); without a critic the values are zero, and so are the
    baselines where none are given. `cut` says which rows go through the models together, `old_log_probs` whether the
    policy's are computed or the sampler's are taken.
    """
    given = takes_sampler_logprobs(completions, models, old_log_probs)

    def work(share: Completions) -> tuple[Tensor, ...]:
        with weights_cast_once():
            passes = [_pass(share.rows(rows).to(models.device), models, given=given) for rows in cut(share)]
        return tuple(torch.cat(parts).cpu() for parts in zip(*passes, strict=True))

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
    """Whether the sampler's log-probs serve as the policy's of this step.

    auto: where they are the trainer's to rounding. Both use the same weights, temperature and (but for bfloat16) the
    same arithmetic; the first rows are computed to see that it is so. A decision of the step alone, the same in every
    process and after a restart.
    """
    if old_log_probs != "auto":
        return old_log_probs == "sampler"
    if models.dtype == "bfloat16" or models.shared_head is not None:
        return False
    some = completions.rows(slice(0, COMPARED)).to(models.device)
    trainer = models.policy_tokens(some).logprobs
    difference = torch.where(some.completion_mask, trainer - some.sampler_logprobs, 0.0).abs().max()
    return bool(difference <= AGREE.get(trainer.dtype, AGREE_ELSE))


def _pass(
    part: Completions, models: Models, *, given: bool
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    if given:
        logprobs, values = part.sampler_logprobs, models.values(part)
    else:
        outputs = models.outputs(part)
        logprobs, values = outputs.logprobs, outputs.values
    reference = models.reference_logprobs(part) if models.has_reference else logprobs
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
    """Make lines of samples.jsonl of the first `limit` completions; a prompt is shown as the model reads it."""
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
