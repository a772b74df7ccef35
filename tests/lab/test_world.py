import re
from random import Random

import pytest

from rlhf.lab import gold, lexicon, world
from rlhf.lab.gold import gold_parts


def test_one_seed_gives_one_world():
    assert world.prompts(3, "train", 50) == world.prompts(3, "train", 50)
    assert world.sft_rows(3, 50) == world.sft_rows(3, 50)
    assert world.prompts(3, "train", 50) != world.prompts(4, "train", 50)
    assert world.sft_rows(3, 50) != world.sft_rows(4, 50)


def test_a_longer_draw_begins_with_the_shorter_one():
    assert world.prompts(0, "eval", 80)[:30] == world.prompts(0, "eval", 30)
    assert world.sft_rows(0, 80)[:30] == world.sft_rows(0, 30)


def test_thousands_of_distinct_prompts_and_no_text_in_both_splits():
    train = {request.text for request in world.prompts(0, "train", 2500)}
    held_out = {request.text for seed in (0, 1) for request in world.prompts(seed, "eval", 600)}
    demonstrations = {row["prompt"] for row in world.sft_rows(0, 3000)}
    assert len(train) == 2500
    assert not held_out & (train | demonstrations)


def test_every_kind_of_request_occurs():
    requests = world.prompts(0, "train", 2500)
    assert {(r.topic, r.aspect) for r in requests} == {(t, a) for t, nouns in lexicon.TOPICS.items() for a in nouns}


def test_no_word_has_two_meanings():
    nouns = [noun for topic, aspects in lexicon.TOPICS.items() for noun in (topic, *aspects)]
    adjectives = [a for t in (lexicon.GENERAL, *lexicon.SPECIAL.values()) for words in t.values() for a in words]
    tables = (lexicon.OPINIONS, lexicon.EFFECTS)
    verbs = [form for t in tables for words in t.values() for pair in words.items() for form in pair]
    verbs += [verb for words in lexicon.VERDICTS.values() for verb in words]
    words = [*nouns, *adjectives, *verbs, *lexicon.INTENSIFIERS, *lexicon.NEGATORS]
    assert len(words) == len(set(words))


def test_the_vocabulary_is_a_few_hundred_words():
    text = " ".join(row["prompt"] + " " + row["completion"] for row in world.sft_rows(0, 4000))
    assert 200 <= len({word.lower() for word in re.findall(r"[A-Za-z]+", text)}) <= 400


def test_a_cut_review_stops_short_and_a_whole_one_with_a_period():
    request = world.prompts(0, "train", 1)[0]
    whole = world.Quality(praise=1.0, stray=0.0, repeat=0.0, cut=0.0, asked=1.0)
    cut = world.Quality(praise=1.0, stray=0.0, repeat=0.0, cut=1.0, asked=1.0)
    for seed in range(50):
        full = world.write_review(request, Random(seed), whole)
        part = world.write_review(request, Random(seed), cut)
        assert full.endswith(".")
        assert full.startswith(part)
        assert not part.endswith((".", ","))


def test_repeats_and_strays_are_what_the_quality_says():
    request = world.prompts(0, "train", 1)[0]
    quality = world.Quality(praise=1.0, stray=0.0, repeat=1.0, cut=0.0, asked=1.0)
    assert gold_parts(request.text, world.write_review(request, Random(0), quality))["repetition"] < 0
    quality = world.Quality(praise=1.0, stray=1.0, repeat=0.0, cut=0.0, asked=0.0)
    parts = gold_parts(request.text, world.write_review(request, Random(0), quality))
    assert parts["topic"] == pytest.approx(0.5 - 2 * 0.6)  # the headline is on the topic, two clauses are not


def test_negation_turns_the_words_round_in_a_good_share_of_clauses():
    texts = [row["completion"] for row in world.sft_rows(0, 1000)]
    clauses = [c for text in texts for s in gold._sentences(text) for c in gold._clauses(s) if c is not None]
    judging = [clause for clause in clauses if clause.polarity]
    polarities = {**lexicon.ADJECTIVES, **{form: polarity for form, (_, polarity) in lexicon.VERBS.items()}}
    turned = sum(polarities[clause.judge] * clause.polarity < 0 for clause in judging)
    assert 0.08 < turned / len(judging) < 0.2
