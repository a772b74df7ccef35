"""The critic's loss (baselines' PPO2; Schulman et al. 2016, app.)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlhf.section import Facts, Positive, Rule, Section, Value

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def shared_weight(loss: ValueLoss, facts: Facts) -> Value | None:
    """Return a weight of the value loss that is out of range, if it competes with the policy's."""
    return None if 0.01 <= loss.coef <= 1.0 or not facts.run.critic.shared else loss.coef


class ValueLoss(Section):
    """The critic's squared error, clipped around the old values."""

    coef: Positive = 0.1
    """Weight relative to the policy loss on a shared backbone; also scales a separate critic's loss."""
    clip_eps: Positive | None = 0.2
    """Maximum distance from the old value before the gradient is clipped, in score units; null: off."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="value-loss-weight",
            level="warning",
            key="coef",
            violation=shared_weight,
            reason="On a shared backbone the losses compete: a large weight harms the policy, a small one the critic.",
            source="Huang et al. 2024 (N+): 0.1; Huang et al. 2022 (37 details): 0.5",
            fix="algorithm.value_loss.coef=0.1",
        ),
    )

    def per_token(
        self, values: Float[Tensor, "B T"], old_values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the clipped value loss per token (baselines' PPO2; Schulman et al. 2016, app.).

            0.5 * max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2)

        The larger of the two errors is taken, so the clip only ever stops a gradient; without `clip_eps` it is plain
        regression.
        """
        import torch

        error = (values - returns) ** 2
        if self.clip_eps is None:
            return 0.5 * error
        near_old = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
        return 0.5 * torch.maximum(error, (near_old - returns) ** 2)

    def clipped(
        self, values: Float[Tensor, "B T"], old_values: Float[Tensor, "B T"], returns: Float[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Flag the tokens at which the loss takes the clipped branch and has no gradient."""
        import torch

        if self.clip_eps is None:
            return torch.zeros_like(values, dtype=torch.bool)
        near_old = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
        return ((near_old - returns) ** 2 > (values - returns) ** 2) & (near_old != values)
