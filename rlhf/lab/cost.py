"""A cost that is at odds with the gold reward, which pays for praise: the number of favorable words of a review."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf.lab.lexicon import ADJECTIVES, VERBS

_FAVORABLE = frozenset(word for word, polarity in ADJECTIVES.items() if polarity > 0) | frozenset(
    form for form, (_, polarity) in VERBS.items() if polarity > 0
)


def praise_cost(prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """Count the favorable adjectives and verbs of each completion; `prompts` and `references` are ignored.

    The SFT model of the lab writes about one a review; the gold reward's best reviews have four or five.
    """
    return [float(sum(word in _FAVORABLE for word in re.findall(r"[a-z]+", text.lower()))) for text in completions]
