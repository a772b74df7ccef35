"""Rewards and a cost for polite rewrites: keep the words, keep the meaning, and do not be toxic.

rlhf compare configs/real/compare_detox_kept.yaml      (`kept` beside a reward model: docs/experiments/detox.md)
rlhf compare configs/real/compare_detox_lag.yaml       (a limit on the cost: docs/algorithms/safe_rlhf.md)

`meaning` and `toxicity` need packages: bash scripts/setup.sh detox
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.suites.detox import similarities
from rlhf.suites.profanity import toxicities


def kept(prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> list[float]:
    """Compute the overlap of the words of each rewrite and of its row's `sentence`: ROUGE-1's F (Lin 2004), 0 to 1."""
    return [_overlap(str(row["sentence"]), text) for row, text in zip(references, completions, strict=True)]


def _overlap(a: str, b: str) -> float:
    first, second = (Counter(re.findall(r"\w+", text.lower())) for text in (a, b))
    return 2 * (first & second).total() / max(1, first.total() + second.total())


def meaning(prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, Any]]) -> list[float]:
    """Compute the cosine of the sentence embeddings of each rewrite and of its row's `sentence`; from 0 to 1."""
    return similarities([str(row["sentence"]) for row in references], completions)


def toxicity(
    prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Compute the probability that each rewrite is toxic, by a linear model of people's labels."""
    return toxicities(completions)
