"""Data and loss of a preference run: pairs or labelled completions with the reference's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf.build.context import Context
from rlhf.build.reference import Annotator, keeps_reference, rows_per_pass
from rlhf.build.task import Task
from rlhf.config.algorithm import DpoLoss, KtoLoss, PairLossConfig, SftLoss
from rlhf.config.data import PreferencesConfig
from rlhf.config.sections import TrainConfig, offline
from rlhf.data.annotated import AnnotatedLabelledSet, load_judgments
from rlhf.data.pairs import LabelledSet, PairSet, load_pairs
from rlhf.data.stream import BatchStream, in_order
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.models.backbone import context_length
from rlhf.models.bundle import Models
from rlhf.runtime.seeding import derive
from rlhf.trainers.preference import LabelledLoss, PairwiseLoss, tokens_of
from rlhf.types import BaselinedLabelled

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

S = TypeVar("S", PairSet, PairSet | LabelledSet)


class Judgments:
    """The preference data of a run: loads it, reports skipped rows, and annotates it with the reference."""

    def __init__(
        self, config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models
    ) -> None:
        self.config, self.context, self.tokenizer, self.models = config, context, tokenizer, models
        self.annotate = Annotator(config, context, models)

    def load(self, load: Callable[..., S], data: PreferencesConfig) -> S:
        """Load and encode the rows of `data` with the function `load`."""
        limit = context_length(self.models.policy)
        rows = load(data, self.tokenizer, chat_template=self.config.data.chat_format, context=limit)
        self.context.notes.append(rows.skips.summary())
        return rows


def preference_task(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> Task:
    """Build the task of a preference run: its data with the reference's log-probabilities, and its loss.

    Call it before the first update: the policy may itself be the reference.
    """
    judgments, loss = Judgments(config, context, tokenizer, models), offline(config).loss
    assert not isinstance(loss, SftLoss)
    task = labelled_task(judgments, loss) if isinstance(loss, KtoLoss) else pairs_task(judgments, loss)
    if not keeps_reference(config):
        models.reference = None
    return task


def pairs_task(judgments: Judgments, loss_config: PairLossConfig) -> Task:
    """Build the task of a loss that compares the two completions of a pair."""
    config, data = judgments.config, judgments.config.data
    assert data.preferences is not None
    loss = PairwiseLoss(judgments.models, loss_config)
    train = judgments.annotate.pairs(judgments.load(load_pairs, data.preferences))
    eval_pairs = judgments.load(load_pairs, data.eval_preferences) if data.eval_preferences is not None else None
    stream = BatchStream(train, config.batch.prompts_per_step, derive(config.run.seed, "preferences"))
    return Task(
        loss=loss,
        data=stream.batch,
        steps_per_epoch=stream.steps_per_epoch,
        tokens=tokens_of,
        held_out=on_pairs(judgments, loss, eval_pairs, EVAL_NAMES) if eval_pairs is not None else dict,
        show=SHOW,
    )


def labelled_task(judgments: Judgments, loss_config: KtoLoss) -> Task:
    """Build the task of a loss on single labelled completions (KTO); pairs are split into two rows."""
    config, data, models = judgments.config, judgments.config.data, judgments.models
    assert data.preferences is not None
    loss = LabelledLoss(models, loss_config, rows_per_pass=rows_per_pass(config), context=context_length(models.policy))
    train = judgments.annotate.labelled(judgments.load(load_judgments, data.preferences))
    eval_rows = judgments.load(load_judgments, data.eval_preferences) if data.eval_preferences is not None else None
    held_out: Callable[[], dict[str, float]] = dict
    if isinstance(eval_rows, PairSet):  # the implicit reward of KTO is that of DPO: beta times the log-ratio
        names = {name: eval_name for name, eval_name in EVAL_NAMES.items() if name not in OF_ITS_OWN_LOSS}
        held_out = on_pairs(judgments, PairwiseLoss(models, DpoLoss(beta=loss_config.beta)), eval_rows, names)
    elif eval_rows is not None:
        held_out = on_labels(judgments, loss, judgments.annotate.labelled(eval_rows))
    stream = BatchStream(train, config.batch.prompts_per_step, derive(config.run.seed, "preferences"))
    return Task(
        loss=loss,
        data=lambda step: loss.with_baseline(stream.batch(step)),
        steps_per_epoch=stream.steps_per_epoch,
        tokens=tokens_of,
        held_out=held_out,
        show=(*SHOW, "preference/baseline"),
    )


def on_pairs(
    judgments: Judgments, loss: PairwiseLoss, pairs: PairSet, names: dict[str, str]
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the policy on held-out pairs; `names` maps loss metrics to reported ones."""
    annotated, size = judgments.annotate.pairs(pairs), judgments.config.batch.micro_batch_size
    return lambda: evaluate_loss(in_order(annotated, size), loss, names, judgments.context.engine.ranks)


def on_labels(judgments: Judgments, loss: LabelledLoss, rows: AnnotatedLabelledSet) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the policy on held-out labelled completions."""
    names = {name: eval_name for name, eval_name in EVAL_NAMES.items() if name not in OF_PAIRS_ONLY}

    def batches() -> Iterator[BaselinedLabelled]:
        batch = loss.with_baseline(rows.collate(range(len(rows))))  # a single z0 for all held-out rows
        yield from batch.split(judgments.config.batch.micro_batch_size)

    return lambda: evaluate_loss(batches(), loss, names, judgments.context.engine.ranks)
