"""x"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 64  # probabilities that sample_token sums as one block


def sample_token(
    scores: Float[Tensor, "B V"], uniform: Float[Tensor, " B"] | None, temperature: float
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Pick a token for each row and return it with its log-probability (nats) at the temperature.

    Args:
        scores: the model's logits.
        uniform: numbers in [0, 1), float64, on the CPU if the device of the scores has no float64: the token is then
            drawn there. None takes the most likely token instead.
        temperature: divides the logits.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probabilities = (wide if temperature == 1.0 else wide / temperature).softmax(dim=-1)
    if uniform is None:
        token = wide.argmax(dim=-1)
    else:
        token = inverse_cdf(probabilities.to(uniform.device), uniform).to(scores.device)
    return token, probabilities.gather(1, token[:, None]).squeeze(1).log()


def inverse_cdf(probabilities: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the cumulative probability first exceeds `uniform`, as `draw` does.

    The float64 sums are taken over blocks first, and then inside the block that contains the threshold, so that the
    whole vocabulary need not be converted and accumulated.
    """
    rows, vocabulary = probabilities.shape
    padding = -vocabulary % BLOCK
    padded = torch.nn.functional.pad(probabilities, (0, padding)) if padding else probabilities
    blocks = padded.view(rows, -1, BLOCK)
    cumulative = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold = uniform * cumulative[:, -1]
    block = torch.searchsorted(cumulative, threshold[:, None], right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    cumulative_inside = blocks.gather(1, block[:, :, None].expand(rows, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    offset = torch.searchsorted(cumulative_inside, threshold[:, None] - before, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + offset).squeeze(1).clamp_(max=vocabulary - 1)
