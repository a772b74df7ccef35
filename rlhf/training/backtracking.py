"""Move a step's update of the policy part of the way back if it went too far (policy_loss.backtrack_above)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf.algo.masked import Mean
from rlhf.algo.policy_loss import kl_old_new
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.tracking.metrics import Metrics
from rlhf.training.online_run import OnlineRun, is_warming_up
from rlhf.types import Experience

MOST_BACKTRACKS = 10  # 2^-10 of the update is left


class Backtracking:
    """The policy's weights at the start of a step, towards which an update that went too far is moved back.

    The optimizer's moments stay as they are. Every rank has whole weights and computes the same.
    """

    def __init__(self, run: OnlineRun, experience: Experience, limit: float) -> None:
        """Copy the trainable weights; `limit` is for KL(old || new) over the step's tokens, in nats per token."""
        self.run, self.experience, self.limit = run, experience, limit
        self.parameters: Sequence[nn.Parameter] = [p for p in run.models.policy.parameters() if p.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.parameters]

    def finish(self, metrics: Metrics) -> None:
        """Halve the step until its KL is within the limit, and add how often and the KL that is left."""
        backtracks, kl = 0, self._kl()
        while not kl <= self.limit and backtracks < MOST_BACKTRACKS:  # NaN too
            halve_step(self.parameters, self.start)
            backtracks, kl = backtracks + 1, self._kl()
        metrics.add("policy/backtracks", float(backtracks))
        metrics.add("kl/old_kept", kl)

    @torch.no_grad()
    def _kl(self) -> float:
        """Compute KL(old || new) over all tokens in the loss, in passes as large as memory allows; 0 without any."""
        run, models = self.run, self.run.models
        if not self.experience.loss_mask.any():
            return 0.0

        def work(share: Experience, size: int) -> tuple[Tensor, ...]:
            with weights_cast_once():
                parts = [
                    models.policy_tokens(share.rows(rows).to(models.device)).logprobs.cpu()
                    for rows in run.passes.cut(share, size)
                ]
            return (torch.cat(parts),)

        ranks = models.engine.ranks
        (logprobs,) = run.passes.run(
            lambda size: ranks.map_rows_to_tensors(self.experience, lambda share: work(share, size))
        )
        mask = self.experience.loss_mask
        old = self.experience.logprobs.to(logprobs.dtype)
        return Mean.of(kl_old_new(logprobs, old, mask), mask).value


def start_backtracking(run: OnlineRun, experience: Experience, step: int) -> Backtracking | None:
    """Return the start for moving an update back; None if the loss never does, or the policy is not trained."""
    limit = run.algorithm.policy_loss.kl_limit
    return None if limit is None or is_warming_up(run, step) else Backtracking(run, experience, limit)


@torch.no_grad()
def halve_step(parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
    """Move each weight half of the way back to its start.     θ <- (θ + θ_start) / 2"""
    for parameter, before in zip(parameters, start, strict=True):
        parameter.add_(before).mul_(0.5)
