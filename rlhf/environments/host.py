"""A host of environments: it begins episodes, steps them and ends them, in this process or in a worker's.

An episode has its own state of Python's and numpy's global random generators: many environments draw from them, or
seed them at reset, and would disturb each other and the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy

from rlhf.environments.load import Make
from rlhf.environments.protocol import (
    Environment,
    EnvironmentFault,
    Fault,
    ResetResult,
    StepResult,
    checked_reset,
    checked_step,
    describe_error,
)

LARGEST_NUMPY_SEED = 2**32
LAST_REWARD = "reward_at_limit"  # the method of an environment, as of tools, whose reward is not in its steps


@dataclass(frozen=True)
class Begin:
    """Make an environment and reset it."""

    episode: int
    seed: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Act:
    """Step the environment of an episode."""

    episode: int
    action: str


@dataclass(frozen=True)
class Cut:
    """Ask the environment of an episode that a limit of the run has ended for its last reward."""

    episode: int


@dataclass(frozen=True)
class End:
    """Close the environment of an episode."""

    episode: int


HostRequest = Begin | Act | Cut | End
HostReply = ResetResult | StepResult | Fault | None


@dataclass
class _Episode:
    environment: Environment
    python_state: Any = None
    numpy_state: Any = None


class Host:
    """Runs requests, one after another; a failure of the environment is an answer, never an exception."""

    def __init__(self, make: Make) -> None:
        """Take the maker of the environments."""
        self.make = make
        self._episodes: dict[int, _Episode] = {}

    def handle(self, request: HostRequest) -> HostReply:
        """Run one request.

        Raises:
            BaseException: one that is no Exception, such as the expiry of a time limit.
        """
        try:
            return request_handlers[type(request)](self, request)
        except (Exception, SystemExit) as error:  # whatever an environment raises; exit() ends its episode alone
            reason = str(error) if isinstance(error, EnvironmentFault) else describe_error(error)
            return Fault(reason)

    def drop(self, episode: int) -> None:
        """Forget an episode, without a call of its environment."""
        self._episodes.pop(episode, None)

    def begin(self, request: Begin) -> ResetResult:
        """Make an environment and reset it, from random generators seeded for this episode."""
        with _kept_generators():
            _seed_generators(request.seed)
            environment = self.make()
            episode = self._episodes[request.episode] = _Episode(environment)  # to be closed, also if reset fails
            row = deepcopy(request.options)  # a change of its values is of this episode alone
            result = checked_reset(environment.reset(seed=request.seed, options=row))
            tools = tuple(getattr(environment, "tool_schemas", ()))
            _save_generators(episode)
        return ResetResult(result.observation, tools, callable(getattr(environment, LAST_REWARD, None)))

    def act(self, request: Act) -> StepResult:
        """Step an environment, from the random generators as its last call left them."""
        episode = self._episodes[request.episode]
        with _kept_generators():
            _restore_generators(episode)
            result = checked_step(episode.environment.step(request.action))
            _save_generators(episode)
        return result

    def cut(self, request: Cut) -> StepResult:
        """Ask an environment for the reward of an episode that a limit of the run has ended."""
        episode = self._episodes[request.episode]
        with _kept_generators():
            _restore_generators(episode)
            reward = getattr(episode.environment, LAST_REWARD)()
            _save_generators(episode)
        return checked_step(("", reward, False, True, {}))

    def end(self, request: End) -> None:
        """Close an environment if it can be closed."""
        episode = self._episodes.pop(request.episode, None)
        close = getattr(episode.environment, "close", None) if episode is not None else None
        if callable(close):
            close()


request_handlers: dict[type, Callable[[Host, Any], HostReply]] = {
    Begin: Host.begin,
    Act: Host.act,
    Cut: Host.cut,
    End: Host.end,
}


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Leave the process's random generators unchanged."""
    outside = _Episode(None)  # type: ignore[arg-type]
    _save_generators(outside)
    try:
        yield
    finally:
        _restore_generators(outside)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % LARGEST_NUMPY_SEED)


def _save_generators(episode: _Episode) -> None:
    episode.python_state = random.getstate()
    episode.numpy_state = numpy.random.get_state()


def _restore_generators(episode: _Episode) -> None:
    random.setstate(episode.python_state)
    numpy.random.set_state(episode.numpy_state)
