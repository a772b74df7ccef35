"""Build a run that trains a process reward model from step labels: `rlhf reward` with the section `process`."""

from __future__ import annotations

from typing import Any

from reward_model.steps import StepLoss
from rlhf.config.data import PreferencesConfig
from rlhf.config.sections import RewardModelConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.steps import StepSet, check_kinds, load_steps
from rlhf.evaluation.during_run import PairEvaluation
from rlhf.factory.context import RunContext, open_context, total_steps
from rlhf.factory.models import build_tokenizer
from rlhf.factory.reward_model import build_scalar_model
from rlhf.models.backbone import context_length
from rlhf.models.folders import MODEL
from rlhf.models.saving import save_scalar_head
from rlhf.models.step_model import save_step_model
from rlhf.runtime.device import choose_precision
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.checkpoint import replace_folder
from rlhf.tracking.metrics import progress_metrics
from rlhf.tracking.view import View
from rlhf.training.checkpoints import Saver
from rlhf.training.offline import OfflineRun


def build_process_model(config: RewardModelConfig, view: View | None = None) -> OfflineRun:
    """Build a run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set or checkpoint is missing or invalid; the subclass says which.
    """
    config, precision = choose_precision(config)
    context = open_context(config, view, precision)
    with context.undone_on_error():
        return _build(config, context)


def finish_process_model(run: OfflineRun) -> dict[str, Any]:
    """Export the model to the run folder, as a token-classification model."""
    replace_folder(run.session.recorder.folder.path / MODEL, run.export, run.session.ranks)
    return {}


def _build(config: RewardModelConfig, context: RunContext) -> OfflineRun:
    assert config.process is not None
    settings, tokenizer = config.process, build_tokenizer(config.model)
    model, trained = build_scalar_model(config, context, tokenizer)
    limit, held_out = context_length(model.classifier), config.data.eval_preferences

    def read(data: PreferencesConfig, name: str) -> StepSet:
        rows = load_steps(data, tokenizer, separator=settings.separator, context=limit)
        context.rows_read(name, rows.skips)
        return rows

    rows = read(config.data.preferences, "preferences")
    check_kinds(rows)
    stream = BatchStream(rows, config.batch.prompts_per_step, derive_seed(context.seed, "steps"))
    loss, engine = StepLoss(model, dtype=config.model.dtype), context.engine
    evaluation = PairEvaluation(
        None if held_out is None else read(held_out, "eval_preferences"),
        loss,
        config.batch.micro_batch_size,
        engine.ranks,
    )
    session = context.session(
        total_steps=total_steps(config.schedule, stream.steps_per_epoch),
        save=Saver(
            lambda folder: save_scalar_head(model, tokenizer, folder / MODEL, engine), {"model": trained}, None, engine
        ),
        evaluate=evaluation,
        show=progress_metrics("reward_model"),
    )
    return OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=stream.batch,
        sources=None,
        loss=loss,
        trained=trained,
        ema=None,
        export=lambda folder: save_step_model(model, tokenizer, folder, separator=settings.separator),
        seed=config.run.seed,
    )
