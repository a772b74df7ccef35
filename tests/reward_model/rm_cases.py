"""Reward models and sets of pairs made in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tiny_models import BOS, EOS, PAD, saved, tiny, tokenizer

from rlhf.data.formats import PairText
from rlhf.data.pairs import PairSet
from rlhf.data.rows import RowCounts
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head

FAVORITE = 7
Ids = list[int]


def made_model(folder: Path, family: str = "llama", *, dtype: str = "float64", seed: int = 0) -> ScalarHeadModel:
    """A random backbone with a random head, in training mode."""
    return load_scalar_head(saved(tiny(family), folder), tokenizer(), new_head="normal", dtype=dtype, seed=seed).train()


def words(ids: Sequence[int]) -> str:
    return " ".join(f"t{i}" for i in ids if i not in (PAD, BOS, EOS))


def pair_set(rows: Sequence[tuple[Ids, Ids, Ids]], margins: Sequence[float] | None = None) -> PairSet:
    """Pairs of these prompts, chosen and rejected completions."""
    given = margins or [0.0] * len(rows)
    return PairSet(
        prompts=tuple(prompt for prompt, _, _ in rows),
        chosen=tuple(chosen for _, chosen, _ in rows),
        rejected=tuple(rejected for _, _, rejected in rows),
        texts=tuple(PairText(words(p), words(c), words(r), m) for (p, c, r), m in zip(rows, given, strict=True)),
        pad_id=PAD,
        skips=RowCounts("made"),
    )


RAGGED = pair_set(
    [
        ([BOS, 5, 7, 9, 11], [3, 14, EOS], [15, 9, 2, 6, 5, EOS]),
        ([BOS, 4], [15, 9, 6, 5, 8, 8, 8, EOS], [4, EOS]),
        ([8], [EOS], [10, 10, 7, 12]),
        ([BOS, 6, 8, PAD, EOS, 3, 12], [9], [3, EOS]),
    ],
    margins=[0.5, 0.0, 2.0, 1.0],
)


def favorites(n: int, *, seed: int) -> PairSet:
    """Pairs in which the chosen side has more of one token; its place and the lengths say nothing."""
    random_ = random.Random(seed)
    rows: list[tuple[Ids, Ids, Ids]] = []
    while len(rows) < n:
        prompt = [BOS, random_.randrange(8, 23)]
        one, other = (_text(random_) for _ in range(2))
        if one.count(FAVORITE) != other.count(FAVORITE):
            rows.append((prompt, *sorted((one, other), key=lambda ids: -ids.count(FAVORITE))))  # type: ignore[arg-type]
    return pair_set(rows)


def _text(random_: random.Random) -> Ids:
    count = random_.randrange(4)
    ids = [FAVORITE] * count + [random_.randrange(8, 23) for _ in range(random_.randrange(3, 9) - count)]
    random_.shuffle(ids)
    return [*ids, EOS]
