"""Errors that are the user's to fix: printed as one plain message, never as a traceback, exit code 2."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right; the message says what is wrong, where, and what to do."""


class ConfigError(UserError):
    """A key, value or combination in the configuration."""


class DataError(UserError):
    """A data file, its rows, or what tokenization makes of them."""


class ModelError(UserError):
    """A model or tokenizer folder."""


class RewardError(UserError):
    """A reward source: its scores or its availability."""


class CheckpointError(UserError):
    """A run folder or a checkpoint in it."""


class NonFiniteScores(RewardError):
    """A score that is NaN or infinite; the message names the completion."""


class DivergenceError(UserError):
    """NaN or Inf, too often in a row."""


class ResourceError(UserError):
    """The machine has too little: memory, disk."""


class ProcessLost(UserError):
    """Another process of the run died, or was silent for too long."""


def install_hint(extra: str) -> str:
    """Say how to install an optional part of this project.

    From a checkout: on the package index the name belongs to another project.
    """
    return f"in the checkout of this project run `bash scripts/setup.sh {extra}` (or `pip install -e '.[{extra}]'`)"
