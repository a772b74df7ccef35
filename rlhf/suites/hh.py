"""The hh suite: dialogues with a chosen and a rejected last answer (Bai et al. 2022), by log-probability and score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from rlhf.rewards.source import Source
from rlhf.section import OneOf, Positive
from rlhf.suites.questions import (
    Estimate,
    NotMeasured,
    SuiteResult,
    mean_estimate,
    pair_estimate,
    skipped_and_notes,
    win_rate_estimate,
)
from rlhf.suites.suite import EvalPairs, Suite, SuiteContext, models_named

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.data.pairs import PairSet
    from rlhf.rewards.source import RewardSource
    from rlhf.suites.subject import Subject
    from rlhf.types import Completions

EXAMPLES = 8
NO_SOURCE = (
    "no reward source: set source.type and source.path, say, as in source.type=model source.path=runs/reward_model"
)
NO_SCORE = "no verifier of the source applies to all answers of any pair: see the columns that it reads"
NO_REFERENCE = "no reference: set reference=PATH to the model that this one was trained from"


@dataclass(frozen=True)
class _ScoredAnswers:
    """Completions and scores, for the pairs whose prompt leaves room for an answer.

    A pair whose answers are not all scored, since no verifier applies to one, has NaN for each.
    """

    completions: Completions
    model: list[float]
    chosen: list[float]
    rejected: list[float]
    start: list[float] | None
    cut: int


class HhSuite(Suite):
    """Settings of hh."""

    name: ClassVar[str] = "hh"
    data: ClassVar[str] = "preference pairs, as of Anthropic's HH: chosen and rejected transcripts"

    dataset: EvalPairs
    """Preference pairs; --data is dataset.path."""
    source: Annotated[Source, OneOf()] | None = None
    """The source of scores; null: the run's judge or reward, if it has one."""
    reference: str | None = None
    """Folder or hub id of the reference of DPO's implicit reward, whose completions are also compared."""
    beta: Positive = 0.1
    """The beta of the implicit reward: it scales the margin, not the accuracy."""
    stop: list[str] = ["\n\nHuman:"]
    """A completion ends before the first of these texts."""

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield the reference and the reward model."""
        yield from models_named(reference=self.reference, source=self.source)

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Compare both sides of every pair, and score the model's answers to its prompt.

        Without a reference or a source, only the parts that need none are computed.

        Raises:
            DataError: there is no usable pair.
            RewardError: the source cannot score.
        """
        from rlhf.data.pairs import pair_pipeline

        source = None if self.source is None else context.build_source(self.source)
        reference = None if self.reference is None else context.load(self.reference)
        pairs = pair_pipeline(
            self.dataset, subject.encoder.tokenizer, chat_template=self.chat_format, context=subject.context
        ).load()
        skipped, notes = skipped_and_notes(pairs.skips)
        figures = self._logprob_figures(pairs, subject, reference)
        left_out = [] if reference else [NotMeasured("DPO's implicit reward: accuracy, margin", NO_REFERENCE)]
        examples: tuple[dict[str, object], ...] = ()
        answerable = [i for i, ids in enumerate(pairs.prompts) if _has_room(ids, subject)]
        if source is None:
            left_out.append(NotMeasured("scores, win rates, accuracy of the reward source", NO_SOURCE))
        elif not answerable:
            left_out.append(
                NotMeasured("scores, win rates", f"no prompt leaves room for {_max_new_tokens(subject)} more tokens")
            )
        else:
            answers = self._sample_and_score(pairs, answerable, subject, reference, source)
            unjudged = sum(map(math.isnan, answers.model))
            if unjudged < len(answerable):
                figures += _score_figures(answers, self.seed)
            else:
                left_out.append(NotMeasured("scores, win rates, accuracy of the reward source", NO_SCORE))
            examples = _examples(answers, subject)
            if reference is None:
                left_out.append(NotMeasured("win rate over the start model", NO_REFERENCE))
            notes += _length_notes(len(pairs) - len(answerable), answers.cut, _max_new_tokens(subject))
            notes += _unjudged_notes(unjudged)
        return SuiteResult(tuple(figures), len(pairs), skipped, tuple(left_out), notes, examples=examples)

    def _logprob_figures(self, pairs: PairSet, subject: Subject, reference: Subject | None) -> list[Estimate]:
        """Compute the accuracies by log-probability and, with a reference, by the implicit reward."""
        import torch

        from rlhf.data.pairs import completion_rows

        rows = completion_rows(pairs)
        chosen, rejected = subject.logprobs(rows).chunk(2)
        counts = map(sum, rows.learned) if rows.learned else map(len, rows.completions)
        lengths = torch.tensor(list(counts), dtype=torch.float64).chunk(2)
        likelier = "pairs whose chosen side is the likelier; long sides are at a disadvantage"
        figures = [
            pair_estimate("logprob_accuracy", chosen.tolist(), rejected.tolist(), likelier),
            pair_estimate(
                "logprob_accuracy_per_token",
                (chosen / lengths[0]).tolist(),
                (rejected / lengths[1]).tolist(),
                "the same, log-probabilities per token",
            ),
        ]
        if reference is None:
            return figures
        ref_chosen, ref_rejected = reference.logprobs(rows).chunk(2)
        chosen_reward = implicit_reward(chosen, ref_chosen, self.beta)
        rejected_reward = implicit_reward(rejected, ref_rejected, self.beta)
        higher = "pairs whose chosen side has the higher implicit reward"
        margin = (chosen_reward - rejected_reward).tolist()
        return [
            pair_estimate("implicit_accuracy", chosen_reward.tolist(), rejected_reward.tolist(), higher),
            mean_estimate("implicit_margin", margin, "implicit reward, chosen less rejected", seed=self.seed),
            *figures,
        ]

    def _sample_and_score(
        self,
        pairs: PairSet,
        answerable: Sequence[int],
        subject: Subject,
        reference: Subject | None,
        source: RewardSource,
    ) -> _ScoredAnswers:
        """Sample answers to the pairs with the indices `answerable`, and score them and both sides of the pairs."""
        import torch

        from rlhf.suites.subject import cut_completions_at_stop, with_completions

        prompts = [pairs.prompts[i] for i in answerable]
        texts = [str(pairs.texts[i].prompt) for i in answerable]

        def sample(model: Subject) -> tuple[Completions, int]:
            drawn = model.sample(prompts, texts, key=self.sampling_key)
            return cut_completions_at_stop(drawn, subject, self.stop)

        def score_side(sides: Sequence[list[int]]) -> list[float]:
            finished = torch.ones(len(answerable), dtype=torch.bool)
            return _scores(
                source, with_completions(completions, [sides[i] for i in answerable], subject, finished=finished)
            )

        completions, shortened = sample(subject)
        sides = [_scores(source, completions), score_side(pairs.chosen), score_side(pairs.rejected)]
        if reference is not None:
            sides.append(_scores(source, sample(reference)[0]))
        model, chosen, rejected, *start = _scored_together(sides)
        return _ScoredAnswers(
            completions=completions,
            model=model,
            chosen=chosen,
            rejected=rejected,
            start=start[0] if start else None,
            cut=shortened,
        )


def implicit_reward(
    logprobs: Float[Tensor, " N"], ref_logprobs: Float[Tensor, " N"], beta: float
) -> Float[Tensor, " N"]:
    """Compute the reward for which a policy is optimal, up to a constant per prompt (Rafailov et al. 2023, eq. 5).

    beta (log π(y|x) - log π_ref(y|x))
    """
    return beta * (logprobs - ref_logprobs)


def _score_figures(answers: _ScoredAnswers, seed: int) -> list[Estimate]:
    """Compute the mean scores, the win rates and the accuracy of the reward source."""
    above_chosen = "the model's answer scores above the chosen side; a tie counts half"
    figures = [
        mean_estimate("score", answers.model, "score of the model's answers", seed=seed),
        mean_estimate("score_chosen", answers.chosen, "score of the chosen sides", seed=seed),
        mean_estimate("score_rejected", answers.rejected, "score of the rejected sides", seed=seed),
        win_rate_estimate("win_rate_chosen", answers.model, answers.chosen, above_chosen, seed=seed),
    ]
    if answers.start is not None:
        above_start = "the model's answer scores above the start model's; a tie counts half"
        figures += [
            mean_estimate("score_start", answers.start, "score of the start model's answers", seed=seed),
            win_rate_estimate("win_rate_start", answers.model, answers.start, above_start, seed=seed),
        ]
    meaning = "pairs whose chosen side the source scores higher: how far it agrees with these labels"
    figures.append(pair_estimate("source_accuracy", answers.chosen, answers.rejected, meaning))
    return figures


def _scored_together(sides: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the scores of all sides, with NaN for every side of a row on which one of them has none."""
    unknown = [any(map(math.isnan, row)) for row in zip(*sides, strict=True)]
    return [[math.nan if gone else score for gone, score in zip(unknown, side, strict=True)] for side in sides]


def _scores(source: RewardSource, completions: Completions) -> list[float]:
    values: list[float] = source(completions).values.double().tolist()
    return values


def _has_room(prompt: Sequence[int], subject: Subject) -> bool:
    """Check whether a prompt and an answer of the maximum length fit into the model's context."""
    return subject.context is None or len(prompt) + _max_new_tokens(subject) <= subject.context


def _max_new_tokens(subject: Subject) -> int:
    return subject.sampling.max_new_tokens


def _length_notes(too_long: int, shortened: int, new_tokens: int) -> tuple[str, ...]:
    """Describe how many prompts were too long and how many answers were cut at a stop text."""
    notes = []
    if too_long:
        notes.append(
            f"{too_long:,} prompts leave no room for {new_tokens:,} more tokens (sampling.max_new_tokens): "
            "their pairs count in the log-probabilities, not in the scores"
        )
    if shortened:
        notes.append(f"{shortened:,} of the model's answers were cut where they went on with another turn (stop)")
    return tuple(notes)


def _unjudged_notes(unjudged: int) -> tuple[str, ...]:
    """Describe how many pairs have no scores."""
    if not unjudged:
        return ()
    return (
        f"no verifier of the source applies to an answer of {unjudged:,} pairs: they count in the log-probabilities, "
        "not in the scores",
    )


def _examples(answers: _ScoredAnswers, subject: Subject) -> tuple[dict[str, object], ...]:
    first = answers.completions.rows(slice(0, EXAMPLES))
    return tuple(
        {"prompt": reference["prompt"], "completion": text, "score": score, "score_chosen": chosen}
        for reference, text, score, chosen in zip(
            first.references, subject.texts(first), answers.model, answers.chosen, strict=False
        )
    )
