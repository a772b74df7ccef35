"""Preference pairs of the lab: two completions of the SFT model, ranked by the gold with Bradley-Terry noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rlhf.lab.gold import best_accuracy, gold_reward, label_pair
from rlhf.lab.world import Split, prompts
from rlhf.runtime.seeding import derive_seed

Sample = Callable[[Sequence[str], int], list[list[str]]]
"""(prompts, number of completions of each) -> the completions of each prompt."""


@dataclass(frozen=True)
class PairsFile:
    """A file of pairs, their number, and the best expected accuracy of any model on the noisy labels."""

    path: Path
    pairs: int
    best_accuracy: float


def write_pairs(path: Path, sample: Sample, *, split: Split, count: int, seed: int, temperature: float) -> PairsFile:
    """Sample two completions of each of `count` prompts, rank them, and write the pairs as JSON lines.

    P(a preferred to b) = sigmoid((gold(a) - gold(b)) / temperature). Pairs of equal texts, or with an empty one, are
    left out.

    Args:
        sample: samples completions from the SFT model.
        split: the split of the prompts; the splits share no prompt text.
        seed: the seed of the prompts and the labels.
        temperature: the temperature of the labels, in units of gold.
    """
    requests = prompts(derive_seed(seed, "pairs", split), split, count)
    completions = sample([request.text for request in requests], 2)
    rng = Random(derive_seed(seed, "labels", split))
    rows, gaps = [], []
    for request, (first, second) in zip(requests, completions, strict=True):
        if first == second or not (first and second):
            continue
        golds = _golds(request.text, first, second)
        gaps.append(golds[0] - golds[1])
        texts = (first, second) if label_pair(*golds, temperature, rng) else (second, first)
        rows.append({"prompt": request.text, "chosen": texts[0], "rejected": texts[1]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return PairsFile(path, len(rows), best_accuracy(gaps, temperature))


def gold_gaps(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Compute the gold of the chosen completion minus the rejected one's, for rows of a file of pairs."""
    golds = (_golds(row["prompt"], row["chosen"], row["rejected"]) for row in rows)
    return [chosen - rejected for chosen, rejected in golds]


def _golds(prompt: str, first: str, second: str) -> tuple[float, float]:
    a, b = gold_reward([prompt] * 2, [first, second], [{}, {}])
    return a, b
