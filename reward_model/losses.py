"""The Bradley-Terry loss on the scores of preference pairs, with margin and centering."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_scores: Float[Tensor, " B"],
    rejected_scores: Float[Tensor, " B"],
    margins: Float[Tensor, " B"],
    *,
    centering: float,
) -> Float[Tensor, " B"]:
    """Compute the negative log-likelihood of each preference, plus a pull of the two scores towards a zero sum.

        L = -log σ(r_c - r_r - m) + c · (r_c + r_r)²

    The first term is that of Bradley & Terry (1952) as in Stiennon et al. (2020) and Ouyang et al. (2022, eq. 1);
    the margin m is from Touvron et al. (2023, eq. 2). Preferences determine scores only up to a constant: the second
    term, with c = `centering` (0.01 is usual), removes that freedom (Eisenstein et al. 2023). Losses are not averaged
    over the pairs of a prompt: every pair counts once.
    """
    return -logsigmoid(chosen_scores - rejected_scores - margins) + centering * (chosen_scores + rejected_scores) ** 2


def wins(gaps: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return 1 where the chosen side scores higher (gap > 0), ½ at a tie, else 0, so a constant score wins half."""
    return torch.heaviside(gaps, torch.tensor(0.5, dtype=gaps.dtype, device=gaps.device))
