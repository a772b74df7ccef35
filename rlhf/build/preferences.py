"""The data and loss of a preference run: pairs or labelled completions, annotated once by the reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.build.context import Context
from rlhf.build.models import build_reference
from rlhf.build.task import Task
from rlhf.config.algorithm import DpoLoss, KtoLoss, PairLossConfig, ReferencedLoss, SftLoss
from rlhf.config.data import PreferencesConfig
from rlhf.config.sections import TrainConfig, judged, offline, reads_reference
from rlhf.data.annotated import (
    AnnotatedLabelledSet,
    AnnotatedPairSet,
    CompletionRows,
    labels_of,
    load_judgments,
    rows_of,
)
from rlhf.data.pairs import LabelledSet, PairSet, load_pairs
from rlhf.data.reference_cache import ReferenceCache, cache_folder, cache_key, rows_fingerprint
from rlhf.data.stream import BatchStream
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.models.backbone import context_length, place
from rlhf.models.bundle import Models
from rlhf.models.fingerprint import weights_fingerprint
from rlhf.runtime.seeding import derive, new_weights
from rlhf.trainers.online import ROWS_PER_PASS
from rlhf.trainers.preference import LabelledLoss, PairwiseLoss, completion_logprobs, tokens_of
from rlhf.types import AnnotatedPairs, BaselinedLabelled

SHOW = ("loss/preference", "preference/accuracy", "preference/margin", "eval/preference_accuracy", "eval/score")
EVAL_NAMES = {
    "loss/preference": "eval/preference_loss",
    "preference/accuracy": "eval/preference_accuracy",
    "preference/margin": "eval/preference_margin",
    "preference/chosen_reward": "eval/chosen_reward",
    "preference/rejected_reward": "eval/rejected_reward",
    "preference/chosen_logprob": "eval/chosen_logprob",
    "preference/rejected_logprob": "eval/rejected_logprob",
}
OF_PAIRS_ONLY = ("preference/accuracy", "preference/margin")
OF_ITS_OWN_LOSS = ("loss/preference",)

HeldOut = Callable[[], dict[str, float]]


def attach_reference(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> None:
    """Give the models the reference that this run reads, if it needs a model of its own for it.

    It does not where the reference is the policy with its adapter off, nor, for log-probabilities that are computed
    before the first step, where it is the policy as it then is.
    """
    if not reads_reference(config):
        return
    if config.policy.lora is not None and config.reference.model is None:
        models.adapter_off_is_reference = True
    elif keeps_reference(config) or context.resume is not None or config.reference.model is not None:
        with new_weights(context.seed):
            reference = build_reference(config, tokenizer)
        assert reference is not None
        models.reference = place(reference, context.engine.device)


def keeps_reference(config: TrainConfig) -> bool:
    """Whether the reference is read while the run goes on: for KTO's z0, or for the KL of held-out completions."""
    return isinstance(offline(config).loss, KtoLoss) or (judged(config) and reads_reference(config))


def preference_task(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> Task:
    """Rows with the reference's log-probabilities, and their loss; the policy must not have been trained on yet."""
    assert config.data.preferences is not None
    annotate = _Annotator(config, context, models)
    train = _load(config, config.data.preferences, context, tokenizer, models)
    held_out = config.data.eval_preferences
    test = _load(config, held_out, context, tokenizer, models) if held_out is not None else None
    loss = offline(config).loss
    assert not isinstance(loss, SftLoss)
    task = (
        _labelled_task(config, models, loss, annotate, train, test)
        if isinstance(loss, KtoLoss)
        else _pairs_task(config, models, loss, annotate, train, test)
    )
    if not keeps_reference(config):
        models.reference = None
    return task


def _pairs_task(
    config: TrainConfig,
    models: Models,
    config_loss: PairLossConfig,
    annotate: _Annotator,
    train: PairSet | LabelledSet,
    test: PairSet | LabelledSet | None,
) -> Task:
    assert isinstance(train, PairSet)
    assert not isinstance(test, LabelledSet)
    loss = PairwiseLoss(models, config_loss)
    stream = BatchStream(annotate.pairs(train), config.batch.prompts_per_step, derive(config.run.seed, "preferences"))
    return Task(
        loss=loss,
        data=stream.batch,
        steps_per_epoch=stream.steps_per_epoch,
        tokens=tokens_of,
        held_out=_on_pairs(config, loss, annotate.pairs(test), EVAL_NAMES) if test is not None else dict,
        show=SHOW,
    )


def _labelled_task(
    config: TrainConfig,
    models: Models,
    config_loss: KtoLoss,
    annotate: _Annotator,
    train: PairSet | LabelledSet,
    test: PairSet | LabelledSet | None,
) -> Task:
    loss = LabelledLoss(models, config_loss, rows_per_pass=_rows_per_pass(config))
    stream = BatchStream(
        annotate.labelled(train), config.batch.prompts_per_step, derive(config.run.seed, "preferences")
    )
    held_out: HeldOut = dict
    if isinstance(test, PairSet):  # its implicit reward is DPO's: beta times the log-ratio
        names = {name: new for name, new in EVAL_NAMES.items() if name not in OF_ITS_OWN_LOSS}
        held_out = _on_pairs(config, PairwiseLoss(models, DpoLoss(beta=config_loss.beta)), annotate.pairs(test), names)
    elif test is not None:
        held_out = _on_labels(config, loss, annotate.labelled(test))
    return Task(
        loss=loss,
        data=lambda step: loss.with_baseline(stream.batch(step)),
        steps_per_epoch=stream.steps_per_epoch,
        tokens=tokens_of,
        held_out=held_out,
        show=(*SHOW, "preference/baseline"),
    )


def _on_pairs(config: TrainConfig, loss: PairwiseLoss, pairs: AnnotatedPairSet, names: dict[str, str]) -> HeldOut:
    size = config.batch.micro_batch_size

    def batches() -> Iterator[AnnotatedPairs]:
        for start in range(0, len(pairs), size):
            yield pairs.collate(range(start, min(start + size, len(pairs))))

    return lambda: evaluate_loss(batches(), loss, names)


def _on_labels(config: TrainConfig, loss: LabelledLoss, rows: AnnotatedLabelledSet) -> HeldOut:
    names = {name: new for name, new in EVAL_NAMES.items() if name not in OF_PAIRS_ONLY}

    def batches() -> Iterator[BaselinedLabelled]:
        whole = loss.with_baseline(rows.collate(range(len(rows))))  # one z0, of all held-out rows
        yield from whole.split(config.batch.micro_batch_size)

    return lambda: evaluate_loss(batches(), loss, names)


def _load(
    config: TrainConfig,
    data: PreferencesConfig,
    context: Context,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
) -> PairSet | LabelledSet:
    load = load_judgments if isinstance(offline(config).loss, KtoLoss) else load_pairs
    found = load(data, tokenizer, chat_template=config.data.chat_template, context=context_length(models.policy))
    context.notes.append(found.skips.summary())
    return found


def _rows_per_pass(config: TrainConfig) -> int:
    return config.batch.micro_batch_size * ROWS_PER_PASS


class _Annotator:
    """The reference's log-probability of every completion of a data set: from the cache, or computed and kept."""

    def __init__(self, config: TrainConfig, context: Context, models: Models) -> None:
        self.config, self.context, self.models = config, context, models
        self.cache = ReferenceCache(cache_folder(config.run.cache_dir, os.environ))
        self._weights: str | None = None

    def pairs(self, found: PairSet) -> AnnotatedPairSet:
        """The pairs, annotated."""
        chosen, rejected = self._annotated(rows_of(found)).chunk(2)
        return AnnotatedPairSet(found, chosen, rejected)

    def labelled(self, found: PairSet | LabelledSet) -> AnnotatedLabelledSet:
        """Single completions, annotated."""
        rows = rows_of(found)
        return AnnotatedLabelledSet(rows, labels_of(found), self._annotated(rows))

    def _annotated(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        if not isinstance(offline(self.config).loss, ReferencedLoss):
            return torch.zeros(len(rows), dtype=torch.float64)
        key = cache_key(
            weights=self._fingerprint(),
            rows=rows_fingerprint(rows.prompts, rows.completions),
            dtype=self.models.dtype,
            temperature=self.models.temperature,
        )
        values = self.cache.read(key, count=len(rows))
        if values is None:
            values = self._computed(rows)
            self.cache.write(key, values)
        else:
            self.context.notes.append(f"reference log-probs of {len(rows):,} completions: from {self.cache.path(key)}")
        self.context.notes += self.cache.notes
        self.cache.notes.clear()
        return values

    def _computed(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        text = f"reference log-probs of {len(rows):,} completions: computed once, kept in {self.cache.folder}"
        if self.context.console is not None:
            self.context.console.print(Text(text), soft_wrap=True)  # now: a large data set takes its time
        models = self.models
        assert models.has_reference or self.context.resume is None, "the policy is its own reference at step 0 only"
        say = models.reference_logprobs if models.has_reference else lambda batch: models.policy_tokens(batch).logprobs
        return completion_logprobs(rows, say, rows_per_pass=_rows_per_pass(self.config), device=models.device)

    def _fingerprint(self) -> str:
        if self._weights is None:
            self._weights = weights_fingerprint(self.models.reference or self.models.policy)
        return self._weights
