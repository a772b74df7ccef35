"""Measure how varied completions are: distinct n-grams over all of them, and repetition within each.

An n-gram is of token ids as the policy drew them, a closing EOS included, not of words; prompts have no part in it.
Distinct n-grams are counted over all completions together, so their share falls with the number of completions and with
their length: it compares only between evaluations of equal numbers of prompts and of like lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhf.masked import Mean
from rlhf.types import Completions

REPEATED = 4  # the n of the n-grams that count as repetition


def diversity(completions: Completions) -> dict[str, float]:
    """The metrics of this page, by name."""
    tokens = completion_tokens(completions)
    found = {f"eval/distinct_{n}": distinct_n(tokens, n) for n in (1, 2, 3)}
    return {**found, "eval/repetition": repetition(tokens).value}


def completion_tokens(completions: Completions) -> list[list[int]]:
    """The live token ids of every completion."""
    lengths = completions.completion_mask.sum(dim=1).tolist()
    return [row[:length].tolist() for row, length in zip(completions.completion_ids, lengths, strict=True)]


def distinct_n(sequences: Iterable[Sequence[int]], n: int) -> float:
    """Distinct n-grams over all n-grams of all sequences (Li et al. 2016); NaN when there are none."""
    grams = [gram for sequence in sequences for gram in _grams(sequence, n)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def repetition(sequences: Iterable[Sequence[int]], n: int = REPEATED) -> Mean:
    """The share of n-grams that occurred earlier in the same sequence, over the n-grams of all sequences.

        sum_i (n-grams of i - distinct n-grams of i) / sum_i n-grams of i

    That is seq-rep-n of Welleck et al. (2020, sec. 6.1), with every n-gram, not every sequence, counting the same:
    a sequence of fewer than n tokens has none.
    """
    grams = [_grams(sequence, n) for sequence in sequences]
    repeated = sum(len(own) - len(set(own)) for own in grams)
    return Mean(float(repeated), float(sum(map(len, grams))))


def _grams(sequence: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
