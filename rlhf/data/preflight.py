"""Check that the files a configuration names exist, before anything slow is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.config.data import DataConfig
from rlhf.config.load import unread_keys
from rlhf.config.reward import ModelSource
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.data.paths import SUFFIXES, looks_local, missing
from rlhf.errors import DataError, ModelError


def check_files(config: TrainConfig | RewardModelConfig) -> None:
    """Check that the data files and model folders of a configuration exist; possible hub ids are not checked.

    Raises:
        ModelError: a model folder is missing; the message has one line per missing path, data files included.
        DataError: only data files are missing.
    """
    models = [f"{key}: {missing(path)}" for key, path in _model_paths(config) if _is_missing(path, ("runs/",))]
    data = [f"{key}: {missing(path)}" for key, path in _data_paths(config) if _is_missing(path)]
    if models:
        raise ModelError("\n".join([*models, *data]))
    if data:
        raise DataError("\n".join(data))


def _data_paths(config: TrainConfig | RewardModelConfig) -> Iterator[tuple[str, str]]:
    unread = unread_keys(config)
    for name in DataConfig.model_fields:
        dataset = getattr(config.data, name)
        if hasattr(dataset, "path") and f"data.{name}" not in unread:
            yield f"data.{name}.path", dataset.path


def _model_paths(config: TrainConfig | RewardModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and path of each model that a new run reads; a resumed run reads its own checkpoint."""
    if (Path(config.run.out_dir) / "checkpoints").is_dir():
        return
    if isinstance(config, RewardModelConfig):
        yield "model.model", config.model.model
        return
    yield "policy.model", config.policy.model
    if (
        config.reward is not None
        and isinstance(config.reward.source, ModelSource)
        and "reward" not in unread_keys(config)
    ):
        yield "reward.source.path", config.reward.source.path


def _is_missing(path: str, local_prefixes: tuple[str, ...] = ()) -> bool:
    is_local = looks_local(path, SUFFIXES) or path.startswith(local_prefixes)
    return is_local and not Path(path).expanduser().exists()
