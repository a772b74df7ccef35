"""Statistics of scored pairs: accuracy with its confidence interval, bins, calibration error, correlation.

Of an ensemble also how far its members disagree, and whether that indicates where it is wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Bool, Float
from scipy.stats import pearsonr, rankdata, spearmanr
from torch import Tensor

from reward_model.losses import win_indicator
from rlhf.runtime.seeding import generator

RESAMPLES = 2000
MIN_CLUSTERS = 10


@dataclass(frozen=True)
class Accuracy:
    """Share of pairs whose chosen side scores higher (ties count half), with a 95 % bootstrap interval."""

    accuracy: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class SubsetAccuracy:
    """The accuracy on a subset of the pairs; None if the subset is empty."""

    accuracy: float | None
    n: int


@dataclass(frozen=True)
class MarginBin:
    """The pairs whose margin lies from `low` to `high`."""

    low: float
    high: float
    accuracy: float
    n: int


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs of similar confidence: the mean probability of the side that the model prefers, and how often it won."""

    predicted: float
    observed: float
    n: int


def accuracy(gaps: Float[Tensor, " N"], clusters: Sequence[Hashable], *, seed: int) -> Accuracy:
    """Compute the accuracy of score gaps (chosen - rejected) with its bootstrap interval.

    Pairs of one prompt are not independent, so the bootstrap resamples whole clusters (prompts); if there are fewer
    than 10 clusters, it resamples pairs.
    """
    won = win_indicator(gaps).double()
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < MIN_CLUSTERS:
        index, groups = torch.arange(len(won)), len(won)
    else:
        index, groups = torch.tensor([numbers[cluster] for cluster in clusters]), len(numbers)
    totals = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, won)
    sizes = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, torch.ones_like(won))
    random = generator(seed, "bootstrap")
    means = torch.empty(RESAMPLES, dtype=torch.float64)
    for i in range(RESAMPLES):
        draw = torch.randint(groups, (groups,), generator=random)
        means[i] = totals[draw].sum() / sizes[draw].sum()
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Accuracy(accuracy=won.mean().item(), low=low, high=high, n=len(won))


def subset_accuracy(gaps: Float[Tensor, " N"], where: Bool[Tensor, " N"]) -> SubsetAccuracy:
    """Compute the accuracy on the pairs that `where` marks."""
    picked = win_indicator(gaps[where]).double()
    return SubsetAccuracy(accuracy=picked.mean().item() if len(picked) else None, n=len(picked))


def accuracy_by_margin(
    gaps: Float[Tensor, " N"], margins: Float[Tensor, " N"], *, bins: int = 5
) -> tuple[MarginBin, ...]:
    """Compute the accuracy in quantile bins of |margin|; equal margins share a bin, so many of them give fewer bins."""
    size = margins.double().abs()
    edges = torch.unique(size.quantile(torch.arange(1, bins, dtype=torch.float64) / bins))
    bin_of = torch.bucketize(size, edges, right=True)
    margin_bins = []
    for number in torch.unique(bin_of).tolist():
        inside = bin_of == number
        won = win_indicator(gaps[inside]).double()
        low, high = size[inside].min().item(), size[inside].max().item()
        margin_bins.append(MarginBin(low=low, high=high, accuracy=won.mean().item(), n=len(won)))
    return tuple(margin_bins)


def calibration(gaps: Float[Tensor, " N"], *, bins: int = 10) -> tuple[float, tuple[CalibrationBin, ...]]:
    """Compute the expected calibration error (Naeini et al. 2015) of P(preferred) = σ(gap), and its bins.

        ECE = Σ_k n_k / N · |predicted_k - observed_k|

    The chosen side always comes first, so the raw σ(gap) could only be compared with 1. Each pair is therefore ordered
    so that the side that the model prefers comes first: predicted is the mean of σ(|gap|), in [½, 1], and observed the
    share of pairs in which that side is the chosen one (½ at a tie). Counting every pair in both orders gives the same,
    mirrored at ½. Bins are of equal width in [½, 1].
    """
    confidence = gaps.double().abs().sigmoid()
    won = win_indicator(gaps).double()
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    calibration_bins, error = [], 0.0
    for number in torch.unique(bin_of).tolist():
        inside = bin_of == number
        predicted, observed = confidence[inside].mean().item(), won[inside].mean().item()
        calibration_bins.append(CalibrationBin(predicted=predicted, observed=observed, n=int(inside.sum())))
        error += inside.double().mean().item() * abs(predicted - observed)
    return error, tuple(calibration_bins)


def pearson(x: Float[Tensor, " N"], y: Float[Tensor, " N"]) -> float | None:
    """Compute the linear (Pearson) correlation, or None if one of the two does not vary."""
    return float(pearsonr(x.double().numpy(), y.double().numpy()).statistic) if _vary(x, y) else None


def spearman(x: Float[Tensor, " N"], y: Float[Tensor, " N"]) -> float | None:
    """Compute the rank (Spearman) correlation, with mean ranks for ties, or None if one of the two does not vary."""
    return float(spearmanr(x.double().numpy(), y.double().numpy()).statistic) if _vary(x, y) else None


def _vary(*columns: Float[Tensor, " N"]) -> bool:
    """Return whether every column has two different values and no NaN, so that a correlation is defined."""
    return all(len(column) > 1 and bool(column.min() < column.max()) for column in columns)


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
