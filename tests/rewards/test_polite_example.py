"""The reward of examples/polite_rewards.py that needs no package."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.rewards.function import load_function

TARGET = f"{Path(__file__).resolve().parents[2] / 'examples' / 'polite_rewards.py'}:kept"


def test_the_kept_words_by_hand() -> None:
    """Five words and four, of which three are common: F = 2 x 3 / 9; a word counts as often as both have it."""
    sentence = "What a stupid, stupid idea!"
    texts = ["What a bad idea", sentence.upper(), "stupid", "", "Something else entirely"]
    scores = load_function(TARGET)([""] * 5, texts, [{"sentence": sentence}] * 5)
    assert scores == pytest.approx([6 / 9, 1.0, 2 / 6, 0.0, 0.0])
