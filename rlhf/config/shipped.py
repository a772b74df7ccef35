"""The configurations of this project: `configs/` of a checkout, which an installed package has beside this package."""

from __future__ import annotations

import difflib
from pathlib import Path

from rlhf.errors import ConfigError

CONFIGS = "configs"
PACKAGE = Path(__file__).resolve().parents[1]


def shipped_configs() -> Path:
    """Return the folder of the project's own configurations, in the installed package or in the checkout.

    Raises:
        ConfigError: it is in neither.
    """
    # The package first: beside an installed one is site-packages, where `configs` would be somebody else's.
    for folder in (PACKAGE / CONFIGS, PACKAGE.parent / CONFIGS):
        if (folder / "ppo.yaml").is_file():
            return folder
    raise ConfigError(f"the project's own {CONFIGS} are not where they were installed; reinstall the package")


def locate_config(path: str | Path) -> Path:
    """Return the configuration file that `path` names, or `path` itself if there is none.

    A run folder stands for its config.yaml. A name such as `configs/ppo.yaml` is looked up in the working folder first,
    and then among the project's own configurations.
    """
    file = Path(path)
    if file.is_dir() and (file / "config.yaml").is_file():
        return file / "config.yaml"
    if file.exists() or not _is_shipped_name(file):
        return file
    shipped = shipped_configs().joinpath(*file.parts[1:])
    return shipped if shipped.is_file() else file


def nearest_config(path: str | Path) -> Path | None:
    """Return the existing configuration whose name is most like that of `path`, in the folder that `path` names."""
    file = Path(path)
    folders = [file.parent]
    if _is_shipped_name(file):
        folders.append(shipped_configs().joinpath(*file.parts[1:-1]))
    names = {other.name for folder in folders for other in folder.glob("*.y*ml")}
    near = difflib.get_close_matches(file.name, sorted(names), n=1)
    return file.parent / near[0] if near else None


def _is_shipped_name(file: Path) -> bool:
    return len(file.parts) > 1 and file.parts[0] == CONFIGS and ".." not in file.parts
