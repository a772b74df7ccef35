"""The metrics that an update collects over its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.tracking.metrics import Metrics
from rlhf.training.losses import OnlineLoss, SampledPairLoss
from rlhf.training.micro_batches import count_tokens
from rlhf.training.online_run import OnlineRun
from rlhf.training.step import LossBatch
from rlhf.types import Experience, SampledPairs


@dataclass
class UpdateRecord:
    """The metrics of one update, collected over its optimizer steps, and whether it is to stop early."""

    run: OnlineRun
    metrics: Metrics = field(default_factory=Metrics)
    steps: int = 0
    steps_taken: int = 0  # less those skipped for a NaN, or in which the policy had no gradient
    tokens: int = 0
    critic_tokens: int = 0  # of the passes in which the critic trained alone
    ptx_tokens: int = 0  # of the demonstrations that were mixed in
    last_kl: float = 0.0
    should_stop: bool = False  # the policy has moved too far from the one that sampled (target_kl)

    def add(
        self,
        step_metrics: Metrics,
        minibatch: Experience | SampledPairs,
        policy_loss: OnlineLoss | SampledPairLoss,
        mixed: Sequence[LossBatch] = (),
    ) -> None:
        """Count an optimizer step, in which the demonstrations `mixed` were trained on too.

        Raises:
            DivergenceError: too many in a row could not be taken.
        """
        target_kl = self.run.algorithm.target_kl
        self.run.session.check_update(step_metrics)
        if self.steps == 0:
            ranks, deviation = self.run.session.ranks, policy_loss.ratio_deviation
            largest = deviation if ranks.world == 1 else ranks.largest(float(deviation))
            self.metrics.add("policy/first_ratio_deviation", largest)
        self.metrics.merge(step_metrics)
        self.steps += 1
        self.steps_taken += "policy/lr" in step_metrics
        self.tokens += count_tokens(minibatch)
        self.ptx_tokens += sum(count_tokens(part.batch) for part in mixed)
        self.last_kl = step_metrics["kl/old"]
        self.should_stop = target_kl is not None and self.last_kl > 1.5 * target_kl

    def add_critic(self, step_metrics: Metrics, minibatch: Experience) -> None:
        """Count an optimizer step of the critic alone.

        Raises:
            DivergenceError: too many in a row could not be taken.
        """
        self.run.session.check_update(step_metrics)
        means = step_metrics.means()
        means.pop("loss/total", None)  # the other steps' has the policy's loss
        self.metrics.update(means)
        self.critic_tokens += count_tokens(minibatch)

    def finish(self) -> Metrics:
        """Return the metrics of the whole update."""
        self.metrics.add("policy/optimizer_steps", float(self.steps_taken))
        self.metrics.add("completion/trained_tokens", float(self.tokens))
        if self.critic_tokens:
            self.metrics.add("critic/extra_tokens", float(self.critic_tokens))
        if self.ptx_tokens:
            self.metrics.add("policy/ptx_tokens", float(self.ptx_tokens))
        if self.steps:
            self.metrics.add("kl/old_last", self.last_kl)
        elif not self.critic_tokens:  # nothing to train on: no optimizer step was skipped
            self.run.session.check_update(self.metrics)
        if self.run.algorithm.target_kl is not None:
            self.metrics.add("policy/early_stop", float(self.should_stop))
        return self.metrics
