"""From Python objects to configuration: objects that are not files are written into the run folder."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rlhf.config.files import Tree, branch_at, merge
from rlhf.config.load import SHORTHANDS
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.data.files import given_rows
from rlhf.data.paths import source_at
from rlhf.errors import ConfigError, DataError, did_you_mean
from rlhf.models.folders import MEMBERS
from rlhf.plugins import as_settings, plugins_in
from rlhf.runtime.distributed import is_main_process, rank_from_env, world_size_from_env
from rlhf.section import Section
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import has_trained
from rlhf.tracking.trackers import flatten
from rlhf.user_code import target_of

Rows = str | Path | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]
"""A path or a hub id; a section such as {"path": ..., "limit": 100}; the rows: a list, a `datasets.Dataset`, an
iterator; or several of these as {name: (data, weight)}. A row is a dictionary, or a text."""
Reward = str | Path | Mapping[str, Any] | Section | Callable[..., Any] | Sequence[Any]
"""A function; a path (a reward model, or file.py:function); a URL; a section of the configuration, as settings or an
instance of its class; a loaded classifier with its tokenizer, as (model, tokenizer); or a list of these, each alone or
as (reward, weight)."""
TextColumn = Literal["prompt", "text"]


@dataclass
class Inputs:
    """Collects the objects of a call as settings, and writes those that need a file once the settings are valid.

    Args:
        resume: the run continues, so files that exist have to have the same content.
        of: the purpose of the folder, for messages.
    """

    folder: Path
    resume: bool | Literal["always"] = False
    of: Literal["run", "comparison"] = "run"
    parameters: float | None = None
    """The number of parameters of a model that is in memory, whose files are not yet there."""
    _pending: list[Callable[[], None]] = field(default_factory=list)

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Remove the folder of a new run, and the one around it if it is new, if the call fails before a step."""
        existed, parent = self.folder.is_dir(), self.folder.parent
        parent_existed = parent.is_dir()
        try:
            yield
        except BaseException:
            if not is_main_process():
                raise
            if not self.resume and self.folder.is_dir() and not has_trained(RunFolder(self.folder)):
                shutil.rmtree(self.folder, ignore_errors=True)
                if existed:
                    self.folder.mkdir(exist_ok=True)
            if not parent_existed:
                with suppress(OSError):  # there is something else in it by now
                    parent.rmdir()
            raise

    def write(self) -> None:
        """Write the collected objects.

        Raises:
            DataError: a row cannot be written as JSON, or a run that continues was begun with other rows.
        """
        for write in self._pending:
            write()
        self._pending.clear()

    def model(self, model: Any, tokenizer: Any) -> Tree:
        """Return the settings `model` and `tokenizer` of a section such as policy.

        Raises:
            ConfigError: a loaded model has no tokenizer with it, or an adapter that is not merged.
        """
        if isinstance(getattr(model, "folder", None), Path):  # the result of a run
            model = model.folder
        if isinstance(model, str | Path):
            return {"model": str(model), **self._tokenizer(tokenizer)}
        _check_loaded_model(model, tokenizer)
        folder = self.folder / "start"
        self.parameters = float(sum(parameter.numel() for parameter in model.parameters()))
        self._pending.append(lambda: self._save_model(model, tokenizer, folder))
        return {"model": str(folder), **({} if _is_object(tokenizer) else self._tokenizer(tokenizer))}

    def rows(self, name: str, rows: Rows, *, text: TextColumn | None) -> Tree:
        """Return the section of a data set.

        Args:
            name: the purpose of the data set, which is also the name of its file.
            text: the column of rows that are texts; None if they have to be dictionaries.

        Raises:
            DataError: the rows are a DataFrame, which gives the names of its columns in their place, or a DatasetDict.
        """
        if isinstance(rows, pd.DataFrame):
            raise DataError(f"{name} is a DataFrame: give its rows, df.to_dict('records')")
        if isinstance(rows, str | Path):
            return {"path": str(rows)}
        if isinstance(rows, Mapping) and hasattr(rows, "column_names"):
            split = next(iter(rows), "train")
            raise DataError(f"{name} is a {type(rows).__name__}: give one of its splits, {name}[{split!r}]")
        if isinstance(rows, Mapping):
            return {"sources": self._sources(name, rows, text)} if _is_mixture(name, rows) else dict(rows)
        path = self.folder / "data" / f"{name}.jsonl"
        self._pending.append(lambda: self._write_rows(path, _as_rows(name, given_rows(rows), text)))
        return {"path": str(path)}

    def data(self, text: TextColumn | None, **sets: Rows | None) -> Tree:
        """Return the sections of the data sets that were given; `text` as in `rows`."""
        return {name: self.rows(name, rows, text=text) for name, rows in sets.items() if rows is not None}

    def _sources(self, name: str, sources: Mapping[str, Any], text: TextColumn | None) -> Tree:
        """Return the sources of a section, each given as (data, weight)."""
        return {
            source: {**self.rows(f"{name}-{source}", rows, text=text), "weight": float(weight)}
            for source, (rows, weight) in sources.items()
        }

    def reward(self, reward: Reward, name: str = "reward") -> Tree:
        """Return the section `source` of a reward.

        Raises:
            ConfigError: it is none of the forms that `Reward` lists.
        """
        if isinstance(reward, Mapping):
            return dict(reward)
        if isinstance(reward, Section):
            return dict(as_settings(reward))
        if isinstance(getattr(reward, "folder", None), Path):  # the result of rlhf.reward_model
            return {"type": "model", "path": str(reward.folder)}  # type: ignore[union-attr]
        if isinstance(reward, str | Path):
            return source_at(str(reward))
        if isinstance(reward, list):
            return self._ensemble(reward, name)
        if isinstance(reward, tuple) and len(reward) == 2 and hasattr(reward[0], "save_pretrained"):
            model, tokenizer = reward
            folder = self.folder / name
            self._pending.append(lambda: self._save_model(model, tokenizer, folder))
            return {"type": "model", "path": str(folder)}
        if hasattr(reward, "save_pretrained"):
            raise ConfigError("a loaded reward model needs its tokenizer: reward=(model, tokenizer)")
        if callable(reward):
            return {"type": "function", "target": target_of(reward)}
        raise ConfigError(
            f"reward is a {type(reward).__name__}: give a function, a path, a URL, (model, tokenizer), or a list"
        )

    def environment(self, environment: Any) -> Tree:
        """Return the section of an environment.

        Raises:
            ConfigError: it is no class, function, target or section.
        """
        if isinstance(environment, Mapping):
            return dict(environment)
        if isinstance(environment, Section):
            return dict(as_settings(environment))
        if isinstance(environment, str | Path):
            return {"target": str(environment)}
        if callable(environment):
            return {"target": target_of(environment)}
        raise ConfigError(
            f"environment is a {type(environment).__name__}: give its class (not an instance: each episode has one of "
            "its own), or a function that makes one"
        )

    def _ensemble(self, rewards: Sequence[Any], name: str) -> Tree:
        """Return the section of a weighted sum.

        Raises:
            ConfigError: an entry is a tuple of another form.
        """
        for number, reward in enumerate(rewards, start=1):
            is_loaded = isinstance(reward, tuple) and hasattr(next(iter(reward), None), "save_pretrained")
            if isinstance(reward, tuple) and not (is_loaded or _has_weight(reward)):
                raise ConfigError(f"{name}: entry {number} of the list is no (reward, weight): the weight is a number")
        pairs = [_with_weight(reward) for reward in rewards]
        sources = [self.reward(reward, f"{name}-{number}") for number, (reward, _) in enumerate(pairs)]
        return {"type": "ensemble", "how": "sum", "weights": [weight for _, weight in pairs], "sources": sources}

    def _tokenizer(self, tokenizer: Any) -> Tree:
        if tokenizer is None:
            return {}
        if isinstance(tokenizer, str | Path):
            return {"tokenizer": str(tokenizer)}
        folder = self.folder / "tokenizer"
        self._pending.append(lambda: _save_whole(folder, tokenizer.save_pretrained))
        return {"tokenizer": str(folder)}

    def _save_model(self, model: Any, tokenizer: Any, folder: Path) -> None:
        if self.resume and (folder / "config.json").is_file():
            return  # the run goes on from its checkpoint; this is where it began

        def save(place: Path) -> None:
            model.save_pretrained(place)
            if _is_object(tokenizer):
                tokenizer.save_pretrained(place)

        _save_whole(folder, save)

    def _write_rows(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new-{rank_from_env()}")
        with new.open("wb") as file:
            file.writelines(_lines(path.stem, rows))
        if self.resume is True and path.is_file() and path.read_bytes() != new.read_bytes():
            new.unlink()
            always = ', or continue from its weights with the new rows (resume="always")' if self.of == "run" else ""
            raise DataError(
                f"{path.stem}: these are not the rows that the {self.of} in {self.folder} began with: give it the same "
                f"ones, or leave resume out for a new {self.of}{always}"
            )
        new.replace(path)


SECTIONS = {*OnlineConfig.model_fields, *OfflineConfig.model_fields, *RewardModelConfig.model_fields}


def nested(settings: Mapping[str, Any], call: Callable[..., Any], model: str = "policy") -> Tree:
    """Turn keywords into a tree: `policy={"lr": 1e-5}`, `**{"policy.lr": 1e-5}` and `lr=1e-5` are the same.

    Args:
        model: the section of the model that it trains.

    Raises:
        ConfigError: a keyword is neither an argument, nor a section, nor a key; the message names the nearest. Or two
            keywords set one key.
    """
    tree: Tree = {}
    setters: dict[str, str] = {}
    for key, value in settings.items():
        full = SHORTHANDS.get(key, key).format(model=model)
        if full.partition(".")[0] not in SECTIONS:
            names = [*inspect.signature(call).parameters, *SECTIONS, *SHORTHANDS]
            near = did_you_mean(key, names) or "; further settings are given by section, policy={...}, or by key"
            raise ConfigError(f"{key}: rlhf.{call.__name__} has no such argument{near}")
        branch = branch_at(full, as_settings(value))
        for leaf in flatten(branch):
            if leaf in setters:
                raise ConfigError(f"{setters[leaf]} and {key} both set {leaf}: give one of them")
            setters[leaf] = key
        tree = merge(tree, branch)
    return with_plugins(tree, settings)


def with_plugins(tree: Tree, settings: object) -> Tree:
    """Return the tree with the plug-ins that define sections among the settings it is made of."""
    own = plugins_in(settings)
    return {**tree, "plugins": list(dict.fromkeys([*tree.get("plugins", []), *own]))} if own else tree


def new_folder(wanted: Path) -> Path:
    """Return the folder of a new run: `wanted`, or the first of wanted-2, wanted-3, ... that holds nothing.

    The processes of a launcher cannot choose together: theirs is `wanted`.

    Raises:
        ConfigError: there are several processes, and `wanted` holds a run.
    """
    if world_size_from_env() > 1:
        if is_main_process() and ((wanted / "config.yaml").is_file() or (wanted / MEMBERS).is_dir()):
            raise ConfigError(f"{wanted} holds a run: give several processes another folder, or resume=True")
        return wanted
    folder, count = wanted, 1
    while folder.is_dir() and any(folder.iterdir()):
        count += 1
        folder = wanted.with_name(f"{wanted.name}-{count}")
    return folder


def _save_whole(folder: Path, save: Callable[[Path], object]) -> None:
    """Save into a folder; the processes of a launcher each save one of their own, and the first is taken."""
    if world_size_from_env() == 1:
        save(folder)
        return
    own = folder.with_name(f".{folder.name}-{rank_from_env()}")
    save(own)
    try:
        own.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(own)


def _check_loaded_model(model: Any, tokenizer: Any) -> None:
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"model is a {type(model).__name__}: give a path, a hub id or a loaded transformers model")
    if hasattr(model, "merge_and_unload"):
        raise ConfigError("the model has an adapter: merge it first (model.merge_and_unload()), then give that model")
    if tokenizer is None:
        raise ConfigError("a loaded model needs its tokenizer: tokenizer=AutoTokenizer.from_pretrained(...)")


def _is_object(tokenizer: Any) -> bool:
    return tokenizer is not None and not isinstance(tokenizer, str | Path)


def _is_mixture(name: str, rows: Mapping[str, Any]) -> bool:
    """Return whether a mapping is {name: (data, weight)} rather than a section.

    Raises:
        DataError: a source has a weight and another has none.
    """
    without = [key for key, value in rows.items() if not _has_weight(value)]
    if without and len(without) < len(rows):
        raise DataError(f"{name}: {without[0]} has no weight: give every source as (rows, weight)")
    return bool(rows) and not without


def _has_weight(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float)


def _with_weight(reward: Any) -> tuple[Any, float]:
    return (reward[0], float(reward[1])) if _has_weight(reward) else (reward, 1.0)


def _as_rows(name: str, rows: Iterable[Any], text: TextColumn | None) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Mapping):
            yield row
        elif isinstance(row, str) and text is not None:
            yield {text: row}
        else:
            wanted = "a dictionary" if text is None else "a dictionary or a text"
            hint = '; a conversation is {"messages": [...]}' if isinstance(row, list | tuple) else ""
            raise DataError(f"{name}: row {number} is a {type(row).__name__}: a row is {wanted}{hint}")


def _lines(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        try:
            yield json.dumps(dict(row), ensure_ascii=False).encode() + b"\n"
        except (TypeError, ValueError) as error:  # half of a surrogate pair is a ValueError
            raise DataError(f"{name}: row {number} cannot be written as JSON: {error}") from error
