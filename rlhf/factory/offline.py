"""Build an offline run from its configuration: SFT, and DPO and related losses on preference data.

The reference of such a run is loaded where it is needed, asked once, and its answers are kept on disk between runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.batching import Batch
from rlhf.config.algorithm import DpoLoss, KtoLoss, PairLossConfig, ReferencedLoss, SftLoss
from rlhf.config.data import PreferencesConfig, SftConfig
from rlhf.config.sections import OfflineConfig
from rlhf.data.datasets import BatchStream, HasPrompt, RowPipeline, RowSet, sequential_batches
from rlhf.data.mixture import MixedStream
from rlhf.data.pairs import (
    AnnotatedLabelledSet,
    AnnotatedPairSet,
    CompletionRows,
    DemonstrationSet,
    LabelledSet,
    PairSet,
    completion_labels,
    completion_rows,
    labelled_pipeline,
    load_demonstrations,
    load_pairs,
    load_preference_data,
    pair_pipeline,
)
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.factory.context import (
    MODEL,
    RunContext,
    keep_best,
    load_trainer_state,
    open_context,
    save_policy,
    save_trainer_state,
    total_steps,
)
from rlhf.factory.data import build_demonstrations, mix
from rlhf.factory.exported import rounded_inputs
from rlhf.factory.models import (
    adapter_off_is_reference,
    build_policy,
    build_reference,
    build_tokenizer,
    export,
    keep_reference_in_bfloat16,
    read_export_origin,
)
from rlhf.factory.online import PromptEvaluator
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import build_sampler
from rlhf.models.backbone import context_length
from rlhf.models.export import Origin, weights_fingerprint
from rlhf.models.policy_models import Ema, Models
from rlhf.runtime.device import choose_precision
from rlhf.runtime.engine import TrainableModel
from rlhf.runtime.seeding import derive_seed, seeded_initialization
from rlhf.tracking.metrics import progress_metrics
from rlhf.training.losses import DemonstrationLoss
from rlhf.training.offline import PREFERENCE_TERM, LabelledLoss, OfflineRun, PairwiseLoss, completion_logprobs
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER
from rlhf.training.session import Recorder
from rlhf.training.step import Loss, count_tokens
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
    sources: Callable[[int], tuple[str, ...]] | None = None  # the source of each row of a step, where they are measured
    steps_per_epoch: float
    tokens: Callable[[Batch], int]  # counts the tokens of a batch
    held_out: HeldOut  # metrics of the current policy; empty without held-out data
    show: tuple[str, ...]  # metrics for the progress display


RowTable = dict[str, list[float]]
"""The values of single held-out rows, by name."""
HeldOut = Callable[[RowTable], dict[str, float]]
"""Evaluates the current policy on held-out data; returns the metrics and fills in the values of single rows."""
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
        self.annotate = ReferenceAnnotator(config, context, models)

    def load(self, load: Callable[..., S], data: PreferencesConfig) -> S:
        """Load and encode the rows of `data` with the function `load`."""
        limit = context_length(self.models.policy)
        rows = load(data, self.tokenizer, chat_template=self.config.data.chat_format, context=limit)
        is_train = data is self.config.preference_data
        self.context.rows_read("preferences" if is_train else "eval_preferences", rows.skips)
        return rows

    def stream(self, rows: RowSet[B]) -> BatchStream[B]:
        """Return the shuffled batches of the rows in memory."""
        return BatchStream(rows, self.config.batch.prompts_per_step, derive_seed(self.config.run.seed, "preferences"))

    def mix(self, pipeline: Callable[..., RowPipeline[P, M]]) -> MixedStream[P, M]:
        """Build the mixed or streamed rows of the run, encoded by the `pipeline` of their use."""
        data = self.config.preference_data
        limit, chat = context_length(self.models.policy), self.config.data.chat_format
        how = pipeline(data, self.tokenizer, chat_template=chat, context=limit)
        size = self.config.batch.prompts_per_step
        return mix(data, self.context, how, section="preferences", rows_per_step=size)


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
        """Build it from a stream; `batch` makes the batch of a step where that is not the stream's own."""
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
    feed: TrainingData[AnnotatedPairs]
    if config.preference_data.is_plain:
        train = judgments.annotate.pairs(judgments.load(load_pairs, config.preference_data))
        feed = TrainingData.of(judgments.stream(train))
    else:
        mixture = judgments.mix(pair_pipeline)
        feed = TrainingData.of(mixture, lambda step: collate_all(judgments.annotate.batch(mixture.rows(step))))
    eval_pairs = judgments.load(load_pairs, data.eval_preferences) if data.eval_preferences is not None else None
    return OfflineTask(
        loss=loss,
        data=feed.batch,
        sources=feed.sources,
        steps_per_epoch=feed.steps_per_epoch,
        tokens=count_tokens,
        held_out=evaluate_pairs_fn(judgments, loss, eval_pairs) if eval_pairs is not None else no_held_out,
        show=progress_metrics("preference"),
    )


def labelled_task(judgments: PreferenceData, loss_config: KtoLoss) -> OfflineTask:
    """Build the task of a loss on single labelled completions (KTO); pairs are split into two rows."""
    config, data, models = judgments.config, judgments.config.data, judgments.models
    loss = LabelledLoss(
        models, loss_config, rows_per_pass=no_grad_batch_size(config), context=context_length(models.policy)
    )
    feed: TrainingData[AnnotatedLabelledCompletions]
    if config.preference_data.is_plain:
        train = judgments.annotate.labelled(judgments.load(load_preference_data, config.preference_data))
        feed = TrainingData.of(judgments.stream(train))
    else:
        mixture = judgments.mix(labelled_pipeline)
        feed = TrainingData.of(mixture, lambda step: collate_all(judgments.annotate.labelled_batch(mixture.rows(step))))
    eval_rows = (
        judgments.load(load_preference_data, data.eval_preferences) if data.eval_preferences is not None else None
    )
    held_out: HeldOut = no_held_out
    if isinstance(eval_rows, PairSet):  # the implicit reward of KTO is that of DPO: beta times the log-ratio
        dpo = PairwiseLoss(models, DpoLoss(beta=loss_config.beta))
        held_out = evaluate_pairs_fn(judgments, dpo, eval_rows, leave_out={"loss/preference"})
    elif eval_rows is not None:
        held_out = evaluate_labelled_fn(judgments, loss, judgments.annotate.labelled(eval_rows))
    return OfflineTask(
        loss=loss,
        data=lambda step: loss.with_baseline(feed.batch(step)),
        sources=feed.sources,
        steps_per_epoch=feed.steps_per_epoch,
        tokens=count_tokens,
        held_out=held_out,
        show=progress_metrics("preference"),
    )


def evaluate_pairs_fn(
    judgments: PreferenceData, loss: PairwiseLoss, pairs: PairSet, leave_out: Collection[str] = ()
) -> HeldOut:
    """Return a function that evaluates the policy on held-out pairs, without the metrics of the loss in `leave_out`."""
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


def build_offline(config: OfflineConfig, console: Console | None = None) -> OfflineRun:
    """Build an offline run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    config, precision = choose_precision(config)
    context = open_context(config, console, [*precision, *(f"warning: {text}" for text in rounded_inputs(config))])
    with context.undone_on_error():
        return _build(config, context)


def _build(config: OfflineConfig, context: RunContext) -> OfflineRun:
    tokenizer = build_tokenizer(config.policy)
    origin = read_export_origin(config.policy, tokenizer)
    engine = context.engine
    policy = build_policy(config.policy, context, tokenizer)
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
    fast_ways = None if engine.splits_weights else models.fast_ways()
    attach_reference(config, context, tokenizer, models)
    trained = engine.train("policy", policy, config.policy, terms=("sft", PREFERENCE_TERM))
    fast_ways = fast_ways or models.fast_ways()  # under ZeRO-3 only DeepSpeed's hooks make weights whole
    fast_ways.with_compiled(models.bodies, config.policy.dtype, wanted=config.policy.compile)
    context.notes += fast_ways.lines()
    task = build_task(config, context, tokenizer, models)
    keep_reference_in_bfloat16(models)  # now: the cache of its log-probabilities goes by its weights as they were
    ema = Ema(policy, config.policy.ema_decay, engine) if config.policy.ema_decay else None
    if context.resume is not None:
        _restore(load_trainer_state(context.resume), trained, ema)
    if context.is_other_run:
        context.state.best = None
    evaluate = _Evaluation(config, context, tokenizer, models, task, ema)
    session = context.session(
        total_steps=total_steps(config.schedule, task.steps_per_epoch),
        save=_make_save(models, trained, tokenizer, origin, ema),
        evaluate=evaluate,
        show=task.show,
    )
    evaluate.connect(session.recorder)

    def export_model(folder: Path) -> None:
        export(policy, ema, tokenizer, folder, engine, origin=origin, dtype=config.policy.export_dtype)

    keep_best(context, session, lambda: evaluate.rows, export_model)
    return OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=task.data,
        sources=task.sources,
        loss=task.loss,
        trained=trained,
        ema=ema,
        tokens=task.tokens,
        export=export_model,
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
        tokens=_count_tokens,
        held_out=_evaluate_rows(held_out, loss, config.batch.micro_batch_size) if held_out is not None else no_held_out,
        show=progress_metrics("sft"),
    )


def _load_rows(
    config: OfflineConfig, data: SftConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> DemonstrationSet:
    rows = load_demonstrations(
        data, tokenizer, chat_template=config.data.chat_format, context=context_length(models.policy)
    )
    context.rows_read("eval_sft", rows.skips)
    return rows


def _evaluate_rows(rows: DemonstrationSet, loss: DemonstrationLoss, size: int) -> HeldOut:
    ranks = loss.models.engine.ranks
    return lambda values: evaluate_loss(sequential_batches(rows, size), loss, ranks, rows=values)


def no_held_out(rows: RowTable) -> dict[str, float]:
    """Return no metrics: there are no held-out data."""
    return {}


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
        self.rows: RowTable = {}  # of the latest evaluation
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
        self.rows = {}
        metrics = self.task.held_out(self.rows) | (self.prompts(step) if self.prompts is not None else {})
        self.rows |= self.prompts.rows if self.prompts is not None else {}
        return metrics


CACHE_VERSION = 1  # of the file format and of what the numbers mean; part of the key
_NAME = "logprobs"


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
        if config.reference.model is not None:
            context.identify_model("reference.model", config.reference.model)
        models.reference = context.engine.freeze("reference", reference)


def needs_reference_during_training(config: OfflineConfig) -> bool:
    """Return whether the reference is read during training.

    It is for KTO's z0, for the KL of held-out completions, and for pairs that are mixed or streamed, which are
    annotated as they come.
    """
    loss = config.algorithm.loss
    is_read_each_step = isinstance(loss, ReferencedLoss) and not config.preference_data.is_plain
    is_evaluated = config.held_out_source is not None and config.uses_reference
    return isinstance(loss, KtoLoss) or is_read_each_step or is_evaluated


def no_grad_batch_size(config: OfflineConfig) -> int:
    """Return the rows of a forward pass without gradient; they affect memory only, no result."""
    return config.batch.micro_batch_size * NO_GRAD_BATCH_MULTIPLIER


class ReferenceAnnotator:
    """Annotates data sets with the reference's log-probability of each completion, from a cache where possible."""

    def __init__(self, config: OfflineConfig, context: RunContext, models: Models) -> None:
        self.config, self.context, self.models = config, context, models
        self.cache = ReferenceCache(cache_folder(config.run.cache_dir, os.environ))
        self._weights: str | None = None

    def pairs(self, pairs: PairSet) -> AnnotatedPairSet:
        """Annotate pairs: both completions of each."""
        chosen, rejected = self._logprobs(completion_rows(pairs)).chunk(2)
        return AnnotatedPairSet(pairs, chosen, rejected)

    def labelled(self, data: PairSet | LabelledSet) -> AnnotatedLabelledSet:
        """Annotate single labelled completions; pairs are split into two rows."""
        rows = completion_rows(data)
        return AnnotatedLabelledSet(rows, completion_labels(data), self._logprobs(rows))

    def batch(self, pairs: PairSet) -> AnnotatedPairSet:
        """Annotate the pairs of one step, without the cache."""
        rows = completion_rows(pairs)
        needed = isinstance(self.config.algorithm.loss, ReferencedLoss)
        values = self._forward(rows) if needed else torch.zeros(len(rows), dtype=torch.float64)
        return AnnotatedPairSet(pairs, *values.chunk(2))

    def labelled_batch(self, rows: LabelledSet) -> AnnotatedLabelledSet:
        """Annotate the labelled completions of one step, without the cache."""
        completions = completion_rows(rows)
        return AnnotatedLabelledSet(completions, completion_labels(rows), self._forward(completions))

    def _logprobs(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        if not isinstance(self.config.algorithm.loss, ReferencedLoss):
            return torch.zeros(len(rows), dtype=torch.float64)
        key = cache_key(
            weights=self._fingerprint(),
            rows=rows_fingerprint(rows.prompts, rows.completions, rows.learned),
            dtype=_arithmetic(self.models),
            temperature=self.models.temperature,
        )
        ranks = self.context.engine.ranks
        values = ranks.on_main(lambda: self.cache.read(key, count=len(rows)))
        if values is None:
            values = computed = self._compute(rows)
            ranks.on_main(lambda: self.cache.write(key, computed))
        else:
            self.context.notes.append(f"reference log-probs of {len(rows):,} completions: from {self.cache.path(key)}")
        self.context.notes += self.cache.notes
        self.cache.notes.clear()
        return values

    def _compute(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        text = f"reference log-probs of {len(rows):,} completions: computed once, kept in {self.cache.folder}"
        if self.context.console is not None:
            self.context.console.print(Text(text), soft_wrap=True)  # at once: a large data set takes time
        return self._forward(rows)

    def _forward(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        models = self.models
        assert models.has_reference or self.context.resume is None, "the policy is its own reference at step 0 only"
        logprobs = (
            models.reference_logprobs if models.has_reference else lambda batch: models.policy_tokens(batch).logprobs
        )
        return completion_logprobs(
            rows,
            logprobs,
            rows_per_pass=no_grad_batch_size(self.config),
            device=models.device,
            ranks=models.engine.ranks,
        )

    def _fingerprint(self) -> str:
        if self._weights is None:
            model, engine = self.models.reference or self.models.policy, self.context.engine
            state = engine.full_state(model)
            self._weights = engine.ranks.on_main(lambda: weights_fingerprint(model, state))
        return self._weights


def _arithmetic(models: Models) -> str:
    """Describe what the numbers are computed in: the run's dtype, and the head's where that is not float32 or better.

    A head in bfloat16 rounds every logit to 8 bits, which moves the sum over a completion.
    """
    return "bfloat16, head too" if models.dtype == "bfloat16" and not models.float32_head else models.dtype


def cache_folder(configured: str | None, environment: Mapping[str, str]) -> Path:
    """Return the cache folder for reference log-probabilities: `reference/` in `configured` or in the user's cache."""
    if configured is not None:
        return Path(configured).expanduser() / "reference"
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "rlhf" / "reference"


def rows_fingerprint(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], learned: Sequence[Sequence[bool]] = ()
) -> str:
    """Compute the SHA-256 digest of token ids, row by row.

    Other rows, another order, another tokenizer or another template give another digest. `learned` marks the tokens of
    each completion whose log-probabilities are summed, if not all are.
    """
    digest = hashlib.sha256()
    for prompt, completion in zip(prompts, completions, strict=True):
        digest.update(f"{len(prompt)} {len(completion)}:{[*prompt, *completion]}".encode())
    for flags in learned:
        digest.update(bytes(flags) + b".")
    return digest.hexdigest()


def cache_key(*, weights: str, rows: str, dtype: str, temperature: float) -> str:
    """Compute the cache key for the log-probabilities of these rows under these weights."""
    parts = {"version": CACHE_VERSION, "weights": weights, "rows": rows, "dtype": dtype, "temperature": temperature}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ReferenceCache:
    """A folder with one file per key, each with a checksum of its numbers; `notes` collects warnings about files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    def path(self, key: str) -> Path:
        """Return the path of the file for `key`."""
        return self.folder / f"{key}.safetensors"

    def read(self, key: str, *, count: int) -> Float[Tensor, " N"] | None:
        """Read the `count` numbers stored under `key`; return None if there are none or the file is damaged (noted)."""
        path = self.path(key)
        if not path.is_file():
            return None
        damage, values = _read_checked(path)
        if not damage and values.shape != (count,):
            damage = f"it holds {tuple(values.shape)} numbers instead of {count}"
        if damage:
            self.notes.append(f"{path} is damaged ({damage}): recomputing")
            return None
        return values

    def write(self, key: str, values: Float[Tensor, " N"]) -> None:
        """Store `values` under `key` atomically; a folder that cannot be written to is noted, not fatal."""
        values = values.detach().cpu().contiguous()
        content = save({_NAME: values}, metadata={"checksum": _checksum(values)})
        temporary = self.folder / f".{key}.{os.getpid()}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(self.path(key))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self.notes.append(
                f"reference log-probs could not be kept in {self.folder} ({error}): the next run computes them again; "
                "set run.cache_dir to a folder that can be written to"
            )


def _read_checked(path: Path) -> tuple[str, Tensor]:
    """Read a file's numbers; return what is wrong with it (empty if nothing), and the numbers."""
    try:
        with safe_open(path, framework="pt") as file:
            values, metadata = file.get_tensor(_NAME), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        return str(error).splitlines()[0], torch.empty(0)
    return "" if metadata.get("checksum") == _checksum(values) else "its checksum does not match", values


def _checksum(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
