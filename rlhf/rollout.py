"""Stage 3: what the frozen models say of the completions, before any update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.kl import kl_estimate
from rlhf.models.bundle import Models
from rlhf.types import Completions, Rollout, Scores, extend


@torch.no_grad()
def annotate(
    completions: Completions,
    scores: Scores,
    models: Models,
    *,
    rows_per_pass: int,
    baselines: Float[Tensor, " B"] | None = None,
) -> Rollout:
    """Log-probs under the policy and the reference, and values; all on the CPU, as the completions are.

    Without a reference its log-probs are the policy's (zero KL); without a critic the values are zero, and so are the
    baselines where none are given.
    """

    def work(share: Completions) -> tuple[Tensor, ...]:
        passes = [_pass(part.to(models.device), models) for part in share.split(rows_per_pass)]
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


def _pass(part: Completions, models: Models) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    outputs = models.outputs(part)
    reference = models.reference_logprobs(part) if models.has_reference else outputs.logprobs
    return outputs.logprobs, reference, outputs.values.to(outputs.logprobs.dtype)


def sample_records(
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str],
    *,
    step: int,
    split: str,
    limit: int,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> list[dict[str, object]]:
    """The first `limit` completions as lines of samples.jsonl."""
    sequence_kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1").sum(dim=1)
    records: list[dict[str, object]] = []
    for row in range(min(limit, len(rollout))):
        length = int(rollout.completion_mask[row].sum())
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        records.append(
            {
                "step": step,
                "split": split,
                "row": int(rollout.row_ids[row]),
                "prompt": decode(prompt),
                "completion": decode(rollout.completion_ids[row, :length].tolist()),
                "score": float(rollout.scores[row]),
                "parts": {name: float(value[row]) for name, value in (parts or {}).items()},
                "kl": float(sequence_kl[row]),
                "length": length,
                "finished": bool(rollout.finished[row]),
            }
        )
    return records
