"""Reward sources from configuration."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from reward_model.source import RewardModelSource
from rlhf.build.context import model_folder
from rlhf.config.sections import EnsembleSource, FunctionSource, ModelSource, RemoteSource, RewardSourceConfig
from rlhf.rewards.ensemble import EnsembleReward
from rlhf.rewards.function import FunctionReward
from rlhf.rewards.remote import RemoteReward
from rlhf.rewards.source import RewardSource
from rlhf.rewards.spread import DealtReward, MainReward
from rlhf.runtime.engine import Engine


def build_source(config: RewardSourceConfig, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> RewardSource:
    """The source that `config` describes, for completions in `tokenizer`'s ids; the same in every process.

    Raises:
        RewardError: a function that cannot be imported.
        ModelError: a reward model that cannot be loaded.
    """
    match config:
        case FunctionSource():
            return MainReward(FunctionReward(config.target, config.kwargs, tokenizer), engine.ranks)
        case ModelSource():
            source = RewardModelSource.load(
                model_folder(config.path), tokenizer, device=engine.device, micro_batch_size=config.micro_batch_size
            )
            source.model = engine.freeze("reward", source.model)
            return DealtReward(source, engine.ranks)
        case RemoteSource():
            remote = RemoteReward(config.url, tokenizer, timeout_s=config.timeout_s, retries=config.retries)
            return MainReward(remote, engine.ranks)
        case EnsembleSource():
            members = [build_source(member, tokenizer, engine) for member in config.sources]
            return EnsembleReward(members, how=config.how, std_coef=config.std_coef)
