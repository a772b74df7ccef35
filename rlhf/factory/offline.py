"""Build an offline run from its configuration: SFT, and DPO and related losses on preference data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from rlhf.batching import Batch
from rlhf.config.algorithm import DpoLoss, KtoLoss, PairLossConfig, SftLoss
from rlhf.config.data import PreferencesConfig, SftConfig
from rlhf.config.sections import OfflineConfig
from rlhf.data.datasets import BatchStream, sequential_batches
from rlhf.data.pairs import DemonstrationSet, LabelledSet, PairSet, load_demonstrations, load_pairs
from rlhf.data.reference_cache import AnnotatedLabelledSet, load_preference_data
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.factory.context import (
    MODEL,
    RunContext,
    load_trainer_state,
    open_context,
    save_policy,
    save_trainer_state,
    total_steps,
)
from rlhf.factory.models import (
    ReferenceAnnotator,
    attach_reference,
    build_policy,
    build_tokenizer,
    export,
    needs_reference_during_training,
    no_grad_batch_size,
    read_export_origin,
)
from rlhf.factory.online import PromptEvaluator
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import build_sampler
from rlhf.models.backbone import context_length
from rlhf.models.origin import Origin
from rlhf.models.policy_models import Ema, Models
from rlhf.runtime.engine import TrainableModel
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.metrics import progress_metrics
from rlhf.training.losses import PREFERENCE_TERM, DemonstrationLoss, LabelledLoss, PairwiseLoss, count_tokens
from rlhf.training.offline import OfflineRun
from rlhf.training.session import Recorder
from rlhf.training.step import Loss
from rlhf.types import BaselinedLabelledCompletions, Demonstrations


@dataclass(frozen=True, kw_only=True)
class OfflineTask:
    """The data of an offline run, its loss, and its evaluation on held-out data."""

    loss: Loss
    data: Callable[[int], Batch]  # the batch of a step
    steps_per_epoch: float
    tokens: Callable[[Batch], int]  # counts the tokens of a batch
    held_out: Callable[[], dict[str, float]]  # metrics of the current policy; empty without held-out data
    show: tuple[str, ...]  # metrics for the progress display


S = TypeVar("S", PairSet, PairSet | LabelledSet)


class PreferenceData:
    """The preference data of a run: loads it, reports skipped rows, and annotates it with the reference."""

    def __init__(
        self, config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
    ) -> None:
        self.config, self.context, self.tokenizer, self.models = config, context, tokenizer, models
        self.annotate = ReferenceAnnotator(config, context, models)

    def load(self, load: Callable[..., S], data: PreferencesConfig) -> S:
        """Load and encode the rows of `data` with the function `load`."""
        limit = context_length(self.models.policy)
        rows = load(data, self.tokenizer, chat_template=self.config.data.chat_format, context=limit)
        self.context.notes.append(rows.skips.summary())
        return rows


def build_task(
    config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> OfflineTask:
    """Build the task of a run: of SFT, or of a preference loss on data with the reference's log-probabilities.

    Call it before the first update: the policy may itself be the reference.
    """
    loss = config.algorithm.loss
    if isinstance(loss, SftLoss):
        return sft_task(config, loss, context, tokenizer, models)
    judgments = PreferenceData(config, context, tokenizer, models)
    task = labelled_task(judgments, loss) if isinstance(loss, KtoLoss) else pairs_task(judgments, loss)
    if not needs_reference_during_training(config):
        models.reference = None
    return task


def pairs_task(judgments: PreferenceData, loss_config: PairLossConfig) -> OfflineTask:
    """Build the task of a loss that compares the two completions of a pair."""
    config, data = judgments.config, judgments.config.data
    loss = PairwiseLoss(judgments.models, loss_config)
    train = judgments.annotate.pairs(judgments.load(load_pairs, config.preference_data))
    eval_pairs = judgments.load(load_pairs, data.eval_preferences) if data.eval_preferences is not None else None
    stream = BatchStream(train, config.batch.prompts_per_step, derive_seed(config.run.seed, "preferences"))
    return OfflineTask(
        loss=loss,
        data=stream.batch,
        steps_per_epoch=stream.steps_per_epoch,
        tokens=count_tokens,
        held_out=evaluate_pairs_fn(judgments, loss, eval_pairs) if eval_pairs is not None else dict,
        show=progress_metrics("preference"),
    )


def labelled_task(judgments: PreferenceData, loss_config: KtoLoss) -> OfflineTask:
    """Build the task of a loss on single labelled completions (KTO); pairs are split into two rows."""
    config, data, models = judgments.config, judgments.config.data, judgments.models
    loss = LabelledLoss(
        models, loss_config, rows_per_pass=no_grad_batch_size(config), context=context_length(models.policy)
    )
    train = judgments.annotate.labelled(judgments.load(load_preference_data, config.preference_data))
    eval_rows = (
        judgments.load(load_preference_data, data.eval_preferences) if data.eval_preferences is not None else None
    )
    held_out: Callable[[], dict[str, float]] = dict
    if isinstance(eval_rows, PairSet):  # the implicit reward of KTO is that of DPO: beta times the log-ratio
        dpo = PairwiseLoss(models, DpoLoss(beta=loss_config.beta))
        held_out = evaluate_pairs_fn(judgments, dpo, eval_rows, leave_out={"loss/preference"})
    elif eval_rows is not None:
        held_out = evaluate_labelled_fn(judgments, loss, judgments.annotate.labelled(eval_rows))
    stream = BatchStream(train, config.batch.prompts_per_step, derive_seed(config.run.seed, "preferences"))
    return OfflineTask(
        loss=loss,
        data=lambda step: loss.with_baseline(stream.batch(step)),
        steps_per_epoch=stream.steps_per_epoch,
        tokens=count_tokens,
        held_out=held_out,
        show=progress_metrics("preference"),
    )


def evaluate_pairs_fn(
    judgments: PreferenceData, loss: PairwiseLoss, pairs: PairSet, leave_out: Collection[str] = ()
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the policy on held-out pairs, without the metrics of the loss in `leave_out`."""
    annotated, size = judgments.annotate.pairs(pairs), judgments.config.batch.micro_batch_size
    ranks = judgments.context.engine.ranks
    return lambda: evaluate_loss(sequential_batches(annotated, size), loss, ranks, leave_out=leave_out)


def evaluate_labelled_fn(
    judgments: PreferenceData, loss: LabelledLoss, rows: AnnotatedLabelledSet
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the policy on held-out labelled completions."""

    def batches() -> Iterator[BaselinedLabelledCompletions]:
        batch = loss.with_baseline(rows.collate(range(len(rows))))  # a single z0 for all held-out rows
        yield from batch.split(judgments.config.batch.micro_batch_size)

    return lambda: evaluate_loss(batches(), loss, judgments.context.engine.ranks, leave_out={"preference/accuracy"})


def build_offline(config: OfflineConfig, console: Console | None = None) -> OfflineRun:
    """Build an offline run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    context = open_context(config, console)
    tokenizer = build_tokenizer(config.policy)
    origin = read_export_origin(config.policy, tokenizer)
    engine = context.engine
    policy = engine.place(build_policy(config.policy, tokenizer, context.resume, context.seed))
    models = Models(
        policy=policy,
        temperature=1.0,  # of the loss; evaluation samples its completions at sampling.temperature
        dtype=config.policy.dtype,
        device=engine.device,
        log_probs=config.policy.log_probs,
        packing=config.policy.packing,
        float32_head=config.policy.head_dtype == "float32",
        engine=engine,
    )
    context.notes += models.fast_ways().lines()
    attach_reference(config, context, tokenizer, models)
    trained = engine.train("policy", policy, config.policy, terms=("sft", PREFERENCE_TERM))
    task = build_task(config, context, tokenizer, models)
    ema = Ema(policy, config.policy.ema_decay, engine) if config.policy.ema_decay else None
    if context.resume is not None:
        _restore(load_trainer_state(context.resume), trained, ema)
    evaluate = _Evaluation(config, context, tokenizer, models, task, ema)
    session = context.session(
        total_steps=total_steps(config.schedule, task.steps_per_epoch),
        save=_make_save(models, trained, tokenizer, origin, ema),
        evaluate=evaluate,
        show=task.show,
    )
    evaluate.connect(session.recorder)
    return OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=task.data,
        loss=task.loss,
        trained=trained,
        ema=ema,
        tokens=task.tokens,
        export=lambda folder: export(
            policy,
            ema,
            tokenizer,
            folder,
            engine,
            origin=origin,
            dtype=config.policy.export_dtype,
            warn=session.recorder.note,
        ),
    )


def sft_task(
    config: OfflineConfig,
    loss_config: SftLoss,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
) -> OfflineTask:
    """Build the task of SFT: demonstrations, and their negative log-likelihood as the loss."""
    loss = DemonstrationLoss(models, aggregate=loss_config.aggregate)
    rows = _load_rows(config, config.sft_data, context, tokenizer, models)
    stream = BatchStream(rows, config.batch.prompts_per_step, derive_seed(context.seed, "sft"))
    eval_sft = config.data.eval_sft
    held_out = _load_rows(config, eval_sft, context, tokenizer, models) if eval_sft is not None else None
    return OfflineTask(
        loss=loss,
        data=stream.batch,
        steps_per_epoch=stream.steps_per_epoch,
        tokens=_count_tokens,
        held_out=_evaluate_rows(held_out, loss, config.batch.micro_batch_size) if held_out is not None else dict,
        show=progress_metrics("sft"),
    )


def _load_rows(
    config: OfflineConfig, data: SftConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> DemonstrationSet:
    rows = load_demonstrations(
        data, tokenizer, chat_template=config.data.chat_format, context=context_length(models.policy)
    )
    context.notes.append(rows.skips.summary())
    return rows


def _evaluate_rows(rows: DemonstrationSet, loss: DemonstrationLoss, size: int) -> Callable[[], dict[str, float]]:
    return lambda: evaluate_loss(sequential_batches(rows, size), loss, loss.models.engine.ranks)


def _count_tokens(batch: Batch) -> int:
    assert isinstance(batch, Demonstrations)
    return int(batch.prompt_mask.sum() + batch.completion_mask.sum())


def _make_save(
    models: Models, trained: TrainableModel, tokenizer: PreTrainedTokenizerBase, origin: Origin, ema: Ema | None
) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        save_policy(models.policy, tokenizer, folder / MODEL, models.engine, origin)
        extra = {"ema": ema.saved()} if ema is not None else {}
        save_trainer_state(folder, {"policy": trained}, extra, models.engine)

    return save


def _restore(state: dict[str, Any], trained: TrainableModel, ema: Ema | None) -> None:
    trained.load_state(state["policy"])
    if ema is not None and "ema" in state:
        ema.load(state["ema"])


class _Evaluation:
    """Evaluation during an offline run: the held-out loss and, with prompts and a judge, sampled completions.

    The moving average of the weights is evaluated, if there is one.
    """

    def __init__(
        self,
        config: OfflineConfig,
        context: RunContext,
        tokenizer: PreTrainedTokenizerBase,
        models: Models,
        task: OfflineTask,
        ema: Ema | None,
    ) -> None:
        self.task, self.ema = task, ema
        self.prompts: PromptEvaluator | None = None
        if config.held_out_source is not None:
            sampling_models = replace(models, temperature=config.sampling.temperature)
            judge = build_source(config.held_out_source, tokenizer, models.engine)
            sampler = build_sampler(config, sampling_models, tokenizer)
            self.prompts = PromptEvaluator(config, context, tokenizer, sampling_models, sampler, judge, None)

    def connect(self, recorder: Recorder) -> None:
        """Send the held-out samples to the recorder of the run."""
        if self.prompts is not None:
            self.prompts.connect(recorder)

    def __call__(self, step: int) -> dict[str, float]:
        if self.ema is None:
            return self._evaluate(step)
        with self.ema.applied():
            return self._evaluate(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        return self.task.held_out() | (self.prompts(step) if self.prompts is not None else {})
