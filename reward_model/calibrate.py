"""Calibrate a reward model: a shift and scale that give its scores mean 0 and std 1 on reference completions.

This keeps the scores of different training runs comparable.
"""

from __future__ import annotations

import math

import torch

from reward_model.model import score_pairs
from rlhf.config.sections import CalibrationConfig
from rlhf.data.stream import RowSet
from rlhf.errors import RewardError
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.types import PreferencePairs

DEGENERATE = 1e-6  # least std relative to max(1, |mean|): below it the scores are one number up to rounding


def calibrate(
    model: ScalarHeadModel,
    pairs: RowSet[PreferencePairs],
    config: CalibrationConfig,
    *,
    micro_batch_size: int,
    dtype: str,
) -> tuple[float, float]:
    """Store in the model the mean and (population) std of its raw scores on completions of `pairs`.

        score = (raw - mean) / std

    The reference completions are spread evenly over `pairs`, at most `config.limit` of them. With data "none" the
    model keeps its present calibration.

    Returns:
        The (mean, std) stored in the model.

    Raises:
        RewardError: the scores are not finite, or are all the same.
    """
    if config.data == "none":
        return model.calibration
    model.calibrate(0.0, 1.0)
    sides = 2 if config.data == "both" else 1
    picked = _spread(len(pairs), math.ceil(config.limit / sides))
    chosen, rejected = score_pairs(model, pairs, picked, micro_batch_size=micro_batch_size, dtype=dtype)
    raw = (chosen if sides == 1 else torch.stack([chosen, rejected], dim=1).flatten())[: config.limit].double()
    mean, std = raw.mean().item(), raw.std(correction=0).item()
    if not (math.isfinite(mean) and math.isfinite(std)) or std <= DEGENERATE * max(1.0, abs(mean)):
        raise RewardError(
            f"the reward model cannot be calibrated: its scores on {len(raw)} reference completions have mean "
            f"{mean:.4g} and standard deviation {std:.4g}; it has learned nothing, or training diverged "
            "(look at loss/rm, lower model.lr), or calibration.limit leaves too few completions"
        )
    model.calibrate(mean, std)
    return mean, std


def _spread(n: int, limit: int) -> list[int]:
    """Return at most `limit` of the numbers below n, evenly spaced."""
    count = min(n, limit)
    return [i * n // count for i in range(count)]
