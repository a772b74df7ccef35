"""From scores to tokens: one exact draw per row, quickly."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 64  # probabilities that are added up together


def pick(
    scores: Float[Tensor, "B V"], uniform: Float[Tensor, " B"] | None, temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """A token for each row, and its log-probability (nats) at the temperature.

    Args:
        scores: the model's logits.
        uniform: in [0, 1), float64; None takes the most likely token instead.
        temperature: divides the logits.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probabilities = (wide if temperature == 1.0 else wide / temperature).softmax(dim=-1)
    token = wide.argmax(dim=-1) if uniform is None else invert(probabilities, uniform)
    return token, probabilities.gather(1, token[:, None]).squeeze(1).log()


def invert(probabilities: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The token at which the cumulative probability first exceeds `uniform`: that of rlhf.sampling.hf.draw.

    The sums are float64, of blocks first and then inside the block that holds the threshold, so that not the whole
    vocabulary is converted and accumulated.
    """
    rows, vocabulary = probabilities.shape
    tail = -vocabulary % BLOCK
    padded = torch.nn.functional.pad(probabilities, (0, tail)) if tail else probabilities
    blocks = padded.view(rows, -1, BLOCK)
    upto = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform * upto[:, -1]
    block = torch.searchsorted(upto, threshold[:, None], right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(rows, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    place = torch.searchsorted(inside, threshold[:, None] - before, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + place).squeeze(1).clamp_(max=vocabulary - 1)
