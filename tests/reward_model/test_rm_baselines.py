"""The two baselines on data whose answer is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from rm_cases import favorites, pair_set

from reward_model.evaluate import fit_bag_of_words, longer_wins
from reward_model.model import win_indicator
from rlhf.data.formats import PairText

FILLER = ["the", "film", "of", "a", "man", "and", "his", "dog", "in", "the", "city", "by", "the", "sea"]


def reviews(n: int, *, seed: int, noise: float = 0.0) -> list[PairText]:
    """The chosen side has a good word, the rejected one a bad word, but for a share of `noise`."""
    random_ = random.Random(seed)
    pairs = []
    for i in range(n):
        good, bad = random_.choice(["superb", "moving"]), random_.choice(["dull", "stale"])
        sides = [" ".join([*random_.sample(FILLER, random_.randrange(3, 9)), word]) for word in (good, bad)]
        if random_.random() < noise:
            sides.reverse()
        pairs.append(PairText(prompt=f"review {i}:", chosen=sides[0], rejected=sides[1], margin=0.0))
    return pairs


def test_longer_wins_is_the_difference_of_lengths() -> None:
    pairs = pair_set([([1], [5, 6, 7], [5]), ([1], [5], [6]), ([1], [5], [6, 7])])
    assert longer_wins(pairs).tolist() == [2, 0, -1]
    assert win_indicator(longer_wins(pairs)).mean() == 0.5


def test_bag_of_words_learns_the_words_and_sees_through_noise() -> None:
    words = fit_bag_of_words(reviews(300, seed=0, noise=0.25))
    assert words is not None
    assert win_indicator(words.gaps(reviews(200, seed=1))).mean() > 0.98
    assert words.n_train == 300


def test_it_is_antisymmetric_and_indifferent_between_equals() -> None:
    words = fit_bag_of_words(reviews(60, seed=0))
    assert words is not None
    pairs = reviews(20, seed=1)
    swapped = [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]
    torch.testing.assert_close(words.gaps(swapped), -words.gaps(pairs))
    same = [replace(pair, rejected=pair.chosen) for pair in pairs]
    assert words.gaps(same).abs().max() == 0


def test_the_order_of_the_pairs_says_nothing() -> None:
    """Every second pair is swapped inside; a pair's neighbors must not change the learned weights."""
    train, test = reviews(61, seed=0), reviews(20, seed=1)
    one, other = fit_bag_of_words(train[:60]), fit_bag_of_words([*train[1:60], train[0]])
    assert one is not None
    assert other is not None
    assert one.strength == other.strength
    torch.testing.assert_close(one.gaps(test), other.gaps(test), rtol=0.02, atol=0.02)


def test_words_that_say_nothing_give_chance() -> None:
    words = fit_bag_of_words(reviews(400, seed=0, noise=0.5))
    assert words is not None
    assert win_indicator(words.gaps(reviews(400, seed=1, noise=0.5))).mean() == pytest.approx(0.5, abs=0.1)


def test_a_favorite_word_is_found_whatever_the_tokenizer() -> None:
    words = fit_bag_of_words(favorites(200, seed=0).texts)
    assert words is not None
    assert win_indicator(words.gaps(favorites(200, seed=1).texts)).mean() > 0.9


def test_without_words_or_pairs_there_is_none() -> None:
    assert fit_bag_of_words([PairText("p", "…", "—", 0.0)] * 20) is None
    assert fit_bag_of_words(reviews(5, seed=0)) is None
