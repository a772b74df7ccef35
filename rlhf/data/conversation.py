"""Conversations in the spellings people have, as lists of `{"role": ..., "content": ...}`."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.data.row import BadRow

Message = dict[str, str]
Prompt = str | list[Message]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
}


def text(values: Mapping[str, object], name: str) -> str:
    """The text in column `name`."""
    if name not in values:
        raise BadRow(f"no {name}")
    return as_text(values[name], name)


def as_text(value: object, name: str) -> str:
    """`value` as text that a tokenizer can read."""
    if value is None:
        raise BadRow(f"no {name}")
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text", f"a {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise BadRow(f"{name} is not valid Unicode") from error
    return value


def some_text(value: object, name: str) -> str:
    """`value` as text with something in it."""
    found = as_text(value, name)
    if not found.strip():
        raise BadRow(f"empty {name}")
    return found


def shown(value: object) -> str:
    """A value as messages show it, which may be anything that JSON can hold."""
    return repr(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def is_messages(value: object) -> bool:
    """Whether `value` has the form of one message or of several."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(m, dict) for m in value))


def messages(value: object, name: str) -> list[Message]:
    """One message or a list of them, with `role`/`content` or with ShareGPT's `from`/`value`."""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not items:
        raise BadRow(f"{name} is not a list of messages")
    return [_message(item, name) for item in items]


def _message(item: object, name: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"{name} is not a list of messages")
    role = item.get("role", item.get("from"))
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"a message of {name} has no known role", shown(role))
    return {
        "role": known,
        "content": as_text(item.get("content", item.get("value")), f"content of a message of {name}"),
    }


def with_system(conversation: list[Message], values: Mapping[str, object]) -> list[Message]:
    """The conversation with the row's `system` column as its first message, where it has one."""
    system = values.get("system")
    if system is None or system == "" or conversation[0]["role"] == "system":
        return conversation
    return [{"role": "system", "content": as_text(system, "system")}, *conversation]


def split_answer(conversation: list[Message], name: str) -> tuple[list[Message], str]:
    """What comes before the last message, and the last message, which must be an assistant's with something in it."""
    *before, last = conversation
    if last["role"] != "assistant":
        raise BadRow(f"the last message of {name} is not the assistant's")
    return before, some_text(last["content"], name)


def asking(conversation: list[Message], name: str) -> list[Message]:
    """The conversation, which must leave the next word to the assistant."""
    if not any(message["role"] == "user" for message in conversation):
        raise BadRow(f"{name} has no user message to answer")
    if conversation[-1]["role"] == "assistant":
        raise BadRow(f"{name} leaves the assistant nothing to answer")
    return conversation


def open_question(conversation: list[Message], name: str) -> list[Message]:
    """The conversation up to where the assistant is to answer: without the answers at its end."""
    end = len(conversation)
    while end and conversation[end - 1]["role"] == "assistant":
        end -= 1
    return asking(conversation[:end], name)
