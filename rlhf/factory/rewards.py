"""Build reward sources from their configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from reward_model.ensemble import EnsembleModelSource
from reward_model.source import RewardModelSource
from rlhf.config.load import load_chat_format
from rlhf.config.reward import (
    ChatSource,
    EnsembleSource,
    FunctionSource,
    ModelSource,
    RemoteSource,
    RewardSourceConfig,
    RulesSource,
    WatchConfig,
)
from rlhf.data.paths import resolve_best
from rlhf.data.tokenizer import vocabulary_digest
from rlhf.errors import ConfigError
from rlhf.factory.context import RunContext
from rlhf.models.folders import member_folders, model_folder
from rlhf.models.policy_models import keep_in_bfloat16
from rlhf.models.scalar_head import EnsembleHeadModel
from rlhf.rewards.ensemble import EnsembleReward
from rlhf.rewards.function import FunctionReward
from rlhf.rewards.judge import ChatModel, ChatReward
from rlhf.rewards.remote import RemoteReward
from rlhf.rewards.rules import RulesReward
from rlhf.rewards.source import MainRankReward, RewardSource, ShardedReward, WatchingJudge
from rlhf.runtime.device import fallback_note, usable_dtype
from rlhf.runtime.engine import Engine
from rlhf.tracking.fingerprint import content_digest


def build_source(
    config: RewardSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    warn: Callable[[str], None] = lambda _: None,
    *,
    may_abstain: bool = False,
) -> RewardSource:
    """Build the reward source that `config` describes.

    Args:
        config: the source.
        tokenizer: the policy's tokenizer, in whose ids the completions are.
        engine: places reward models on devices, and has the process group over which scoring is spread.
        warn: receives a message if a reward model has another vocabulary than the policy.
        may_abstain: whether a function may leave a completion to other sources, as those of an ensemble may.

    Raises:
        RewardError: a function cannot be imported, or an address is invalid.
        ConfigError: a template lacks its fields, or a key or token is not in the environment.
        ModelError: a reward model cannot be loaded.
    """
    match config:
        case FunctionSource():
            function = FunctionReward(
                config.target, config.kwargs, tokenizer, timeout_s=config.timeout_s, may_abstain=may_abstain
            )
            return MainRankReward(function, engine.ranks)
        case ModelSource():
            return _build_model(config, tokenizer, engine, warn)
        case RemoteSource():
            return MainRankReward(_build_remote(config, tokenizer), engine.ranks)
        case ChatSource():
            chat = ChatModel(config, os.environ, section="source")
            return MainRankReward(ChatReward(config, tokenizer, chat, section="source"), engine.ranks)
        case EnsembleSource():
            members = [build_source(member, tokenizer, engine, warn, may_abstain=True) for member in config.sources]
            return EnsembleReward(
                members,
                how=config.how,
                std_coef=config.std_coef,
                weights=config.weights,
                names=config.names,
                may_abstain=may_abstain,
            )
        case RulesSource():
            ruled = config.source
            source = build_source(ruled, tokenizer, engine, warn, may_abstain=may_abstain) if ruled else None
            return RulesReward(config.rules, tokenizer, source)


def identify_source(config: RewardSourceConfig, context: RunContext, key: str = "reward.source") -> None:
    """Record the weights of the reward models of a source, and check that they are what the run began with.

    The file of a function may change, since a mistake in it may have stopped the run: that is a warning.
    """
    match config:
        case ModelSource():
            context.identify_model(f"{key}.path", resolve_best(config.path))
        case FunctionSource():
            file = Path(config.target.rpartition(":")[0])
            digest = content_digest(file) if file.suffix == ".py" and file.is_file() else None
            context.identify(f"{key}.target", digest, may_change=True)
        case EnsembleSource():
            for number, member in enumerate(config.sources):
                identify_source(member, context, f"{key}.sources.{number}")
        case RulesSource():
            if config.source is not None:
                identify_source(config.source, context, f"{key}.source")
        case _:
            pass


def build_watch(
    config: WatchConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    *,
    seed: int,
    warn: Callable[[str], None],
) -> WatchingJudge | None:
    """Build the judge that watches the training completions; None without one. For errors see build_source."""
    if config is None:
        return None
    source = build_source(config.source, tokenizer, engine, warn)
    return WatchingJudge(source=source, rows=config.rows, every=config.every, seed=seed, warn=warn)


def _build_model(
    config: ModelSource, tokenizer: PreTrainedTokenizerBase, engine: Engine, warn: Callable[[str], None]
) -> RewardSource:
    """Load a reward model, or an ensemble of them, and spread the scoring over the ranks."""
    dtype = usable_dtype(config.dtype, engine.device)
    if dtype != config.dtype:
        warn(fallback_note("reward.source.dtype"))
    members = member_folders(config.path)
    if members:
        single = ModelSource(path="", micro_batch_size=config.micro_batch_size, dtype=dtype)
        sources = [
            _build_model(single.model_copy(update={"path": str(member)}), tokenizer, engine, warn) for member in members
        ]
        names = [f"member.{number}" for number in range(len(members))]
        return EnsembleReward(sources, how=config.how, std_coef=config.std_coef, names=names)
    source = RewardModelSource.load(
        model_folder(config.path),
        tokenizer,
        device=engine.device,
        micro_batch_size=config.micro_batch_size,
        dtype=dtype,
        engine=engine,
        chat=load_chat_format(resolve_best(config.path)),
    )
    source.model = engine.freeze("reward", source.model)
    if not engine.splits_weights:
        keep_in_bfloat16(source.model, dtype=dtype, device=engine.device)
    if source.note:
        warn(source.note)
    if isinstance(source.model, EnsembleHeadModel):
        return ShardedReward(EnsembleModelSource(source, how=config.how, std_coef=config.std_coef), engine.ranks)
    if config.how != "mean":
        raise ConfigError(f"source.how is {config.how}, but {config.path} is one reward model, not an ensemble")
    return ShardedReward(source, engine.ranks)


def _build_remote(config: RemoteSource, tokenizer: PreTrainedTokenizerBase) -> RemoteReward:
    name = config.token_env
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"reward.source.token_env: the environment variable {name} is not set: put the token in it")
    return RemoteReward(
        config.url,
        tokenizer,
        timeout_s=config.timeout_s,
        retries=config.retries,
        secret=os.environ[name] if name is not None else None,
        vocabulary=vocabulary_digest(tokenizer) if config.send_tokens else None,
    )
