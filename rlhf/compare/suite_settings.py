"""Complete and check the settings of a comparison's suites, before anything runs and without importing torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rlhf.config.load import dump, merge, validate
from rlhf.config.reward import RewardSourceConfig
from rlhf.config.sections import TrainConfig
from rlhf.errors import ConfigError
from rlhf.evaluation.suites.settings import SETTINGS, SuiteSettings

Json = dict[str, Any]
Settings = dict[str, dict[str, Any]]


def suites_of(
    suites: Mapping[str, Json], train: TrainConfig, proxy: RewardSourceConfig | None, n: int | None
) -> Settings:
    """Complete the settings of the suites for one cell.

    Args:
        suites: the settings that the comparison gives.
        train: the configuration of the cell's run; its seed, device, dtype and chat template hold for the suites too.
        proxy: the reward that is trained on, by which best-of-n picks.
        n: the n of a best-of-n arm, whose suites are those that can draw several answers and keep one; None otherwise.

    Raises:
        ConfigError: no such suite, or a setting is wrong; the message names it.
    """
    complete = {name: _settings(name, given, train) for name, given in suites.items()}
    if n is None:
        return complete
    picking = {name: settings for name, settings in complete.items() if "best_of" in _settings_class(name).model_fields}
    source = None if proxy is None else {"type": proxy.type, **proxy.model_dump(mode="json", exclude_unset=True)}
    return {name: {**settings, "best_of": n, "source": source} for name, settings in picking.items()}


def _settings_class(name: str) -> type[SuiteSettings]:
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"suites: {name!r} is not one of {', '.join(SETTINGS)}{hint}")
    return SETTINGS[name]


def _settings(name: str, given: Json, train: TrainConfig) -> Json:
    """Complete a suite's settings from those of the run, and check them."""
    common = {
        "seed": train.run.seed,
        "device": train.run.device,
        "dtype": train.policy.dtype,
        "trust_remote_code": train.policy.trust_remote_code,
        "chat_template": train.data.chat_template,
        "sampling": {"temperature": train.sampling.temperature, "batch_size": train.sampling.batch_size},
    }
    try:
        return dump(validate(_settings_class(name), merge(common, given)))
    except ConfigError as error:
        raise ConfigError(f"suites.{name}: {error}") from error
