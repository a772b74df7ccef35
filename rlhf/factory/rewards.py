"""Build reward sources from their configuration."""

from __future__ import annotations

import os
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from reward_model.source import RewardModelSource
from rlhf.config.reward import ChatSource, EnsembleSource, FunctionSource, ModelSource, RemoteSource, RewardSourceConfig
from rlhf.data.tokenizer import vocabulary_digest
from rlhf.errors import ConfigError
from rlhf.factory.context import model_folder
from rlhf.rewards.ensemble import EnsembleReward, MainRankReward, ShardedReward
from rlhf.rewards.function import FunctionReward
from rlhf.rewards.judge import ChatModel, ChatReward
from rlhf.rewards.remote import RemoteReward
from rlhf.rewards.source import RewardSource
from rlhf.runtime.engine import Engine


def build_source(
    config: RewardSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    warn: Callable[[str], None] = lambda _: None,
) -> RewardSource:
    """Build the reward source that `config` describes.

    Args:
        config: the source.
        tokenizer: the policy's tokenizer, in whose ids the completions are.
        engine: places reward models on devices, and has the process group over which scoring is spread.
        warn: receives a message if a reward model has another vocabulary than the policy.

    Raises:
        RewardError: a function cannot be imported, or an address is invalid.
        ConfigError: a template lacks its fields, or a key or token is not in the environment.
        ModelError: a reward model cannot be loaded.
    """
    match config:
        case FunctionSource():
            function = FunctionReward(config.target, config.kwargs, tokenizer, timeout_s=config.timeout_s)
            return MainRankReward(function, engine.ranks)
        case ModelSource():
            source = RewardModelSource.load(
                model_folder(config.path), tokenizer, device=engine.device, micro_batch_size=config.micro_batch_size
            )
            source.model = engine.freeze("reward", source.model)
            if source.note:
                warn(source.note)
            return ShardedReward(source, engine.ranks)
        case RemoteSource():
            return MainRankReward(_build_remote(config, tokenizer), engine.ranks)
        case ChatSource():
            chat = ChatModel(config, os.environ, section="source")
            return MainRankReward(ChatReward(config, tokenizer, chat, section="source"), engine.ranks)
        case EnsembleSource():
            members = [build_source(member, tokenizer, engine, warn) for member in config.sources]
            return EnsembleReward(members, how=config.how, std_coef=config.std_coef)


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
