"""Rewards of completions of eight words: quick to import, for a process that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def count_good(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """The gold of these runs: the share of a completion's words that are `good`, minus the share that are `bad`."""
    return [(words.count("good") - words.count("bad")) / max(len(words), 1) for words in map(str.split, completions)]


def count_words(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """A judge that is not the reward: `good` counts, beside any other words."""
    return [float(words.count("good")) for words in map(str.split, completions)]


def golds(*completions: str) -> list[float]:
    return count_good(prompts=[], completions=list(completions), references=[])
