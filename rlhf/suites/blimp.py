"""The blimp suite: is a grammatical sentence likelier than one that a single error sets apart (Warstadt et al. 2020)?

Training on a reward can damage a model's grammar before its answers look odd; these 67 paradigms show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf.config.data import Count
from rlhf.data.conversation import some_text
from rlhf.data.rows import BadRow
from rlhf.suites.questions import (
    Estimate,
    Item,
    SuiteResult,
    exclude,
    groups,
    mean_estimate,
    pair_estimate,
    read_items,
    too_long,
)
from rlhf.suites.suite import EvalRows, Suite, SuiteContext

if TYPE_CHECKING:
    from rlhf.suites.subject import Subject

LIKELIER = "pairs whose good sentence is the likelier"


@dataclass(frozen=True)
class MinimalPair:
    """A sentence, the same with an error, and the paradigm and the phenomenon that they belong to."""

    good: str
    bad: str
    paradigm: str
    phenomenon: str


def read_minimal_pair(values: Mapping[str, object]) -> MinimalPair:
    """Read a row with `good`, `bad` and, if there are any, `paradigm` and `phenomenon`.

    Raises:
        BadRow: a sentence is missing, or both are equal.
    """
    good, bad = (some_text(values.get(name), name) for name in ("good", "bad"))
    if good == bad:
        raise BadRow("both sentences are equal", repr(good))
    paradigm = str(values.get("paradigm") or "all")
    return MinimalPair(good, bad, paradigm, str(values.get("phenomenon") or paradigm))


class BlimpSuite(Suite):
    """Settings of blimp."""

    name: ClassVar[str] = "blimp"
    data: ClassVar[str] = "pairs of sentences with good, bad and paradigm, as BLiMP's"

    dataset: EvalRows
    """Pairs of sentences; --data is dataset.path."""
    rows_per_pass: Count = 256
    """Sentences of a forward pass; affects memory only. They are short, so that many fit."""

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the settings of sampling: nothing is sampled."""
        return ("seed", "sampling")

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Compare the log-probabilities of both sentences of every pair.

        Raises:
            DataError: there is no usable pair.
        """
        items, skips = read_items(self.dataset, read_minimal_pair, columns=("good", "bad"), what="pairs of sentences")
        items = exclude(items, skips, lambda item: _too_long(subject, item.value))
        pairs = [item.value for item in items]
        scores = sentence_logprobs(subject, [pair.good for pair in pairs] + [pair.bad for pair in pairs])
        good, bad = scores[: len(pairs)], scores[len(pairs) :]
        return SuiteResult.of(
            _figures(pairs, good, bad, self.seed),
            skips,
            groups=_by_paradigm(pairs, good, bad),
            examples=map(_record, items, good, bad),
        )


def sentence_logprobs(subject: Subject, sentences: Sequence[str]) -> list[float]:
    """Compute the log-probability of each sentence, in nats, summed over all of its tokens.

        log π(x_1 … x_n | s)

    s is the token that the tokenizer puts before a text, else the EOS token. Sentences of similar length share a
    forward pass without padding.
    """
    from rlhf.data.pairs import CompletionRows

    encoder = subject.encoder
    start = [encoder.prefix[-1] if encoder.prefix else encoder.eos_id]
    ids = tuple(encoder.text(sentence) for sentence in sentences)
    values: list[float] = subject.logprobs(CompletionRows((start,) * len(ids), ids, encoder.pad_id)).tolist()
    return values


def _too_long(subject: Subject, pair: MinimalPair) -> BadRow | None:
    """Return the reason to leave out a pair that exceeds the model's context; None if it fits."""
    longest = max(len(subject.encoder.text(text)) for text in (pair.good, pair.bad))
    return too_long(subject, 1, longest, of="the sentence")


def _figures(pairs: Sequence[MinimalPair], good: Sequence[float], bad: Sequence[float], seed: int) -> list[Estimate]:
    """Compute the accuracy over all pairs, over paradigms and of each phenomenon, and the mean margin."""
    accuracy = pair_estimate("accuracy", good, bad, LIKELIER)
    rates = [sum(accuracy.values[i] for i in rows) / len(rows) for _, rows in groups([pair.paradigm for pair in pairs])]
    margins = [a - b for a, b in zip(good, bad, strict=True)]
    return [
        accuracy,
        mean_estimate(
            "paradigm_mean", rates, "the same by paradigm, mean and interval over paradigms", seed=seed, shares=True
        ),
        *(
            pair_estimate(name, [good[i] for i in rows], [bad[i] for i in rows], "accuracy on this phenomenon")
            for name, rows in groups([pair.phenomenon for pair in pairs])
            if name != "all"
        ),
        mean_estimate("margin", margins, "log-probability of the good sentence less the bad one's, nats", seed=seed),
    ]


def _by_paradigm(
    pairs: Sequence[MinimalPair], good: Sequence[float], bad: Sequence[float]
) -> dict[str, tuple[Estimate, ...]]:
    return {
        name: (pair_estimate("accuracy", [good[i] for i in rows], [bad[i] for i in rows], LIKELIER),)
        for name, rows in groups([pair.paradigm for pair in pairs])
    }


def _record(item: Item[MinimalPair], good: float, bad: float) -> dict[str, object]:
    pair = item.value
    return {
        "paradigm": pair.paradigm,
        "good": pair.good,
        "bad": pair.bad,
        "logprob_good": round(good, 6),
        "logprob_bad": round(bad, 6),
    }
