"""The report card of an ensemble: how far its members disagree, and whether that tells when it is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from jaxtyping import Bool, Float
from scipy.stats import rankdata
from torch import Tensor

from reward_model.ensemble import score_member_pairs
from reward_model.losses import win_indicator
from reward_model.statistics import RESAMPLES
from rlhf.data.pairs import PairSet
from rlhf.models.ensemble_head import EnsembleHeadModel
from rlhf.runtime.seeding import generator


@dataclass(frozen=True)
class Auc:
    """An area under the ROC curve with its 95 % bootstrap interval; None where nothing, or everything, is wrong."""

    auc: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class EnsembleCard:
    """The figures of an ensemble on held-out pairs.

    `predicts_error` is the probability that the members disagree more on a pair that the ensemble's mean gets wrong
    than on one that it gets right (½: disagreement says nothing). `small_gap_predicts_error` is the same for a small
    mean gap, which needs no ensemble: what the first has beyond the second is what the members add.
    """

    members: int
    member_accuracy: dict[str, float]
    disagreement: float  # mean over pairs of the standard deviation over members of the gap
    disagreement_when_right: float | None
    disagreement_when_wrong: float | None
    gap_correlation: float | None  # mean over pairs of members of the correlation of their gaps
    predicts_error: Auc
    small_gap_predicts_error: Auc

    def as_dict(self) -> dict[str, object]:
        """Return the card as plain data, for report_card.json."""
        return asdict(self)


def member_gaps(model: EnsembleHeadModel, pairs: PairSet, *, micro_batch_size: int, dtype: str) -> Float[Tensor, "K N"]:
    """Compute every member's calibrated score gap, chosen - rejected, of each pair."""
    chosen, rejected = score_member_pairs(
        model, pairs, range(len(pairs)), micro_batch_size=micro_batch_size, dtype=dtype
    )
    return (chosen - rejected).double().T


def ensemble_card(gaps: Float[Tensor, "K N"], *, seed: int) -> EnsembleCard:
    """Compute the card from the members' gaps on held-out pairs; `seed` is that of the bootstrap over pairs.

    A pair that the mean gap ties counts as wrong.
    """
    mean, std = gaps.mean(dim=0), gaps.std(dim=0, correction=0)
    wrong = mean <= 0
    return EnsembleCard(
        members=len(gaps),
        member_accuracy={f"member {k}": float(win_indicator(row).mean()) for k, row in enumerate(gaps)},
        disagreement=float(std.mean()),
        disagreement_when_right=_mean(std[~wrong]),
        disagreement_when_wrong=_mean(std[wrong]),
        gap_correlation=_mean_correlation(gaps),
        predicts_error=auc_interval(std, wrong, seed=seed),
        small_gap_predicts_error=auc_interval(-mean.abs(), wrong, seed=seed),
    )


def auc(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> float | None:
    """Compute the area under the ROC curve of a score for the positive class; None where a class is empty.

        AUC = P(score of a positive > score of a negative) + ½ P(they tie) = (R - n₊(n₊ + 1)/2) / (n₊ n₋)

    where R is the sum of the positives' ranks among all scores, ties at their mean rank (Mann & Whitney 1947).
    """
    n_positive = int(positive.sum())
    n_negative = len(positive) - n_positive
    if not n_positive or not n_negative:
        return None
    ranks = torch.from_numpy(rankdata(scores.double().numpy()))
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def auc_interval(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"], *, seed: int) -> Auc:
    """Compute the AUC with its percentile interval over resampled pairs; resamples with one class are left out."""
    value = auc(scores, positive)
    if value is None:
        return Auc(None, None, None)
    random, areas = generator(seed, "auc"), []
    for _ in range(RESAMPLES):
        draw = torch.randint(len(scores), (len(scores),), generator=random)
        area = auc(scores[draw], positive[draw])
        if area is not None:
            areas.append(area)
    quantiles = torch.tensor(areas, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    low, high = quantiles.tolist()
    return Auc(value, low, high)


def _mean(values: Float[Tensor, " N"]) -> float | None:
    return float(values.mean()) if len(values) else None


def _mean_correlation(gaps: Float[Tensor, "K N"]) -> float | None:
    """Compute the mean correlation between different members; None for one member or one that does not vary."""
    if len(gaps) < 2 or bool((gaps.std(dim=1, correction=0) == 0).any()) or gaps.shape[1] < 2:
        return None
    matrix = torch.corrcoef(gaps)
    return float(matrix[~torch.eye(len(gaps), dtype=torch.bool)].mean())
