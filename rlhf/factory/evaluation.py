"""Evaluation of a finished run against another model (same prompts, random numbers and judge), and on suites."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config.data import PromptsConfig
from rlhf.config.load import dump
from rlhf.config.sections import TrainConfig
from rlhf.data.files import count_rows
from rlhf.data.paths import check_against
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.evaluate import PolicyEvaluation, evaluate_policy
from rlhf.evaluation.win_rate import (
    Interval,
    LengthControlled,
    bootstrap,
    length_controlled_win_rate,
    mean_difference,
    outcomes,
    win_rate,
)
from rlhf.factory.data import load_prompts_of_run
from rlhf.factory.exported import rounded_inputs, rounded_models
from rlhf.factory.models import build_tokenizer, policy_alone
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import build_sampler
from rlhf.models.backbone import check_vocabulary, freeze, load_causal_lm, move_to
from rlhf.models.export import weights_fingerprint
from rlhf.models.folders import model_folder
from rlhf.models.policy_models import Models
from rlhf.rewards.chat import ChatModel
from rlhf.rewards.pair_judge import PairJudge, Verdicts
from rlhf.rewards.source import RewardSource, Source, Texts, decode
from rlhf.runtime.device import choose_device, fallback_note, usable_dtype
from rlhf.runtime.engine import Engine, make_engine
from rlhf.runtime.seeding import derive_seed
from rlhf.suites.questions import SuiteResult
from rlhf.suites.subject import Subject, load_subject
from rlhf.suites.suite import Suite, SuiteContext
from rlhf.tracking.run_folder import versions, write_atomically
from rlhf.tracking.trackers import to_json
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER
from rlhf.types import Completions, Scores, StopReason

START = "start"  # the value of --against that names the model the run started from


@dataclass(frozen=True)
class PairwiseComparison:
    """The verdicts of eval.judge on the pairs, each judged in both orders."""

    judge: str
    win_rate: Interval
    length_controlled: LengthControlled
    inconsistent: float  # share of pairs on which the two orders disagree; they count as ties
    first_shown: float  # share of the verdicts for a side that favour the one shown first
    unreadable: int  # answers without a verdict; their pairs count as ties
    answers: int


@dataclass(frozen=True)
class PolicyComparison:
    """The result of `rlhf eval`: metrics of the run and of the other model (`reference`), and their comparison.

    `win_rate`, `length_controlled` and `difference` are None if there are no scores.
    """

    prompts: int  # for which both have a score
    against: str
    run: dict[str, float]
    reference: dict[str, float]
    win_rate: Interval | None
    length_controlled: LengthControlled | None
    difference: Interval | None
    pairwise: PairwiseComparison | None = None
    rows: list[dict[str, object]] = field(default_factory=list)  # one per pair judged: prompt, texts, both verdicts
    notes: tuple[str, ...] = ()  # remarks on the models for the reader
    data: str = ""  # the file of the held-out prompts
    data_rows: int = 0  # all rows of that file, also those that a part, a limit or a fault leaves out


@dataclass(frozen=True)
class _Side:
    """One of the two models: its evaluation, its texts, and its tokenizer."""

    evaluation: PolicyEvaluation
    texts: Texts
    tokenizer: PreTrainedTokenizerBase

    def column(self, name: str) -> list[object]:
        """Return one column of the prompt rows."""
        return [row.get(name) for row in self.texts.references]


def compare_models(config: TrainConfig, run: str, against: str) -> PolicyComparison:
    """Evaluate the model of `run` and another one, and compare them.

    A model with another vocabulary is evaluated with its own tokenizer and without a KL; the lengths of the two are
    then compared in characters.

    Args:
        against: another run, a model folder or hub id, or `start` for the model that the run started from.

    Raises:
        UserError: there is no judge, there are no prompts, or a model cannot be loaded.
    """
    held_out = _held_out(config)
    if against != START:
        check_against(against)
    judge = _pair_judge(config)  # first: a mistake in its settings shows before anything is sampled
    after = _side(config, run, run)
    before = _other_side(config, run, against, after)
    if before.column("prompt") != after.column("prompt"):
        raise DataError(
            f"{run} and {against} read the held-out prompts differently (one leaves out or cuts prompts that the other "
            "does not): set data.eval_prompts.max_prompt_tokens so that both read them whole"
        )
    length_difference = _length_difference(after, before)
    scored = _score_source(config) is not None
    a, b = after.evaluation.scores.values, before.evaluation.scores.values
    if (a - b).isnan().all():
        raise DataError(f"there is no held-out prompt on which a verifier applies to both {run} and {against}")
    asked = after.texts.as_in_rows().prompts
    verdicts = judge(asked, after.texts.completions, before.texts.completions) if judge else None
    return PolicyComparison(
        prompts=int((~(a - b).isnan()).sum()),
        against=against,
        run=after.evaluation.metrics,
        reference=before.evaluation.metrics,
        win_rate=win_rate(a, b) if scored else None,
        length_controlled=length_controlled_win_rate(outcomes(a, b)[None], length_difference[None]) if scored else None,
        difference=mean_difference(a, b) if scored else None,
        pairwise=_pairwise(judge, verdicts, length_difference) if judge and verdicts else None,
        rows=_rows(after, before, verdicts) if verdicts else [],
        notes=(
            *_failed_episodes(run, after),
            *_failed_episodes("the reference" if against == START else against, before),
            *rounded_models(run, against),
            *rounded_inputs(config),
        ),
        data=held_out.path,
        data_rows=count_rows(held_out),
    )


def _held_out(config: TrainConfig) -> PromptsConfig:
    if config.data.eval_prompts is None:
        raise ConfigError("nothing to evaluate on: set data.eval_prompts.path")
    return config.data.eval_prompts


def _failed_episodes(name: str, side: _Side) -> list[str]:
    stops = side.evaluation.rollout.stops
    failed = int((stops == StopReason.ERROR).sum())
    return [f"the environment failed in {failed} of {len(stops)} episodes of {name}"] if failed else []


def _side(config: TrainConfig, path: str | None, tokenizer_from: str, *, with_reference: bool = True) -> _Side:
    tokenizer = build_tokenizer(config.policy.model_copy(update={"model": tokenizer_from}))
    evaluation = evaluate_model(config, path, tokenizer_from, with_reference=with_reference)
    return _Side(evaluation, decode(evaluation.rollout, tokenizer), tokenizer)


def _other_side(config: TrainConfig, run: str, against: str, after: _Side) -> _Side:
    if against == START:
        return _side(config, None, run)
    own_tokenizer = config.model_copy(update={"policy": config.policy.model_copy(update={"tokenizer": None})})
    tokenizer = build_tokenizer(own_tokenizer.policy.model_copy(update={"model": against}))
    if tokenizer.get_vocab() == after.tokenizer.get_vocab():
        return _side(config, against, run)
    return _side(own_tokenizer, against, against, with_reference=False)


def _length_difference(after: _Side, before: _Side) -> Float[Tensor, " N"]:
    """Compute how much longer each completion of the first is, in tokens or, for other vocabularies, characters."""
    if after.tokenizer.get_vocab() == before.tokenizer.get_vocab():
        a, b = (side.evaluation.rollout.action_mask.sum(dim=1) for side in (after, before))
    else:
        a, b = (torch.tensor([len(text) for text in side.texts.completions]) for side in (after, before))
    return (a - b).double()


def _pair_judge(config: TrainConfig) -> PairJudge | None:
    section = "eval.judge"
    chat = config.eval.judge
    return PairJudge(chat, ChatModel(chat, os.environ, section=section), section=section) if chat is not None else None


def _pairwise(judge: PairJudge, verdicts: Verdicts, length_difference: Float[Tensor, " N"]) -> PairwiseComparison:
    return PairwiseComparison(
        judge=judge.model.config.model,
        win_rate=bootstrap(verdicts.wins, shares=True),
        length_controlled=length_controlled_win_rate(verdicts.wins[None], length_difference[None]),
        inconsistent=verdicts.inconsistent,
        first_shown=verdicts.first_shown,
        unreadable=verdicts.unreadable,
        answers=verdicts.answers,
    )


def _rows(after: _Side, before: _Side, verdicts: Verdicts) -> list[dict[str, object]]:
    texts = (after.texts.prompts, after.texts.completions, before.texts.completions)
    results = (verdicts.straight, verdicts.swapped, verdicts.wins.tolist())
    names = ("prompt", "run", "reference", "run_shown_first", "run_shown_second", "outcome")
    return [dict(zip(names, row, strict=True)) for row in zip(*texts, *results, strict=True)]


def evaluate_model(
    config: TrainConfig, path: str | None, tokenizer_from: str, *, with_reference: bool = True
) -> PolicyEvaluation:
    """Evaluate a model on the run's held-out prompts, scored by the judge of the run.

    Args:
        path: the model; None: the model that the run started from.
        tokenizer_from: the run or model folder whose tokenizer is used.
        with_reference: whether the KL to the run's reference is measured.

    Raises:
        UserError: there is no judge, there are no prompts, or a model cannot be loaded.
    """
    engine = make_engine(config.run)
    dtype = usable_dtype(config.policy.dtype, engine.device)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})
    data = _held_out(config)
    tokenizer = build_tokenizer(config.policy.model_copy(update={"model": tokenizer_from}))
    models = _load_models(config, path, tokenizer, engine, with_reference=with_reference)
    held_out = load_prompts_of_run(data, config, tokenizer, models.policy)
    source = _score_source(config)
    evaluation = evaluate_policy(
        list(held_out.batches(config.sampling.batch_size)),
        build_sampler(config, models, tokenizer),
        models,
        build_source(source, tokenizer, engine, leaves_out=True) if source is not None else _zero_scores,
        proxy=None,
        cost=_build_cost(config, tokenizer, engine),
        key=derive_seed(config.run.seed, "eval"),
        greedy=config.eval.greedy and source is not None,
        rows_per_pass=config.batch.micro_batch_size * NO_GRAD_BATCH_MULTIPLIER,
    )
    if source is not None:
        return evaluation
    metrics = {name: value for name, value in evaluation.metrics.items() if not name.startswith("eval/score")}
    return PolicyEvaluation(metrics, evaluation.rollout, evaluation.scores, evaluation.exact_kl)


def _load_models(
    config: TrainConfig, path: str | None, tokenizer: PreTrainedTokenizerBase, engine: Engine, *, with_reference: bool
) -> Models:
    subject = model_folder(path or config.policy.model)
    policy = move_to(_load(config, subject, tokenizer), engine.device)
    models = policy_alone(policy, config.policy, engine, temperature=config.sampling.temperature)
    if with_reference:  # the one of the run: a teacher may have taken its place
        reference, trust = model_folder(config.reference_model or config.policy.model), config.trusts_reference
        is_itself = subject == reference
        models.reference = (
            policy if is_itself else move_to(_load(config, reference, tokenizer, trust=trust), engine.device)
        )
    return models


def _build_cost(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> RewardSource | None:
    if config.reward is None or config.reward.cost is None:
        return None
    return build_source(config.reward.cost.source, tokenizer, engine, leaves_out=True)


def _zero_scores(completions: Completions) -> Scores:
    """Score every completion 0, for an evaluation in which only pairs are judged."""
    return Scores(values=torch.zeros(len(completions)), parts={})


def _score_source(config: TrainConfig) -> Source | None:
    """Return the source that scores single completions; None if only eval.judge compares pairs."""
    if config.eval.source is not None:
        return config.eval.source
    if config.reward is not None:  # an offline run may set it for its evaluation
        return config.reward.source
    if config.eval.judge is not None:
        return None
    raise ConfigError(
        "no judge: set eval.source, e.g. eval.source.type=model eval.source.path=runs/reward_model, or eval.judge "
        "for pairs"
    )


def _load(
    config: TrainConfig, path: str, tokenizer: PreTrainedTokenizerBase, *, trust: bool | None = None
) -> PreTrainedModel:
    trust = config.policy.trust_remote_code if trust is None else trust
    model = load_causal_lm(path, dtype=config.policy.dtype, trust_remote_code=trust)
    check_vocabulary(model, tokenizer, path)
    return freeze(model)


def write_result(path: Path, name: str, target: str, result: SuiteResult, settings: Suite, subject: Subject) -> None:
    """Write the result of a suite on a model as JSON, with the settings and package versions used."""
    content = {
        "suite": name,
        "model": {"path": target, "weights": weights_fingerprint(subject.model)},
        **result.as_json(),
        "config": dump(settings),
        "dtype": subject.dtype,  # the one used, which the CPU may have chosen
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_json(content), indent=2, ensure_ascii=False) + "\n")


def load_model_for_suite(settings: Suite, path: str, *, like: Subject | None = None) -> Subject:
    """Load the model at `path` for a suite; with `like`, it shares that model's tokenizer and chat template."""
    return load_subject(
        model_folder(path),
        path=path,
        sampling=settings.sampling,
        chat_template=settings.chat_format,
        dtype=settings.dtype,
        device=choose_device(settings.device, key="device"),
        rows_per_pass=settings.rows_per_pass,
        trust_remote_code=settings.trust_remote_code,
        encoder=None if like is None else like.encoder,
    )


def evaluate_suite(settings: Suite, subject: Subject, task: str) -> SuiteResult:
    """Run a suite on a model; `task` is the text after the colon in the suite's name, else empty."""
    context = SuiteContext(
        load=lambda path: load_model_for_suite(settings, path, like=subject),
        build_source=lambda config: build_source(
            config, subject.encoder.tokenizer, Engine(subject.device), leaves_out=True
        ),
        task=task,
    )
    result = settings.run(subject, context)
    fallback = [] if subject.dtype == settings.dtype else [fallback_note("dtype")]
    return replace(result, notes=(*result.notes, *fallback, *rounded_models(subject.path, dump(settings))))
