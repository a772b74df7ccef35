"""The columns that prompts add to the rows they are from, and the prompt as the row has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MESSAGES = "prompt_messages"  # the column with a whole prompt as messages, if a chat template is applied
CONVERSATION = "prompt_is_conversation"  # the column that is True if the row has messages rather than a text


def own_prompt(reference: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """Return the prompt of a reference as its row has it; of a prompt that was cut, the text that is left."""
    turns: list[dict[str, Any]] = reference.get(MESSAGES) or []
    if not turns:
        return str(reference["prompt"])
    return turns if reference.get(CONVERSATION) else str(turns[-1]["content"])


def with_own_prompt(reference: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a reference with the prompt as its row has it; a conversation keeps the text that the model reads."""
    own = own_prompt(reference) if reference.get(MESSAGES) else None
    return {**reference, "prompt": own} if isinstance(own, str) else reference
