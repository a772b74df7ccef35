"""A grammar that writes short reviews, and the prompts that ask for them; all randomness comes from one seed.

A prompt names a topic and one aspect to be mentioned. A review judges aspects of the topic in three to five clauses,
often under negation ("nothing about the bed was dirty"), so that single words do not reveal its sentiment. The
demonstrations are of mixed sentiment and quality, as real ones are: some praise, some complain, some stray to other
topics, repeat themselves or stop in mid-sentence. A model that imitates them leaves room for improvement.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from rlhf.lab.lexicon import (
    CITIES,
    EFFECTS,
    FILLERS,
    FRIENDS,
    GENERAL,
    HEADLINES,
    INTENSIFIERS,
    JOINS,
    MOODS,
    NAMES,
    NEGATORS,
    OPENERS,
    OPINIONS,
    PEOPLE,
    SEASONS,
    SPECIAL,
    TAILS,
    TARGETS,
    TOPICS,
    VERDICTS,
)

Split = Literal["train", "eval"]

PROMPT_TEMPLATES = (
    "Write a review of the {topic} in {city}, mention the {aspect}:",
    "{name} wants a review of the {topic} and its {aspect}:",
    "Review the {topic} in {city} for {name}, with the {aspect}:",
    "For {name}, a few words on the {topic} and the {aspect}:",
    "An opinion on the {topic} in {city} and the {aspect}, please:",
)
EVAL_EVERY = 10  # one prompt in 10 is held out


@dataclass(frozen=True)
class Request:
    """A prompt, with the topic and the aspect it asks for."""

    topic: str
    aspect: str  # the noun to be mentioned
    text: str  # the prompt as the policy reads it


@dataclass(frozen=True)
class Quality:
    """The quality of a review: probabilities per clause, except `cut` and `asked`, which are per review."""

    praise: float  # a clause is favourable
    stray: float  # a clause is about another topic
    repeat: float  # a clause repeats an earlier one
    cut: float  # the review stops before its end
    asked: float  # the requested aspect is judged


QUALITIES = {
    "good": Quality(praise=0.97, stray=0.02, repeat=0.01, cut=0.02, asked=0.8),
    "fair": Quality(praise=0.50, stray=0.10, repeat=0.03, cut=0.08, asked=0.5),
    "poor": Quality(praise=0.02, stray=0.20, repeat=0.08, cut=0.20, asked=0.3),
}
"""The qualities of demonstrations, by name."""

SFT_MIX = {"good": 0.28, "fair": 0.08, "poor": 0.64}
"""The share of each quality in the SFT corpus."""


def prompts(seed: int, split: Split, count: int) -> list[Request]:
    """Generate `count` distinct requests of a split; no prompt text is in both splits, whatever the seeds."""
    rng = Random(f"prompts/{split}/{seed}")
    requests: dict[str, Request] = {}
    while len(requests) < count:
        request = _request(rng)
        if split_of(request.text) == split:
            requests[request.text] = request
    return list(requests.values())


def split_of(text: str) -> Split:
    """Return the split that a prompt belongs to, a function of its text alone."""
    return "eval" if zlib.crc32(text.encode()) % EVAL_EVERY == 0 else "train"


def sft_rows(seed: int, count: int) -> list[dict[str, str]]:
    """Generate the SFT corpus: prompts of the train split, possibly repeated, each with a review of random quality."""
    rng = Random(f"sft/{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        request = _request(rng)
        if split_of(request.text) == "train":
            quality = rng.choices(list(SFT_MIX), weights=list(SFT_MIX.values()))[0]
            rows.append({"prompt": request.text, "completion": write_review(request, rng, QUALITIES[quality])})
    return rows


def write_review(request: Request, rng: Random, quality: Quality) -> str:
    """Write a review of the given quality that answers the request."""
    draft = _Draft(rng=rng)
    polarity = _polarity(rng, quality)
    headline = _headline(draft, request.topic, polarity)
    for noun in _nouns(request, rng, quality, count=rng.choices((2, 3, 4), weights=(3, 4, 2))[0]):
        polarity = _polarity(rng, quality)
        draft.add(_clause(draft, _topic_of(noun), noun, polarity), polarity)
        if rng.random() < quality.repeat:
            draft.repeat()
    if rng.random() < 0.15:
        draft.add(_filler(rng), 0)
    text = f"{headline} {draft.text()}"
    if rng.random() < quality.cut:
        words = text.split(" ")
        text = " ".join(words[: rng.randint(len(words) // 2, len(words) - 1)]).rstrip(".,")
    return text


def _polarity(rng: Random, quality: Quality) -> int:
    return 1 if rng.random() < quality.praise else -1


def _request(rng: Random) -> Request:
    topic = rng.choice(list(TOPICS))
    aspect = rng.choice(TOPICS[topic])
    text = rng.choice(PROMPT_TEMPLATES).format(
        topic=topic,
        aspect=aspect,
        city=rng.choice(CITIES),
        name=rng.choice(NAMES),
    )
    return Request(topic=topic, aspect=aspect, text=text)


@dataclass
class _Draft:
    """The clauses written so far, with their polarities, and the words already used."""

    rng: Random
    clauses: list[tuple[str, int]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def fresh(self, words: Iterable[str]) -> str:
        """Draw one of `words`, earlier ones more often, and an unused one if any is left."""
        words = list(words)
        unused = [word for word in words if word not in self.used] or words
        word = self.rng.choices(unused, weights=[1 / (1 + words.index(word)) for word in unused])[0]
        self.used.add(word)
        return word

    def add(self, clause: str, polarity: int) -> None:
        """Append a clause."""
        self.clauses.append((clause, polarity))

    def repeat(self) -> None:
        """Repeat a random earlier clause."""
        self.clauses.append(self.rng.choice(self.clauses))

    def text(self) -> str:
        """Join the clauses to sentences of one or two, with a connective that fits their polarities."""
        sentences, clauses = [], list(self.clauses)
        while clauses:
            sentence, polarity = clauses.pop(0)
            if clauses and self.rng.random() < 0.4:
                next_clause, next_polarity = clauses.pop(0)
                join = self.rng.choice(JOINS["contrast" if polarity * next_polarity < 0 else "same"])
                sentence = f"{sentence}, {join} {next_clause}"
            if self.rng.random() < 0.3:
                neutral = polarity == 0 or self.rng.random() < 0.15
                opener = self.rng.choice(OPENERS if neutral else MOODS[polarity])
                sentence = f"{opener}, {sentence}"
            sentence = " ".join("I" if word == "i" else word for word in sentence.split(" "))
            sentences.append(sentence[0].upper() + sentence[1:] + ".")
        return " ".join(sentences)


def _nouns(request: Request, rng: Random, quality: Quality, count: int) -> list[str]:
    """Draw the distinct nouns to judge, in order, with or without the requested one."""
    on_topic = [noun for noun in TOPICS[request.topic] if noun != request.aspect]
    off_topic = [noun for topic, nouns in TOPICS.items() if topic != request.topic for noun in nouns]
    strays = sum(rng.random() < quality.stray for _ in range(count))
    nouns = rng.sample(on_topic, count - strays) + rng.sample(off_topic, strays)
    if rng.random() < quality.asked:
        nouns[0] = request.aspect
    rng.shuffle(nouns)
    return nouns


def _topic_of(noun: str) -> str:
    return next(topic for topic, nouns in TOPICS.items() if noun in nouns)


def _headline(draft: _Draft, topic: str, polarity: int) -> str:
    """Write a first sentence that sums up the review: "A good hotel." or "Not a bad film."."""
    negated = draft.rng.random() < 0.05
    adjective = draft.fresh(HEADLINES[-polarity if negated else polarity])
    article = "an" if adjective[0] in "aeiou" else "a"
    opening = f"Not {article}" if negated else article.capitalize()
    return f"{opening} {adjective} {topic}."


def _clause(draft: _Draft, topic: str, noun: str, polarity: int) -> str:
    """Write a clause that judges `noun` with this polarity, directly or by negating the opposite."""
    rng = draft.rng
    form = rng.choices(list(_FORM_WEIGHTS), weights=list(_FORM_WEIGHTS.values()))[0]
    negated = form is _write_nothing or rng.random() < 0.10
    return form(draft, _Statement(topic, noun, -polarity if negated else polarity, negated))


@dataclass(frozen=True)
class _Statement:
    """The content of a clause: its words have `polarity`, and if it is `negated` it means the opposite."""

    topic: str
    noun: str
    polarity: int
    negated: bool


def _write_state(draft: _Draft, statement: _Statement) -> str:
    negator = f"{draft.rng.choice(NEGATORS)} " if statement.negated else ""
    return f"the {statement.noun} was {negator}{_judgment(draft, statement)}{_tail(draft.rng)}"


def _write_nothing(draft: _Draft, statement: _Statement) -> str:
    noun, adjective = statement.noun, _adjective(draft, statement)
    return draft.rng.choice(
        (f"nothing about the {noun} was {adjective}", f"there was nothing {adjective} about the {noun}")
    )


def _write_find(draft: _Draft, statement: _Statement) -> str:
    subject = "nobody" if statement.negated else draft.rng.choice(PEOPLE)
    return f"{subject} found the {statement.noun} {_judgment(draft, statement)}{_tail(draft.rng)}"


def _write_opinion(draft: _Draft, statement: _Statement) -> str:
    return f"{_opinion(draft, statement.polarity, statement.negated)} the {statement.noun}"


def _write_effect(draft: _Draft, statement: _Statement) -> str:
    verbs = EFFECTS[statement.polarity]
    past = draft.fresh(verbs)
    verb = f"did not {verbs[past]}" if statement.negated else past
    return f"the {statement.noun} {verb} {draft.rng.choice(TARGETS)}"


def _write_verdict(draft: _Draft, statement: _Statement) -> str:
    verdict = draft.fresh(VERDICTS[statement.polarity])
    never = "never " if statement.negated else ""
    return f"{draft.rng.choice(PEOPLE)} would {never}{verdict} the {statement.noun}"


# The forms of a clause, and how often each is drawn. The order matters to a seed.
_FORM_WEIGHTS: dict[Callable[[_Draft, _Statement], str], int] = {
    _write_state: 58,
    _write_nothing: 4,
    _write_find: 12,
    _write_opinion: 11,
    _write_effect: 11,
    _write_verdict: 4,
}


def _judgment(draft: _Draft, statement: _Statement) -> str:
    """Draw an adjective, sometimes with an intensifier, but never with both a negator and an intensifier."""
    adjective = _adjective(draft, statement)
    if statement.negated or draft.rng.random() < 0.6:
        return adjective
    return f"{draft.fresh(INTENSIFIERS)} {adjective}"


def _adjective(draft: _Draft, statement: _Statement) -> str:
    special = draft.rng.random() < 0.3
    words = SPECIAL[statement.topic] if special else GENERAL
    return draft.fresh(words[statement.polarity])


def _opinion(draft: _Draft, polarity: int, negated: bool) -> str:
    rng = draft.rng
    past = draft.fresh(OPINIONS[polarity])
    if not negated:
        return f"{rng.choice(PEOPLE)} {past}"
    subject, base = rng.choice(PEOPLE), OPINIONS[polarity][past]
    return rng.choice((f"nobody {past}", f"{subject} never {past}", f"{subject} did not {base}"))


def _tail(rng: Random) -> str:
    return f" {rng.choice(TAILS)}" if rng.random() < 0.1 else ""


def _filler(rng: Random) -> str:
    return rng.choice(FILLERS).format(season=rng.choice(SEASONS), friend=rng.choice(FRIENDS))
