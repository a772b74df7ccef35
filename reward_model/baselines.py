"""The baselines that a reward model must beat: the longer side wins, and a bag-of-words logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from torch import Tensor

from rlhf.data.formats import PairText
from rlhf.data.pairs import PairSet

Matrix = Any  # scipy.sparse, which has no types

STRENGTHS = (0.01, 0.1, 1.0, 10.0)
FOLDS = 3


def longer_wins(pairs: PairSet) -> Float[Tensor, " N"]:
    """Return the score gaps of "longer is better": the tokens of the chosen side minus those of the rejected one."""
    sides = zip(pairs.chosen, pairs.rejected, strict=True)
    return torch.tensor([len(chosen) - len(rejected) for chosen, rejected in sides], dtype=torch.float64)


@dataclass(frozen=True)
class BagOfWords:
    """A linear score of a text's words: r(y) = w · φ(y), where φ is their TF-IDF."""

    vectorizer: TfidfVectorizer
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


def _differences(vectorizer: TfidfVectorizer, texts: Sequence[PairText]) -> Matrix:
    chosen = vectorizer.transform([pair.chosen for pair in texts])
    return chosen - vectorizer.transform([pair.rejected for pair in texts])


def _groups(texts: Sequence[PairText]) -> np.ndarray:
    """Number each pair by its prompt, or individually if there are too few prompts for cross-validation by prompt."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(str(pair.prompt) for pair in texts))}
    if len(numbers) < 10 * FOLDS:
        return np.arange(len(texts))
    return np.array([numbers[str(pair.prompt)] for pair in texts])


def _best_strength(features: Matrix, labels: np.ndarray, groups: np.ndarray) -> float:
    correct = dict.fromkeys(STRENGTHS, 0)
    for train, held_out in GroupKFold(FOLDS).split(features, labels, groups):
        for strength in STRENGTHS:
            won = (features[held_out] @ _fit(features[train], labels[train], strength) > 0) == labels[held_out]
            correct[strength] += int(won.sum())
    return max(STRENGTHS, key=lambda strength: correct[strength])


def _fit(features: Matrix, labels: np.ndarray, strength: float) -> np.ndarray:
    model = LogisticRegression(C=strength, fit_intercept=False, solver="liblinear", max_iter=1000, random_state=0)
    weights: np.ndarray = model.fit(features, labels).coef_[0]
    return weights
