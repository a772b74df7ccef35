"""The report card of a reward model: figures that predict trouble when a policy is trained against it.

Accuracy with its confidence interval, bins, calibration error and correlation; of an ensemble also how far its members
disagree, and whether that indicates where it is wrong. Beside it the baselines that a reward model must beat: the
longer side wins, and a bag-of-words logistic regression.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from reward_model.model import CHUNK, score_pairs, score_rows, win_indicator
from rlhf.data.formats import PairText
from rlhf.data.pairs import PairSet
from rlhf.data.tokenizer import right_pad
from rlhf.errors import DataError, RewardError
from rlhf.evaluation.win_rate import resamples, wilson
from rlhf.models.backbone import context_length
from rlhf.models.scalar_head import ScalarHeadModel

Degrade = Callable[[list[int]], list[int]]


def repeated(content: list[int]) -> list[int]:
    """Return the text twice in a row."""
    return content + content


def halved(content: list[int]) -> list[int]:
    """Return the first half of the text, rounded up."""
    return content[: (len(content) + 1) // 2]


PROBES: dict[str, Degrade] = {"repeated": repeated, "halved": halved}


def degrade(
    ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], how: Degrade, *, eos_ids: Sequence[int]
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """Degrade each completion's text but keep its ending: an EOS stays the last token and is not repeated."""
    rows = []
    for row, live in zip(ids, mask, strict=True):
        content = row[live].tolist()
        ending = [content.pop()] if content and content[-1] in eos_ids else []
        rows.append(how(content) + ending)
    return right_pad(rows, pad_id=0)


@dataclass(frozen=True)
class ByMargin:
    """Accuracy by |margin|; `of` names the margin: the data's, or the score gap if the data have none."""

    of: str
    bins: tuple[MarginBin, ...]


@dataclass(frozen=True)
class Calibration:
    """How well σ(gap) works as a probability: the expected calibration error and its bins."""

    ece: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class Length:
    """How much the score depends on length: correlation over all completions, and accuracy by which side is longer."""

    pearson: float | None
    spearman: float | None
    accuracy: dict[str, SubsetAccuracy]


@dataclass(frozen=True)
class Baseline:
    """The accuracy of a simple rule on the same pairs, and the number of pairs it was fitted on."""

    accuracy: float
    low: float
    high: float
    n: int
    n_train: int


@dataclass(frozen=True)
class ProbeResult:
    """Share of the chosen completions whose degraded copy scores higher (ties count half)."""

    scores_higher: float | None
    n: int


@dataclass(frozen=True)
class ReportCard:
    """The figures of a reward model on held-out pairs."""

    accuracy: float
    accuracy_low: float  # 95 % bootstrap interval, prompts resampled
    accuracy_high: float
    n: int
    loss: float  # -log σ(gap), nats per pair, of the raw scores and without margin or centering
    score_mean: float
    score_std: float
    by_margin: ByMargin
    calibration: Calibration
    length: Length
    baselines: dict[str, Baseline]
    probes: dict[str, ProbeResult]

    def as_dict(self) -> dict[str, object]:
        """Return the report card as plain data, for report_card.json."""
        return asdict(self)


def uncalibrated_gaps(model: ScalarHeadModel, gaps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the score gaps without the calibration's scale, so that σ(gap) is the probability that was trained."""
    return gaps.double() * model.calibration[1]


def evaluate_reward_model(
    model: ScalarHeadModel,
    pairs: PairSet,
    *,
    train: PairSet,
    eos_ids: Sequence[int],
    micro_batch_size: int,
    dtype: str,
    seed: int = 0,
) -> ReportCard:
    """Compute the report card on held-out `pairs`.

    Args:
        model: the reward model, calibrated or not.
        pairs: held-out pairs.
        train: the pairs it was trained on; the bag-of-words baseline is fitted on them.
        eos_ids: tokens that end a completion; degraded copies keep their ending.
        micro_batch_size: rows per forward pass.
        dtype: arithmetic; see rlhf.models.backbone.autocast.
        seed: seed of the bootstrap.

    Raises:
        DataError: there are no held-out pairs.
        RewardError: the model's scores are NaN or infinite.
    """
    if len(pairs) == 0:
        raise DataError("there are no held-out pairs to evaluate on: give data.eval_preferences usable rows")
    chosen, rejected = score_pairs(model, pairs, range(len(pairs)), micro_batch_size=micro_batch_size, dtype=dtype)
    scores = torch.stack([chosen, rejected]).double()
    if not scores.isfinite().all():
        raise RewardError("the reward model gives held-out completions scores that are NaN or infinite; training broke")
    gaps = uncalibrated_gaps(model, chosen - rejected)
    overall = accuracy(gaps, _prompts(pairs), seed=seed)
    ece, bins = calibration(gaps)
    return ReportCard(
        accuracy=overall.accuracy,
        accuracy_low=overall.low,
        accuracy_high=overall.high,
        n=overall.n,
        loss=-logsigmoid(gaps).mean().item(),
        score_mean=scores.mean().item(),
        score_std=scores.std(correction=0).item(),
        by_margin=_by_margin(gaps, pairs),
        calibration=Calibration(ece=ece, bins=bins),
        length=_length(scores, pairs),
        baselines=_baselines(pairs, train, seed),
        probes=_probes(model, chosen, pairs, eos_ids=eos_ids, micro_batch_size=micro_batch_size, dtype=dtype),
    )


def _prompts(pairs: PairSet) -> list[str]:
    return [str(pair.prompt) for pair in pairs.texts]


def _by_margin(gaps: Float[Tensor, " N"], pairs: PairSet) -> ByMargin:
    margins = torch.tensor([pair.margin for pair in pairs.texts], dtype=torch.float64)
    if margins.any():
        return ByMargin(of="margin in the data", bins=accuracy_by_margin(gaps, margins))
    return ByMargin(of="score gap", bins=accuracy_by_margin(gaps, gaps))


def _length(scores: Float[Tensor, "2 N"], pairs: PairSet) -> Length:
    sides = [[len(ids) for ids in side] for side in (pairs.chosen, pairs.rejected)]
    lengths = torch.tensor(sides, dtype=torch.float64)
    gaps, longer = scores[0] - scores[1], lengths[0] - lengths[1]
    return Length(
        pearson=pearson(lengths.flatten(), scores.flatten()),
        spearman=spearman(lengths.flatten(), scores.flatten()),
        accuracy={
            "chosen_longer": subset_accuracy(gaps, longer > 0),
            "chosen_shorter": subset_accuracy(gaps, longer < 0),
            "same_length": subset_accuracy(gaps, longer == 0),
        },
    )


def _baselines(pairs: PairSet, train: PairSet, seed: int) -> dict[str, Baseline]:
    scored = {"longer_wins": _baseline(accuracy(longer_wins(pairs), _prompts(pairs), seed=seed), 0)}
    words = fit_bag_of_words(train.texts)
    if words is not None:
        scored["bag_of_words"] = _baseline(accuracy(words.gaps(pairs.texts), _prompts(pairs), seed=seed), words.n_train)
    return scored


def _baseline(result: Accuracy, n_train: int) -> Baseline:
    return Baseline(accuracy=result.accuracy, low=result.low, high=result.high, n=result.n, n_train=n_train)


def _probes(
    model: ScalarHeadModel,
    chosen: Float[Tensor, " N"],
    pairs: PairSet,
    *,
    eos_ids: Sequence[int],
    micro_batch_size: int,
    dtype: str,
) -> dict[str, ProbeResult]:
    """Score degraded copies of the chosen sides; a copy too long for the model's context is not counted."""
    context = context_length(model.classifier)
    won: dict[str, list[Tensor]] = {name: [] for name in PROBES}
    for start in range(0, len(pairs), CHUNK):
        batch = pairs.collate(range(start, min(start + CHUNK, len(pairs))))
        original = chosen[start : start + CHUNK]
        for name, how in PROBES.items():
            ids, mask = degrade(batch.chosen_ids, batch.chosen_mask, how, eos_ids=eos_ids)
            length = batch.prompt_mask.sum(dim=1) + mask.sum(dim=1)
            fits = length <= context if context is not None else torch.ones_like(length, dtype=torch.bool)
            if fits.any():
                rows = (batch.prompt_ids[fits], batch.prompt_mask[fits], ids[fits], mask[fits])
                scores = score_rows(model, *rows, micro_batch_size=micro_batch_size, dtype=dtype)
                won[name].append(win_indicator(scores - original[fits]))
    return {name: _probe(parts) for name, parts in won.items()}


def _probe(parts: list[Tensor]) -> ProbeResult:
    if not parts:
        return ProbeResult(scores_higher=None, n=0)
    won = torch.cat(parts).double()
    return ProbeResult(scores_higher=won.mean().item(), n=len(won))


# Functions import scikit-learn and scipy.stats: 100 MB that a run needs only once it makes a card.
Matrix = Any  # scipy.sparse, which has no types
Vectorizer = Any  # scikit-learn's TfidfVectorizer

STRENGTHS = (0.01, 0.1, 1.0, 10.0)
FOLDS = 3


def longer_wins(pairs: PairSet) -> Float[Tensor, " N"]:
    """Return the score gaps of "longer is better": the tokens of the chosen side minus the rejected one's."""
    sides = zip(pairs.chosen, pairs.rejected, strict=True)
    return torch.tensor([len(chosen) - len(rejected) for chosen, rejected in sides], dtype=torch.float64)


@dataclass(frozen=True)
class BagOfWords:
    """A linear score of a text's words: r(y) = w · φ(y), where φ is their TF-IDF."""

    vectorizer: Vectorizer
    weights: np.ndarray
    strength: float  # C, the inverse regularization chosen by cross-validation
    n_train: int

    def gaps(self, texts: Sequence[PairText]) -> Float[Tensor, " B"]:
        """Compute the score gaps, chosen - rejected."""
        return torch.from_numpy(np.asarray(_differences(self.vectorizer, texts) @ self.weights, dtype=np.float64))


def fit_bag_of_words(texts: Sequence[PairText]) -> BagOfWords | None:
    """Fit a logistic regression on φ(chosen) - φ(rejected); return None if there are too few pairs or no words.

    This is Bradley-Terry with a linear score, without intercept. Swapping the sides of a pair negates both its
    difference and its label, which leaves the loss unchanged; so every second pair is swapped to have two classes, and
    the score is antisymmetric. C is the best of four values by 3-fold cross-validation in which a prompt's pairs are
    never split between folds (if there are enough prompts).
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    if len(texts) < 2 * FOLDS:
        return None
    vectorizer = TfidfVectorizer(sublinear_tf=True, min_df=2, token_pattern=r"(?u)\b\w+\b|[!?]")
    try:
        vectorizer.fit([side for pair in texts for side in (pair.chosen, pair.rejected)])
    except ValueError:  # scikit-learn's error for an empty vocabulary
        return None
    labels = np.arange(len(texts)) % 2
    swapped = [replace(p, chosen=p.rejected, rejected=p.chosen) for p in texts]
    features = _differences(vectorizer, [texts[i] if first else swapped[i] for i, first in enumerate(labels)])
    strength = _best_strength(features, labels, _groups(texts))
    weights = _fit(features, labels, strength)
    return BagOfWords(vectorizer=vectorizer, weights=weights, strength=strength, n_train=len(texts))


def _differences(vectorizer: Vectorizer, texts: Sequence[PairText]) -> Matrix:
    chosen = vectorizer.transform([pair.chosen for pair in texts])
    return chosen - vectorizer.transform([pair.rejected for pair in texts])


def _groups(texts: Sequence[PairText]) -> np.ndarray:
    """Number each pair by its prompt, or individually if there are too few prompts for cross-validation by prompt."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(str(pair.prompt) for pair in texts))}
    if len(numbers) < 10 * FOLDS:
        return np.arange(len(texts))
    return np.array([numbers[str(pair.prompt)] for pair in texts])


def _best_strength(features: Matrix, labels: np.ndarray, groups: np.ndarray) -> float:
    from sklearn.model_selection import GroupKFold

    correct = dict.fromkeys(STRENGTHS, 0)
    for train, held_out in GroupKFold(FOLDS).split(features, labels, groups):
        for strength in STRENGTHS:
            won = (features[held_out] @ _fit(features[train], labels[train], strength) > 0) == labels[held_out]
            correct[strength] += int(won.sum())
    return max(STRENGTHS, key=lambda strength: correct[strength])


def _fit(features: Matrix, labels: np.ndarray, strength: float) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, fit_intercept=False, solver="liblinear", max_iter=1000, random_state=0)
    weights: np.ndarray = model.fit(features, labels).coef_[0]
    return weights


MIN_CLUSTERS = 10


@dataclass(frozen=True)
class Accuracy:
    """Share of pairs whose chosen side scores higher (ties count half), with a 95 % interval."""

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
    than 10 clusters, it resamples pairs. If all pairs or none are right, so are all resamples: then the interval is
    Wilson's of the clusters.
    """
    won = win_indicator(gaps).double()
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < MIN_CLUSTERS:
        index, groups = torch.arange(len(won)), len(won)
    else:
        index, groups = torch.tensor([numbers[cluster] for cluster in clusters]), len(numbers)
    totals = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, won)
    sizes = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, torch.ones_like(won))
    share = won.mean().item()
    if share in (0.0, 1.0):
        return Accuracy(share, *wilson(share * groups, groups), n=len(won))
    means = torch.cat([totals[rows].sum(dim=1) / sizes[rows].sum(dim=1) for rows in resamples(groups, seed=seed)])
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Accuracy(share, low, high, n=len(won))


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
    from scipy.stats import pearsonr

    return float(pearsonr(x.double().numpy(), y.double().numpy()).statistic) if _vary(x, y) else None


def spearman(x: Float[Tensor, " N"], y: Float[Tensor, " N"]) -> float | None:
    """Compute the rank (Spearman) correlation, with mean ranks for ties, or None if one of the two does not vary."""
    from scipy.stats import spearmanr

    return float(spearmanr(x.double().numpy(), y.double().numpy()).statistic) if _vary(x, y) else None


def _vary(*columns: Float[Tensor, " N"]) -> bool:
    """Return whether every column has two different values and no NaN, so that a correlation is defined."""
    return all(len(column) > 1 and bool(column.min() < column.max()) for column in columns)


@dataclass(frozen=True)
class Auc:
    """An area under the ROC curve with its 95 % bootstrap interval; None if nothing, or everything, is wrong."""

    auc: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class EnsembleCard:
    """The figures of an ensemble on held-out pairs.

    `predicts_error` is the probability that the members disagree more on a pair that the ensemble's mean gets wrong
    than on one that it gets right (½: disagreement says nothing). `small_gap_predicts_error` is the same for a small
    mean gap, which needs no ensemble: the members add the difference of the two.
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
    """Compute the card from the members' gaps on held-out pairs; `seed` is of the bootstrap over pairs.

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
    """Compute the area under the ROC curve of a score for the positive class; None if a class is empty.

        AUC = P(score of a positive > score of a negative) + ½ P(they tie) = (R - n₊(n₊ + 1)/2) / (n₊ n₋)

    where R is the sum of the positives' ranks among all scores, ties at their mean rank (Mann & Whitney 1947).
    """
    from scipy.stats import rankdata

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
    drawn = (
        auc(scores[draw], positive[draw]) for part in resamples(len(scores), seed=seed, key="auc") for draw in part
    )
    areas = [area for area in drawn if area is not None]
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
