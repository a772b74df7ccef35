"""Write rlhf/api/keywords.py, the types of the keyword arguments of rlhf.train and the others, from the configuration.

python scripts/make_keywords.py
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import rlhf
from rlhf.api.inputs import SHORTHANDS
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.section import Choice

TARGET = Path(__file__).resolve().parents[1] / "rlhf" / "api" / "keywords.py"
HEAD = '''\
"""The types of the keyword arguments that are settings, by which an editor completes keys.

Made by scripts/make_keywords.py from the configuration, whose pages in docs/configuration describe the keys. Each
class has the keys of a section, or the settings of a call; all of them are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict
'''
CALLS: dict[str, tuple[Any, tuple[type[BaseModel], ...]]] = {
    "TrainKeywords": (rlhf.train, (OnlineConfig, OfflineConfig)),
    "SftKeywords": (rlhf.sft, (OfflineConfig,)),
    "RewardModelKeywords": (rlhf.reward_model, (RewardModelConfig,)),
    "CompareKeywords": (rlhf.compare, (OnlineConfig, OfflineConfig)),
}
SCALARS = (int, float, str, bool)


def keywords() -> str:
    """Return the text of the module."""
    sections: dict[str, str] = {}
    calls = {name: _keywords(call, configs, sections) for name, (call, configs) in CALLS.items()}
    first, *others = calls.values()
    shared = {key: kind for key, kind in first.items() if all(fields.get(key) == kind for fields in others)}
    texts = [
        _typed_dict(name, {key: kind for key, kind in fields.items() if key not in shared}, base="SharedKeywords")
        for name, fields in calls.items()
    ]
    texts = [_typed_dict("SharedKeywords", shared), *texts]
    return "\n\n".join([HEAD, *_reachable(sections, texts), *texts])


def _reachable(sections: Mapping[str, str], texts: Sequence[str]) -> list[str]:
    """Return the classes of sections that the texts name, or that these classes name in turn."""
    named: set[str] = set()
    while more := {name for name in sections if any(f": {name}\n" in text for text in texts)} - named:
        named |= more
        texts = [*texts, *(sections[name] for name in more)]
    return [text for name, text in sections.items() if name in named]


def _keywords(call: Any, configs: tuple[type[BaseModel], ...], sections: dict[str, str]) -> dict[str, str]:
    """Return the type of every setting that a call takes beside its arguments."""
    fields = _fields(configs, sections)
    fields |= {short: kind for short, key in SHORTHANDS.items() if (kind := _shorthand(key, configs))}
    taken = inspect.signature(call).parameters
    return {key: kind for key, kind in fields.items() if key not in taken}


def _fields(models: tuple[type[BaseModel], ...], classes: dict[str, str]) -> dict[str, str]:
    """Return the type of every key of sections; keys of several sections with different types are of any type."""
    fields: dict[str, str] = {}
    for model in models:
        for name, field in model.model_fields.items():
            kind = _type(field.annotation, classes)
            fields[name] = kind if fields.get(name, kind) == kind else "Mapping[str, Any]"
    return fields


def _type(annotation: Any, classes: dict[str, str]) -> str:
    """Write an annotation; sections become a TypedDict of their own, and more complicated types become Any."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, Choice):
            return "Any"
        if issubclass(annotation, BaseModel):
            return _section(annotation, classes)
        return annotation.__name__ if annotation in (*SCALARS, types.NoneType) else "Any"
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return f"Literal[{', '.join(_quoted(value) for value in typing.get_args(annotation))}]"
    if origin is typing.Annotated:
        return _type(typing.get_args(annotation)[0], classes)
    if origin in (typing.Union, types.UnionType):
        kinds = list(dict.fromkeys(_type(member, {}) for member in typing.get_args(annotation)))
        return "Any" if "Any" in kinds or any(kind.endswith("Keys") for kind in kinds) else " | ".join(kinds)
    return "Any"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _section(model: type[BaseModel], classes: dict[str, str]) -> str:
    name = f"{model.__name__.removesuffix('Config')}Keys"
    if name not in classes:
        classes[name] = _typed_dict(name, _fields((model,), classes))
    return name


def _shorthand(key: str, configs: tuple[type[BaseModel], ...]) -> str | None:
    """Return the type of the key that a short name stands for; None if the configurations have no such section."""
    section, _, field = key.partition(".")
    for config in configs:
        name = section.format(model="policy" if "policy" in config.model_fields else "model")
        if name in config.model_fields:
            model = config.model_fields[name].annotation
            assert isinstance(model, type)
            assert issubclass(model, BaseModel)
            return _type(model.model_fields[field].annotation, {})
    return None


def _typed_dict(name: str, fields: Mapping[str, str], *, base: str = "TypedDict") -> str:
    keys = [f"    {key}: {kind.replace('NoneType', 'None')}" for key, kind in fields.items()]
    return "\n".join([f"class {name}({base}, total=False):", *keys]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(keywords(), encoding="utf-8")
