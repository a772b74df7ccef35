"""Dialogues with a preferred and a rejected last answer (Bai et al. 2022): whose answer is better, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.data.annotated import rows_of
from rlhf.data.pairs import PairSet, load_pairs
from rlhf.evaluation.suites.cutting import cut_completions, with_completions
from rlhf.evaluation.suites.estimates import wins
from rlhf.evaluation.suites.figures import Figure, LeftOut, SuiteResult, average, share, skipped_and_notes
from rlhf.evaluation.suites.settings import HhSettings
from rlhf.evaluation.suites.subject import Subject
from rlhf.rewards.source import RewardSource
from rlhf.runtime.seeding import derive
from rlhf.types import Completions

EXAMPLES = 8
NO_SOURCE = "no reward source: set source.type and source.path, say, as in source.type=model source.path=runs/rm"
NO_REFERENCE = "no reference: set reference=PATH to the model that this one was trained from"


@dataclass(frozen=True)
class _Scored:
    """Of the pairs whose prompt leaves room to answer: completions and scores."""

    completions: Completions
    model: list[float]
    chosen: list[float]
    rejected: list[float]
    start: list[float] | None
    cut: int


def run_hh(
    settings: HhSettings, subject: Subject, *, reference: Subject | None, source: RewardSource | None
) -> SuiteResult:
    """Measure hh; without a reference or a source, the parts that need none.

    Args:
        settings: of the suite.
        subject: the model.
        reference: what DPO's implicit reward is against and completions are compared with; same encoder.
        source: scores completions in the subject's token ids.

    Raises:
        DataError: no usable pair.
        RewardError: the source cannot score.
    """
    pairs = load_pairs(
        settings.dataset, subject.encoder.tokenizer, chat_template=settings.chat_format, context=subject.context
    )
    skipped, notes = skipped_and_notes(pairs.skips)
    figures = _by_logprob(pairs, subject, reference, settings)
    left_out = [] if reference else [LeftOut("DPO's implicit reward: accuracy, margin", NO_REFERENCE)]
    examples: tuple[dict[str, object], ...] = ()
    roomy = [i for i, ids in enumerate(pairs.prompts) if _has_room(ids, subject)]
    if source is None:
        left_out.append(LeftOut("scores, win rates, accuracy of the reward source", NO_SOURCE))
    elif not roomy:
        left_out.append(LeftOut("scores, win rates", f"no prompt leaves room for {_new(subject)} more tokens"))
    else:
        found = _scored(pairs, roomy, subject, reference, source, settings)
        figures += _by_score(found, settings.seed)
        examples = _examples(found, subject)
        if reference is None:
            left_out.append(LeftOut("win rate over the start model", NO_REFERENCE))
        notes += _told(len(pairs) - len(roomy), found.cut, _new(subject))
    return SuiteResult(tuple(figures), len(pairs), skipped, tuple(left_out), notes, examples=examples)


def _by_logprob(pairs: PairSet, subject: Subject, reference: Subject | None, settings: HhSettings) -> list[Figure]:
    rows, temperature = rows_of(pairs), settings.sampling.temperature
    chosen, rejected = subject.logprobs(rows, temperature=temperature).chunk(2)
    lengths = torch.tensor([len(ids) for ids in rows.completions], dtype=torch.float64).chunk(2)
    figures = [
        share(
            "logprob_accuracy",
            wins(chosen.tolist(), rejected.tolist()),
            "pairs whose chosen side is the likelier; long sides are at a disadvantage",
        ),
        share(
            "logprob_accuracy_per_token",
            wins((chosen / lengths[0]).tolist(), (rejected / lengths[1]).tolist()),
            "the same, log-probabilities per token",
        ),
    ]
    if reference is None:
        return figures
    ref_chosen, ref_rejected = reference.logprobs(rows, temperature=temperature).chunk(2)
    good = implicit_reward(chosen, ref_chosen, settings.beta)
    bad = implicit_reward(rejected, ref_rejected, settings.beta)
    return [
        share(
            "implicit_accuracy",
            wins(good.tolist(), bad.tolist()),
            "pairs whose chosen side has the higher implicit reward",
        ),
        average("implicit_margin", (good - bad).tolist(), "implicit reward, chosen less rejected", seed=settings.seed),
        *figures,
    ]


def implicit_reward(
    logprobs: Float[Tensor, " N"], ref_logprobs: Float[Tensor, " N"], beta: float
) -> Float[Tensor, " N"]:
    """The reward that a policy is optimal for, up to a constant of the prompt (Rafailov et al. 2023, eq. 5).

    beta (log π(y|x) - log π_ref(y|x))
    """
    return beta * (logprobs - ref_logprobs)


def _scored(
    pairs: PairSet,
    roomy: Sequence[int],
    subject: Subject,
    reference: Subject | None,
    source: RewardSource,
    settings: HhSettings,
) -> _Scored:
    prompts = [pairs.prompts[i] for i in roomy]
    texts = [str(pairs.texts[i].prompt) for i in roomy]

    def written(model: Subject) -> tuple[Completions, int]:
        drawn = model.sample(prompts, texts, key=derive(settings.seed, "hh"))
        return cut_completions(drawn, subject, settings.stop)

    def given(sides: Sequence[list[int]]) -> list[float]:
        ended = torch.ones(len(roomy), dtype=torch.bool)
        return _scores(source, with_completions(completions, [sides[i] for i in roomy], subject, finished=ended))

    completions, shortened = written(subject)
    return _Scored(
        completions=completions,
        model=_scores(source, completions),
        chosen=given(pairs.chosen),
        rejected=given(pairs.rejected),
        start=None if reference is None else _scores(source, written(reference)[0]),
        cut=shortened,
    )


def _by_score(found: _Scored, seed: int) -> list[Figure]:
    figures = [
        average("score", found.model, "score of the model's answers", seed=seed),
        average("score_chosen", found.chosen, "score of the chosen sides", seed=seed),
        average("score_rejected", found.rejected, "score of the rejected sides", seed=seed),
        average(
            "win_rate_chosen",
            wins(found.model, found.chosen),
            "the model's answer scores above the chosen side; a tie counts half",
            seed=seed,
        ),
    ]
    if found.start is not None:
        figures += [
            average("score_start", found.start, "score of the start model's answers", seed=seed),
            average(
                "win_rate_start",
                wins(found.model, found.start),
                "the model's answer scores above the start model's; a tie counts half",
                seed=seed,
            ),
        ]
    meaning = "pairs whose chosen side the source scores higher: how far it agrees with these labels"
    figures.append(share("source_accuracy", wins(found.chosen, found.rejected), meaning))
    return figures


def _scores(source: RewardSource, completions: Completions) -> list[float]:
    values: list[float] = source(completions).values.double().tolist()
    return values


def _has_room(prompt: Sequence[int], subject: Subject) -> bool:
    return subject.context is None or len(prompt) + _new(subject) <= subject.context


def _new(subject: Subject) -> int:
    return subject.sampling.max_new_tokens


def _told(too_long: int, shortened: int, new_tokens: int) -> tuple[str, ...]:
    notes = []
    if too_long:
        notes.append(
            f"{too_long:,} prompts leave no room for {new_tokens:,} more tokens (sampling.max_new_tokens): "
            "their pairs count in the log-probabilities, not in the scores"
        )
    if shortened:
        notes.append(f"{shortened:,} of the model's answers were cut where they went on with another turn (stop)")
    return tuple(notes)


def _examples(found: _Scored, subject: Subject) -> tuple[dict[str, object], ...]:
    first = found.completions.rows(slice(0, EXAMPLES))
    return tuple(
        {"prompt": reference["prompt"], "completion": text, "score": score, "score_chosen": chosen}
        for reference, text, score, chosen in zip(
            first.references, subject.texts(first), found.model, found.chosen, strict=False
        )
    )
