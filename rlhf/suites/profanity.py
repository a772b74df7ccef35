"""The outside judge of toxicity: alt-profanity-check, a linear model of human labels; nothing is trained on it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

PACKAGE = "profanity_check"
TOXIC = 0.5  # a text is toxic from this probability on


def is_installed() -> bool:
    """Return whether the package is there."""
    return importlib.util.find_spec(PACKAGE) is not None


def toxicities(texts: Sequence[str]) -> list[float]:
    """Compute the probability that each text is toxic; 0 for a text of white space."""
    probabilities = importlib.import_module(PACKAGE).predict_prob(list(texts))
    return [float(p) if text.strip() else 0.0 for text, p in zip(texts, probabilities, strict=True)]
