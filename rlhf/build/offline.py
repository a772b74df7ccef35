"""Building an offline run from its configuration: SFT or a preference loss, both over the same loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from rlhf.build.context import MODEL, Context, open_context, total_steps
from rlhf.build.models import build_origin, build_policy, build_tokenizer, export
from rlhf.build.online import EvaluatePrompts
from rlhf.build.preferences import preference_task
from rlhf.build.reference import attach_reference
from rlhf.build.rewards import build_source
from rlhf.build.sampler import build_sampler
from rlhf.build.saving import load_trainer, save_policy, save_trainer
from rlhf.build.task import Task
from rlhf.config.algorithm import SftLoss
from rlhf.config.data import SftConfig
from rlhf.config.sections import TrainConfig, judged, offline
from rlhf.data.pairs import DemonstrationSet, load_demonstrations
from rlhf.data.stream import BatchStream, in_order
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.models.backbone import context_length
from rlhf.models.bundle import Ema, Models
from rlhf.models.origin import Origin
from rlhf.runtime.engine import Trained
from rlhf.runtime.recorder import Recorder
from rlhf.runtime.seeding import derive
from rlhf.trainers.losses import DemonstrationLoss
from rlhf.trainers.offline import OfflineRun
from rlhf.trainers.preference import TERM
from rlhf.types import Batch, Demonstrations

SHOW = ("loss/sft", "loss/accuracy", "policy/grad_norm", "policy/lr", "eval/loss", "eval/score")
EVAL_NAMES = {"loss/sft": "eval/loss"}


def build_offline(config: TrainConfig, console: Console | None = None) -> OfflineRun:
    """Build an offline run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    context = open_context(config, console)
    tokenizer = build_tokenizer(config.policy)
    origin = build_origin(config.policy, tokenizer)
    engine = context.engine
    policy = engine.place(build_policy(config.policy, tokenizer, context.resume, context.seed))
    is_sft = isinstance(offline(config).loss, SftLoss)
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
    trained = engine.train("policy", policy, config.policy, terms=("sft", TERM))
    task = (sft_task if is_sft else preference_task)(config, context, tokenizer, models)
    ema = Ema(policy, config.policy.ema_decay, engine) if config.policy.ema_decay else None
    if context.resume is not None:
        _restore(load_trainer(context.resume), trained, ema)
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
            tell=session.recorder.note,
        ),
    )


def sft_task(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> Task:
    """Build the task of SFT: demonstrations, and their negative log-likelihood as the loss."""
    loss_config = offline(config).loss
    assert isinstance(loss_config, SftLoss)
    assert config.data.sft is not None
    loss = DemonstrationLoss(models, aggregate=loss_config.aggregate)
    rows = _load_rows(config, config.data.sft, context, tokenizer, models)
    stream = BatchStream(rows, config.batch.prompts_per_step, derive(context.seed, "sft"))
    eval_sft = config.data.eval_sft
    held_out = _load_rows(config, eval_sft, context, tokenizer, models) if eval_sft is not None else None
    return Task(
        loss=loss,
        data=stream.batch,
        steps_per_epoch=stream.steps_per_epoch,
        tokens=_count_tokens,
        held_out=_evaluate_rows(held_out, loss, config.batch.micro_batch_size) if held_out is not None else dict,
        show=SHOW,
    )


def _load_rows(
    config: TrainConfig, data: SftConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models
) -> DemonstrationSet:
    rows = load_demonstrations(
        data, tokenizer, chat_template=config.data.chat_format, context=context_length(models.policy)
    )
    context.notes.append(rows.skips.summary())
    return rows


def _evaluate_rows(rows: DemonstrationSet, loss: DemonstrationLoss, size: int) -> Callable[[], dict[str, float]]:
    return lambda: evaluate_loss(in_order(rows, size), loss, EVAL_NAMES, loss.models.engine.ranks)


def _count_tokens(batch: Batch) -> int:
    assert isinstance(batch, Demonstrations)
    return int(batch.prompt_mask.sum() + batch.completion_mask.sum())


def _make_save(
    models: Models, trained: Trained, tokenizer: PreTrainedTokenizerBase, origin: Origin, ema: Ema | None
) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        save_policy(models.policy, tokenizer, folder / MODEL, models.engine, origin)
        extra = {"ema": ema.saved()} if ema is not None else {}
        save_trainer(folder, {"policy": trained}, extra, models.engine)

    return save


def _restore(state: dict[str, Any], trained: Trained, ema: Ema | None) -> None:
    trained.load_state(state["policy"])
    if ema is not None and "ema" in state:
        ema.load(state["ema"])


class _Evaluation:
    """Evaluation during an offline run: the held-out loss and, with prompts and a judge, sampled completions.

    The moving average of the weights is evaluated, if there is one.
    """

    def __init__(
        self,
        config: TrainConfig,
        context: Context,
        tokenizer: PreTrainedTokenizerBase,
        models: Models,
        task: Task,
        ema: Ema | None,
    ) -> None:
        self.task, self.ema = task, ema
        self.prompts: EvaluatePrompts | None = None
        if judged(config):
            assert config.eval.source is not None
            sampling_models = replace(models, temperature=config.sampling.temperature)
            judge = build_source(config.eval.source, tokenizer, models.engine)
            sampler = build_sampler(config, sampling_models, tokenizer)
            self.prompts = EvaluatePrompts(config, context, tokenizer, sampling_models, sampler, judge, None)

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
