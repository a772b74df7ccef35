"""The gold reward: the true quality of a review, computed from the texts of the prompt and the completion alone.

The completion is parsed clause by clause with the grammar. A clause counts if it is complete and *fresh*: it judges a
noun that no earlier clause judged, with a word that no earlier clause used to judge. A good word or sentence that is
repeated therefore adds nothing to any part, and costs under `repetition`. The gold is the sum of seven parts:

    sentiment   3.5 · Σ_c p_c / (n + 1)   n fresh clauses of polarity p_c in [-1, 1] after negation: praise is rewarded
    topic       1 - 2^-k - 0.6 · min(o, 3)    k distinct nouns of the topic in fresh clauses, o of other topics anywhere
    asked       0.4 if a fresh clause judges the aspect that the prompt asks for
    ending      0.3 if the text ends with a period, else -0.3
    form        -0.5 · min(incomplete clauses, 3); an empty text has one incomplete clause
    repetition  -min(0.5 · r + 0.25 · g, 2.5) r content words and g four-word runs that occurred before
    length      -0.3 for each fresh clause short of three, -0.05 for each word over 45

A perfect review of five clauses scores 4.59, an empty text -1.7; careless reviews lie between about -6 and 3.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Any

from rlhf.errors import RewardError
from rlhf.lab.lexicon import (
    ADJECTIVES,
    ASPECT_TOPIC,
    EFFECTS,
    FILLERS,
    FRIENDS,
    INTENSIFIERS,
    JOINS,
    MOODS,
    NEGATORS,
    OPENERS,
    OPINIONS,
    PEOPLE,
    PLAIN_STRENGTH,
    SEASONS,
    TAILS,
    TARGETS,
    TOPICS,
    VERBS,
    VERDICTS,
)

SENTIMENT_WEIGHT = 3.5
OFF_TOPIC_COST = 0.6
ASKED_WEIGHT = 0.4
ENDING_WEIGHT = 0.3
INCOMPLETE_COST = 0.5
REPEATED_WORD_COST = 0.5
REPEATED_RUN_COST = 0.25
REPETITION_LIMIT = 2.5
SHORT_COST = 0.3
LONG_COST = 0.05
MIN_CLAUSES = 3
MAX_WORDS = 45
COUNTED_AT_MOST = 3  # off-topic nouns, incomplete clauses
RUN = 4  # words in a run that should not occur twice

CONTENT = frozenset(ADJECTIVES) | frozenset(ASPECT_TOPIC) | frozenset(INTENSIFIERS) | frozenset(VERBS)


@dataclass(frozen=True)
class PromptRequest:
    """The topic and the aspect that a prompt asks for, as parsed from its text."""

    topic: str
    aspect: str


@dataclass(frozen=True)
class Clause:
    """A complete clause: the noun it judges, the judging word, and its polarity; a filler judges nothing."""

    noun: str
    judge: str
    polarity: float  # in [-1, 1], after negation; 0 for a filler


def gold_reward(prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """Compute the gold reward of each completion from the texts; `references` is ignored."""
    return [
        sum(gold_parts(prompt, completion).values()) for prompt, completion in zip(prompts, completions, strict=True)
    ]


def gold_parts(prompt: str, completion: str) -> dict[str, float]:
    """Compute the weighted parts whose sum is the gold reward."""
    asked = parse_prompt(prompt)
    sentences = _sentences(completion)
    tokens = [token for sentence in sentences for token in sentence]
    clauses = [clause for sentence in sentences for clause in _clauses(sentence)]
    fresh = _fresh(clause for clause in clauses if clause is not None)
    nouns = {clause.noun for clause in fresh}
    return {
        "sentiment": SENTIMENT_WEIGHT * sum(c.polarity for c in fresh) / (len(fresh) + 1),
        "topic": _topic_part(asked.topic, nouns, mentioned=ASPECT_TOPIC.keys() & tokens),
        "asked": ASKED_WEIGHT * (asked.aspect in nouns),
        "ending": ENDING_WEIGHT if completion.rstrip().endswith(".") else -ENDING_WEIGHT,
        "form": _form_part(clauses),
        "repetition": -_repetition(sentences),
        "length": _length_part(len(fresh), words=len(tokens) - tokens.count(",")),
    }


def _topic_part(topic: str, judged: Set[str], *, mentioned: Set[str]) -> float:
    """Compute the part of the gold for judged nouns of the topic and for mentioned nouns of others."""
    on_topic = sum(ASPECT_TOPIC[noun] == topic for noun in judged)
    off_topic = sum(ASPECT_TOPIC[noun] != topic for noun in mentioned)
    return 1 - 2.0**-on_topic - OFF_TOPIC_COST * min(off_topic, COUNTED_AT_MOST)


def _form_part(clauses: Sequence[Clause | None]) -> float:
    """Compute the part of the gold for incomplete clauses, of which an empty text has one."""
    incomplete = clauses.count(None) if clauses else 1
    return -INCOMPLETE_COST * min(incomplete, COUNTED_AT_MOST)


def _length_part(fresh_clauses: int, *, words: int) -> float:
    return -SHORT_COST * max(MIN_CLAUSES - fresh_clauses, 0) - LONG_COST * max(words - MAX_WORDS, 0)


def parse_prompt(prompt: str) -> PromptRequest:
    """Parse the topic and the aspect that a prompt names; without an aspect it is the topic itself.

    Raises:
        RewardError: the prompt names no topic of the lab.
    """
    words = re.findall(r"[a-z]+", prompt.lower())
    topic = next((word for word in words if word in TOPICS), None)
    if topic is None:
        raise RewardError(
            f"the lab's gold reward cannot read the prompt {prompt!r}: it needs a topic ({', '.join(TOPICS)}); "
            f"for other prompts use another reward"
        )
    aspect = next((word for word in words if word in TOPICS[topic]), topic)
    return PromptRequest(topic=topic, aspect=aspect)


def preference_probability(gold_a: float, gold_b: float, temperature: float) -> float:
    """Compute P(a preferred to b) = σ((g_a - g_b) / temperature) (Bradley & Terry 1952)."""
    return 1 / (1 + math.exp(min((gold_b - gold_a) / temperature, 700.0)))


def label_pair(gold_a: float, gold_b: float, temperature: float, rng: Random) -> bool:
    """Draw from `preference_probability` whether a noisy judge prefers a to b."""
    return rng.random() < preference_probability(gold_a, gold_b, temperature)


def best_accuracy(gold_gaps: Sequence[float], temperature: float) -> float:
    """Compute the best expected accuracy on labels drawn at this temperature: the mean of max(p, 1 - p) over pairs."""
    assert gold_gaps, "no pairs"
    return math.fsum(preference_probability(abs(gap), 0.0, temperature) for gap in gold_gaps) / len(gold_gaps)


def expected_accuracy(model_gaps: Sequence[float], gold_gaps: Sequence[float], temperature: float) -> float:
    """Compute the accuracy of a model's preferences in expectation over the judge's label noise.

    It is the mean of P if the model prefers the first, 1 - P if it prefers the second, and 1/2 if it is
    undecided, with P = σ(gold gap / temperature). The accuracy on a single draw of the labels would have a standard
    error of √(a(1-a)/N): 0.013 at 1,000 pairs.

    Args:
        model_gaps: the model's score of the first minus its score of the second, for each pair.
        gold_gaps: the same difference of the gold rewards.
        temperature: the temperature of the judge, in units of gold.
    """
    assert model_gaps, "no pairs"
    total = 0.0
    for model, gold in zip(model_gaps, gold_gaps, strict=True):
        first = preference_probability(gold, 0.0, temperature)
        total += 0.5 if model == 0 else first if model > 0 else 1 - first
    return total / len(model_gaps)


def _sentences(text: str) -> list[list[str]]:
    """Split a text into sentences of lower-case words and commas; any other mark makes its clause incomplete."""
    parts = (re.findall(r"[a-z]+|[^a-z\s]", part) for part in text.lower().split("."))
    return [part for part in parts if part]


def _clauses(sentence: Sequence[str]) -> list[Clause | None]:
    """Parse the clauses of a sentence, None for an incomplete one; an opener before a clause is skipped."""
    chunks = [chunk.strip() for chunk in " ".join(sentence).split(",")]
    if len(chunks) > 1 and chunks[0] in _OPENING:
        chunks = chunks[1:]
    joined = [_without_join(chunk) for chunk in chunks[1:]]
    return [_parse(chunk) for chunk in (chunks[0], *joined)]


def _without_join(chunk: str) -> str:
    """Return a clause without its connective; empty, and so incomplete, if it has no connective."""
    first, _, rest = chunk.partition(" ")
    return rest if first in _JOIN_WORDS else ""


def _parse(text: str) -> Clause | None:
    if _FILLER.fullmatch(text):
        return Clause(noun="", judge=text, polarity=0.0)
    match = next((match for pattern in _PATTERNS if (match := pattern.fullmatch(text))), None)
    if match is None:
        return None
    words = match.groupdict()
    judge, polarity = VERBS[words["verb"]] if "verb" in words else (words["adj"], ADJECTIVES[words["adj"]])
    strength = INTENSIFIERS.get(words.get("much") or "", PLAIN_STRENGTH)
    if words.get("neg"):
        polarity, strength = -polarity, PLAIN_STRENGTH
    return Clause(noun=words["noun"], judge=judge, polarity=polarity * strength)


def _fresh(clauses: Iterable[Clause]) -> list[Clause]:
    """Select the judging clauses that repeat neither the noun nor the judging word of an earlier one."""
    fresh: list[Clause] = []
    for clause in clauses:
        if clause.polarity and all(clause.noun != c.noun and clause.judge != c.judge for c in fresh):
            fresh.append(clause)
    return fresh


def _repetition(sentences: Sequence[Sequence[str]]) -> float:
    content = Counter(VERBS[word][0] if word in VERBS else word for s in sentences for word in s if word in CONTENT)
    runs = Counter(tuple(s[i : i + RUN]) for s in sentences for i in range(len(s) - RUN + 1))
    cost = REPEATED_WORD_COST * (content.total() - len(content)) + REPEATED_RUN_COST * (runs.total() - len(runs))
    return min(cost, REPETITION_LIMIT)


def _any(words: Iterable[str]) -> str:
    return "(?:" + "|".join(words) + ")"


def _group(name: str, words: Iterable[str]) -> str:
    return f"(?P<{name}>" + "|".join(words) + ")"


_OPENING = frozenset((*OPENERS, *MOODS[1], *MOODS[-1]))
_JOIN_WORDS = frozenset(word for words in JOINS.values() for word in words)
_FILLER = re.compile(_any(f.format(season=_any(SEASONS), friend=_any(FRIENDS)) for f in FILLERS))


def _past_forms(verbs: Mapping[int, Mapping[str, str]]) -> list[str]:
    return [past for forms in verbs.values() for past in forms]


def _base_forms(verbs: Mapping[int, Mapping[str, str]]) -> list[str]:
    return [base for forms in verbs.values() for base in forms.values()]


def _patterns() -> list[re.Pattern[str]]:
    """Build a pattern for each form of clause, over words joined by single spaces."""
    noun, who = "the " + _group("noun", ASPECT_TOPIC), _any(PEOPLE)
    adjective = f"(?:{_group('much', INTENSIFIERS)} )?{_group('adj', ADJECTIVES)}"
    tail = f"(?: {_any(TAILS)})?"
    verdicts = [verb for verbs in VERDICTS.values() for verb in verbs]
    return [
        re.compile(form)
        for form in (
            f"{noun} was (?:{_group('neg', NEGATORS)} )?{adjective}{tail}",
            f"(?P<neg>nothing) about {noun} was {adjective}",
            f"there was (?P<neg>nothing) {adjective} about {noun}",
            f"(?:(?P<neg>nobody)|{who}) found {noun} {adjective}{tail}",
            f"(?:(?P<neg>nobody|{who} never)|{who}) {_group('verb', _past_forms(OPINIONS))} {noun}",
            f"{who} (?P<neg>did not) {_group('verb', _base_forms(OPINIONS))} {noun}",
            f"{noun} {_group('verb', _past_forms(EFFECTS))} {_any(TARGETS)}",
            f"{noun} (?P<neg>did not) {_group('verb', _base_forms(EFFECTS))} {_any(TARGETS)}",
            f"(?:(?P<neg>not) )?an? {adjective} {_group('noun', ASPECT_TOPIC)}",
            f"{who} would (?:(?P<neg>never|not) )?{_group('verb', verdicts)} {noun}",
        )
    ]


_PATTERNS = _patterns()
