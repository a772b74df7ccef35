"""The steps after the training of a reward model: calibration, export, report card.

An ensemble of separate reward models is one run for each member, in a folder that names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from reward_model.ensemble import calibrate_ensemble, member_gaps
from reward_model.evaluate import accuracy, ensemble_card, evaluate_reward_model
from reward_model.model import calibrate, score_pairs
from rlhf.config.sections import RewardModelConfig
from rlhf.data.formats import PairText
from rlhf.data.pairs import PairSet, pair_pipeline
from rlhf.data.tokenizer import stop_token_ids
from rlhf.errors import ConfigError
from rlhf.factory.data import open_mixture
from rlhf.factory.exported import note_export
from rlhf.factory.models import build_tokenizer
from rlhf.models.backbone import context_length
from rlhf.models.folders import MODEL, model_folder, write_members
from rlhf.models.scalar_adapters import load_adapter_weights
from rlhf.models.scalar_head import EnsembleHeadModel, ScalarHeadModel, load_reward_heads
from rlhf.runtime.distributed import is_main_process
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.checkpoint import replace_folder
from rlhf.tracking.exported import read_export
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import MEMBERS
from rlhf.training.offline import OfflineRun

PAIRS = "preferences"  # the section of the pairs
CARD_PAIRS = 8192  # rows of a mixture that calibration and the report card read


@dataclass(frozen=True)
class RewardModelRun:
    """A reward-model run, with what calibration, the export and the report card need."""

    run: OfflineRun
    config: RewardModelConfig
    model: ScalarHeadModel
    tokenizer: PreTrainedTokenizerBase
    load_pairs: Callable[[], PairSet]  # the training rows; of a mixture, as many rows of its beginning as CARD_PAIRS
    eval_pairs: PairSet | None
    splits_weights: bool  # over the ranks: none has the whole model

    @cached_property
    def pairs(self) -> PairSet:
        """Return the pairs that were trained on; of mixed or streamed ones the first."""
        return self.load_pairs()


def compute_report_card(config: RewardModelConfig, path: str) -> dict[str, Any]:
    """Compute the report card of the reward model in `path` on the held-out pairs of `config`.

    Raises:
        ConfigError: there are no held-out pairs.
    """
    if config.process is not None:
        raise ConfigError(
            "a process reward model has no report card: eval/process_accuracy in the run's metrics.jsonl is its "
            "accuracy on held-out steps"
        )
    if config.data.eval_preferences is None:
        raise ConfigError("nothing to evaluate on: set data.eval_preferences.path")
    model, tokenizer = _load_trained(config, path)
    limit, chat = context_length(model.classifier), config.data.chat_format
    held_out = pair_pipeline(config.data.eval_preferences, tokenizer, chat_template=chat, context=limit).load()
    pipeline = pair_pipeline(config.data.preferences, tokenizer, chat_template=chat, context=limit)
    if config.data.preferences.is_plain:
        train = pipeline.load()
    else:
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
    chat = config.data.chat_format
    pairs = pair_pipeline(config.data.eval_preferences, tokenizer, chat_template=chat, context=limit).load()
    size, dtype = config.batch.micro_batch_size, config.model.dtype
    chosen, rejected = score_pairs(model, pairs, range(len(pairs)), micro_batch_size=size, dtype=dtype)
    return pairs.texts, (chosen - rejected).tolist()


def finish_reward_model(built: RewardModelRun) -> dict[str, Any]:
    """Calibrate the model, export it to the run folder, and write and return the report card of the exported model.

    Without held-out pairs there is no card: the result is empty.
    """
    config, folder = built.config, built.run.session.recorder.folder
    _restore_best(built)
    _calibrate(config, built.model, built.pairs)
    replace_folder(folder.path / MODEL, built.run.export, built.run.session.ranks)
    note_export(built.run.session)
    if built.eval_pairs is None:
        return {}
    model = built.model
    if not built.splits_weights and built.run.session.ranks.on_main(lambda: _is_rounded(folder)):
        model = _exported_model(built, folder.path)
    card = _report_card(config, model, built.tokenizer, built.pairs, built.eval_pairs)
    built.run.session.ranks.on_main(lambda: folder.write_report_card(card))
    return card


def _is_rounded(folder: RunFolder) -> bool:
    """Return whether the exported weights may differ from the weights in memory."""
    record = read_export(folder.path)
    return record is None or record.dtype != "float32"


def _calibrate(config: RewardModelConfig, model: ScalarHeadModel, pairs: PairSet) -> None:
    size, dtype = config.batch.micro_batch_size, config.model.dtype
    if isinstance(model, EnsembleHeadModel):
        calibrate_ensemble(model, pairs, config.calibration, micro_batch_size=size, dtype=dtype)
    else:
        calibrate(model, pairs, config.calibration, micro_batch_size=size, dtype=dtype)


def _restore_best(built: RewardModelRun) -> None:
    """Put the weights of the best checkpoint into the model, if the run keeps one and exports it."""
    keeper = built.run.session.best
    best = keeper.finish() if keeper is not None else None
    if best is not None:
        _load_weights(built, best)


def _exported_model(built: RewardModelRun, path: Path) -> ScalarHeadModel:
    """Return the model with the weights as they were rounded for the export."""
    if built.model.adapter is not None:
        exported, _ = _load_trained(built.config, str(path))
        return exported.to(next(built.model.parameters()).device)
    _load_weights(built, path)
    return built.model


def _load_weights(built: RewardModelRun, path: Path) -> None:
    if built.model.adapter is not None:
        load_adapter_weights(built.model, Path(model_folder(str(path))))
        return
    saved, _ = _load_trained(built.config, str(path))
    built.model.classifier.load_state_dict(saved.classifier.state_dict())


def _load_trained(config: RewardModelConfig, path: str) -> tuple[ScalarHeadModel, PreTrainedTokenizerBase]:
    tokenizer = build_tokenizer(config.model.model_copy(update={"model": path}))
    dtype, trust = config.model.dtype, config.model.trust_remote_code
    model = load_reward_heads(model_folder(path), tokenizer, dtype=dtype, trust_remote_code=trust, is_checkpoint=True)
    return model, tokenizer


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
    scored = [score_gaps(member, member.run.out_dir) for member in members]
    gaps = torch.tensor([of_member for _, of_member in scored], dtype=torch.float64)
    mean = accuracy(gaps.mean(dim=0), [str(pair.prompt) for pair in scored[0][0]], seed=config.run.seed)
    card = {
        "accuracy": mean.accuracy,
        "accuracy_low": mean.low,
        "accuracy_high": mean.high,
        "n": mean.n,
        "ensemble": ensemble_card(gaps, seed=config.run.seed).as_dict(),
    }
    RunFolder(folder).write_report_card(card)
    return card
