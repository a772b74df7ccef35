"""The data and loss of a preference run: pairs or labelled completions, annotated once by the reference."""

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
    """The preference data of a run: loaded, its skipped rows noted, annotated."""

    def __init__(
        self, config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models
    ) -> None:
        self.config, self.context, self.tokenizer, self.models = config, context, tokenizer, models
        self.annotate = Annotator(config, context, models)

    def load(self, load: Callable[..., S], data: PreferencesConfig) -> S:
        """The rows of `data`, encoded."""
        limit = context_length(self.models.policy)
        found = load(data, self.tokenizer, chat_template=self.config.data.chat_format, context=limit)
        self.context.notes.append(found.skips.summary())
        return found


def preference_task(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> Task:
    """Rows with the reference's log-probabilities, and their loss; the policy must not have been trained on yet."""
    judgments, loss = Judgments(config, context, tokenizer, models), offline(config).loss
    assert not isinstance(loss, SftLoss)
    task = labelled_task(judgments, loss) if isinstance(loss, KtoLoss) else pairs_task(judgments, loss)
    if not keeps_reference(config):
        models.reference = None
    return task


def pairs_task(judgments: Judgments, loss_config: PairLossConfig) -> Task:
    """For a loss that compares the two sides of a pair."""
    config, data = judgments.config, judgments.config.data
    assert data.preferences is not None
    loss = PairwiseLoss(judgments.models, loss_config)
    train = judgments.annotate.pairs(judgments.load(load_pairs, data.preferences))
    test = judgments.load(load_pairs, data.eval_preferences) if data.eval_preferences is not None else None
    stream = BatchStream(train, config.batch.prompts_per_step, derive(config.run.seed, "preferences"))
    return Task(
        loss=loss,
        data=stream.batch,
        steps_per_epoch=stream.steps_per_epoch,
        tokens=tokens_of,
        held_out=on_pairs(judgments, loss, test, EVAL_NAMES) if test is not None else dict,
        show=SHOW,
    )


def labelled_task(judgments: Judgments, loss_config: KtoLoss) -> Task:
    """For a loss that judges completions one by one; pairs are taken apart."""
    config, data, models = judgments.config, judgments.config.data, judgments.models
    assert data.preferences is not None
    loss = LabelledLoss(models, loss_config, rows_per_pass=rows_per_pass(config), context=context_length(models.policy))
    train = judgments.annotate.labelled(judgments.load(load_judgments, data.preferences))
    test = judgments.load(load_judgments, data.eval_preferences) if data.eval_preferences is not None else None
    held_out: Callable[[], dict[str, float]] = dict
    if isinstance(test, PairSet):  # their implicit reward is DPO's: beta times the log-ratio
        names = {name: new for name, new in EVAL_NAMES.items() if name not in OF_ITS_OWN_LOSS}
        held_out = on_pairs(judgments, PairwiseLoss(models, DpoLoss(beta=loss_config.beta)), test, names)
    elif test is not None:
        held_out = on_labels(judgments, loss, judgments.annotate.labelled(test))
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
    judgments: Judgments, loss: PairwiseLoss, found: PairSet, names: dict[str, str]
) -> Callable[[], dict[str, float]]:
    """How the policy does on held-out pairs, when called."""
    pairs, size = judgments.annotate.pairs(found), judgments.config.batch.micro_batch_size
    return lambda: evaluate_loss(in_order(pairs, size), loss, names, judgments.context.engine.ranks)


def on_labels(judgments: Judgments, loss: LabelledLoss, rows: AnnotatedLabelledSet) -> Callable[[], dict[str, float]]:
    """How the policy does on held-out labelled completions, when called."""
    names = {name: new for name, new in EVAL_NAMES.items() if name not in OF_PAIRS_ONLY}

    def batches() -> Iterator[BaselinedLabelled]:
        whole = loss.with_baseline(rows.collate(range(len(rows))))  # one z0, of all held-out rows
        yield from whole.split(judgments.config.batch.micro_batch_size)

    return lambda: evaluate_loss(batches(), loss, names, judgments.context.engine.ranks)
