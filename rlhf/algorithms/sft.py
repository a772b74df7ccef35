"""Supervised fine-tuning: imitation of demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.algorithms.offline_loss import OfflineLoss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.algo.masked import Mean


class DemonstratedLoss(OfflineLoss):
    """A loss of every token of given answers."""

    data: ClassVar[Literal["demonstrations", "pairs", "labelled"]] = "demonstrations"
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """The weighting of the tokens."""

    def per_token(
        self, logprobs: Float[Tensor, "B T"], teacher: Float[Tensor, "K B T"] | None = None
    ) -> Float[Tensor, "B T"]:
        """Compute the loss of each token; `teacher` is the output of `against_teacher`, if the loss reads a teacher."""
        raise NotImplementedError

    def measure(self, columns: Float[Tensor, "K B T"], mask: Bool[Tensor, "B T"]) -> Mapping[str, Mean]:
        """Compute the metrics from the output of `against_teacher`; the table of metrics has their names."""
        return {}


class Sft(DemonstratedLoss):
    """Next-token negative log-likelihood over completion tokens."""

    type: Literal["sft"] = "sft"

    def per_token(
        self, logprobs: Float[Tensor, "B T"], teacher: Float[Tensor, "K B T"] | None = None
    ) -> Float[Tensor, "B T"]:
        """Compute the loss of each token, -log π(y_t | x, y_<t)."""
        return -logprobs
