"""The family of judges, which compare the completions of a prompt by the score of each, or two at a time.

A class below `Judge` is a judge that `judge.type` can name, in this package or in a user's module.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rlhf.config.reward import ChatPairsConfig
from rlhf.data.paths import source_at
from rlhf.labelling.data import LabelGroup
from rlhf.references import CONVERSATION, MESSAGES
from rlhf.rewards.source import Source, sources_in
from rlhf.section import Choice, OneOf

if TYPE_CHECKING:
    from rlhf.types import Completions

CONSISTENT = {("A", "B"), ("B", "A"), ("tie", "tie")}  # the answers in the two orders that name the same side


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of a judge on a group: the wins, and the answers behind them."""

    wins: tuple[tuple[float, ...], ...]  # [i][j]: 1 if completion i beats j, 0 if it loses, 1/2 for a tie
    scores: tuple[float, ...]  # of each completion: the judge's own, or how many others it beats
    is_scored: bool  # whether the scores are the judge's own
    answers: int = 0  # of a language model
    unreadable: int = 0  # of them
    compared: int = 0  # pairs compared in both orders, with two readable answers
    inconsistent: int = 0  # of them: the two orders disagree, which is a tie
    first_shown: int = 0  # decided answers for the side that was shown first
    decided: int = 0  # answers that name a side


JudgeGroups = Callable[[Sequence[LabelGroup]], list[Verdict]]
"""Compares the completions of each group."""


class Judge(Choice):
    """A comparison of the completions of a prompt."""

    @property
    def reads_columns(self) -> bool:
        """Return whether answers may depend on other columns than the prompt and the completions."""
        return False

    @abstractmethod
    def build(self, warn: Callable[[str], None]) -> JudgeGroups:
        """Return the function that compares the completions of groups; `warn` receives messages for the user.

        Raises:
            UserError: it cannot be built, or later the judge fails; the message says why.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return the judge in a few words."""

    def check(self) -> None:
        """Check before anything is loaded what the fields alone do not tell."""

    def model_paths(self) -> Iterator[tuple[str, str]]:
        """Yield key and path of every model that the judge loads."""
        yield from ()


class ScoreJudge(Judge):
    """A source of scores: a reward model, a function, rules, a server, or a language model that rates each answer."""

    type: Literal["scores"] = "scores"
    source: Annotated[Source, OneOf()]
    """The source; the higher score wins, and equal scores are a tie."""

    @property
    def reads_columns(self) -> bool:
        """Return whether a source is no model: functions, verifiers and servers get the row."""
        return not all(source.model_paths() for _, source in sources_in(self))

    def build(self, warn: Callable[[str], None]) -> JudgeGroups:
        """Return a function that scores each completion once."""
        from rlhf.config.run import RunConfig
        from rlhf.data.tokenizer import byte_tokenizer
        from rlhf.factory.rewards import build_source
        from rlhf.runtime.engine import make_engine

        source = build_source(self.source, byte_tokenizer(), make_engine(RunConfig()), warn)

        def ask(groups: Sequence[LabelGroup]) -> list[Verdict]:
            scores = source(group_completions(groups))
            unreadable = scores.parts.get("unreadable")
            verdicts, start = [], 0
            for group in groups:
                rows = slice(start, start + len(group.completions))
                start = rows.stop
                values, failed, answers = scores.values[rows], 0, 0
                if unreadable is not None:  # in training such an answer counts as the middle of the range
                    values = values.masked_fill(unreadable[rows] > 0, math.nan)
                    failed, answers = int(unreadable[rows].sum()), len(group.completions)
                verdicts.append(verdict_of_scores(values.tolist(), answers=answers, unreadable=failed))
            return verdicts

        return ask

    def describe(self) -> str:
        """Return the source in a few words."""
        return self.source.describe()

    def check(self) -> None:
        """Import functions and check their arguments.

        Raises:
            UserError: a source could not be built.
        """
        for _, source in sources_in(self):
            source.check()

    def model_paths(self) -> Iterator[tuple[str, str]]:
        """Yield key and path of each reward model."""
        for place, source in sources_in(self, "judge"):
            yield from ((f"{place}.{field}", path) for field, path in source.model_paths().items())


class ChatJudge(Judge):
    """A language model behind an OpenAI-compatible endpoint that compares two completions, in both orders."""

    type: Literal["pairs"] = "pairs"
    chat: ChatPairsConfig
    """The endpoint; every pair of a prompt's completions is two questions, and each is asked once (cache_dir)."""

    def build(self, warn: Callable[[str], None]) -> JudgeGroups:
        """Return a function that asks about every pair of a group."""
        from rlhf.rewards.chat import ChatModel
        from rlhf.rewards.pair_judge import PairJudge, combine_verdicts

        section = "judge.chat"
        judge = PairJudge(self.chat, ChatModel(self.chat, os.environ, section=section), section=section)

        def ask(groups: Sequence[LabelGroup]) -> list[Verdict]:
            asked = [(group, i, j) for group in groups for i, j in combinations(range(len(group.completions)), 2)]
            verdicts = judge(
                [group.prompt_text for group, _, _ in asked],
                [group.completions[i] for group, i, _ in asked],
                [group.completions[j] for group, _, j in asked],
            )
            both = list(zip(verdicts.straight, verdicts.swapped, strict=True))
            results, start = [], 0
            for group in groups:
                count = len(group.completions)
                answers = both[start : start + count * (count - 1) // 2]
                start += len(answers)
                outcomes = [combine_verdicts(*pair) for pair in answers]
                results.append(verdict_of_pairs(count, outcomes, answers))
            return results

        return ask

    def describe(self) -> str:
        """Return the model and its address."""
        return f"{self.chat.model} at {self.chat.base_url}"


def verdict_of_scores(scores: Sequence[float], *, answers: int = 0, unreadable: int = 0) -> Verdict:
    """Return the verdict of a score for each completion of a group."""
    wins = tuple(tuple(_beats(first, second) for second in scores) for first in scores)
    return Verdict(wins=wins, scores=tuple(scores), is_scored=True, answers=answers, unreadable=unreadable)


def _beats(first: float, second: float) -> float:
    """Compare two scores; a completion without one (NaN) ties with every other."""
    return 0.5 if first == second or math.isnan(first) or math.isnan(second) else float(first > second)


def verdict_of_pairs(
    count: int, outcomes: Sequence[float], answers: Sequence[tuple[str | None, str | None]]
) -> Verdict:
    """Return the verdict of comparisons of all pairs of `count` completions, in the order of itertools.combinations.

    The score of a completion is the number of others that it beats, a tie counting half (Copeland 1951).

    Args:
        count: completions of the group.
        outcomes: for each pair 1 if its first side wins, 0 if it loses, 1/2 for a tie.
        answers: for each pair the answers in the two orders, A being the side shown first; None: not readable.
    """
    wins = [[0.5] * count for _ in range(count)]
    for (i, j), outcome in zip(combinations(range(count), 2), outcomes, strict=True):
        wins[i][j], wins[j][i] = outcome, 1 - outcome
    readable = [pair for pair in answers if None not in pair]
    decided = [answer for pair in answers for answer in pair if answer in ("A", "B")]
    return Verdict(
        wins=tuple(map(tuple, wins)),
        scores=tuple(sum(row) - 0.5 for row in wins),
        is_scored=False,
        answers=2 * len(answers),
        unreadable=sum(answer is None for pair in answers for answer in pair),
        compared=len(readable),
        inconsistent=sum(pair not in CONSISTENT for pair in readable),
        first_shown=sum(answer == "A" for answer in decided),
        decided=len(decided),
    )


def group_completions(groups: Sequence[LabelGroup]) -> Completions:
    """Return the completions of groups as rows, in order, each finished; their tokens are bytes."""
    from rlhf.data.datasets import has_text_prompt
    from rlhf.data.tokenizer import as_completions, byte_tokenizer

    tokenizer = byte_tokenizer()

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return encoded

    end = int(tokenizer.eos_token_id)
    rows = [
        (group, text, columns)
        for group in groups
        for text, columns in zip(group.completions, group.columns or [{}] * len(group.completions), strict=True)
    ]
    references = [
        {
            **columns,
            "prompt": group.prompt_text,
            MESSAGES: group.messages,
            CONVERSATION: not isinstance(group.prompt, str) and not has_text_prompt(columns),
        }
        for group, _, columns in rows
    ]
    prompts, answers = [ids(group.prompt_text) for group, _, _ in rows], [[*ids(text), end] for _, text, _ in rows]
    return as_completions(prompts, answers, pad_id=end, references=references, finished=True)


def judge_at(place: str) -> dict[str, Any]:
    """Return the settings of the judge that --judge names: a reward model, a function, a server, or an endpoint.

    An address that ends in /v1 is an OpenAI-compatible endpoint, which needs judge.chat.model too.
    """
    if place.startswith(("http://", "https://")) and place.rstrip("/").endswith("/v1"):
        return {"type": "pairs", "chat": {"base_url": place}}
    return {"type": "scores", "source": source_at(place)}
