"""One answer to every question of a set: the texts, their lengths, and which were cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf.data.row import BadRow
from rlhf.data.skips import Skips
from rlhf.evaluation.diversity import completion_tokens, distinct_n
from rlhf.evaluation.suites.figures import Figure, average, share
from rlhf.evaluation.suites.questions import NEW, Item, T, too_long, without
from rlhf.evaluation.suites.subject import Subject
from rlhf.rewards.source import RewardSource
from rlhf.types import Completions

Pick = Callable[[Completions], Tensor]
"""Returns the row index of the completion to keep for each question."""


@dataclass(frozen=True)
class Answers:
    """A model's answers, one for each question."""

    texts: list[str]
    lengths: list[float]
    truncated: list[bool]
    distinct_2: float

    @property
    def rows(self) -> dict[str, list[float]]:
        """Return the values of every answer, by figure."""
        return {"length": self.lengths, "truncated": list(map(float, self.truncated))}

    def figures(self, *, seed: int) -> list[Figure]:
        """Compute the mean length, the share of truncated answers and the distinct bigrams."""
        return [
            average("length", self.lengths, "tokens of an answer, EOS included", seed=seed),
            share("truncated", list(map(float, self.truncated)), "answers that reached sampling.max_new_tokens"),
            Figure(
                "distinct_2", self.distinct_2, None, None, len(self.texts), "none", "distinct bigrams of all answers"
            ),
        ]


def answerable(subject: Subject, items: list[Item[T]], skips: Skips, text: Callable[[T], str]) -> list[Item[T]]:
    """Drop, and count, the questions that do not fit into the model's context with an answer.

    Raises:
        DataError: no question is left.
    """
    room = subject.sampling.max_new_tokens

    def reason(item: Item[T]) -> BadRow | None:
        return too_long(subject, len(subject.encoder.prompts([subject.ask(text(item.found))])[0]), room, of=NEW)

    return without(items, skips, reason)


def answer(
    subject: Subject, questions: Sequence[str], *, key: int, greedy: bool, count: int = 1, pick: Pick | None = None
) -> Answers:
    """Answer every question once; with `pick`, sample `count` answers and keep the one that it picks."""
    prompts = [subject.ask(question) for question in questions]
    ids = subject.encoder.prompts(prompts)
    texts = [rendered.prompt for rendered in prompts]
    completions = subject.sample(ids, texts, key=key, count=count, greedy=greedy and count == 1)
    if count > 1:
        assert pick is not None, "several answers, and nothing picks one"
        completions = completions.rows(pick(completions))
    tokens = completion_tokens(completions)
    return Answers(
        texts=subject.texts(completions),
        lengths=[float(len(row)) for row in tokens],
        truncated=[not finished for finished in completions.finished.tolist()],
        distinct_2=distinct_n(tokens, 2),
    )


def pick_best(source: RewardSource, rows: Sequence[Mapping[str, object]], count: int) -> Pick:
    """Make a `Pick` that keeps the answer that `source` scores highest; the source reads the row of the question."""

    def pick(completions: Completions) -> Int[Tensor, " Q"]:
        references = tuple(dict(row) for row in rows for _ in range(count))
        scores = source(replace(completions, references=references)).values.view(-1, count)
        return scores.argmax(dim=1) + torch.arange(len(scores)) * count

    return pick
