"""Notices that several verbs print about the model that they read."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rlhf.factory.exported import rounded_models


def warn_of_rounding(*models: str) -> None:
    """Print on standard error a warning for each model whose exported weights have lost their training."""
    for text in rounded_models(*models):
        Console(stderr=True).print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
