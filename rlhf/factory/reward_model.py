"""Build a reward-model run from its configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from reward_model.ensemble import EnsembleLoss, bootstrap_weights
from reward_model.model import BradleyTerryLoss
from rlhf.config.data import PreferencesConfig
from rlhf.config.sections import HeadInit, RewardModelConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.formats import PairText
from rlhf.data.mixture import MixedStream
from rlhf.data.pairs import PairSet, pair_pipeline
from rlhf.errors import ConfigError
from rlhf.evaluation.during_run import PairEvaluation
from rlhf.factory.context import RunContext, keep_best, open_context
from rlhf.factory.data import mix
from rlhf.factory.exported import export_scalar_head
from rlhf.factory.models import build_tokenizer, check_base, note_not_continued, note_overruled, read_export_origin
from rlhf.factory.reward_card import CARD_PAIRS, PAIRS, RewardModelRun
from rlhf.models.backbone import context_length, enable_gradient_checkpointing
from rlhf.models.folders import MODEL, model_folder
from rlhf.models.logprobs import FastWays, of_bodies
from rlhf.models.lora import Dropout
from rlhf.models.saving import save_scalar_head
from rlhf.models.scalar_adapters import (
    base_below,
    check_trainable_heads,
    has_one_head,
    load_adapted,
    load_adapter_weights,
)
from rlhf.models.scalar_head import EnsembleHeadModel, ScalarHeadModel, as_ensemble, load_reward_heads, load_scalar_head
from rlhf.models.stored import store_weights
from rlhf.runtime.device import choose_precision
from rlhf.runtime.engine import TrainableModel
from rlhf.runtime.seeding import derive_seed, seeded_initialization
from rlhf.tracking.metrics import progress_metrics
from rlhf.tracking.view import View
from rlhf.training.checkpoints import Saver, load_trainer_state
from rlhf.training.offline import OfflineRun
from rlhf.types import PreferencePairs


def build_reward_model(config: RewardModelConfig, view: View | None = None) -> RewardModelRun:
    """Build a reward-model run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set or checkpoint is missing or invalid; the subclass says which.
    """
    config, precision = choose_precision(config)
    context = open_context(config, view, precision)
    with context.undone_on_error():
        return _build(config, context)


def _build(config: RewardModelConfig, context: RunContext) -> RewardModelRun:
    tokenizer = build_tokenizer(config.model)
    origin = read_export_origin(config.model, tokenizer, config.data.chat_format)
    model, trained = build_scalar_model(config, context, tokenizer)
    engine, max_length = context.engine, context_length(model.classifier)
    stream = _train_stream(config, context, tokenizer, max_length)
    held_out = config.data.eval_preferences
    eval_pairs = _load_pairs(config, held_out, context, tokenizer, max_length) if held_out is not None else None
    loss = _build_loss(config, model)
    evaluation = PairEvaluation(eval_pairs, loss, config.batch.micro_batch_size, engine.ranks)

    def save_model(folder: Path) -> None:
        save_scalar_head(model, tokenizer, folder, engine)

    session = context.session(
        total_steps=context.total_steps(stream.steps_per_epoch),
        save=Saver(lambda folder: save_model(folder / MODEL), {"model": trained}, None, engine),
        evaluate=evaluation,
        show=progress_metrics("reward_model"),
    )
    _check_best(config, context)
    keep_best(context, session, lambda: evaluation.rows, save_model)
    dtype, kind = config.model.export_dtype, config.model.export
    run = OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=stream.batch,
        sources=stream.names if isinstance(stream, MixedStream) else None,
        loss=loss,
        trained=trained,
        ema=None,
        export=lambda folder: export_scalar_head(model, tokenizer, folder, engine, origin, dtype, kind),
        seed=config.run.seed,
    )
    first_pairs, splits_weights = partial(_first_pairs, stream), engine.splits_weights
    return RewardModelRun(run, config, model, tokenizer, first_pairs, eval_pairs, splits_weights)


def build_scalar_model(
    config: RewardModelConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase
) -> tuple[ScalarHeadModel, TrainableModel]:
    """Build the model and what trains it, as the checkpoint has them if the run is resumed."""
    model = _build_model(config, context, tokenizer)
    fast_ways = None if context.engine.splits_weights else _fast_ways(config, context, model)
    trained = context.train("policy", model, config.model, dtype=config.model.dtype, terms=("rm",))
    fast_ways = fast_ways or _fast_ways(config, context, model)
    context.notes += fast_ways.lines()
    if context.resume is not None:
        trained.load_state(load_trainer_state(context.resume)["model"])
    if context.is_other_run:
        context.state.best = None
    return model, trained


def _train_stream(
    config: RewardModelConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> BatchStream[PreferencePairs] | MixedStream[PairText, PairSet]:
    data, size = config.data.preferences, config.batch.prompts_per_step
    if data.is_plain:
        pairs = _load_pairs(config, data, context, tokenizer, limit)
        _check_margins(config, pairs)
        order = config.ensemble.number("order")
        names = ("pairs",) if order is None else ("pairs", "member", order)
        return BatchStream(pairs, size, derive_seed(context.seed, *names))
    pipeline = pair_pipeline(data, tokenizer, chat_template=config.data.chat_format, context=limit)
    mixture = mix(data, context, pipeline, section=PAIRS, rows_per_step=size)
    if config.loss.use_margin:
        _check_margins(config, mixture.first(CARD_PAIRS))
    return mixture


def _check_margins(config: RewardModelConfig, pairs: PairSet) -> None:
    if config.loss.use_margin and not any(text.margin for text in pairs.texts):
        raise ConfigError(
            "loss.use_margin=true, but no pair of data.preferences has a margin: give a column margin, or "
            "score_chosen and score_rejected, or leave loss.use_margin out"
        )


def _first_pairs(stream: BatchStream[PreferencePairs] | MixedStream[PairText, PairSet]) -> PairSet:
    if isinstance(stream, MixedStream):
        return stream.first(CARD_PAIRS)
    assert isinstance(stream.rows, PairSet)
    return stream.rows


def _build_loss(config: RewardModelConfig, model: ScalarHeadModel) -> BradleyTerryLoss | EnsembleLoss:
    """Build the loss; the seed of bootstrap resamples is the run's, the same for members trained on other machines."""
    seed, dtype = derive_seed(config.run.seed, "bootstrap"), config.model.dtype
    if isinstance(model, EnsembleHeadModel):
        bootstrap = seed if "pairs" in config.ensemble.varied else None
        return EnsembleLoss(model, config.loss, dtype=dtype, bootstrap=bootstrap)
    member = config.ensemble.number("pairs")
    if member is None:
        return BradleyTerryLoss(model, config.loss, dtype=dtype)
    return BradleyTerryLoss(
        model,
        config.loss,
        dtype=dtype,
        weigh=lambda pairs: bootstrap_weights(pairs, [member], seed=seed)[:, 0],
    )


def _check_best(config: RewardModelConfig, context: RunContext) -> None:
    """Check that the best weights can be put back into the model before it is calibrated.

    Raises:
        ConfigError: each rank has only a part of them.
    """
    if config.checkpoint.best is not None and context.engine.sharding.stage == 3:
        raise ConfigError("checkpoint.best of a reward model needs whole weights: set sharding=zero2, ddp or none")


def _build_model(config: RewardModelConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    # Adapters come back onto the base that they started from; a model that is trained whole is in the checkpoint.
    is_whole = context.resume is not None and config.model.lora is None
    path = str(context.resume / MODEL) if context.resume and is_whole else model_folder(config.model.model)
    with seeded_initialization(context.seed):
        model = _load_model(config, context, path, tokenizer)
    context.identify_model("model.model", config.model.model)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model.classifier)
    model.train()
    Dropout(model)  # off until a step, also in the trials of the fast ways
    return model


def _load_model(
    config: RewardModelConfig, context: RunContext, path: str, tokenizer: PreTrainedTokenizerBase
) -> ScalarHeadModel:
    settings: dict[str, Any] = {
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "engine": context.engine,
    }
    lora, weights, how = config.model.lora, config.model.weights, config.ensemble
    member = how.number("head")
    seed = derive_seed(context.seed, "reward model", *(() if member is None else ("member", member)))
    if context.resume is None:
        check_trainable_heads(path, trust_remote_code=config.model.trust_remote_code)
    goes_on = how.size == 1 and has_one_head(path, trust_remote_code=config.model.trust_remote_code)
    new_head: HeadInit | None = None if goes_on else "normal"
    if lora is not None:
        check_base("model", config.model, base_below(path, lora))
        note_not_continued(context, "model", path, lora)
        model = load_adapted(
            path,
            tokenizer,
            lora,
            weights=weights,
            new_head=new_head,
            seed=seed,
            note_overruled=partial(note_overruled, context, "model", path),
            **settings,
        )
    elif context.resume:
        model = load_reward_heads(path, tokenizer, is_checkpoint=context.goes_on_in_dtype, **settings)
    else:
        model = load_scalar_head(path, tokenizer, new_head=new_head, seed=seed, **settings)
    if lora is not None or not context.resume:
        if how.is_shared:
            model = as_ensemble(model, size=how.size, seed=seed, same_head="head" not in how.varied)
        model.reset_calibration()
    if lora is not None and context.resume:
        load_adapter_weights(model, context.resume / MODEL)
    if lora is None and weights != "auto":
        store_weights(model.classifier, weights)
    model.packing = config.model.packing
    return model


def _fast_ways(config: RewardModelConfig, context: RunContext, model: ScalarHeadModel) -> FastWays:
    """Find out by trial which fast paths the model supports; under ZeRO-3 call it once the model is sharded."""
    bodies = [model.classifier.base_model]
    ways = of_bodies(bodies, packing=config.model.packing)
    ways.with_varlen(bodies, config.model.dtype, context.engine.device)
    return ways.under_zero(context.engine.sharding.stage)


def _load_pairs(
    config: RewardModelConfig,
    data: PreferencesConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
) -> PairSet:
    pairs = pair_pipeline(data, tokenizer, chat_template=config.data.chat_format, context=max_length).load()
    is_train = data is config.data.preferences
    context.rows_read("preferences" if is_train else "eval_preferences", pairs.skips)
    return pairs
