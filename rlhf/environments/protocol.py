"""Defines environments: Gymnasium's reset and step, with text or messages, and checks of their results.

    class Guess:
        def reset(self, *, seed=None, options=None):  # options: the data row
            return "Guess my number.", {}

        def step(self, action):
            return "higher", 0.0, False, False, {}    # observation, reward, terminated, truncated, info

A subclass of gymnasium.Env is one without changes. Nothing here imports torch: worker processes start with it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

Observation = str | list[dict[str, Any]]
"""The policy's next input: a text, which is a user's message if there is a chat template, or messages."""

STEP_FORM = "step returns (observation, reward, terminated, truncated, info)"
RESET_FORM = "reset returns (observation, info)"
LARGEST_REWARD = 3.0e38  # float32
TOOL_CALLS, TOOL_ERRORS, MALFORMED = "tool_calls", "tool_errors", "malformed"  # numbers of info that are logged
QUOTED = 300  # characters of a fault that are kept


@runtime_checkable
class Environment(Protocol):
    """One task for the policy: it is reset once, then answers each action, until it says that the episode is over."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin an episode; return the first observation and a dictionary of further information.

        The observation goes below the prompt of the data row; messages take its place, and None or "" leaves it.

        Args:
            seed: of the episode's own random numbers; the episodes of a group have the same.
            options: the columns of the data row.
        """

    def step(self, action: str) -> Any:
        """Take the policy's text of this turn; return (observation, reward, terminated, truncated, info)."""


class EnvironmentFault(Exception):
    """An environment raised, hung, or did not return a step: a failure of the machinery, not of the policy."""


@dataclass(frozen=True)
class ResetResult:
    """The first observation of an episode, and the tools of its environment."""

    observation: Observation
    tools: tuple[Mapping[str, Any], ...] = ()  # as chat templates take them; an environment's `tool_schemas`
    has_last_reward: bool = False  # the environment has `reward_at_limit`, for an episode that a limit of the run ends


@dataclass(frozen=True)
class StepResult:
    """The answer to one action."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    metrics: Mapping[str, float] = field(default_factory=dict)  # the finite numbers of info

    @property
    def is_tool_result(self) -> bool:
        """Return whether the observation comes from tools."""
        return self.metrics.get(TOOL_CALLS, 0.0) > 0


@dataclass(frozen=True)
class Fault:
    """The reason that an environment gave no answer, in one line."""

    reason: str


def checked_reset(returned: Any) -> ResetResult:
    """Check what reset returned; the information is optional, as in older environments and TRL's.

    Raises:
        EnvironmentFault: it is not a text, messages or None, alone or with a dictionary.
    """
    observation = returned
    if isinstance(returned, tuple) and not all(map(_is_message, returned)):
        if len(returned) != 2:
            raise EnvironmentFault(f"{RESET_FORM}; it returned {len(returned)} values")
        observation, info = returned
        if not isinstance(info, Mapping | None):
            raise EnvironmentFault(f"{RESET_FORM}; the info is a {type(info).__name__}")
    return ResetResult(_observation("" if observation is None else observation, RESET_FORM))


def checked_step(returned: Any) -> StepResult:
    """Check what step returned.

    Raises:
        EnvironmentFault: it is not Gymnasium's five, the observation is no text, the reward no finite number, or
            `terminated` or `truncated` neither true nor false.
    """
    if not isinstance(returned, tuple) or len(returned) != 5:
        got = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise EnvironmentFault(f"{STEP_FORM}; it returned {got}")
    observation, reward, terminated, truncated, info = returned
    number = _number(reward)
    if number is None:
        raise EnvironmentFault(f"the reward has to be a finite number; step returned {_typed(reward)}")
    numbers = info.items() if isinstance(info, Mapping) else ()
    metrics = {str(name): value for name, raw in numbers if (value := _number(raw)) is not None}
    text = _observation("" if observation is None else observation, STEP_FORM)
    return StepResult(text, number, _flag("terminated", terminated), _flag("truncated", truncated), metrics)


def _observation(value: Any, form: str) -> Observation:
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes) and all(map(_is_message, value)):
        return [{**message, "content": _encodable(message["content"] or "")} for message in value]
    raise EnvironmentFault(f"{form}, with a text or a list of messages; the observation is a {type(value).__name__}")


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be tokenized


def _is_message(value: Any) -> bool:
    has_role = isinstance(value, Mapping) and isinstance(value.get("role"), str)
    return has_role and "content" in value and isinstance(value["content"], str | None)


def _number(value: Any) -> float | None:
    """Return a number as a float that float32 holds; None for anything else. A tensor of one number is one."""
    value = _plain(value)
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer that no float holds
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST_REWARD else None


def _flag(name: str, value: Any) -> bool:
    """Return a value that is true, false, 0, 1 or None as a bool."""
    plain = _plain(value)
    if plain is None or (isinstance(plain, Real) and plain in (0, 1)):
        return bool(plain)
    raise EnvironmentFault(f"{name} has to be true or false; step returned {_typed(value)}")


def _plain(value: Any) -> Any:
    """Return the element of an array or a tensor of one element; anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (RuntimeError, TypeError, ValueError):  # of several elements
        return value


def _typed(value: Any) -> str:
    return f"the {type(value).__name__} {repr(value)[:40]}"


def describe_error(error: BaseException) -> str:
    """Return an exception in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:QUOTED]}{place}"
