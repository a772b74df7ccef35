"""Supervised fine-tuning: imitation of demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.algorithms.offline_loss import OfflineLoss

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class Sft(OfflineLoss):
    """Next-token negative log-likelihood over completion tokens."""

    type: Literal["sft"] = "sft"
    data: ClassVar[Literal["demonstrations", "pairs", "labelled"]] = "demonstrations"
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """How the tokens are weighted."""

    def per_token(self, logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute the loss of each token, -log π(y_t | x, y_<t)."""
        return -logprobs
