"""Build a run that trains a process reward model from step labels: `rlhf reward` with the section `process`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from reward_model.steps import StepLoss
from rlhf.config.data import PreferencesConfig, RewardModelDataConfig
from rlhf.config.sections import RewardModelConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.steps import StepSet, check_kinds, load_steps
from rlhf.evaluation.during_run import PairEvaluation
from rlhf.factory.context import RunContext, open_context
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
    separator, tokenizer = config.process.separator, build_tokenizer(config.model)
    model, trained = build_scalar_model(config, context, tokenizer)
    read = partial(load_steps, tokenizer=tokenizer, separator=separator, context=context_length(model.classifier))
    rows, held_out = _load_rows(config.data, context, read)
    stream = BatchStream(rows, config.batch.prompts_per_step, derive_seed(context.seed, "steps"))
    loss, engine = StepLoss(model, dtype=config.model.dtype), context.engine
    session = context.session(
        total_steps=context.total_steps(stream.steps_per_epoch),
        save=Saver(
            lambda folder: save_scalar_head(model, tokenizer, folder / MODEL, engine), {"model": trained}, None, engine
        ),
        evaluate=PairEvaluation(held_out, loss, config.batch.micro_batch_size, engine.ranks),
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
        export=lambda folder: save_step_model(model, tokenizer, folder, separator=separator),
        seed=config.run.seed,
    )


def _load_rows(
    data: RewardModelDataConfig, context: RunContext, read: Callable[[PreferencesConfig], StepSet]
) -> tuple[StepSet, StepSet | None]:
    """Load the rows to train on and the held-out ones, and report the rows left out of each."""
    rows = read(data.preferences)
    context.rows_read("preferences", rows.skips)
    check_kinds(rows)
    if data.eval_preferences is None:
        return rows, None
    held_out = read(data.eval_preferences)
    context.rows_read("eval_preferences", held_out.skips)
    return rows, held_out
