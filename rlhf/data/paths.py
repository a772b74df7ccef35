"""The paths of data files, and the check that they exist before anything heavy is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from rlhf.config.data import DataConfig, TrainableDataConfig
from rlhf.config.load import unread_keys
from rlhf.config.reward import ModelSource
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import ConfigError, DataError, ModelError

KINDS = ("jsonl", "json", "csv", "parquet")
SUFFIXES = tuple(f".{kind}{gz}" for kind in KINDS for gz in (("", ".gz") if kind != "parquet" else ("",)))
"""The suffixes of data files."""


def looks_local(path: str, suffixes: tuple[str, ...] = ()) -> bool:
    """Return whether the non-existent `path` was meant as a file or folder rather than a hub id `owner/name`."""
    if path.startswith(("/", ".", "~")) or path.endswith((*suffixes, "/")) or "\\" in path:
        return True
    first, *rest = path.split("/")
    return len(rest) > 1 or (bool(rest) and Path(first).is_dir())


def missing(path: str) -> str:
    """Return the message "no such file or folder: ...", with similar names from the deepest folder that exists."""
    wanted = Path(path).expanduser()
    known = wanted
    while not known.is_dir() and known != known.parent:
        wanted, known = known, known.parent
    message = f"no such file or folder: {path}"
    if not known.is_dir():
        return message
    names = [entry.name for entry in known.iterdir() if not entry.name.startswith(".")]
    near = difflib.get_close_matches(wanted.name, names, n=3, cutoff=0.5)
    if near:
        return f"{message} (in {known} there is {', '.join(near)})"
    return f"{message} ({known} has no {wanted.name})"


def check_files(config: TrainConfig | RewardModelConfig) -> None:
    """Check that the data files and model folders of a configuration exist; possible hub ids are not checked.

    Raises:
        ModelError: a model folder is missing; the message has one line per missing path, data files included.
        DataError: only data files are missing.
    """
    models = [f"{key}: {missing(path)}" for key, path in _model_paths(config) if is_missing(path, ("runs/",))]
    data = [f"{key}: {missing(path)}" for key, path in _data_paths(config) if is_missing(path)]
    if models:
        raise ModelError("\n".join([*models, *data]))
    if data:
        raise DataError("\n".join(data))


def _data_paths(config: TrainConfig | RewardModelConfig) -> Iterator[tuple[str, str]]:
    unread = unread_keys(config)
    for name in DataConfig.model_fields:
        dataset = getattr(config.data, name)
        if isinstance(dataset, TrainableDataConfig) and f"data.{name}" not in unread:
            for key, source in dataset.sources.items():
                yield f"data.{name}.sources.{key}.path", source.path
            if dataset.path:
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


def is_missing(path: str, local_prefixes: tuple[str, ...] = (), *, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Return whether `path` was meant as a file or folder, by its prefix or suffix or looks, and does not exist."""
    is_local = looks_local(path, suffixes) or path.startswith(local_prefixes)
    return is_local and not Path(path).expanduser().exists()


def resolve_best(path: str) -> str:
    """Turn RUN@best into the folder of that run's best checkpoint; return any other path as it is.

    Raises:
        ConfigError: the run has kept none.
    """
    run, at, name = path.rpartition("@")
    if not at or name != "best":
        return path
    kept = sorted(Path(run).expanduser().glob("best/step-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    if not kept:
        raise ConfigError(f"{run} has kept no best checkpoint: it needs checkpoint.best in its configuration")
    return str(kept[-1])
