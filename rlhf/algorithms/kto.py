"""Kahneman-Tversky optimization (Ethayarajh et al. 2024): labelled completions, which need not be pairs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import model_validator

from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.offline_loss import LabelLoss, PairLoss, usual_beta
from rlhf.section import Facts, NonNegative, Positive, Rule, Value

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def one_sided(weight: str) -> Rule:
    """Return the rule that warns if a side has no weight."""

    def violation(loss: Kto, facts: Facts) -> Value | None:
        return 0.0 if getattr(loss, weight) == 0.0 else None

    return Rule(
        name="kto-one-sided",
        level="warning",
        key=weight,
        violation=violation,
        reason="With one weight at 0, KTO only imitates or only unlearns.",
        source="Ethayarajh et al. 2024: the weighted counts of the two sides in a ratio of 1 to 3/2",
        fix="both weights above 0",
    )


class Kto(LabelLoss):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), on single labelled completions or the sides of pairs.

        L = λ_D (1 - σ(β (h - z0)))     if the completion is desirable
        L = λ_U (1 - σ(β (z0 - h)))     if it is not desirable

    The loss is eq. 8 of the paper; λ_D and λ_U are `desirable_weight` and `undesirable_weight`.
    """

    type: Literal["kto"] = "kto"
    beta: Annotated[Positive, usual_beta(0.01, 1.0, "Ethayarajh et al. 2024: 0.01 to 0.1")] = 0.1
    """As in DPO."""
    desirable_weight: NonNegative = 1.0
    """Weight of desirable completions; times their number it should be 1 to 1.5 times the same of undesirable ones."""
    undesirable_weight: NonNegative = 1.0
    """Weight of undesirable completions."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (one_sided("desirable_weight"), one_sided("undesirable_weight"))

    @model_validator(mode="after")
    def _check_weights(self) -> Kto:
        if self.desirable_weight + self.undesirable_weight == 0:
            raise ValueError("desirable_weight and undesirable_weight are both 0: nothing would be learned")
        return self

    def check_sizes(self, rows_per_step: int) -> None:
        """Check that a row has another one beside it."""
        if rows_per_step < 2:
            raise ValueError("KTO's z0 pairs a prompt with another's completion: batch.prompts_per_step must be >= 2")

    def reward(self, log_ratios: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Compute the implicit reward of completions, β h."""
        return self.beta * log_ratios

    def baseline(self, mismatched_log_ratios: Float[Tensor, " B"]) -> Float[Tensor, ""]:
        """Compute z0, a biased estimate of KL(π || π_ref) that needs no sampling (Ethayarajh et al. 2024, sec. 4.1).

            z0 = max(0, mean over i of log π(y_j | x_i) - log π_ref(y_j | x_i)),     y_j another prompt's completion

        The mean is over the whole minibatch, so that splitting it into micro-batches cannot change it; no gradient.
        """
        return mismatched_log_ratios.detach().mean().clamp(min=0)

    def per_completion(
        self, log_ratios: Float[Tensor, " B"], desirable: Bool[Tensor, " B"], baselines: Float[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """Compute the loss of each completion; `baselines` are z0, which gets no gradient."""
        import torch

        distance = self.beta * (log_ratios - baselines.detach())
        gain, loss = self.desirable_weight, self.undesirable_weight
        return torch.where(desirable, gain * torch.sigmoid(-distance), loss * torch.sigmoid(distance))

    def as_pair_loss(self) -> PairLoss:
        """Return DPO, whose implicit reward is the same."""
        return Dpo(beta=self.beta)


def mismatched_partners(prompts: Sequence[Hashable]) -> list[int]:
    """Return for every row the next row, cyclically, that has a different prompt; just the next if all are equal.

    The paper shifts a batch by one, but if neighbors share a prompt, the shifted pair is no mismatch.
    """
    count = len(prompts)
    partners = [(row + 1) % count for row in range(count)]
    if len(set(prompts)) > 1:
        for row in reversed(range(2 * count)):  # twice around: the last rows look past the end
            here, following = row % count, (row + 1) % count
            if prompts[here] == prompts[following]:
                partners[here] = partners[following]
    return partners
