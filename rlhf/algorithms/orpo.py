"""Odds ratio preference optimization (Hong et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rlhf.algorithms.offline_loss import PairLoss
from rlhf.section import NonNegative, Usual

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Side

ODDS_EPS = 1e-6  # mean log-probabilities are clamped to at most -ODDS_EPS: at 0 the odds are infinite


class Orpo(PairLoss):
    """Odds ratio preference optimization (Hong et al. 2024): SFT on the chosen side and an odds ratio; no reference.

        L = -m_w - λ log σ(log odds(y_w) - log odds(y_l)),     odds(y) = p / (1 - p),  p = exp m(y),  λ = coef

    The loss is eq. 6 and 7 of the paper. Departure: m is clamped to at most -1e-6, because a completion of probability
    1 has infinite odds. The SFT term is the mean over a completion's own tokens, as in the paper; implementations that
    average over all tokens of a batch give long completions more weight.
    """

    type: Literal["orpo"] = "orpo"
    needs_reference: ClassVar[bool] = False
    coef: Annotated[
        NonNegative,
        Usual(
            low=0.01,
            high=1.0,
            rule="orpo-weight",
            reason="Above 1 the odds-ratio term outweighs the likelihood that keeps ORPO close to the data; below 0.01 "
            "it is SFT on the chosen side.",
            source="Hong et al. 2024: 0.1 to 1",
            fix="0.1",
        ),
    ] = 0.1
    """Weight of the odds-ratio term relative to the likelihood: the paper's lambda."""

    def reward(self, side: Side) -> Float[Tensor, " B"]:
        """Compute the implicit reward of one side of each pair, its log odds."""
        return self._log_odds(side.mean_logprobs)

    def per_pair(self, chosen: Side, rejected: Side) -> Float[Tensor, " B"]:
        """Compute the loss of each pair."""
        from torch.nn.functional import logsigmoid

        m_w, m_l = chosen.mean_logprobs, rejected.mean_logprobs
        return -m_w - self.coef * logsigmoid(self._log_odds(m_w) - self._log_odds(m_l))

    def _log_odds(self, mean_logprobs: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        import torch

        below_zero = mean_logprobs.clamp(max=-ODDS_EPS)
        return below_zero - torch.log(-torch.expm1(below_zero))
