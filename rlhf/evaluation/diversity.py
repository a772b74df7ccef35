"""Diversity of completions: distinct n-grams over all of them, and repetition within each.

N-grams are of the sampled token ids, not of words; they include a closing EOS, and prompts are left out. Distinct
n-grams are counted over all completions together, so their share falls with the number of completions and with their
length: compare it only between evaluations with equal numbers of prompts and similar lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhf.algo.masked import Mean
from rlhf.types import Completions

REPEATED = 4  # the n of the n-grams that count as repetition


def diversity(completions: Completions) -> dict[str, float]:
    """Compute the diversity metrics of a batch of completions, by metric name."""
    tokens = completion_tokens(completions)
    distinct = {f"eval/distinct_{n}": distinct_n(tokens, n) for n in (1, 2, 3)}
    return {**distinct, "eval/repetition": repetition(tokens).value}


def completion_tokens(completions: Completions) -> list[list[int]]:
    """Return the token ids of every completion, without padding."""
    lengths = completions.completion_mask.sum(dim=1).tolist()
    return [row[:length].tolist() for row, length in zip(completions.completion_ids, lengths, strict=True)]


def distinct_n(sequences: Iterable[Sequence[int]], n: int) -> float:
    """Compute distinct n-grams over all n-grams of all sequences (Li et al. 2016); NaN when there are none."""
    grams = [gram for sequence in sequences for gram in _grams(sequence, n)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def repetition(sequences: Iterable[Sequence[int]], n: int = REPEATED) -> Mean:
    """Compute the share of n-grams that occurred earlier in the same sequence, over the n-grams of all sequences.

        sum_i (n-grams of i - distinct n-grams of i) / sum_i n-grams of i

    This is seq-rep-n of Welleck et al. (2020, sec. 6.1), except that n-grams rather than sequences have equal weight:
    a sequence of fewer than n tokens has none.
    """
    grams = [_grams(sequence, n) for sequence in sequences]
    repeated = sum(len(row) - len(set(row)) for row in grams)
    return Mean(float(repeated), float(sum(map(len, grams))))


def _grams(sequence: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """Return the n-grams of a sequence, in order."""
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
