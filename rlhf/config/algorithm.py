"""The algorithm section of a training run: an online algorithm of rlhf/algorithms, or an offline loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from rlhf.algorithms.online import Online
from rlhf.algorithms.policy_loss import PolicyLoss
from rlhf.section import NonNegative, Positive, Section, type_discriminator

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class ReferencedPairSection(Section):
    """What every loss of pairs with a reference has: the likelihood of the chosen side besides."""

    type: str
    nll_coef: NonNegative = 0.0
    """Weight of the chosen side's negative log-likelihood per token, added to the loss to keep chosen completions
    likely. 1 in iterative RPO (Pang et al. 2024); 0: off."""


class DpoLoss(ReferencedPairSection):
    """Direct preference optimization (Rafailov et al. 2023); with label smoothing, conservative DPO (cDPO)."""

    type: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """Factor of the log-ratio to the reference (nats per sequence); a larger value stays closer to it."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of flipped labels; 0.1 is usual for cDPO."""


class RobustDpoLoss(ReferencedPairSection):
    """DPO with a loss that is unbiased under flipped labels (Chowdhury et al. 2024)."""

    type: Literal["robust_dpo"] = "robust_dpo"
    beta: Positive = 0.1
    """As in DPO."""
    label_smoothing: Smoothing = 0.1
    """Assumed share of flipped labels; if it is too large, the loss has no lower bound."""


class IpoLoss(ReferencedPairSection):
    """Identity preference optimization (Azar et al. 2024)."""

    type: Literal["ipo"] = "ipo"
    beta: Positive = 0.1
    """The paper's tau: the difference of log-ratios is pulled towards 1 / (2 beta) nats."""
    normalize: Literal["none", "length"] = "none"
    """none: log-ratios summed over a completion (the paper); length: per token (TRL). Each needs its own beta."""


class HingeLoss(ReferencedPairSection):
    """DPO with a hinge instead of the logistic loss (Liu et al. 2024)."""

    type: Literal["hinge"] = "hinge"
    beta: Positive = 0.1
    """As in DPO."""
    margin: Positive = 1.0
    """A pair has no gradient once the chosen side leads by this much implicit reward."""


ReferencedPairLoss = DpoLoss | RobustDpoLoss | IpoLoss | HingeLoss
"""Losses that need both sides of a pair and the reference's log-probabilities."""


class OnlinePairLoss(PolicyLoss):
    """A preference loss on pairs sampled from the policy itself and ranked by the reward (Guo et al. 2024)."""

    reads_old_logprobs: ClassVar[bool] = True

    type: Literal["pair"] = "pair"
    loss: Annotated[
        Annotated[DpoLoss, Tag("dpo")]
        | Annotated[RobustDpoLoss, Tag("robust_dpo")]
        | Annotated[IpoLoss, Tag("ipo")]
        | Annotated[HingeLoss, Tag("hinge")],
        Discriminator(type_discriminator("dpo")),
    ] = DpoLoss()
    """dpo, robust_dpo, ipo or hinge, with the offline settings; only beta keeps the policy near the reference."""

    @property
    def pair_loss(self) -> ReferencedPairLoss:
        """Return the loss of the sampled pairs."""
        return self.loss

    def check(self, algorithm: Online) -> None:
        """Check that nothing leaves out a side of a pair, and that no KL penalty is set that would not be read."""
        if algorithm.mask_truncated:
            raise ValueError(
                "mask_truncated leaves out single completions, but a pair loss learns from two at once: "
                "set mask_truncated=false, and reward.shaping.missing_eos_penalty to rank what is cut off lower"
            )
        if algorithm.kl.placement != "none":
            raise ValueError(
                f"a pair loss reads no KL penalty, but kl.placement is {algorithm.kl.placement}: leave algorithm.kl "
                "out; the pull to the reference is policy_loss.loss.beta"
            )


class SftLoss(Section):
    """Next-token negative log-likelihood over completion tokens."""

    type: Literal["sft"] = "sft"
    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """How the tokens are weighted."""


class SlicLoss(Section):
    """SLiC-HF (Zhao et al. 2023): a hinge on log-probabilities plus the chosen side's likelihood; no reference."""

    type: Literal["slic"] = "slic"
    margin: Positive = 1.0
    """By how much the chosen side should be likelier, in nats summed over the completion."""
    nll_coef: NonNegative = 0.5
    """Weight of the chosen side's negative log-likelihood, summed over its tokens."""


class SimpoLoss(Section):
    """Simple preference optimization (Meng et al. 2024); no reference."""

    type: Literal["simpo"] = "simpo"
    beta: Positive = 2.0
    """Multiplies the mean log-probability per token, in nats."""
    gamma: NonNegative = 1.0
    """Target margin between the two rewards, which include beta."""


class OrpoLoss(Section):
    """Odds ratio preference optimization (Hong et al. 2024): SFT on the chosen side and an odds ratio; no reference."""

    type: Literal["orpo"] = "orpo"
    coef: NonNegative = 0.1
    """Weight of the odds-ratio term relative to the likelihood: the paper's lambda."""


class KtoLoss(Section):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), on single labelled completions or the sides of pairs."""

    type: Literal["kto"] = "kto"
    beta: Positive = 0.1
    """As in DPO."""
    desirable_weight: NonNegative = 1.0
    """Weight of desirable completions; times their number it should be 1 to 1.5 times the same of undesirable ones."""
    undesirable_weight: NonNegative = 1.0
    """Weight of undesirable completions."""

    @model_validator(mode="after")
    def _check_weights(self) -> KtoLoss:
        if self.desirable_weight + self.undesirable_weight == 0:
            raise ValueError("desirable_weight and undesirable_weight are both 0: nothing would be learned")
        return self


ReferencedLoss = ReferencedPairLoss | KtoLoss
"""Losses that read the reference's log-probabilities."""
PairLossConfig = ReferencedPairLoss | SlicLoss | SimpoLoss | OrpoLoss
"""Losses that need both sides of a pair at once."""
OfflineLoss = Annotated[
    Annotated[SftLoss, Tag("sft")]
    | Annotated[DpoLoss, Tag("dpo")]
    | Annotated[RobustDpoLoss, Tag("robust_dpo")]
    | Annotated[IpoLoss, Tag("ipo")]
    | Annotated[HingeLoss, Tag("hinge")]
    | Annotated[SlicLoss, Tag("slic")]
    | Annotated[SimpoLoss, Tag("simpo")]
    | Annotated[OrpoLoss, Tag("orpo")]
    | Annotated[KtoLoss, Tag("kto")],
    Discriminator(type_discriminator("sft")),
]


class Offline(Section):
    """An algorithm that learns from a fixed data set."""

    preset: str | None = None
    """The preset that these settings start from."""
    loss: OfflineLoss = SftLoss()
    """The policy's loss: sft, or a preference loss (dpo, robust_dpo, ipo, hinge, slic, simpo, orpo, kto)."""

    @property
    def name(self) -> str:
        """Return the preset's name, or the loss's type if no preset is named."""
        return self.preset or self.loss.type

    def check_sizes(self, prompts_per_step: int) -> None:
        """Check that the loss can work with this many rows in a step."""
        if isinstance(self.loss, KtoLoss) and prompts_per_step < 2:
            raise ValueError("KTO's z0 pairs a prompt with another's completion: batch.prompts_per_step must be >= 2")


def algorithm_kind(value: object) -> Literal["online", "offline"]:
    """Return the kind of an algorithm: offline if it has a `loss`, the loss over a fixed data set."""
    offline = "loss" in value if isinstance(value, Mapping) else isinstance(value, Offline)
    return "offline" if offline else "online"


Algorithm = Annotated[
    Annotated[Online, Tag("online")] | Annotated[Offline, Tag("offline")], Discriminator(algorithm_kind)
]
"""Online, unless the section sets `loss`, the loss over a fixed data set."""
