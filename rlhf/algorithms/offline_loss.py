"""Defines the losses over fixed data: sections with an equation each, which the offline loop asks for values.

The functions take one number per completion. With y_w the chosen completion of prompt x and y_l the rejected one, a
`rlhf.types.Side` of the pairs has

    logprobs           log π(y), the log-probability of the whole completion: summed over its tokens, EOS included
    log_ratios         h(y), its log-ratio to the reference, log π(y) - log π_ref(y)
    mean_logprobs      m(y), its mean log-probability per token, log π(y) / |y|

The loss compares the implicit rewards of completions; the chosen side wins if its reward is higher. A new
loss is one class, in this package or in a user's module; it is a preset of its own name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.algorithms.presets import preset
from rlhf.section import Choice, NonNegative, Usual

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.algo.divergence import TeacherTokens
    from rlhf.types import Side


def usual_beta(low: float, high: float, source: str) -> Usual:
    """Return the usual range of the factor β of log-ratios to the reference, with what `source` reports."""
    return Usual(
        low=low,
        high=high,
        rule="preference-beta",
        reason="If β is too small the policy leaves the reference; if it is too large nothing is learned.",
        source=source,
        fix="0.1",
    )


def usual_smoothing(source: str) -> Usual:
    """Return the usual range of the assumed share of flipped labels, with what `source` reports."""
    return Usual(
        high=0.3,
        rule="label-smoothing",
        reason="A smoothing above 0.3 assumes that a third of the labels are wrong, so the pairs carry little signal.",
        source=source,
        fix="0.1",
    )


class OfflineLoss(Choice):
    """A loss over a fixed data set."""

    data: ClassVar[Literal["demonstrations", "pairs", "labelled"]]
    """The kind of the data's rows: a text to imitate, a pair of completions, or a completion with a label."""
    completions_per_row: ClassVar[int] = 1
    needs_reference: ClassVar[bool] = False
    """Whether the loss reads the reference's log-probabilities."""
    reads_teacher: ClassVar[bool] = False
    """Whether it compares the policy's next-token distributions with a teacher's, by `against_teacher`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Register the loss, and declare it as a preset with its defaults."""
        super().__pydantic_init_subclass__(**kwargs)
        name = cls.model_fields["type"].default
        if cls.members.get(name) is cls:
            preset(name, {"algorithm": {"loss": {"type": name}}})

    def check_sizes(self, rows_per_step: int) -> None:
        """Check that the loss can work with this many rows in a step."""

    def against_teacher(self, log_pi: Float[Tensor, "N V"], teacher: TeacherTokens) -> Float[Tensor, "K N"]:
        """Compute K numbers of each token from its distributions, for a loss that reads a teacher."""
        raise NotImplementedError


class PairLoss(OfflineLoss):
    """A loss over pairs: a value for each pair, and the implicit reward of a completion."""

    data: ClassVar[Literal["demonstrations", "pairs", "labelled"]] = "pairs"
    completions_per_row: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = True

    def reward(self, side: Side) -> Float[Tensor, " B"]:
        """Compute the implicit reward of one side of each pair: β h, β the loss's `beta` (1 if it has none)."""
        beta: float = getattr(self, "beta", 1.0)
        return beta * side.log_ratios

    @abstractmethod
    def per_pair(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair."""

    def measure(self, chosen: Side, rejected: Side) -> Mapping[str, Tensor]:
        """Compute the loss's own metrics, which `metrics` declares: of each the values that are averaged."""
        return {}


class LogRatioLoss(PairLoss):
    """A comparison of log-ratios, and the likelihood of the chosen side besides (Pang et al. 2024, eq. 1).

    L = compare(y_w, y_l) - α m(y_w),     α = nll_coef
    """

    nll_coef: NonNegative = 0.0
    """Weight of the chosen side's negative log-likelihood per token, added to the loss to keep chosen completions
    likely. 1 in iterative RPO (Pang et al. 2024); 0: off."""

    def compare(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair, without the likelihood of its chosen side."""
        raise NotImplementedError

    def per_pair(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair.

        Without the likelihood, a chosen completion may lose probability as long as the rejected one loses more.
        """
        loss = self.compare(chosen, rejected)
        return loss - self.nll_coef * chosen.mean_logprobs if self.nll_coef > 0 else loss


class LabelLoss(OfflineLoss):
    """A loss over completions that are labelled desirable or undesirable; the sides of pairs are taken as such."""

    data: ClassVar[Literal["demonstrations", "pairs", "labelled"]] = "labelled"
    needs_reference: ClassVar[bool] = True

    def reward(self, log_ratios: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Compute the implicit reward of completions from their log-ratios h."""
        raise NotImplementedError

    def baseline(self, mismatched_log_ratios: Float[Tensor, " B"]) -> Float[Tensor, ""]:
        """Compute the baseline of a minibatch from the log-ratios of completions of other prompts; no gradient."""
        raise NotImplementedError

    def per_completion(
        self, log_ratios: Float[Tensor, " B"], desirable: Bool[Tensor, " B"], baselines: Float[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """Compute the loss of each completion."""
        raise NotImplementedError

    def as_pair_loss(self) -> PairLoss:
        """Return a loss over pairs with the same implicit reward, for the metrics of held-out pairs."""
        raise NotImplementedError
