"""Find the settings on which the arms of a comparison differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.config.load import dump
from rlhf.config.sections import TrainConfig
from rlhf.runtime.loggers import flatten

OWN = ("run.name", "run.out_dir", "run.seed")  # differ between any two cells


def differences(configs: Mapping[str, TrainConfig]) -> dict[str, dict[str, Any]]:
    """Return dotted key -> arm -> value, for every key that some arm sets and on which two arms disagree.

    An arm has no value for the keys of a section that it does not read.
    """
    settings_of = {arm: _settings_read(config) for arm, config in configs.items()}
    keys = dict.fromkeys(key for config in configs.values() for key in _settings_set(config))
    missing = object()
    return {
        key: {arm: settings[key] for arm, settings in settings_of.items() if key in settings}
        for key in keys
        if key not in OWN and len({repr(settings.get(key, missing)) for settings in settings_of.values()}) > 1
    }


def _settings_set(config: TrainConfig) -> dict[str, object]:
    """Return the keys that the files or a preset set."""
    return flatten(config.model_dump(mode="json", exclude_unset=True))


def _settings_read(config: TrainConfig) -> dict[str, object]:
    """Return every key, defaults included, of the sections and data sets that are set."""
    tree = {section: value for section, value in dump(config).items() if section in config.model_fields_set}
    data = {name: value for name, value in tree.get("data", {}).items() if name in config.data.model_fields_set}
    return flatten({**tree, "data": data})
