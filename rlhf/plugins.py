"""Plug-ins: modules of the user's that define choices of their own (losses, advantages, rewards, suites, alarms).

A plug-in is listed under `plugins:` in a configuration, as a file or as the name of a module. Its import
registers its classes: a configuration can then name them like the classes of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import ConfigError
from rlhf.section import Choice, Section, is_left_out, walk
from rlhf.user_code import load_module

OURS = ("rlhf", "reward_model")
_loaded: dict[str, str] = {}  # name of a class's module -> the plug-in as it is listed


def load_plugins(tree: Mapping[str, Any]) -> None:
    """Import the plug-ins that a tree of settings lists, each once.

    Raises:
        ConfigError: the list is not one, there is no such file or module, or its import fails; also if it defines a
            class whose `type` is taken, or that has none.
    """
    names = tree.get("plugins") or []
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"plugins: give a list of files and modules, as in plugins: [{names}]")
    for name in map(str, names):
        if name not in _loaded.values():
            module = _imported_from(name) or load_module(name, what="plug-in", error=ConfigError)
            _check_classes(module, name)
            _loaded[module.__name__] = name


def _check_classes(module: ModuleType, plugin: str) -> None:
    """Check that each class of a family that a plug-in defines can be chosen, or is a base of others.

    Raises:
        ConfigError: it has no type, or no name.
    """
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and kind.__module__ == module.__name__ and is_left_out(kind):
            del sys.modules[module.__name__]  # once the user has repaired the file, it is imported
            word = kind.__name__.lower()
            key, line = ("type", f'type: Literal["{word}"]') if issubclass(kind, Choice) else ("name", "name")
            raise ConfigError(
                f"plug-in {plugin!r}: {kind.__name__} has no {key}, so no setting can choose it: "
                f'write {line} = "{word}" into the class'
            )


def _imported_from(file: str) -> ModuleType | None:
    """Return the module that was imported from a file before, as by a script beside it."""
    if not file.endswith(".py"):
        return None
    place = str(Path(file).resolve())
    return next((module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == place), None)


def as_settings(value: Any) -> Any:
    """Return settings with each section among them as plain data, as a configuration file has it."""
    if isinstance(value, Section):
        named = {"type": value.type} if isinstance(value, Choice) else {}
        return named | value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: as_settings(inner) for key, inner in value.items()}
    return [as_settings(inner) for inner in value] if isinstance(value, list) else value


def sections_in(value: Any) -> Iterator[Section]:
    """Yield the sections among settings, as they were given: not the ones within a section."""
    if isinstance(value, Section):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from sections_in(inner)


def plugins_in(value: Any) -> list[str]:
    """Return the plug-ins that define the sections among settings, each once."""
    kinds = {type(inner): None for section in sections_in(value) for _, inner in walk(section)}
    return list(dict.fromkeys(name for name in map(plugin_of, kinds) if name is not None))


def plugin_of(kind: type[Section]) -> str | None:
    """Return the plug-in that defines a class of sections; None for one of ours, and for one that has no module.

    A class of a script or a notebook has none: no other process can import it.
    """
    module = kind.__module__
    if module.partition(".")[0] in OURS or module == "__main__":
        return None
    if module in _loaded:
        return _loaded[module]
    file = getattr(sys.modules.get(module), "__file__", None)
    return module if file is None or _is_installed(Path(file)) else file


def _is_installed(file: Path) -> bool:
    return "site-packages" in file.parts
