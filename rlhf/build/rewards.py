"""Reward sources from configuration."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from reward_model.source import RewardModelSource
from rlhf.build.context import model_folder
from rlhf.config.sections import EnsembleSource, FunctionSource, ModelSource, RemoteSource, RewardSourceConfig
from rlhf.rewards.ensemble import EnsembleReward
from rlhf.rewards.function import FunctionReward
from rlhf.rewards.remote import RemoteReward
from rlhf.rewards.source import RewardSource


def build_source(config: RewardSourceConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> RewardSource:
    """The source that `config` describes, for completions in `tokenizer`'s ids.

    Raises:
        RewardError: a function that cannot be imported.
        ModelError: a reward model that cannot be loaded.
    """
    match config:
        case FunctionSource():
            return FunctionReward(config.target, config.kwargs, tokenizer, timeout_s=config.timeout_s)
        case ModelSource():
            return RewardModelSource.load(
                model_folder(config.path), tokenizer, device=device, micro_batch_size=config.micro_batch_size
            )
        case RemoteSource():
            return RemoteReward(config.url, tokenizer, timeout_s=config.timeout_s, retries=config.retries)
        case EnsembleSource():
            members = [build_source(member, tokenizer, device) for member in config.sources]
            return EnsembleReward(members, how=config.how, std_coef=config.std_coef)
