"""Corrections for completions from another distribution than the policy's; the equations are in rlhf.algo."""

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
    """No correction: the sampler's tokens count as drawn by the policy."""

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

    by_sequence: ClassVar[bool]
    """True: each token gets the ratio of its whole completion. False: each token gets its own ratio."""
    masks: ClassVar[bool]
    """True: a ratio above the cap becomes the weight 0. False: it becomes the cap."""

    cap: Cap = 3.0
    """Largest weight of a token or of a completion."""

    def ratios(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the ratios pi_old / sampler; 1 outside the mask."""
        from rlhf.algo.correction import sequence_ratios, token_ratios

        return (sequence_ratios if self.by_sequence else token_ratios)(logprobs, sampler_logprobs, mask)

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the limited ratios."""
        from rlhf.algo.correction import masked_above, truncated

        return (masked_above if self.masks else truncated)(self.ratios(logprobs, sampler_logprobs, mask), self.cap)

    def is_capped(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Bool[Tensor, "B T"]:
        """Flag the ratios above the cap."""
        return self.ratios(logprobs, sampler_logprobs, mask) > self.cap


class TokenTruncate(CappedCorrection):
    """Weight each token by its ratio, at most the cap: low variance, some bias (IMPALA, Espeholt et al. 2018)."""

    by_sequence: ClassVar[bool] = False
    masks: ClassVar[bool] = False

    type: Literal["token_truncate"] = "token_truncate"


class TokenMask(CappedCorrection):
    """Weight each token by its ratio, and leave out tokens whose ratio exceeds the cap."""

    by_sequence: ClassVar[bool] = False
    masks: ClassVar[bool] = True

    type: Literal["token_mask"] = "token_mask"


class SequenceTruncate(CappedCorrection):
    """Weight each completion by its ratio, at most the cap: unbiased below the cap, more variance."""

    by_sequence: ClassVar[bool] = True
    masks: ClassVar[bool] = False

    type: Literal["sequence_truncate"] = "sequence_truncate"


class SequenceMask(CappedCorrection):
    """Weight each completion by its ratio, and leave out completions whose ratio exceeds the cap (TRL's default)."""

    by_sequence: ClassVar[bool] = True
    masks: ClassVar[bool] = True

    type: Literal["sequence_mask"] = "sequence_mask"
