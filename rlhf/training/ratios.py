"""The distribution of a step's importance ratios, beside the objective that they climb, for the report's figure."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.policy_loss import TokenLoss, Tokens
from rlhf.runtime.distributed import Distributed

BINS = 60
SIGNS = {"positive": 1.0, "negative": -1.0}  # of the advantage


class RatioHistogram:
    """Counts of the ratios over all updates of a step, apart for advantages above and below 0.

    Ratios beyond the range are counted in its outermost bins. On a GPU the counts stay there until they are read.
    """

    def __init__(self, low: float, high: float) -> None:
        """Count between two ratios."""
        self.low, self.high = low, high
        self.counts: dict[str, Tensor] = {}

    def add(self, ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> None:
        """Count the live tokens with an advantage."""
        inside = ratio.detach().float().clamp(self.low, self.high)
        for name, sign in SIGNS.items():
            live = torch.where(mask & (sign * advantages > 0), inside, self.low - 1.0)  # which histc leaves out
            counts = torch.histc(live, bins=BINS, min=self.low, max=self.high)
            self.counts[name] = counts + self.counts[name] if name in self.counts else counts

    def figure(self, loss: TokenLoss, coefs: Coefs, ranks: Distributed) -> dict[str, object]:
        """Return the counts of all ranks with the gain of the objective in the middle of each bin."""
        width = (self.high - self.low) / BINS
        middles = [self.low + width * (number + 0.5) for number in range(BINS)]
        empty = [0.0] * BINS
        gathered = ranks.gather({name: counts.tolist() for name, counts in self.counts.items()})
        counts = {
            name: [sum(column) for column in zip(*(rank.get(name, empty) for rank in gathered), strict=True)]
            for name in SIGNS
        }
        gains = {name: objective_gain(loss, middles, sign, coefs) for name, sign in SIGNS.items()}
        return {"ratios": middles, "counts": counts, "gains": gains}


def objective_gain(loss: TokenLoss, ratios: list[float], sign: float, coefs: Coefs) -> list[float]:
    """Compute how much a ratio gains over ratio 1 in the objective of a token whose advantage is 1 or -1.

    L(1) - L(ratio), for losses that are functions of the ratio
    """
    ratio = torch.tensor([[1.0, *ratios]], dtype=torch.float64)
    tokens = Tokens(
        ratio=ratio,
        logprobs=ratio.log(),
        old_logprobs=torch.zeros_like(ratio),
        advantages=torch.full_like(ratio, sign),
        mask=torch.ones_like(ratio, dtype=torch.bool),
        old_kl=ratio - 1 - ratio.log(),
        coefs=coefs,
    )
    per_token = loss.per_token(tokens).per_token
    gains: list[float] = (per_token[0, 0] - per_token[0, 1:]).tolist()
    return gains
