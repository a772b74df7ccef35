"""Import what a run names of the user's code and check how it is called, before anything slow is done."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.config.reward import EnsembleSource, FunctionSource, RewardSourceConfig, RulesSource
from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.rewards.function import check_function


def check_functions(config: TrainConfig) -> None:
    """Import every function that a run names, and check that it takes the arguments it will be called with.

    Raises:
        UserError: a function cannot be imported or called so; the message names its key.
    """
    if isinstance(config, OnlineConfig):
        config.algorithm.policy_loss.load()
        config.algorithm.advantage.load()
        for source in _functions_of(config.reward.source):
            check_function(source.target, source.kwargs)
    if config.eval.source is not None:
        for source in _functions_of(config.eval.source):
            check_function(source.target, source.kwargs)


def _functions_of(source: RewardSourceConfig) -> Iterator[FunctionSource]:
    match source:
        case FunctionSource():
            yield source
        case EnsembleSource():
            for member in source.sources:
                yield from _functions_of(member)
        case RulesSource() if source.source is not None:
            yield from _functions_of(source.source)
        case _:
            pass
