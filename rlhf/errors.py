"""Errors that the user can fix: printed as one plain message instead of a traceback, with exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong, where, and what to do."""


class ConfigError(UserError):
    """An invalid key, value or combination of values in the configuration."""


class DataError(UserError):
    """A problem with a data file, its rows, or their tokenization."""


class ModelError(UserError):
    """A problem with a model or tokenizer folder."""


class RewardError(UserError):
    """A problem with a reward source: its scores or its availability."""


class SamplingError(UserError):
    """A problem with a sampling server: it does not answer, or its weights are not the trainer's."""


class CheckpointError(UserError):
    """A problem with a run folder or a checkpoint in it."""


class NonFiniteScores(RewardError):
    """A score that is NaN or infinite; the message names the completion."""


class DivergenceError(UserError):
    """Too many steps in a row with a NaN or Inf."""


class ResourceError(UserError):
    """Not enough memory or disk space."""


class RankLost(UserError):
    """Another rank died, or sent nothing within the timeout."""


_PYTHON: ContextVar[bool] = ContextVar("python", default=False)


@contextmanager
def called_from_python() -> Iterator[None]:
    """Let messages name arguments of the Python interface in place of commands and settings."""
    token = _PYTHON.set(True)
    try:
        yield
    finally:
        _PYTHON.reset(token)


def command_or_call(command: str, call: str) -> str:
    """Return the text for the interface in use: `command` on the command line, `call` from Python."""
    return call if _PYTHON.get() else command


def how_to_continue(folder: object = "...") -> str:
    """Describe how the run in a folder is continued, as the beginning of a sentence."""
    call = f"the same call with folder={str(folder)!r} and resume=True continues"
    return command_or_call("the same command continues", call)


DISTRIBUTION = "rlhf-trainer"  # what pip calls this project; on the package index `rlhf` is somebody else's


def install_hint(extra: str) -> str:
    """Describe how to install an optional extra of this project."""
    return f"run `pip install '{DISTRIBUTION}[{extra}]'` (in a checkout: `bash scripts/setup.sh {extra}`)"


def did_you_mean(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "; did you mean ...?" with the choice most like `name`, or with two that are equally like it; else ""."""
    ratios = {choice: difflib.SequenceMatcher(None, choice, name).ratio() for choice in choices}
    best = max(ratios.values(), default=0.0)
    closest = [choice for choice, ratio in ratios.items() if ratio == best >= cutoff]
    return f"; did you mean {' or '.join(closest)}?" if 0 < len(closest) <= 2 else ""
