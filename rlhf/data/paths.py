"""The paths of data files, and the check that they exist before anything heavy is imported."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.config.data import DataConfig, TrainableDataConfig
from rlhf.config.load import unread_keys
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import ConfigError, DataError, ModelError
from rlhf.rewards.source import sources_in
from rlhf.section import Section, walk
from rlhf.user_code import check_target

HUB_TIMEOUT_S = 10.0
MODEL_PREFIXES = ("runs/", "models/", "checkpoints/", "outputs/")  # folders rather than organizations of the hub
DATA_PREFIXES = ("data/", *MODEL_PREFIXES)
FETCHED = (
    "blimp",
    "gsm8k",
    "harmful_prompts",
    "hh_harmless",
    "ifeval",
    "paradetox",
    "persona",
    "realtoxicityprompts",
    "refusal_labels",
    "stories",
    "truthfulqa",
    "xstest",
    "xstest_labels",
)
"""The data sets that scripts/get_data.py fetches into data/."""
CHAINS = ("detox", "harmless")
MAKERS = {
    "models/smollm2-135m-instruct": "python scripts/get_smollm2.py",
    "models/stories260k": "python scripts/get_stories260k.py",
    "runs/instructions/train.jsonl": "python scripts/make_instructions.py runs/instructions/train.jsonl --rows 4000",
    "runs/instructions/eval.jsonl": (
        "python scripts/make_instructions.py runs/instructions/eval.jsonl --rows 64 --skip 100000"
    ),
    **{
        f"runs/json/{name}.jsonl": f"python scripts/make_json_task.py runs/json/{name}.jsonl --split {name} --rows {n}"
        for name, n in (("train", 4000), ("tune", 96), ("test", 300))
    },
    **{f"data/{name}": f"python scripts/get_data.py {name}" for name in FETCHED},
    "runs/sft": "rlhf train configs/sft.yaml policy.model=MODEL data.sft.path=ROWS.jsonl",
    "runs/reward_model": "rlhf reward configs/reward_model.yaml data.preferences.path=PAIRS.jsonl",
    **{f"runs/{chain}/sft": f"rlhf train configs/real/{chain}_sft.yaml" for chain in CHAINS},
    **{f"runs/{chain}/reward_model": f"rlhf reward configs/real/{chain}_reward_model.yaml" for chain in CHAINS},
}
"""The command that makes each model folder and data file which shipped configurations name; of a folder, all in it."""
KINDS = ("jsonl", "json", "csv", "parquet")
SUFFIXES = tuple(f".{kind}{gz}" for kind in KINDS for gz in (("", ".gz") if kind != "parquet" else ("",)))
"""The suffixes of data files."""


@dataclass
class Lookups:
    """The answers to whether models and data files exist, each path and hub id looked up once."""

    later: Path | None = None
    """A folder that is made before the runs begin: its content is not looked up."""
    prefix: str | None = None
    """The beginning of the names of files that are made before the runs."""
    _models: dict[str, str | None] = field(default_factory=dict)
    _data: dict[str, str | None] = field(default_factory=dict)

    def missing_model(self, path: str) -> str | None:
        """Return why a model cannot be loaded from a path or hub id; None if there is nothing against it."""
        if path not in self._models:
            self._models[path] = None if self.is_later(path) else missing_model(path)
        return self._models[path]

    def missing_data(self, path: str) -> str | None:
        """Return why rows cannot be read from a path or hub id; None if there is nothing against it."""
        if path not in self._data:
            self._data[path] = None if self.is_later(path) else missing_data(path)
        return self._data[path]

    def is_later(self, path: str) -> bool:
        """Return whether a path is made before the runs begin."""
        if self.prefix is not None and path.startswith(self.prefix):
            return True
        return self.later is not None and Path(path).is_relative_to(self.later)


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
    maker = next((command for made, command in MAKERS.items() if Path(path).is_relative_to(made)), None)
    if maker is not None:
        return f"{message}. `{maker}` makes it"
    if not known.is_dir():
        return message
    names = [entry.name for entry in known.iterdir() if not entry.name.startswith(".")]
    near = difflib.get_close_matches(wanted.name, names, n=3, cutoff=0.5)
    if near:
        return f"{message} (in {known} there is {', '.join(near)})"
    return f"{message} (there is no {wanted.name} in {known.resolve()})"


def check_files(config: TrainConfig | RewardModelConfig, lookups: Lookups | None = None) -> None:
    """Check that the data files and models of a configuration exist, and that its folder can be written.

    Other names than paths are hub ids; the hub is asked for each of them once, with a time limit.

    Args:
        lookups: the answers for paths and hub ids until now, when several runs are checked; new answers are added.

    Raises:
        ConfigError: run.out_dir cannot be written.
        ModelError: a model is missing; the message has one line per missing path, data files included.
        DataError: only data files are missing.
    """
    if os.environ.get("RANK", "0") == "0":  # a rank that removes the empty folder would take it from another
        check_out_dir(config.run.out_dir)
    lookups = Lookups() if lookups is None else lookups
    is_resumed = (Path(config.run.out_dir) / "checkpoints").is_dir()  # a resumed run reads its own checkpoint
    named = [] if is_resumed else model_paths(config)
    models = [f"{key}: {problem}" for key, path in named if (problem := lookups.missing_model(path))]
    by_path = {
        path: key for key, path in reversed([(key, path) for key, path, _ in data_paths(config)])
    }  # held-out rows may be a part of a file
    data = [f"{key}: {problem}" for path, key in reversed(by_path.items()) if (problem := lookups.missing_data(path))]
    if models:
        raise ModelError("\n".join([*models, *data]))
    if data:
        raise DataError("\n".join(data))


def check_targets(config: TrainConfig | RewardModelConfig) -> None:
    """Check that the file of each section's `target` (a reward, a loss, an advantage) defines it; nothing is run.

    Raises:
        ConfigError: a file is missing, cannot be parsed, or lacks the function.
    """
    for key, section in walk(config):
        target = getattr(section, "target", None)
        if isinstance(target, str):
            check_target(target, what=key, error=ConfigError)


def check_out_dir(path: str, key: str = "run.out_dir") -> None:
    """Check that files can be written into a folder, which need not exist yet; none is left behind.

    Raises:
        ConfigError: they cannot; the message says why.
    """
    folder = Path(path).expanduser()
    above = next(parent for parent in (folder, *folder.parents) if parent.exists() or parent == parent.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is a file" if above.is_file() else (error.strerror or str(error)).lower()
        raise ConfigError(f"{key}: cannot write into {path} ({reason}): choose another folder, {key}=...") from error
    finally:
        for made in (folder, *folder.parents):
            if made != above and above in made.parents and made.is_dir() and not any(made.iterdir()):
                made.rmdir()


def missing_model(path: str) -> str | None:
    """Return why a model cannot be loaded from a path or hub id; None if there is nothing against it."""
    try:
        path = resolve_best(path)
    except ConfigError as error:
        return str(error)
    if is_missing(path, MODEL_PREFIXES, suffixes=(".gguf",)):
        return missing(path)
    return None if Path(path).expanduser().exists() else _not_on_hub(path)


def check_against(path: str) -> None:
    """Check that a model to compare with exists; the hub is not asked for a name without its owner.

    Raises:
        ModelError: it does not exist.
    """
    is_here = "/" in path or Path(path).expanduser().exists() or _in_hub_cache(path)
    problem = missing_model(path) if is_here else f"{missing(path)}; a model of the hub is OWNER/NAME"
    if problem is not None:
        raise ModelError(f"the model to compare with: {problem}")


def missing_data(path: str) -> str | None:
    """Return why rows cannot be read from a path or hub id; None if there is nothing against it."""
    if is_missing(path, DATA_PREFIXES):
        return missing(path)
    return None if Path(path).expanduser().exists() or path.startswith("lab:") else _no_data_on_hub(path)


def _no_data_on_hub(name: str) -> str | None:
    """Return why the hub does not have a data set; None if it has it, if it is in the cache, or in offline mode."""
    import huggingface_hub
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets").expanduser()
    offline = os.environ.get("HF_DATASETS_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    folder = name.replace("/", "___")
    if offline or constants.HF_HUB_OFFLINE or (cache / folder).is_dir() or (cache / folder.lower()).is_dir():
        return None  # the library that loads it answers at once
    return _ask_hub(name, partial(huggingface_hub.dataset_info, name, timeout=HUB_TIMEOUT_S), "file", "data set")


def _not_on_hub(name: str) -> str | None:
    """Return why the hub does not have a model; None if it has it, or if it is in the cache.

    The libraries that load a model ask an unreachable hub for a minute; here it is asked once.
    """
    import huggingface_hub  # takes a third of a second, and only a hub id needs it

    if _in_hub_cache(name):
        return None
    return _ask_hub(name, partial(huggingface_hub.model_info, name, timeout=HUB_TIMEOUT_S), "folder", "model")


def _in_hub_cache(name: str) -> bool:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        files = ("config.json", "tokenizer_config.json")
        return any(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files)
    except HFValidationError:
        return False


def _ask_hub(name: str, ask: Callable[[], object], local: str, kind: str) -> str | None:
    """Return why the hub does not have `name`, a `kind` of thing that is no `local` file or folder; None if it has."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        ask()
    except HFValidationError:
        return missing(name)
    except RepositoryNotFoundError:
        return f"{name!r} is neither a {local} here nor a {kind} on the hub (or it is private: `hf auth login`)"
    except OfflineModeIsEnabled:
        return f"{name!r} is neither a {local} here nor in the hub's cache, and HF_HUB_OFFLINE is set"
    except Exception as error:  # any error of the HTTP client
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"{name!r} is no {local} here, and the hub could not be asked for it: {line}"
    return None


def data_paths(config: TrainConfig | RewardModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the key, path and split of each data set that a run reads."""
    unread = unread_keys(config)
    for name in DataConfig.model_fields:
        dataset = getattr(config.data, name)
        if isinstance(dataset, TrainableDataConfig) and f"data.{name}" not in unread:
            yield from section_paths(dataset, f"data.{name}")


def section_paths(dataset: TrainableDataConfig, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield the key, below the section's, the path and the split of each source of a data section."""
    for name, source in dataset.sources.items():
        yield f"{key}.sources.{name}.path", source.path, source.split or dataset.split
    if dataset.path:
        yield f"{key}.path", dataset.path, dataset.split


def model_paths(config: TrainConfig | RewardModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and path of each model that a new run reads."""
    if isinstance(config, RewardModelConfig):
        yield "model.model", config.model.model
        if config.model.tokenizer is not None:
            yield "model.tokenizer", config.model.tokenizer
        return
    yield "policy.model", config.policy.model
    if config.policy.tokenizer is not None:
        yield "policy.tokenizer", config.policy.tokenizer
    unread = unread_keys(config)
    if config.reference.model is not None and "reference" not in unread:
        yield "reference.model", config.reference.model
    if config.teacher is not None:
        yield from ((f"teacher.{field}", path) for field, path in config.teacher.model_paths().items())
    if config.critic.init not in ("auto", "policy", "reward") and "critic" not in unread:
        yield "critic.init", config.critic.init
    if config.reward is not None and "reward" not in unread:
        yield from _source_paths(config.reward, "reward")
        if config.reward.process is not None:
            process = config.reward.process.model_paths()
            yield from ((f"reward.process.{field}", path) for field, path in process.items())
    yield from _source_paths(config.eval, "eval")


def _source_paths(section: Section, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and path of each reward model of the sources in a section."""
    for place, source in sources_in(section, key):
        yield from ((f"{place}.{field}", path) for field, path in source.model_paths().items())


def is_missing(path: str, local_prefixes: tuple[str, ...] = (), *, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Return whether `path` was meant as a file or folder, by its prefix or suffix or looks, and does not exist."""
    is_local = looks_local(path, suffixes) or path.startswith(local_prefixes)
    return is_local and not Path(path).expanduser().exists()


def source_at(place: str) -> dict[str, Any]:
    """Return the source at a URL, a function's path or a reward model's, told apart by their looks."""
    if place.startswith(("http://", "https://")):
        return {"type": "remote", "url": place}
    location, colon, name = place.rpartition(":")
    if colon and name.isidentifier() and (location.endswith(".py") or not looks_local(location)):
        return {"type": "function", "target": place}
    return {"type": "model", "path": place}


def resolve_best(path: str) -> str:
    """Turn RUN@best into the folder of that run's best checkpoint; return any other path as it is.

    Raises:
        ConfigError: the run has kept none.
    """
    run, at, name = path.rpartition("@")
    if not at or name != "best":
        return path
    best = best_checkpoint(Path(run).expanduser())
    if best is None:
        raise ConfigError(f"{run} has kept no best checkpoint: it needs checkpoint.best in its configuration")
    return str(best)


def best_checkpoint(run: Path) -> Path | None:
    """Return the folder of a run's best checkpoint; None if it has kept none."""
    return max(run.glob("best/step-*"), key=lambda folder: int(folder.name.partition("-")[2]), default=None)
