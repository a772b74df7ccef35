"""Import the functions of the user that a run names and check their arguments, before anything slow is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from rlhf.config.algorithm import FunctionAdvantage, FunctionLoss
from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.errors import ConfigError, did_you_mean
from rlhf.rewards.source import sources_in
from rlhf.section import Section
from rlhf.user_code import checked_per_token, load_function

ARGUMENTS: Mapping[type[Section], tuple[str, str, Sequence[str]]] = {
    FunctionLoss: ("loss", "algorithm.policy_loss", ("logprobs", "old_logprobs", "advantages", "mask")),
    FunctionAdvantage: ("advantage", "algorithm.advantage", ("rewards", "mask", "group_size")),
}
"""For each section: the word for its function, its key, and the arguments that the function is called with."""


def user_function(config: Section) -> Callable[..., Tensor] | None:
    """Return the loss or advantage that a section of type function names; None for any other section.

    Raises:
        ConfigError: there is no such function, or it does not take the arguments.
    """
    if not isinstance(config, FunctionLoss | FunctionAdvantage):
        return None
    what, key, arguments = ARGUMENTS[type(config)]
    function = load_function(config.target, what=what, error=ConfigError)
    _check_arguments(function, config.target, key, arguments, config.kwargs)
    called = partial(function, **config.kwargs)
    return checked_per_token(called, f"the {what} {config.target!r}", finite=what == "advantage")


def check_functions(config: TrainConfig) -> None:
    """Import every function that a run names and check its arguments, and check the reward sources.

    Raises:
        UserError: a function cannot be imported or called so, or a source cannot be built; the message names its key.
    """
    sources = sources_in(config.eval, "eval")
    if isinstance(config, OnlineConfig):
        user_function(config.algorithm.policy_loss)
        user_function(config.algorithm.advantage)
        sources = chain(sources_in(config.reward, "reward"), sources)
    for _, source in sources:
        source.check()


def _check_arguments(
    function: Callable[..., Any], target: str, key: str, arguments: Sequence[str], kwargs: Mapping[str, Any]
) -> None:
    """Check by its signature that a function takes these arguments and keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none
        return
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        names = [name for name in signature.parameters if name not in arguments]
        hint = did_you_mean(unknown[0], names) if unknown else ""
        given = f"{key}.kwargs: {unknown[0]!r} is no argument of {target!r}{hint}" if unknown else f"{key}: {error}"
        raise ConfigError(
            f"{given}. It is called with {', '.join([*arguments, *kwargs])}, and has the arguments {signature}"
        ) from error
