"""Building a reward-model run from its configuration, and what follows it: calibration, export, report card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from reward_model.evaluate import evaluate_reward_model
from reward_model.losses import BradleyTerryLoss
from reward_model.model import calibrate, score_pairs
from rlhf.batching import Batch
from rlhf.config.data import PreferencesConfig
from rlhf.config.sections import RewardModelConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.formats import PairText
from rlhf.data.pairs import PairSet, load_pairs
from rlhf.data.tokenize import stop_token_ids
from rlhf.errors import ConfigError
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.factory.context import (
    MODEL,
    RunContext,
    export_scalar_head,
    load_trainer_state,
    model_folder,
    open_context,
    save_scalar_head,
    save_trainer_state,
    total_steps,
)
from rlhf.factory.models import build_tokenizer, read_export_origin
from rlhf.models.backbone import context_length, enable_gradient_checkpointing
from rlhf.models.logprobs import of_bodies
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.seeding import derive_seed, seeded_initialization
from rlhf.tracking.checkpoint import replace_folder
from rlhf.tracking.metrics import progress_metrics
from rlhf.training.offline import OfflineRun
from rlhf.types import PreferencePairs


@dataclass(frozen=True)
class RewardModelRun:
    """A reward-model run, with what calibration, the export and the report card need."""

    run: OfflineRun
    config: RewardModelConfig
    model: ScalarHeadModel
    tokenizer: PreTrainedTokenizerBase
    pairs: PairSet
    eval_pairs: PairSet | None


def build_reward_model(config: RewardModelConfig, console: Console | None = None) -> RewardModelRun:
    """Build a reward-model run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set or checkpoint is missing or invalid; the subclass says which.
    """
    context = open_context(config, console)
    tokenizer = build_tokenizer(config.model)
    origin = read_export_origin(config.model, tokenizer)
    model = _build_model(config, context, tokenizer)
    trained = context.engine.train("policy", model, config.model, terms=("rm",))
    if context.resume is not None:
        trained.load_state(load_trainer_state(context.resume)["model"])
    max_length = context_length(model.classifier)
    pairs = _load_pairs(config, config.data.preferences, context, tokenizer, max_length)
    held_out = config.data.eval_preferences
    eval_pairs = _load_pairs(config, held_out, context, tokenizer, max_length) if held_out is not None else None
    loss = BradleyTerryLoss(model, config.loss, dtype=config.model.dtype)
    stream = BatchStream(pairs, config.batch.prompts_per_step, derive_seed(context.seed, "pairs"))

    def save(folder: Path) -> None:
        save_scalar_head(model, tokenizer, folder / MODEL, context.engine)
        save_trainer_state(folder, {"model": trained}, {}, context.engine)

    def evaluate(_step: int) -> dict[str, float]:
        return _evaluate_pairs(eval_pairs, loss, config.batch.micro_batch_size, context.engine.ranks)

    session = context.session(
        total_steps=total_steps(config.schedule, stream.steps_per_epoch),
        save=save,
        evaluate=evaluate,
        show=progress_metrics("reward_model"),
    )
    run = OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=stream.batch,
        loss=loss,
        trained=trained,
        ema=None,
        tokens=_count_tokens,
        export=lambda folder: export_scalar_head(
            model, tokenizer, folder, context.engine, origin, config.model.export_dtype, session.recorder.note
        ),
    )
    return RewardModelRun(run, config, model, tokenizer, pairs, eval_pairs)


def compute_report_card(config: RewardModelConfig, path: str) -> dict[str, Any]:
    """Compute the report card of the reward model in `path` on the held-out pairs of `config`.

    Raises:
        ConfigError: there are no held-out pairs.
    """
    if config.data.eval_preferences is None:
        raise ConfigError("nothing to evaluate on: set data.eval_preferences.path")
    model, tokenizer = _load_trained(config, path)
    train, held_out = (
        load_pairs(data, tokenizer, chat_template=config.data.chat_format, context=context_length(model.classifier))
        for data in (config.data.preferences, config.data.eval_preferences)
    )
    return _report_card(config, model, tokenizer, train, held_out)


def score_gaps(config: RewardModelConfig, path: str) -> tuple[tuple[PairText, ...], list[float]]:
    """Return the held-out pairs of `config` and their score gaps (chosen minus rejected) by the model in `path`.

    Raises:
        ConfigError: there are no held-out pairs.
    """
    if config.data.eval_preferences is None:
        raise ConfigError("nothing to evaluate on: set data.eval_preferences.path")
    model, tokenizer = _load_trained(config, path)
    limit = context_length(model.classifier)
    pairs = load_pairs(config.data.eval_preferences, tokenizer, chat_template=config.data.chat_format, context=limit)
    size, dtype = config.batch.micro_batch_size, config.model.dtype
    chosen, rejected = score_pairs(model, pairs, range(len(pairs)), micro_batch_size=size, dtype=dtype)
    return pairs.texts, (chosen - rejected).tolist()


def finish_reward_model(built: RewardModelRun) -> dict[str, Any]:
    """Calibrate the model, export it to the run folder, write the report card, and return the card.

    Without held-out pairs there is no card: the result is empty.
    """
    config, folder = built.config, built.run.session.recorder.folder
    size, dtype = config.batch.micro_batch_size, config.model.dtype
    calibrate(built.model, built.pairs, config.calibration, micro_batch_size=size, dtype=dtype)
    replace_folder(folder.path / MODEL, built.run.export, built.run.session.ranks)
    if built.eval_pairs is None:
        return {}
    card = _report_card(config, built.model, built.tokenizer, built.pairs, built.eval_pairs)
    built.run.session.ranks.on_main(lambda: folder.write_report_card(card))
    return card


def _load_trained(config: RewardModelConfig, path: str) -> tuple[ScalarHeadModel, PreTrainedTokenizerBase]:
    tokenizer = build_tokenizer(config.model.model_copy(update={"model": path}))
    return load_scalar_head(model_folder(path), tokenizer, new_head=None, dtype=config.model.dtype), tokenizer


def _report_card(
    config: RewardModelConfig,
    model: ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    train: PairSet,
    held_out: PairSet,
) -> dict[str, Any]:
    return evaluate_reward_model(
        model,
        held_out,
        train=train,
        eos_ids=stop_token_ids(tokenizer, config.data.chat_format),
        micro_batch_size=config.batch.micro_batch_size,
        dtype=config.model.dtype,
        seed=config.run.seed,
    ).as_dict()


def _build_model(config: RewardModelConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    path = str(context.resume / MODEL) if context.resume else model_folder(config.model.model)
    with seeded_initialization(context.seed):
        model = _load_model(config, context, path, tokenizer)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model.classifier)
    model.train()
    return model


def _load_model(
    config: RewardModelConfig, context: RunContext, path: str, tokenizer: PreTrainedTokenizerBase
) -> ScalarHeadModel:
    model = load_scalar_head(
        path,
        tokenizer,
        new_head=None if context.resume else "normal",
        dtype=config.model.dtype,
        seed=derive_seed(context.seed, "reward model"),
        trust_remote_code=config.model.trust_remote_code,
    )
    model.packing = config.model.packing
    fast_ways = of_bodies([model.classifier.base_model], packing=config.model.packing)
    context.notes += fast_ways.under_zero(context.engine.sharding.stage).lines()
    return model


def _load_pairs(
    config: RewardModelConfig,
    data: PreferencesConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
) -> PairSet:
    pairs = load_pairs(data, tokenizer, chat_template=config.data.chat_format, context=max_length)
    context.notes.append(pairs.skips.summary())
    return pairs


def _evaluate_pairs(pairs: PairSet | None, loss: BradleyTerryLoss, size: int, ranks: Distributed) -> dict[str, float]:
    if pairs is None:
        return {}
    starts = range(0, len(pairs), size)
    batches = (pairs.collate(list(range(start, min(start + size, len(pairs))))) for start in starts)
    return evaluate_loss(batches, loss, ranks)


def _count_tokens(batch: Batch) -> int:
    assert isinstance(batch, PreferencePairs)
    prompts = 2 * int(batch.prompt_mask.sum())
    return prompts + int(batch.chosen_mask.sum() + batch.rejected_mask.sum())
