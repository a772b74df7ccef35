"""The interface of the models for a policy loss that searches its step: gradient, curvature, and effect of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algo.trust_region import Trial


@runtime_checkable
class StepSpace(Protocol):
    """The policy's weights at a batch: vectors have an entry for each trained parameter; all ranks have the same."""

    @property
    def gradient(self) -> Float[Tensor, " N"]:
        """Return the gradient of the loss over the whole batch."""

    def fisher_product(self, vector: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Compute the product of a vector with the Fisher matrix of the next token, averaged over tokens."""

    def attempt(self, direction: Float[Tensor, " N"], length: float) -> Trial:
        """Set the weights to theta - length * direction, and evaluate KL(old || new) and the loss there."""

    def restore(self) -> None:
        """Set the weights to theta again, bit by bit."""
