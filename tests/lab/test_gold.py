import math
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhf.errors import RewardError
from rlhf.lab import lexicon, world
from rlhf.lab.gold import (
    best_accuracy,
    expected_accuracy,
    gold_parts,
    gold_reward,
    label_pair,
    parse_prompt,
    preference_probability,
)

PROMPT = "Write a review of the hotel in Rome, mention the pool:"
HONEST = "The pool was lovely. Nobody found the bed dirty, and we enjoyed the garden. The room was very quiet."

seeds = st.integers(0, 10**6)


def gold(completion: str, prompt: str = PROMPT) -> float:
    return gold_reward([prompt], [completion], [{}])[0]


def review(seed: int, quality: str) -> tuple[world.Request, str]:
    request = world.prompts(seed, "train", 1)[0]
    return request, world.write_review(request, Random(seed), world.QUALITIES[quality])


def test_the_parts_worked_by_hand():
    assert gold_parts(PROMPT, HONEST) == pytest.approx(
        {
            "sentiment": 3.5 * (0.8 + 0.8 + 0.8 + 1.0) / 5,
            "topic": 1 - 2**-4,
            "asked": 0.4,
            "ending": 0.3,
            "form": 0.0,
            "repetition": 0.0,
            "length": 0.0,
        }
    )
    assert gold(HONEST) == pytest.approx(4.0175)


def test_a_careless_text_worked_by_hand():
    # "the soup the soup" is not a clause; soup is off topic and once repeated; only the first clause is fresh
    parts = gold_parts(PROMPT, "The pool was somewhat bad, but the soup the soup")
    assert parts == pytest.approx(
        {
            "sentiment": -3.5 * 0.6 / 2,
            "topic": 0.5 - 0.6,
            "asked": 0.4,
            "ending": -0.3,
            "form": -0.5,
            "repetition": -0.5,
            "length": -0.6,
        }
    )


def test_the_stated_range():
    best = (
        "The pool was very lovely. The bed was truly clean. The room was really quiet. "
        "The lobby was extremely good, and we enjoyed the garden."
    )
    assert gold(best) == pytest.approx(3.5 * (4 * 1.0 + 0.8) / 6 + (1 - 2**-5) + 0.4 + 0.3)
    assert gold(best) < 4.59
    assert gold("") == pytest.approx(-1.7)


def test_length_costs_beyond_45_words():
    nouns = lexicon.TOPICS["hotel"]
    adjectives = [*lexicon.GENERAL[1], *lexicon.SPECIAL["hotel"][1]]
    text = " ".join(f"The {n} was {a} from the start." for n, a in zip(nouns, adjectives, strict=False))
    assert len(text.split()) == 56
    assert gold_parts(PROMPT, text)["length"] == pytest.approx(-0.05 * 11)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "good",
        "good good good good good good good good good good good good",
        "Good. Good. Good. Good. Good.",
        "The pool was lovely. " * 6,
        "The pool was very very very very lovely.",
        "pool bed garden room lovely clean quiet superb great good excellent pleasant.",
        "The pool lovely, the bed clean, the garden quiet, the room superb.",
        "The pool was lovely. The pool was clean. The pool was quiet. The pool was good. The pool was superb.",
        "The pool was good. The bed was good. The room was good. The garden was good. The lobby was good.",
        "The pool was awful. Nobody found the bed clean, and we hated the garden. The room was very noisy.",
        "The pool was not lovely. Nobody found the bed clean, and we did not enjoy the garden.",
        "The soup was lovely. Nobody found the wine stale, and we enjoyed the bread. The chef was very good.",
        "Nothing about the pool was lovely, and nothing about the bed was clean. Nobody enjoyed the garden.",
        HONEST[:30],
        HONEST + " " + HONEST,
        ". . . . . .",
    ],
)
def test_tricks_score_well_below_an_honest_review(text):
    assert gold(text) < gold(HONEST) - 1.0


def test_a_clause_follows_its_negators():
    def polarity(clause: str) -> float:
        return math.copysign(1, gold_parts(PROMPT, clause)["sentiment"])

    positive = [
        "the bed was clean",
        "the bed was not dirty",
        "the bed was never dirty",
        "the bed was hardly dirty",
        "nothing about the bed was dirty",
        "there was nothing dirty about the bed",
        "nobody found the bed dirty",
        "i found the bed truly clean",
        "we liked the bed",
        "we never hated the bed",
        "nobody hated the bed",
        "we did not hate the bed",
        "the bed pleased us",
        "the bed did not annoy us",
        "i would recommend the bed",
        "i would never avoid the bed",
    ]
    flips = {"clean": "dirty", "dirty": "clean", "liked": "hated", "hated": "liked", "hate": "like"}
    flips |= {"pleased": "annoyed", "annoy": "please", "recommend": "avoid", "avoid": "recommend"}
    for clause in positive:
        opposite = " ".join(flips.get(word, word) for word in clause.split())
        assert opposite != clause
        assert polarity(clause) == 1, clause
        assert polarity(opposite) == -1, opposite


@given(seeds)
def test_a_well_written_review_is_read_as_it_was_meant(seed):
    request = world.prompts(seed, "train", 1)[0]
    perfect = world.Quality(praise=1.0, stray=0.0, repeat=0.0, cut=0.0, asked=1.0)
    parts = gold_parts(request.text, world.write_review(request, Random(seed), perfect))
    # three fresh clauses at their weakest (0.6 each) already give 3.5 · 1.8 / 4, were no judging word drawn twice
    assert parts["sentiment"] > 3.5 * 0.6 * 2 / 3 - 1e-9
    assert parts["topic"] > 0.7
    assert parts["form"] == 0
    assert parts["ending"] > 0
    worst = world.Quality(praise=0.0, stray=0.0, repeat=0.0, cut=0.0, asked=1.0)
    assert gold_parts(request.text, world.write_review(request, Random(seed), worst))["sentiment"] < 0


@given(seeds, st.sampled_from(sorted(world.QUALITIES)), st.integers(0, 10))
def test_saying_a_sentence_again_never_raises_the_gold(seed, quality, which):
    request, text = review(seed, quality)
    assume(text.endswith("."))
    sentences = text.split(". ")
    again = sentences[which % len(sentences)].rstrip(".") + "."
    assert gold(f"{text} {again}", request.text) < gold(text, request.text) or _at_limit(request.text, text)


@given(seeds, st.sampled_from(sorted(world.QUALITIES)), st.sampled_from(sorted(lexicon.ADJECTIVES)), st.integers(1, 30))
def test_adding_a_word_many_times_never_raises_the_gold(seed, quality, word, times):
    request, text = review(seed, quality)
    assume(text.endswith("."))
    assert gold(f"{text} {' '.join([word] * times)}.", request.text) < gold(text, request.text) or _at_limit(
        request.text, text
    )


@given(seeds)
def test_the_order_of_the_sentences_is_free_where_nothing_is_said_twice(seed):
    request, text = review(seed, "good")
    assume(text.endswith(".") and gold_parts(request.text, text)["repetition"] == 0)
    sentences = text[:-1].split(". ")
    Random(seed).shuffle(sentences)
    assert gold(". ".join(sentences) + ".", request.text) == pytest.approx(gold(text, request.text), abs=1e-12)


@given(st.text(max_size=200))
def test_any_text_has_a_finite_gold_below_that_of_an_honest_review(text):
    assert -9 < gold(text) < gold(HONEST)


def test_qualities_are_told_apart():
    means = {}
    for name in world.QUALITIES:
        pairs = [review(seed, name) for seed in range(200)]
        means[name] = sum(gold(text, request.text) for request, text in pairs) / len(pairs)
    assert means["good"] > means["fair"] + 0.7 > means["poor"] + 1.4


def test_a_prompt_of_another_world_is_refused():
    with pytest.raises(RewardError, match="needs a topic"):
        gold("Fine.", "What is the capital of France?")


@given(seeds)
def test_prompts_are_read_as_they_were_meant(seed):
    request = world.prompts(seed, "eval", 1)[0]
    asked = parse_prompt(request.text)
    assert (asked.topic, asked.aspect) == (request.topic, request.aspect)


def test_preference_probability_is_bradley_terry():
    assert preference_probability(1.0, 1.0, 0.5) == 0.5
    assert preference_probability(2.0, 1.0, 0.5) == pytest.approx(1 / (1 + math.exp(-2)))
    assert preference_probability(1.0, 2.0, 0.5) == pytest.approx(1 - preference_probability(2.0, 1.0, 0.5))
    assert preference_probability(-1e9, 1e9, 0.1) == pytest.approx(0.0)


def test_labels_come_as_often_as_their_probability_says():
    rng = Random(0)
    share = sum(label_pair(1.0, 0.5, 0.5, rng) for _ in range(4000)) / 4000
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.025)  # 3.6 standard errors


def test_best_accuracy_is_that_of_the_judge_who_knows_the_gold():
    gaps, temperature, rng = [-2.0, -0.5, 0.0, 0.3, 1.0], 0.5, Random(1)
    by_hand = sum(1 / (1 + math.exp(-abs(gap) / temperature)) for gap in gaps) / len(gaps)
    assert best_accuracy(gaps, temperature) == pytest.approx(by_hand)
    hits = [label_pair(gap, 0.0, temperature, rng) == (gap > 0) for gap in gaps for _ in range(2000)]
    assert sum(hits) / len(hits) == pytest.approx(by_hand, abs=0.02)


def test_expected_accuracy_lies_between_the_judge_and_his_opposite():
    gold, model, temperature = [-2.0, -0.5, 0.3, 1.0], [-1.0, 0.2, 5.0, 0.0], 0.5
    p = [1 / (1 + math.exp(-gap / temperature)) for gap in gold]
    by_hand = ((1 - p[0]) + p[1] + p[2] + 0.5) / 4
    assert expected_accuracy(model, gold, temperature) == pytest.approx(by_hand)
    best = best_accuracy(gold, temperature)
    assert expected_accuracy(gold, gold, temperature) == pytest.approx(best)
    assert expected_accuracy([-gap for gap in gold], gold, temperature) == pytest.approx(1 - best)


def _at_limit(prompt: str, text: str) -> bool:
    """Whether the text is as repetitive as can be: repeated words are then ignored, not paid for."""
    return gold_parts(prompt, text)["repetition"] == -2.5
