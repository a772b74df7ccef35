"""The configuration of the language model in a model, which may be nested: Gemma 3 and others read images too."""

from __future__ import annotations

from typing import Any

WINDOWS = ("sliding_window", "keep_window_size")  # settings beyond which a token does not see all tokens before it


def text_config(model: Any) -> Any:
    """Return the configuration of the text decoder of a model: its own, or the one nested in it."""
    config = model.config
    nested = getattr(config, "get_text_config", None)
    return config if nested is None else nested(decoder=True)


def attention_window(model: Any) -> int | None:
    """Return the number of tokens that attention of some layer reaches back; None if every layer sees all tokens."""
    config = text_config(model)
    windows = [getattr(config, name, None) for name in WINDOWS]
    return min((int(window) for window in windows if window), default=None)
