"""A reward without a model: the sentiment of the words, by the VADER lexicon (Hutto and Gilbert 2014).

    rlhf train configs/real/ppo_stories_vader.yaml       (reward.source.target: examples/vader_reward.py:score)

Take it as a template for your own: a function of three lists that returns one number a completion.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
ALPHA = 15.0  # VADER's own normalization constant


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    references: Sequence[Mapping[str, Any]],
    *,
    lexicon: str,
    with_prompt: bool = False,
) -> list[float]:
    """s / sqrt(s^2 + 15) for each completion, s the sum of its words' valences; in (-1, 1), 0 without sentiment.

    Args:
        prompts: read only where `with_prompt`.
        completions: what is scored.
        references: not read.
        lexicon: path of vader_lexicon.txt.
        with_prompt: score prompt and completion as one text; a word cut in two by the prompt's end is then whole.
    """
    valences = load_lexicon(lexicon)
    texts = [before + own if with_prompt else own for before, own in zip(prompts, completions, strict=True)]
    return [normalized(total_valence(text, valences)) for text in texts]


def total_valence(text: str, valences: Mapping[str, float]) -> float:
    """The sum over the text's words, lower-cased; unknown words count 0. No negation, no emphasis, no emoticons."""
    return sum(valences.get(word, 0.0) for word in WORD.findall(text.lower()))


def normalized(total: float) -> float:
    """VADER's squashing of a sum to (-1, 1)."""
    return total / math.sqrt(total * total + ALPHA)


@functools.lru_cache(maxsize=4)
def load_lexicon(path: str) -> Mapping[str, float]:
    """Word -> mean valence (-4 .. 4) from the tab-separated file, read once."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    columns = (line.split("\t") for line in lines if line.strip())
    return {row[0]: float(row[1]) for row in columns}
