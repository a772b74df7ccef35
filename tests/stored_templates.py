"""Read the chat templates of `tests/templates`: as the families write them, a line after each block.

The renderer of transformers drops the line break after a block, so that it writes nothing.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("templates")


def chat_template(name: str) -> str:
    """Return the template in `name`.jinja, without the line break at the file's end."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
