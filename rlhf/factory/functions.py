"""Import the user's code that a run names and check its arguments, before anything slow is done."""

from __future__ import annotations

from itertools import chain

from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.rewards.source import sources_in


def check_functions(config: TrainConfig) -> None:
    """Import every function that a run names and check its arguments, and check the reward sources.

    Raises:
        UserError: a function cannot be imported or called so, or a source cannot be built; the message names its key.
    """
    sources = sources_in(config.eval, "eval")
    if isinstance(config, OnlineConfig):
        config.algorithm.policy_loss.load()
        config.algorithm.advantage.load()
        sources = chain(sources_in(config.reward, "reward"), sources)
    for _, source in sources:
        source.check()
    if config.environment is not None:
        config.environment.check()
