"""Corrections of completions that another distribution than the policy's sampled; the equations are in rlhf.algo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rlhf.section import Choice, Usual

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.algo.masked import Mean

Cap = Annotated[
    float,
    Field(ge=1),
    Usual(
        low=1.5,
        high=10.0,
        rule="correction-cap",
        reason="A cap near 1 biases the gradient; a large cap lets single tokens or completions dominate a step.",
        source="Espeholt et al. 2018 (1), Hilton et al. 2022 and TRL's GRPO (3)",
        fix="sampling.correction.cap=3",
    ),
]


class Correction(Choice):
    """Importance weights pi_old / sampler of the advantages."""

    is_off: ClassVar[bool] = False
    """Whether nothing is weighted, so that the trainer's own log-probabilities are not needed."""

    type: str

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the weight of every token from its log-probabilities under policy and sampler; 1 outside the mask."""
        raise NotImplementedError

    def is_capped(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Flag the tokens whose weight is not the plain ratio."""
        raise NotImplementedError

    def measure(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> dict[str, Mean]:
        """Compute the metrics of the weights."""
        from rlhf.algo.masked import Mean
        from rlhf.algo.selection import effective_sample_share

        weights = self.weigh(logprobs, sampler_logprobs, mask)
        share = effective_sample_share(weights, mask)
        return {
            "correction/weight": Mean.of(weights, mask),
            "correction/capped": Mean.of(self.is_capped(logprobs, sampler_logprobs, mask), mask),
            "correction/masked": Mean.of(weights == 0, mask),
            "correction/ess": Mean(share, 1.0),
        }


class NoCorrection(Correction):
    """No correction: what the sampler drew counts as drawn by the policy."""

    is_off: ClassVar[bool] = True

    type: Literal["none"] = "none"

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Return ones."""
        import torch

        return torch.ones_like(logprobs)

    def is_capped(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Return no token."""
        import torch

        return torch.zeros_like(mask)


class CappedCorrection(Correction):
    """A correction by ratios, of which those above a cap are truncated or masked."""

    cap: Cap = 3.0
    """Largest weight of a token or of a completion."""

    def ratios(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the ratios pi_old / sampler; 1 outside the mask."""
        raise NotImplementedError

    def limit(self, ratios: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute the weights from the ratios."""
        raise NotImplementedError

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the limited ratios."""
        return self.limit(self.ratios(logprobs, sampler_logprobs, mask))

    def is_capped(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Flag the ratios above the cap."""
        return self.ratios(logprobs, sampler_logprobs, mask) > self.cap


class TokenCorrection(CappedCorrection):
    """A correction by the ratio of each token."""

    def ratios(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the ratio of every token."""
        from rlhf.algo.correction import token_ratios

        return token_ratios(logprobs, sampler_logprobs, mask)


class SequenceCorrection(CappedCorrection):
    """A correction by the ratio of each completion, the product over its tokens."""

    def ratios(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the ratio of every completion, at each of its tokens."""
        from rlhf.algo.correction import sequence_ratios

        return sequence_ratios(logprobs, sampler_logprobs, mask)


class TokenTruncate(TokenCorrection):
    """Weight each token by its ratio, at most the cap: low variance, some bias (IMPALA, Espeholt et al. 2018)."""

    type: Literal["token_truncate"] = "token_truncate"

    def limit(self, ratios: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute min(ratio, cap)."""
        from rlhf.algo.correction import truncated

        return truncated(ratios, self.cap)


class TokenMask(TokenCorrection):
    """Weight each token by its ratio, and leave out tokens whose ratio exceeds the cap."""

    type: Literal["token_mask"] = "token_mask"

    def limit(self, ratios: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute the ratio, 0 above the cap."""
        from rlhf.algo.correction import masked_above

        return masked_above(ratios, self.cap)


class SequenceTruncate(SequenceCorrection):
    """Weight each completion by its ratio, at most the cap: unbiased below the cap, more variance."""

    type: Literal["sequence_truncate"] = "sequence_truncate"

    def limit(self, ratios: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute min(product of the ratios, cap)."""
        from rlhf.algo.correction import truncated

        return truncated(ratios, self.cap)


class SequenceMask(SequenceCorrection):
    """Weight each completion by its ratio, and leave out completions whose ratio exceeds the cap (TRL's default)."""

    type: Literal["sequence_mask"] = "sequence_mask"

    def limit(self, ratios: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Compute the product of the ratios, 0 above the cap."""
        from rlhf.algo.correction import masked_above

        return masked_above(ratios, self.cap)
