"""One greedy answer to every question of a set: the answers' texts, how long they are and which did not end."""

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
"""Which completion of each question is kept, as row numbers."""


@dataclass(frozen=True)
class Answers:
    """What a model answered, one text for each question."""

    texts: list[str]
    lengths: list[float]
    truncated: list[bool]
    distinct_2: float

    @property
    def rows(self) -> dict[str, list[float]]:
        """Return the numbers of every answer, by the figure they are of."""
        return {"length": self.lengths, "truncated": list(map(float, self.truncated))}

    def figures(self, *, seed: int) -> list[Figure]:
        """Return the length, the share that was cut off and the distinct bigrams."""
        return [
            average("length", self.lengths, "tokens of an answer, EOS included", seed=seed),
            share("truncated", list(map(float, self.truncated)), "answers that reached sampling.max_new_tokens"),
            Figure(
                "distinct_2", self.distinct_2, None, None, len(self.texts), "none", "distinct bigrams of all answers"
            ),
        ]


def answerable(subject: Subject, items: list[Item[T]], skips: Skips, text: Callable[[T], str]) -> list[Item[T]]:
    """Leave out, and count, the questions that do not fit into the model's context with an answer.

    Raises:
        DataError: none is left.
    """
    room = subject.sampling.max_new_tokens

    def why(item: Item[T]) -> BadRow | None:
        return too_long(subject, len(subject.encoder.prompts([subject.ask(text(item.found))])[0]), room, of=NEW)

    return without(items, skips, why)


def answer(
    subject: Subject, questions: Sequence[str], *, key: int, greedy: bool, count: int = 1, pick: Pick | None = None
) -> Answers:
    """Answer every question once; with `pick`, draw `count` answers and keep the one it chooses."""
    asked = [subject.ask(question) for question in questions]
    ids = subject.encoder.prompts(asked)
    prompts = [rendered.prompt for rendered in asked]
    completions = subject.sample(ids, prompts, key=key, count=count, greedy=greedy and count == 1)
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
    """Make a `Pick` that keeps the answer which `source` scores highest; it reads the question's row."""

    def pick(completions: Completions) -> Int[Tensor, " Q"]:
        references = tuple(dict(row) for row in rows for _ in range(count))
        scores = source(replace(completions, references=references)).values.view(-1, count)
        return scores.argmax(dim=1) + torch.arange(len(scores)) * count

    return pick
