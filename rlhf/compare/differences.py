"""What differs between the arms' configurations, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.config.load import dump
from rlhf.config.sections import TrainConfig
from rlhf.runtime.loggers import flatten

OWN = ("run.name", "run.out_dir", "run.seed")  # differ by definition


def differences(configs: Mapping[str, TrainConfig]) -> dict[str, dict[str, Any]]:
    """Dotted key -> arm -> value, for every key that some arm sets and on which two disagree.

    An arm that does not read the section has no value for its keys: what an arm does not read is not set in it.
    """
    read = {arm: _read(config) for arm, config in configs.items()}
    keys = dict.fromkeys(key for config in configs.values() for key in _set(config))
    missing = object()
    return {
        key: {arm: settings[key] for arm, settings in read.items() if key in settings}
        for key in keys
        if key not in OWN and len({repr(settings.get(key, missing)) for settings in read.values()}) > 1
    }


def _set(config: TrainConfig) -> dict[str, object]:
    """The keys that the files or a preset set."""
    return flatten(config.model_dump(mode="json", exclude_unset=True))


def _read(config: TrainConfig) -> dict[str, object]:
    """Every key, defaults included, of the sections and data sets that are set."""
    tree = {section: value for section, value in dump(config).items() if section in config.model_fields_set}
    data = {name: value for name, value in tree.get("data", {}).items() if name in config.data.model_fields_set}
    return flatten({**tree, "data": data})
