"""A grammar that writes short reviews, and the prompts which ask for them; all randomness comes from one seed.

A prompt names a topic and one aspect to be mentioned. A review judges aspects of the topic in three to five clauses,
often under negation ("nothing about the bed was dirty"), so that its words alone do not say what it thinks. The
demonstrations are of mixed sentiment and mixed quality, as real ones are: some praise, some complain, some stray to
other topics, repeat themselves or stop in mid-sentence. A model that imitates them leaves room for better.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
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

PHRASINGS = (
    "Write a review of the {topic} in {city}, mention the {aspect}:",
    "{name} wants a review of the {topic} and its {aspect}:",
    "Review the {topic} in {city} for {name}, with the {aspect}:",
    "For {name}, a few words on the {topic} and the {aspect}:",
    "An opinion on the {topic} in {city} and the {aspect}, please:",
)
EVAL_SHARE = 10  # one prompt in so many is held out


@dataclass(frozen=True)
class Request:
    """What a prompt asks for, and the prompt."""

    topic: str
    aspect: str  # the noun to be mentioned
    text: str  # the prompt as the policy reads it


@dataclass(frozen=True)
class Quality:
    """How well a review is written: chances per clause, but for `cut` and `asked`, which are per review."""

    praise: float  # a clause is favourable
    stray: float  # a clause is about another topic
    repeat: float  # a clause says again what an earlier one said
    cut: float  # the review stops before its end
    asked: float  # the aspect asked for is judged


QUALITIES = {
    "good": Quality(praise=0.97, stray=0.02, repeat=0.01, cut=0.02, asked=0.8),
    "fair": Quality(praise=0.50, stray=0.10, repeat=0.03, cut=0.08, asked=0.5),
    "poor": Quality(praise=0.02, stray=0.20, repeat=0.08, cut=0.20, asked=0.3),
}
"""The qualities a demonstration may have, by name."""

SFT_MIX = {"good": 0.28, "fair": 0.08, "poor": 0.64}
"""Shares of the qualities in the SFT corpus."""


def prompts(seed: int, split: Split, count: int) -> list[Request]:
    """So many distinct requests of a split; no prompt text is in both splits, whatever the seeds."""
    rng = Random(f"prompts/{split}/{seed}")
    found: dict[str, Request] = {}
    while len(found) < count:
        request = _request(rng)
        if split_of(request.text) == split:
            found[request.text] = request
    return list(found.values())


def split_of(text: str) -> Split:
    """The split a prompt belongs to: a function of its text alone."""
    return "eval" if zlib.crc32(text.encode()) % EVAL_SHARE == 0 else "train"


def sft_rows(seed: int, count: int) -> list[dict[str, str]]:
    """The SFT corpus: prompts of the train split (they may recur), each with a review of drawn quality."""
    rng = Random(f"sft/{seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        request = _request(rng)
        if split_of(request.text) == "train":
            name = rng.choices(list(SFT_MIX), weights=list(SFT_MIX.values()))[0]
            rows.append({"prompt": request.text, "completion": write_review(request, rng, QUALITIES[name])})
    return rows


def write_review(request: Request, rng: Random, quality: Quality) -> str:
    """A review that answers the request as well as `quality` says."""
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
    text = rng.choice(PHRASINGS).format(
        topic=topic,
        aspect=aspect,
        city=rng.choice(CITIES),
        name=rng.choice(NAMES),
    )
    return Request(topic=topic, aspect=aspect, text=text)


@dataclass
class _Draft:
    """The clauses written so far, with their polarities, and the words not to be used again."""

    rng: Random
    clauses: list[tuple[str, int]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def fresh(self, words: Iterable[str]) -> str:
        """One of `words`, the earlier ones more often, one that the draft has not used if any is left."""
        words = list(words)
        left = [word for word in words if word not in self.used] or words
        word = self.rng.choices(left, weights=[1 / (1 + words.index(word)) for word in left])[0]
        self.used.add(word)
        return word

    def add(self, clause: str, polarity: int) -> None:
        """Say this next."""
        self.clauses.append((clause, polarity))

    def repeat(self) -> None:
        """Say something again."""
        self.clauses.append(self.rng.choice(self.clauses))

    def text(self) -> str:
        """Sentences of one or two clauses, the joint between two clauses fitting their polarities."""
        sentences, clauses = [], list(self.clauses)
        while clauses:
            sentence, polarity = clauses.pop(0)
            if clauses and self.rng.random() < 0.4:
                following, other = clauses.pop(0)
                join = self.rng.choice(JOINS["contrast" if polarity * other < 0 else "same"])
                sentence = f"{sentence}, {join} {following}"
            if self.rng.random() < 0.3:
                neutral = polarity == 0 or self.rng.random() < 0.15
                opener = self.rng.choice(OPENERS if neutral else MOODS[polarity])
                sentence = f"{opener}, {sentence}"
            sentence = " ".join("I" if word == "i" else word for word in sentence.split(" "))
            sentences.append(sentence[0].upper() + sentence[1:] + ".")
        return " ".join(sentences)


def _nouns(request: Request, rng: Random, quality: Quality, count: int) -> list[str]:
    """What to judge, in order: distinct nouns, the one asked for among them or not."""
    own = [noun for noun in TOPICS[request.topic] if noun != request.aspect]
    other = [noun for topic, nouns in TOPICS.items() if topic != request.topic for noun in nouns]
    strays = sum(rng.random() < quality.stray for _ in range(count))
    nouns = rng.sample(own, count - strays) + rng.sample(other, strays)
    if rng.random() < quality.asked:
        nouns[0] = request.aspect
    rng.shuffle(nouns)
    return nouns


def _topic_of(noun: str) -> str:
    return next(topic for topic, nouns in TOPICS.items() if noun in nouns)


def _headline(draft: _Draft, topic: str, polarity: int) -> str:
    """A first sentence that says it all: "A good hotel." or "Not a bad film."."""
    negated = draft.rng.random() < 0.05
    adjective = draft.fresh(HEADLINES[-polarity if negated else polarity])
    article = "an" if adjective[0] in "aeiou" else "a"
    opening = f"Not {article}" if negated else article.capitalize()
    return f"{opening} {adjective} {topic}."


def _clause(draft: _Draft, topic: str, noun: str, polarity: int) -> str:
    """A clause that judges `noun` with this polarity: directly, or by negating the opposite."""
    rng = draft.rng
    kind = rng.choices(("state", "nothing", "find", "opinion", "effect", "verdict"), weights=(58, 4, 12, 11, 11, 4))[0]
    negated = kind == "nothing" or rng.random() < 0.10
    said = -polarity if negated else polarity
    match kind:
        case "state":
            negator = f"{rng.choice(NEGATORS)} " if negated else ""
            return f"the {noun} was {negator}{_judgment(draft, topic, said, negated)}{_tail(rng)}"
        case "nothing":
            adjective = _adjective(draft, topic, said)
            return rng.choice(
                (f"nothing about the {noun} was {adjective}", f"there was nothing {adjective} about the {noun}")
            )
        case "find":
            subject = "nobody" if negated else rng.choice(PEOPLE)
            return f"{subject} found the {noun} {_judgment(draft, topic, said, negated)}{_tail(rng)}"
        case "opinion":
            return f"{_opinion(draft, said, negated)} the {noun}"
        case "effect":
            past = draft.fresh(EFFECTS[said])
            verb = f"did not {EFFECTS[said][past]}" if negated else past
            return f"the {noun} {verb} {rng.choice(TARGETS)}"
        case _:
            verdict = draft.fresh(VERDICTS[said])
            return f"{rng.choice(PEOPLE)} would {'never ' if negated else ''}{verdict} the {noun}"


def _judgment(draft: _Draft, topic: str, polarity: int, negated: bool) -> str:
    """An adjective, with an intensifier at times; a negator stands alone."""
    adjective = _adjective(draft, topic, polarity)
    if negated or draft.rng.random() < 0.6:
        return adjective
    return f"{draft.fresh(INTENSIFIERS)} {adjective}"


def _adjective(draft: _Draft, topic: str, polarity: int) -> str:
    special = draft.rng.random() < 0.3
    return draft.fresh(SPECIAL[topic][polarity] if special else GENERAL[polarity])


def _opinion(draft: _Draft, polarity: int, negated: bool) -> str:
    rng = draft.rng
    past = draft.fresh(OPINIONS[polarity])
    if not negated:
        return f"{rng.choice(PEOPLE)} {past}"
    who, base = rng.choice(PEOPLE), OPINIONS[polarity][past]
    return rng.choice((f"nobody {past}", f"{who} never {past}", f"{who} did not {base}"))


def _tail(rng: Random) -> str:
    return f" {rng.choice(TAILS)}" if rng.random() < 0.1 else ""


def _filler(rng: Random) -> str:
    return rng.choice(FILLERS).format(season=rng.choice(SEASONS), friend=rng.choice(FRIENDS))
