"""A reward and a cost for polite rewrites: keep the meaning, and do not be toxic.   bash scripts/setup.sh detox

rlhf compare configs/real/compare_detox_lag.yaml       (a limit on the cost: docs/algorithms/safe_rlhf.md)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.suites.detox import similarities
from rlhf.suites.profanity import toxicities


def meaning(prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> list[float]:
    """Compute the cosine of the sentence embeddings of each rewrite and of its row's `sentence`; from 0 to 1."""
    return similarities([str(row["sentence"]) for row in references], completions)


def toxicity(
    prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Compute the probability that each rewrite is toxic, by a linear model of people's labels."""
    return toxicities(completions)
