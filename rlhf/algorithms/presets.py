"""The presets: named algorithms of a few lines of configuration each, declared in the files of the algorithms."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}
"""The meaning of each preset: the section `algorithm`, and the sizes that it requires or is designed for.
docs/algorithms/ has a page for each: equations, defaults, departures from the paper, metrics to watch."""


def preset(name: str, settings: dict[str, Any]) -> None:
    """Declare a preset by its sections: {"algorithm": {...}, "sampling": {...}}.

    Raises:
        ValueError: another preset has this name.
    """
    if PRESETS.setdefault(name, settings) != settings:
        raise ValueError(f"there is a preset {name!r} with other settings: {PRESETS[name]}")
