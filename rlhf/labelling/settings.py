"""The settings of `rlhf label` from its arguments, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.config.files import Tree, merge, parse_overrides
from rlhf.config.load import validate
from rlhf.data.paths import is_missing, missing, missing_model
from rlhf.errors import ConfigError, DataError
from rlhf.labelling.judges import judge_at
from rlhf.labelling.label import LabelConfig
from rlhf.plugins import load_plugins


def label_settings(
    completions: str,
    overrides: Sequence[str] = (),
    *,
    judge: str | None = None,
    out: str | None = None,
    compare_with: str | None = None,
) -> LabelConfig:
    """Build the settings of a call: arguments, with key=value settings over them.

    Raises:
        ConfigError: a setting is wrong, or a model that is named does not exist.
        DataError: a file does not exist.
    """
    tree: Tree = {"completions": {"path": completions}}
    tree |= {"judge": judge_at(judge)} if judge is not None else {}
    tree |= {"out": out} if out is not None else {}
    tree |= {"compare_with": {"path": compare_with}} if compare_with is not None else {}
    return label_config(merge(tree, parse_overrides(overrides)))


def label_config(tree: Tree) -> LabelConfig:
    """Build and check the settings from a tree of them.

    Raises:
        ConfigError: a setting is wrong, or a model that is named does not exist.
        DataError: a file does not exist.
    """
    load_plugins(tree)
    config = validate(LabelConfig, tree)
    for section in (config.completions, config.compare_with):
        if section is not None and is_missing(section.path):
            raise DataError(missing(section.path))
    for key, path in config.judge.model_paths():
        if (problem := missing_model(path)) is not None:
            raise ConfigError(f"{key}: {problem}")
    config.judge.check()
    return config
