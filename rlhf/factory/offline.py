"""Build an offline run from its configuration: SFT, and DPO and related losses on preference data.

The reference of such a run is loaded if it is needed; rlhf.training.reference asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.offline_loss import LabelLoss, PairLoss
from rlhf.algorithms.sft import DemonstratedLoss
from rlhf.batching import Batch
from rlhf.config.data import PreferencesConfig, SftConfig
from rlhf.config.sections import OfflineConfig
from rlhf.data.datasets import BatchStream, HasPrompt, RowPipeline, RowSet, rows_read, sequential_batches
from rlhf.data.mixture import MixedStream
from rlhf.data.pairs import (
    AnnotatedLabelledSet,
    DemonstrationSet,
    LabelledSet,
    PairSet,
    demonstration_pipeline,
    labelled_pipeline,
    pair_pipeline,
    preference_pipeline,
)
from rlhf.evaluation.during_run import HeldOut, no_held_out
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.factory.context import RunContext, keep_best, open_context, total_steps
from rlhf.factory.data import build_demonstrations, mix
from rlhf.factory.evaluator import build_offline_evaluation
from rlhf.factory.models import (
    adapter_off_is_reference,
    build_policy,
    build_reference,
    build_tokenizer,
    export,
    keep_reference_in_bfloat16,
    policy_alone,
    read_export_origin,
)
from rlhf.factory.teacher import build_teacher
from rlhf.models.backbone import context_length
from rlhf.models.dither import dither_matrices
from rlhf.models.policy_models import Ema, Models
from rlhf.models.saving import save_models
from rlhf.runtime.device import choose_precision
from rlhf.runtime.engine import TrainableModel
from rlhf.runtime.seeding import derive_seed, seeded_initialization
from rlhf.tracking.metrics import progress_metrics
from rlhf.tracking.view import View
from rlhf.training.checkpoints import Saver, load_trainer_state, restore_trainer_state
from rlhf.training.losses import DemonstrationLoss
from rlhf.training.offline import PREFERENCE_TERM, LabelledLoss, OfflineRun, PairwiseLoss
from rlhf.training.reference import ReferenceAnnotator, no_grad_batch_size
from rlhf.training.step import Loss
from rlhf.types import (
    AnnotatedLabelledCompletions,
    AnnotatedPairs,
    BaselinedLabelledCompletions,
    Demonstrations,
)


@dataclass(frozen=True, kw_only=True)
class OfflineTask:
    """The data of an offline run, its loss, and its evaluation on held-out data."""

    loss: Loss
    data: Callable[[int], Batch]  # the batch of a step
    sources: Callable[[int], tuple[str, ...]] | None = None  # the source of each row of a step, if they are measured
    steps_per_epoch: float
    held_out: HeldOut  # metrics of the current policy; empty without held-out data
    show: tuple[str, ...]  # metrics for the progress display


S = TypeVar("S", PairSet, PairSet | LabelledSet)
B = TypeVar("B", bound=Batch)
P = TypeVar("P", bound=HasPrompt)
M = TypeVar("M", bound=RowSet[Any])


class PreferenceData:
    """The preference data of a run: loads it, reports skipped rows, and annotates it with the reference."""

    def __init__(
        self, config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
    ) -> None:
        self.config, self.context, self.tokenizer, self.models = config, context, tokenizer, models
        self.annotate = ReferenceAnnotator(
            config,
            models,
            is_resumed=context.resume is not None,
            note=context.notes.append,
            announce=context.announce,
        )

    def _rows(self, pipeline: Callable[..., RowPipeline[P, M]], data: PreferencesConfig) -> RowPipeline[P, M]:
        limit, chat = context_length(self.models.policy), self.config.data.chat_format
        return pipeline(data, self.tokenizer, chat_template=chat, context=limit)

    def load(self, pipeline: Callable[..., RowPipeline[Any, S]], data: PreferencesConfig) -> S:
        """Load and encode the rows of `data` by the `pipeline` of their use."""
        rows = self._rows(pipeline, data).load()
        is_train = data is self.config.preference_data
        self.context.rows_read("preferences" if is_train else "eval_preferences", rows.skips)
        return rows

    def stream(self, rows: RowSet[B]) -> BatchStream[B]:
        """Return the shuffled batches of the rows in memory."""
        return BatchStream(rows, self.config.batch.prompts_per_step, self._order_seed)

    def rows_read(self, count: int) -> list[int]:
        """Return the indices, of `count` rows in memory, that the whole run reads."""
        size = self.config.batch.prompts_per_step
        return rows_read(count, size, self._order_seed, total_steps(self.config.schedule, count / size))

    @property
    def _order_seed(self) -> int:
        return derive_seed(self.config.run.seed, "preferences")

    def mix(self, pipeline: Callable[..., RowPipeline[P, M]]) -> MixedStream[P, M]:
        """Build the mixed or streamed rows of the run, encoded by the `pipeline` of their use."""
        data, size = self.config.preference_data, self.config.batch.prompts_per_step
        return mix(data, self.context, self._rows(pipeline, data), section="preferences", rows_per_step=size)


@dataclass(frozen=True)
class TrainingData(Generic[B]):
    """The batches that a run trains on, and of a mixture the source of each row."""

    batch: Callable[[int], B]
    steps_per_epoch: float
    sources: Callable[[int], tuple[str, ...]] | None

    @classmethod
    def of(
        cls, stream: BatchStream[B] | MixedStream[Any, Any], batch: Callable[[int], B] | None = None
    ) -> TrainingData[B]:
        """Build it from a stream; `batch` makes the batch of a step if that is not the stream's own."""
        sources = stream.names if isinstance(stream, MixedStream) else None
        return cls(batch or stream.batch, stream.steps_per_epoch, sources)


def collate_all(rows: RowSet[B]) -> B:
    """Collate all rows of a data set into one batch."""
    return rows.collate(list(range(len(rows))))


def build_task(
    config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> OfflineTask:
    """Build the task of a run: of SFT, or of a preference loss on data with the reference's log-probabilities.

    Call it before the first update: the policy may itself be the reference.
    """
    loss = config.algorithm.loss
    task = TASKS[loss.data](config, loss, context, tokenizer, models)
    if not needs_reference_during_training(config):
        models.reference = None
    return task


def pairs_task(
    config: OfflineConfig,
    section: PairLoss,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
) -> OfflineTask:
    """Build the task of a loss that compares the two completions of a pair."""
    judgments, data = PreferenceData(config, context, tokenizer, models), config.data
    loss = PairwiseLoss(models, section)
    feed: TrainingData[AnnotatedPairs]
    if config.preference_data.is_plain:
        train = judgments.annotate.pairs(judgments.load(pair_pipeline, config.preference_data), judgments.rows_read)
        feed = TrainingData.of(judgments.stream(train))
    else:
        mixture = judgments.mix(pair_pipeline)
        feed = TrainingData.of(mixture, lambda step: collate_all(judgments.annotate.batch(mixture.rows(step))))
    eval_pairs = judgments.load(pair_pipeline, data.eval_preferences) if data.eval_preferences is not None else None
    return OfflineTask(
        loss=loss,
        data=feed.batch,
        sources=feed.sources,
        steps_per_epoch=feed.steps_per_epoch,
        held_out=evaluate_pairs_fn(judgments, loss, eval_pairs) if eval_pairs is not None else no_held_out,
        show=progress_metrics("preference"),
    )


def labelled_task(
    config: OfflineConfig,
    section: LabelLoss,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
) -> OfflineTask:
    """Build the task of a loss on single labelled completions (KTO); pairs are split into two rows."""
    judgments, data = PreferenceData(config, context, tokenizer, models), config.data
    loss = LabelledLoss(
        models, section, rows_per_pass=no_grad_batch_size(config), context=context_length(models.policy)
    )
    feed: TrainingData[AnnotatedLabelledCompletions]
    if config.preference_data.is_plain:
        rows = judgments.load(preference_pipeline, config.preference_data)
        if isinstance(rows, LabelledSet) and len({text.desirable for text in rows.texts}) == 1:
            context.notes.append(
                f"warning: all rows of data.preferences have label={str(rows.texts[0].desirable).lower()}: KTO learns "
                "from the difference between desirable and undesirable completions, so give rows of both kinds"
            )
        train = judgments.annotate.labelled(rows, judgments.rows_read)
        feed = TrainingData.of(judgments.stream(train))
    else:
        mixture = judgments.mix(labelled_pipeline)
        feed = TrainingData.of(mixture, lambda step: collate_all(judgments.annotate.labelled_batch(mixture.rows(step))))
    eval_rows: PairSet | LabelledSet | None = (
        judgments.load(preference_pipeline, data.eval_preferences) if data.eval_preferences is not None else None
    )
    held_out: HeldOut = no_held_out
    if isinstance(eval_rows, PairSet):
        pair_loss = PairwiseLoss(models, section.as_pair_loss())
        held_out = evaluate_pairs_fn(judgments, pair_loss, eval_rows, leave_out={"loss/preference", "loss"})
    elif eval_rows is not None:
        held_out = evaluate_labelled_fn(judgments, loss, judgments.annotate.labelled(eval_rows))
    return OfflineTask(
        loss=loss,
        data=lambda step: loss.with_baseline(feed.batch(step)),
        sources=feed.sources,
        steps_per_epoch=feed.steps_per_epoch,
        held_out=held_out,
        show=progress_metrics("preference"),
    )


def evaluate_pairs_fn(
    judgments: PreferenceData, loss: PairwiseLoss, pairs: PairSet, leave_out: Collection[str] = ()
) -> HeldOut:
    """Return a function that evaluates the policy on held-out pairs, without the values of the loss in `leave_out`."""
    annotated, size = judgments.annotate.pairs(pairs), judgments.config.batch.micro_batch_size
    ranks = judgments.context.engine.ranks
    return lambda values: evaluate_loss(
        sequential_batches(annotated, size), loss, ranks, leave_out=leave_out, rows=values
    )


def evaluate_labelled_fn(judgments: PreferenceData, loss: LabelledLoss, rows: AnnotatedLabelledSet) -> HeldOut:
    """Return a function that evaluates the policy on held-out labelled completions."""

    def batches() -> Iterator[BaselinedLabelledCompletions]:
        batch = loss.with_baseline(rows.collate(range(len(rows))))  # a single z0 for all held-out rows
        yield from batch.split(judgments.config.batch.micro_batch_size)

    ranks = judgments.context.engine.ranks
    return lambda values: evaluate_loss(batches(), loss, ranks, leave_out={"preference/accuracy"}, rows=values)


def build_offline(config: OfflineConfig, view: View | None = None) -> OfflineRun:
    """Build an offline run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    config, precision = choose_precision(config)
    context = open_context(config, view, precision)
    with context.undone_on_error():
        return _build(config, context)


def _build(config: OfflineConfig, context: RunContext) -> OfflineRun:
    tokenizer = build_tokenizer(config.policy)
    origin = read_export_origin(config.policy, tokenizer, config.data.chat_format)
    engine = context.engine
    models, trained = _build_models(config, context, tokenizer)
    task = build_task(config, context, tokenizer, models)
    keep_reference_in_bfloat16(models)  # now: the cache of its log-probabilities goes by its weights as they were
    ema = Ema(models.policy, config.policy.ema_decay, engine) if config.policy.ema_decay else None
    if context.resume is not None:
        restore_trainer_state(load_trainer_state(context.resume), {"policy": trained}, ema)
    if context.is_other_run:
        context.state.best = None
    evaluation = build_offline_evaluation(config, context, tokenizer, models, task.held_out, ema)
    session = context.session(
        total_steps=context.total_steps(task.steps_per_epoch),
        save=Saver(partial(save_models, models, tokenizer, origin), {"policy": trained}, ema, engine),
        evaluate=evaluation,
        show=task.show,
    )
    evaluation.connect(session.recorder)

    def export_model(folder: Path) -> None:
        export(models.policy, ema, tokenizer, folder, engine, origin=origin, config=config.policy)

    keep_best(context, session, lambda: evaluation.rows, export_model)
    return OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=task.data,
        sources=task.sources,
        loss=task.loss,
        trained=trained,
        ema=ema,
        export=export_model,
        seed=config.run.seed,
    )


def _build_models(
    config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase
) -> tuple[Models, TrainableModel]:
    """Build the policy and the reference, and what trains the policy."""
    engine = context.engine
    policy = build_policy(config.policy, context, tokenizer)
    # The temperature is of the loss; evaluation samples its completions at sampling.temperature.
    models = policy_alone(policy, config.policy, engine, temperature=1.0)
    fast_ways = None if engine.splits_weights else models.fast_ways()
    attach_reference(config, context, tokenizer, models)
    models.teacher = build_teacher(config, context, tokenizer, models.policy)
    terms = ("sft", PREFERENCE_TERM)
    trained = context.train("policy", models.policy, config.policy, dtype=models.dtype, terms=terms)
    fast_ways = fast_ways or models.fast_ways()  # under ZeRO-3 only DeepSpeed's hooks make weights whole
    context.notes += fast_ways.lines()
    return models, trained


def sft_task(
    config: OfflineConfig,
    section: DemonstratedLoss,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
) -> OfflineTask:
    """Build the task of a loss per token of demonstrations, as SFT's."""
    loss = DemonstrationLoss(models, section)
    stream = build_demonstrations(
        config.sft_data,
        context,
        tokenizer,
        chat=config.data.chat_format,
        rows_per_step=config.batch.prompts_per_step,
        model_context=context_length(models.policy),
    )
    feed: TrainingData[Demonstrations] = TrainingData.of(stream)
    eval_sft = config.data.eval_sft
    held_out = _load_rows(config, eval_sft, context, tokenizer, models) if eval_sft is not None else None
    return OfflineTask(
        loss=loss,
        data=feed.batch,
        sources=feed.sources,
        steps_per_epoch=feed.steps_per_epoch,
        held_out=_evaluate_rows(held_out, loss, config.batch.micro_batch_size) if held_out is not None else no_held_out,
        show=progress_metrics("sft"),
    )


def _load_rows(
    config: OfflineConfig, data: SftConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> DemonstrationSet:
    rows = demonstration_pipeline(
        data, tokenizer, chat_template=config.data.chat_format, context=context_length(models.policy)
    ).load()
    context.rows_read("eval_sft", rows.skips)
    return rows


def _evaluate_rows(rows: DemonstrationSet, loss: DemonstrationLoss, size: int) -> HeldOut:
    ranks = loss.models.engine.ranks
    return lambda values: evaluate_loss(sequential_batches(rows, size), loss, ranks, rows=values)


TASKS: dict[str, Callable[..., OfflineTask]] = {
    "demonstrations": sft_task,
    "pairs": pairs_task,
    "labelled": labelled_task,
}
"""The function that builds the task of a loss, by the kind of its rows."""


def attach_reference(
    config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> None:
    """Load the reference into `models` if this run needs one as a separate model.

    It needs none if the reference is the policy with its adapter disabled, nor if the reference is only read before
    the first step, when it equals the policy.
    """
    if not config.uses_reference:
        return
    if adapter_off_is_reference(config):
        models.adapter_off_is_reference = True
    elif needs_reference_during_training(config) or context.resume is not None or config.reference.model is not None:
        with seeded_initialization(context.seed):
            reference = build_reference(config, tokenizer, context.engine)
        is_start = config.reference.model is None and not needs_reference_during_training(config)
        if is_start and config.policy.weights == "auto" and models.dtype == "bfloat16":
            dither_matrices(reference, context.engine, frozen=True)  # what the policy was before the first step
        if config.reference.model is not None:
            context.identify_model("reference.model", config.reference.model)
        models.reference = context.engine.freeze("reference", reference)


def needs_reference_during_training(config: OfflineConfig) -> bool:
    """Return whether the reference is read during training.

    It is for the baseline of labelled completions (KTO), for the KL of held-out completions, and for pairs that are
    mixed or streamed, which are annotated as they come.
    """
    loss = config.algorithm.loss
    is_read_each_step = loss.needs_reference and not config.preference_data.is_plain
    is_evaluated = config.held_out_source is not None and config.uses_reference
    return loss.data == "labelled" or is_read_each_step or is_evaluated
