"""`gym:ID`: environments that are registered with Gymnasium and speak text, such as gem's and textworld's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

from rlhf.environments.load import Adapter, Make
from rlhf.errors import ConfigError, did_you_mean, install_hint
from rlhf.user_code import load_module

NUMBER = re.compile(r"-?[0-9]+")
MOST_DIGITS = 18
OWN_HINT = re.compile("Did you mean|Please use")  # in Gymnasium's message


class GymAdapter(Adapter):
    """Makes the environments that `gymnasium.make` knows; `gym:package:ID` imports the package first."""

    name: ClassVar[str] = "gym"
    extra: ClassVar[str] = "gym"

    @classmethod
    def load(cls, target: str, kwargs: Mapping[str, Any]) -> Make:
        """Return the maker of the environment of this ID, with its wrappers and its limit of steps.

        Gymnasium's checker of spaces is left out: text is in none.

        Raises:
            ConfigError: Gymnasium or the package is not installed, or has no such ID.
        """
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError(f"environment.target gym:{target} needs gymnasium: {install_hint(cls.extra)}") from error
        package, _, identifier = target.rpartition(":")
        if package:  # it registers its environments
            load_module(package, what="environment", error=ConfigError)
        try:
            spec = gymnasium.spec(identifier)
        except (gymnasium.error.Error, ImportError) as error:
            hint = "" if OWN_HINT.search(str(error)) else did_you_mean(identifier, gymnasium.registry)
            raise ConfigError(f"environment.target gym:{target}: {error}{hint}") from error
        if spec.entry_point is None:
            raise ConfigError(f"environment.target gym:{target}: this ID has no entry point")
        return lambda: TextOnly(gymnasium.make(identifier, disable_env_checker=True, **deepcopy(kwargs)))


class TextOnly:
    """A Gymnasium environment whose actions may be numbers: a discrete space takes the number in the text."""

    def __init__(self, environment: Any) -> None:
        """Take the environment."""
        self.environment = environment
        count, start = getattr(environment.action_space, "n", None), getattr(environment.action_space, "start", 0)
        self.choices = None if count is None else range(int(start), int(start) + int(count))

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Reset the environment; an observation that is no text is written out."""
        observation, info = self.environment.reset(seed=seed, options=dict(options or {}))
        return _as_text(observation), info

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        """Take the text, or the one number in it; an action that is not legal gets a message and no reward."""
        chosen: Any = action
        if self.choices is not None:
            numbers = NUMBER.findall(action)
            if len(numbers) != 1 or len(numbers[0]) > MOST_DIGITS or int(numbers[0]) not in self.choices:
                message = f"Answer with one whole number from {self.choices[0]} to {self.choices[-1]}."
                return message, 0.0, False, False, {"malformed": 1.0}
            chosen = int(numbers[0])
        observation, reward, terminated, truncated, info = self.environment.step(chosen)
        return _as_text(observation), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()


def _as_text(observation: Any) -> Any:
    is_messages = isinstance(observation, list) and all(isinstance(message, Mapping) for message in observation)
    return observation if isinstance(observation, str) or is_messages else str(observation)
