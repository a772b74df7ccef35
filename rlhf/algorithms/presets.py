"""Named algorithms: a few lines of configuration each, declared in the file of the algorithm that they are."""

from __future__ import annotations

from typing import Any

Tree = dict[str, Any]

PRESETS: dict[str, Tree] = {}
"""What each preset stands for: the section `algorithm`, and the sizes that it requires or is designed for.
docs/algorithms/ has a page for each: equations, defaults, departures from the paper, what to watch."""


def preset(name: str, settings: Tree) -> None:
    """Name these settings: those of `algorithm`, and of other sections the sizes that the algorithm requires."""
    PRESETS[name] = settings
