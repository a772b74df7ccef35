"""Build a reward-model run from its configuration, and what follows it: calibration, export, report card.

An ensemble of separate reward models is one run for each member, in a folder that names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from reward_model.ensemble import EnsembleLoss, bootstrap_weights, calibrate_ensemble, member_gaps
from reward_model.evaluate import ensemble_card, evaluate_reward_model
from reward_model.model import BradleyTerryLoss, calibrate, score_pairs
from rlhf.batching import Batch
from rlhf.config.data import PreferencesConfig
from rlhf.config.sections import RewardModelConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.formats import PairText
from rlhf.data.mixture import MixedStream
from rlhf.data.pairs import PairSet, load_pairs, pair_pipeline
from rlhf.data.tokenizer import stop_token_ids
from rlhf.errors import ConfigError
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.factory.context import (
    MODEL,
    RunContext,
    keep_best,
    load_trainer_state,
    model_folder,
    open_context,
    save_scalar_head,
    save_trainer_state,
    total_steps,
    write_members,
)
from rlhf.factory.data import mix, open_mixture
from rlhf.factory.exported import export_scalar_head, note_export, rounded_inputs
from rlhf.factory.models import build_tokenizer, read_export_origin
from rlhf.models.backbone import context_length, enable_gradient_checkpointing
from rlhf.models.logprobs import FastWays, of_bodies
from rlhf.models.scalar_head import EnsembleHeadModel, ScalarHeadModel, as_ensemble, load_reward_heads, load_scalar_head
from rlhf.runtime.device import choose_precision
from rlhf.runtime.distributed import Distributed, is_main_process
from rlhf.runtime.seeding import derive_seed, seeded_initialization
from rlhf.tracking.checkpoint import replace_folder
from rlhf.tracking.exported import read_export
from rlhf.tracking.metrics import progress_metrics
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import MEMBERS
from rlhf.training.offline import OfflineRun
from rlhf.types import PreferencePairs

PAIRS = "preferences"  # the section of the pairs
CARD_PAIRS = 8192  # rows of a mixture that calibration and the report card read


@dataclass(frozen=True)
class RewardModelRun:
    """A reward-model run, with what calibration, the export and the report card need."""

    run: OfflineRun
    config: RewardModelConfig
    model: ScalarHeadModel
    tokenizer: PreTrainedTokenizerBase
    load_pairs: Callable[[], PairSet]  # what was trained on; of a mixture, as many rows of its beginning as CARD_PAIRS
    eval_pairs: PairSet | None
    splits_weights: bool  # over the ranks: none has the whole model

    @cached_property
    def pairs(self) -> PairSet:
        """Return the pairs that were trained on; of mixed or streamed ones the first."""
        return self.load_pairs()


def build_reward_model(config: RewardModelConfig, console: Console | None = None) -> RewardModelRun:
    """Build a reward-model run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set or checkpoint is missing or invalid; the subclass says which.
    """
    config, precision = choose_precision(config)
    context = open_context(config, console, [*precision, *(f"warning: {text}" for text in rounded_inputs(config))])
    with context.undone_on_error():
        return _build(config, context)


def _build(config: RewardModelConfig, context: RunContext) -> RewardModelRun:
    tokenizer = build_tokenizer(config.model)
    origin = read_export_origin(config.model, tokenizer)
    model = _build_model(config, context, tokenizer)
    fast_ways = None if context.engine.splits_weights else _fast_ways(config, context, model)
    trained = context.engine.train("policy", model, config.model, terms=("rm",))
    fast_ways = fast_ways or _fast_ways(config, context, model)
    context.notes += fast_ways.lines()
    if context.resume is not None:
        trained.load_state(load_trainer_state(context.resume)["model"])
    if context.is_other_run:
        context.state.best = None
    max_length = context_length(model.classifier)
    stream = _train_stream(config, context, tokenizer, max_length)
    held_out = config.data.eval_preferences
    eval_pairs = _load_pairs(config, held_out, context, tokenizer, max_length) if held_out is not None else None
    loss = _build_loss(config, model)

    def save(folder: Path) -> None:
        save_scalar_head(model, tokenizer, folder / MODEL, context.engine)
        save_trainer_state(folder, {"model": trained}, {}, context.engine)

    rows: dict[str, list[float]] = {}  # of the latest evaluation

    def evaluate(_step: int) -> dict[str, float]:
        return _evaluate_pairs(eval_pairs, loss, config.batch.micro_batch_size, context.engine.ranks, rows)

    session = context.session(
        total_steps=total_steps(config.schedule, stream.steps_per_epoch),
        save=save,
        evaluate=evaluate,
        show=progress_metrics("reward_model"),
    )
    _check_best(config, context)
    keep_best(context, session, lambda: rows, lambda folder: save_scalar_head(model, tokenizer, folder, context.engine))
    run = OfflineRun(
        batch=config.batch,
        schedule=config.schedule,
        session=session,
        data=stream.batch,
        sources=stream.names if isinstance(stream, MixedStream) else None,
        loss=loss,
        trained=trained,
        ema=None,
        tokens=_count_tokens,
        export=lambda folder: export_scalar_head(
            model, tokenizer, folder, context.engine, origin, config.model.export_dtype
        ),
    )
    first_pairs, splits_weights = partial(_first_pairs, stream), context.engine.splits_weights
    return RewardModelRun(run, config, model, tokenizer, first_pairs, eval_pairs, splits_weights)


def _train_stream(
    config: RewardModelConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> BatchStream[PreferencePairs] | MixedStream[PairText, PairSet]:
    """Return the batches of training pairs."""
    data, size = config.data.preferences, config.batch.prompts_per_step
    if data.is_plain:
        pairs = _load_pairs(config, data, context, tokenizer, limit)
        order = config.ensemble.number("order")
        names = ("pairs",) if order is None else ("pairs", "member", order)
        return BatchStream(pairs, size, derive_seed(context.seed, *names))
    pipeline = pair_pipeline(data, tokenizer, chat_template=config.data.chat_format, context=limit)
    return mix(data, context, pipeline, section=PAIRS, rows_per_step=size)


def _first_pairs(stream: BatchStream[PreferencePairs] | MixedStream[PairText, PairSet]) -> PairSet:
    if isinstance(stream, MixedStream):
        return stream.first(CARD_PAIRS)
    assert isinstance(stream.rows, PairSet)
    return stream.rows


def compute_report_card(config: RewardModelConfig, path: str) -> dict[str, Any]:
    """Compute the report card of the reward model in `path` on the held-out pairs of `config`.

    Raises:
        ConfigError: there are no held-out pairs.
    """
    if config.data.eval_preferences is None:
        raise ConfigError("nothing to evaluate on: set data.eval_preferences.path")
    model, tokenizer = _load_trained(config, path)
    limit, chat = context_length(model.classifier), config.data.chat_format
    held_out = load_pairs(config.data.eval_preferences, tokenizer, chat_template=chat, context=limit)
    if config.data.preferences.is_plain:
        train = load_pairs(config.data.preferences, tokenizer, chat_template=chat, context=limit)
    else:
        pipeline = pair_pipeline(config.data.preferences, tokenizer, chat_template=chat, context=limit)
        seed = derive_seed(config.run.seed, PAIRS)
        train = open_mixture(config.data.preferences, pipeline, seed=seed, name=PAIRS, rows_per_step=1).first(
            CARD_PAIRS
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
    """Calibrate the model, export it to the run folder, and write and return the report card of what was exported.

    Without held-out pairs there is no card: the result is empty.
    """
    config, folder = built.config, built.run.session.recorder.folder
    _restore_best(built)
    _calibrate(config, built.model, built.pairs)
    replace_folder(folder.path / MODEL, built.run.export, built.run.session.ranks)
    note_export(built.run.session)
    if built.eval_pairs is None:
        return {}
    if not built.splits_weights and built.run.session.ranks.on_main(lambda: _is_rounded(folder)):
        _load_weights(built, folder.path)  # rounded
    card = _report_card(config, built.model, built.tokenizer, built.pairs, built.eval_pairs)
    built.run.session.ranks.on_main(lambda: folder.write_report_card(card))
    return card


def _is_rounded(folder: RunFolder) -> bool:
    """Return whether the exported weights may differ from those in memory."""
    record = read_export(folder.path)
    return record is None or record.dtype != "float32"


def _calibrate(config: RewardModelConfig, model: ScalarHeadModel, pairs: PairSet) -> None:
    size, dtype = config.batch.micro_batch_size, config.model.dtype
    if isinstance(model, EnsembleHeadModel):
        calibrate_ensemble(model, pairs, config.calibration, micro_batch_size=size, dtype=dtype)
    else:
        calibrate(model, pairs, config.calibration, micro_batch_size=size, dtype=dtype)


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


def _restore_best(built: RewardModelRun) -> None:
    """Put the weights of the best checkpoint into the model, if the run keeps one and exports it."""
    keeper = built.run.session.best
    best = keeper.finish() if keeper is not None else None
    if best is not None:
        _load_weights(built, best)


def _load_weights(built: RewardModelRun, path: Path) -> None:
    """Put the weights of a saved reward model into the run's."""
    saved, _ = _load_trained(built.config, str(path))
    built.model.classifier.load_state_dict(saved.classifier.state_dict())


def _load_trained(config: RewardModelConfig, path: str) -> tuple[ScalarHeadModel, PreTrainedTokenizerBase]:
    tokenizer = build_tokenizer(config.model.model_copy(update={"model": path}))
    dtype, trust = config.model.dtype, config.model.trust_remote_code
    return load_reward_heads(model_folder(path), tokenizer, dtype=dtype, trust_remote_code=trust), tokenizer


def _report_card(
    config: RewardModelConfig,
    model: ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    train: PairSet,
    held_out: PairSet,
) -> dict[str, Any]:
    size, dtype, seed = config.batch.micro_batch_size, config.model.dtype, config.run.seed
    card = evaluate_reward_model(
        model,
        held_out,
        train=train,
        eos_ids=stop_token_ids(tokenizer, config.data.chat_format),
        micro_batch_size=size,
        dtype=dtype,
        seed=seed,
    ).as_dict()
    if isinstance(model, EnsembleHeadModel):
        gaps = member_gaps(model, held_out, micro_batch_size=size, dtype=dtype)
        card["ensemble"] = ensemble_card(gaps, seed=seed).as_dict()
    return card


def _build_model(config: RewardModelConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    path = str(context.resume / MODEL) if context.resume else model_folder(config.model.model)
    with seeded_initialization(context.seed):
        model = _load_model(config, context, path, tokenizer)
    context.identify_model("model.model", config.model.model)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model.classifier)
    model.train()
    return model


def _load_model(
    config: RewardModelConfig, context: RunContext, path: str, tokenizer: PreTrainedTokenizerBase
) -> ScalarHeadModel:
    settings: dict[str, Any] = {
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "engine": context.engine,
    }
    if context.resume:
        model = load_reward_heads(path, tokenizer, **settings)
    else:
        member = config.ensemble.number("head")
        seed = derive_seed(context.seed, "reward model", *(() if member is None else ("member", member)))
        model = load_scalar_head(path, tokenizer, new_head="normal", seed=seed, **settings)
        if config.ensemble.is_shared:
            same_head = "head" not in config.ensemble.varied
            model = as_ensemble(model, size=config.ensemble.size, seed=seed, same_head=same_head)
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
    pairs = load_pairs(data, tokenizer, chat_template=config.data.chat_format, context=max_length)
    is_train = data is config.data.preferences
    context.rows_read("preferences" if is_train else "eval_preferences", pairs.skips)
    return pairs


def _evaluate_pairs(
    pairs: PairSet | None,
    loss: BradleyTerryLoss | EnsembleLoss,
    size: int,
    ranks: Distributed,
    rows: dict[str, list[float]],
) -> dict[str, float]:
    if pairs is None:
        return {}
    starts = range(0, len(pairs), size)
    batches = (pairs.collate(list(range(start, min(start + size, len(pairs))))) for start in starts)
    return evaluate_loss(batches, loss, ranks, rows=rows)


def _count_tokens(batch: Batch) -> int:
    assert isinstance(batch, PreferencePairs)
    prompts = 2 * int(batch.prompt_mask.sum())
    return prompts + int(batch.chosen_mask.sum() + batch.rejected_mask.sum())


def member_configs(config: RewardModelConfig) -> list[RewardModelConfig]:
    """Return the configuration of each member's own run; empty unless all of several separate ones are to be trained.

    A member's run has a folder of its own and says which member it is, so that it can be repeated, or trained on
    another machine, by itself.
    """
    ensemble = config.ensemble
    if ensemble.size == 1 or ensemble.backbone == "shared" or ensemble.member is not None:
        return []
    return [_member_config(config, number) for number in range(ensemble.size)]


def _member_config(config: RewardModelConfig, number: int) -> RewardModelConfig:
    folder = Path(config.run.out_dir) / MEMBERS / str(number)
    run = config.run.model_copy(update={"out_dir": str(folder), "name": f"{config.run.name}, member {number}"})
    ensemble = config.ensemble.model_copy(update={"member": number})
    return config.model_copy(update={"run": run, "ensemble": ensemble})


def finish_members(config: RewardModelConfig, members: Sequence[RewardModelConfig]) -> dict[str, Any]:
    """Write the members' names and the ensemble's report card into its folder, and return the card.

    Without held-out pairs the card is empty.
    """
    if not is_main_process():
        return {}
    folder = Path(config.run.out_dir)
    write_members(folder, [f"{MEMBERS}/{number}" for number in range(len(members))])
    if config.data.eval_preferences is None:
        return {}
    gaps = torch.tensor([score_gaps(member, member.run.out_dir)[1] for member in members], dtype=torch.float64)
    card = {"ensemble": ensemble_card(gaps, seed=config.run.seed).as_dict()}
    RunFolder(folder).write_report_card(card)
    return card
