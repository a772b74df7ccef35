"""An ensemble of reward models on one backbone: every member's score, the loss that trains them, a RewardSource."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float
from scipy.special import pdtr
from torch import Tensor

from reward_model.model import (
    bradley_terry,
    pair_scores,
    reference_statistics,
    score_pairs,
    score_rows,
    spread_indices,
    win_indicator,
)
from reward_model.source import RewardModelSource, check_finite
from rlhf.algo.masked import Mean
from rlhf.config.reward import CalibrationConfig, RewardModelLoss
from rlhf.data.datasets import RowSet
from rlhf.data.pairs import PairSet
from rlhf.models.backbone import autocast
from rlhf.models.scalar_head import EnsembleHeadModel, sequence_member_scores
from rlhf.rewards.ensemble import combine, disagreement
from rlhf.types import Completions, PreferencePairs, Scores

LARGEST_COUNT = 20  # of a Poisson(1) number; P(larger) < 1e-19
Combination = Literal["mean", "minimum", "mean_minus_std"]


def bootstrap_weights(pairs: PreferencePairs, members: Sequence[int], *, seed: int) -> Float[Tensor, "B K"]:
    """Compute how often each member's bootstrap resample of the data contains each pair: Poisson(1) numbers.

    A resample of n pairs with replacement has each Binomial(n, 1/n) times, which tends to Poisson(1), independent of
    the other pairs (Oza & Russell 2001; the heads of Osband et al. 2016 are trained so). The number follows from the
    seed, the member and the pair's token ids alone: it is the same in every epoch, on every rank and after a restart.
    """
    rows = [
        b"".join(
            row[live].cpu().numpy().tobytes() + b"|"
            for row, live in (
                (pairs.prompt_ids[i], pairs.prompt_mask[i]),
                (pairs.chosen_ids[i], pairs.chosen_mask[i]),
                (pairs.rejected_ids[i], pairs.rejected_mask[i]),
            )
        )
        for i in range(len(pairs))
    ]
    counts = [[_poisson_number(f"{seed}|{member}|".encode() + row) for member in members] for row in rows]
    return torch.tensor(counts, dtype=torch.float64, device=pairs.prompt_ids.device).view(len(pairs), len(members))


def _poisson_number(key: bytes) -> int:
    """Draw a Poisson(1) number by inversion from a uniform number that is a hash of the key."""
    uniform = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
    return bisect_right(_poisson_cdf(), uniform)


@cache
def _poisson_cdf() -> list[float]:
    return [float(pdtr(count, 1.0)) for count in range(LARGEST_COUNT)]


class EnsembleLoss:
    """The Bradley-Terry loss of every member: one term, `rm`, the mean over members summed over pairs.

    With a seed for `bootstrap`, each member weights the pairs by its own bootstrap resample. The mean over members
    leaves the backbone's gradient at the size of one model's.
    """

    def __init__(self, model: EnsembleHeadModel, config: RewardModelLoss, *, dtype: str, bootstrap: int | None) -> None:
        self.model, self.config, self.dtype, self.bootstrap = model, config, dtype, bootstrap
        self.row_values: dict[str, Tensor] = {}  # of each pair of the latest call of `terms`

    def denominators(self, batch: PreferencePairs) -> dict[str, float]:
        """Return the number of pairs, by which the loss is divided."""
        return {"rm": float(len(batch))}

    def terms(self, micro: PreferencePairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss summed over the pairs of `micro`; the metrics are of the mean score, unweighted."""
        device = self.model.head.weight.device
        pairs = micro.to(device)
        with autocast(self.dtype, device):
            chosen, rejected = pair_scores(self.model, pairs, scorer=sequence_member_scores)
        size = chosen.shape[1]
        margins = pairs.margins.to(chosen) if self.config.use_margin else torch.zeros_like(chosen[:, 0])
        losses = bradley_terry(
            chosen.T.flatten(), rejected.T.flatten(), margins.repeat(size), centering=self.config.centering
        ).view(size, -1)
        weights = torch.ones_like(losses)
        if self.bootstrap is not None:
            weights = bootstrap_weights(pairs, range(size), seed=self.bootstrap).T.to(losses)
        wins = win_indicator((chosen - rejected).detach().mean(dim=1))
        self.row_values = {"loss": losses.detach().mean(dim=0), "accuracy": wins}
        return {"rm": (weights * losses).mean(dim=0).sum()}, _metrics(chosen.detach(), rejected.detach(), losses)


def _metrics(
    chosen: Float[Tensor, "B K"], rejected: Float[Tensor, "B K"], losses: Float[Tensor, "K B"]
) -> dict[str, Mean]:
    gaps = chosen - rejected
    return {
        "loss/rm": Mean.of(losses.detach().mean(dim=0)),
        "rm/accuracy": Mean.of(win_indicator(gaps.mean(dim=1))),
        "rm/margin": Mean.of(gaps.mean(dim=1)),
        "rm/score_mean": Mean.of(chosen.mean(dim=1)) + Mean.of(rejected.mean(dim=1)),
        "rm/disagreement": Mean.of(gaps.std(dim=1, correction=0)),
    }


def member_gaps(model: EnsembleHeadModel, pairs: PairSet, *, micro_batch_size: int, dtype: str) -> Float[Tensor, "K N"]:
    """Compute every member's calibrated score gap, chosen - rejected, of each pair."""
    chosen, rejected = score_pairs(
        model,
        pairs,
        range(len(pairs)),
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        scorer=sequence_member_scores,
    )
    return (chosen - rejected).double().T


def calibrate_ensemble(
    model: EnsembleHeadModel,
    pairs: RowSet[PreferencePairs],
    config: CalibrationConfig,
    *,
    micro_batch_size: int,
    dtype: str,
) -> None:
    """Store in the model each member's mean and std on the same completions of `pairs`; see calibrate.

    Raises:
        RewardError: a member's scores are not finite, or are all the same.
    """
    if config.data == "none":
        return
    model.reset_calibration()
    sides = score_pairs(
        model,
        pairs,
        spread_indices(pairs, config),
        micro_batch_size=micro_batch_size,
        dtype=dtype,
        scorer=sequence_member_scores,
    )
    columns = zip(sides[0].unbind(dim=1), sides[1].unbind(dim=1), strict=True)
    means, stds = zip(*(reference_statistics(*column, config) for column in columns), strict=True)
    model.calibrate_members(list(means), list(stds))


class EnsembleModelSource:
    """A RewardSource: the combined score of all members, in one forward pass.

    The parts are each member's score and their "disagreement", the standard deviation over members.
    """

    def __init__(self, source: RewardModelSource, *, how: Combination, std_coef: float) -> None:
        assert isinstance(source.model, EnsembleHeadModel)
        self.source, self.model = source, source.model
        self.how, self.std_coef = how, std_coef

    def __call__(self, completions: Completions) -> Scores:
        """Score completions; see RewardSource."""
        rows, parts = self.source.prepare(completions)
        scores = score_rows(
            self.model,
            rows.prompt_ids,
            rows.prompt_mask,
            rows.completion_ids,
            rows.completion_mask,
            micro_batch_size=self.source.micro_batch_size,
            dtype=self.source.dtype,
            scorer=sequence_member_scores,
        ).float()
        check_finite(scores)
        weights = torch.ones(self.model.size)
        parts |= {f"member.{number}": column for number, column in enumerate(scores.unbind(dim=1))}
        parts["disagreement"] = disagreement(scores.T, weights)
        return Scores(values=combine(scores.T, weights, how=self.how, std_coef=self.std_coef), parts=parts)
