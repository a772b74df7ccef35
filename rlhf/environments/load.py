"""Make the environments that a configuration names: by a class of the user, or another library's by a prefix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

from rlhf.environments.protocol import Environment
from rlhf.errors import ConfigError, did_you_mean
from rlhf.section import Named
from rlhf.user_code import OBJECT, load_function

WHAT = "environment"
Make = Callable[[], Environment]
"""Makes one environment, in the state before its reset."""


class Adapter(Named):
    """Makes environments of another library, by a prefix: a class below it with `name = "gym"` has `gym:ID`."""

    name: ClassVar[str]
    extra: ClassVar[str] = ""
    """The optional extra of this project that installs the library; empty if there is none."""

    @classmethod
    def load(cls, target: str, kwargs: Mapping[str, Any]) -> Make:
        """Return the maker of an environment; `target` is the text after the prefix.

        Raises:
            ConfigError: the library is not installed, or has no such environment.
        """
        raise NotImplementedError


def adapter_of(target: str) -> tuple[type[Adapter], str] | None:
    """Return the adapter that a target names by its prefix, with the rest of it; None without such a prefix."""
    from rlhf.environments import gym, reasoning, textarena  # noqa: F401  # they register themselves

    prefix, colon, rest = target.partition(":")
    adapter = Adapter.choices().get(prefix)
    return (adapter, rest) if colon and adapter is not None and not target.startswith(OBJECT) else None


def load_environment(target: str, kwargs: Mapping[str, Any]) -> Make:
    """Return the maker of the environments that `target` names, and check how they are made.

    Raises:
        ConfigError: there is no such class, it has no reset, it is of tools without a reward, or it does not take the
            keywords.
    """
    from rlhf.environments.tools import ToolEnvironment, is_tool_class

    chosen = adapter_of(target)
    if chosen is not None:
        return chosen[0].load(chosen[1], kwargs)
    made = load_function(target, what=WHAT, error=ConfigError)
    _check_arguments(made, target, kwargs)
    if is_tool_class(made):
        _check_reward(made, target)
        return lambda: ToolEnvironment(made(**deepcopy(kwargs)))
    if isinstance(made, type) and not (hasattr(made, "reset") and hasattr(made, "step")):
        names = [name for name in vars(made) if not name.startswith("_")]
        raise ConfigError(
            f"environment.target {target!r} needs the methods reset(seed, options) and step(action)"
            f"{did_you_mean('step', names)}; a class of tools needs reset and public methods with type hints"
        )
    return lambda: _checked(made(**deepcopy(kwargs)), target)


def _check_reward(made: Any, target: str) -> None:
    from rlhf.environments.tools import REWARD

    if not callable(getattr(made, REWARD, None)):
        raise ConfigError(
            f"environment.target {target!r} is a class of tools without {REWARD}: define {REWARD}(self), which returns "
            "the reward of an episode that has ended, as TRL's reward functions read it from the instance. Without it "
            "every episode would earn 0"
        )


def _checked(environment: Any, target: str) -> Environment:
    if not isinstance(environment, Environment):
        raise ConfigError(f"environment.target {target!r} made a {type(environment).__name__} without reset or step")
    return environment


def _check_arguments(made: Callable[..., Any], target: str, kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(made)
        signature.bind(**kwargs)
    except ValueError:  # some built-ins have none
        return
    except TypeError as error:
        unknown = next((name for name in kwargs if name not in signature.parameters), "")
        hint = did_you_mean(unknown, signature.parameters) if unknown else ""
        raise ConfigError(f"environment.kwargs: {target!r} has the arguments {signature}: {error}{hint}") from error
