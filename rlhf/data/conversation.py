"""Conversations in the spellings people have, as lists of `{"role": ..., "content": ...}` with their other fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.row import BadRow

Message = dict[str, Any]  # role, content (text), and the row's other fields: tool_calls, name, reasoning_content, ...
Prompt = str | list[Message]

WRITTEN_BY_ALL = {"role", "content"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SPELLINGS = {"role", "content", "from", "value"}

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
    "function": "tool",
    "observation": "tool",
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
    others = {str(key): value for key, value in item.items() if key not in _SPELLINGS and value not in (None, [], "")}
    if "tool_calls" in others:
        others["tool_calls"] = _tool_calls(others["tool_calls"])
    content = item.get("content", item.get("value"))
    if content is None and "tool_calls" in others:
        content = ""
    return {"role": known, "content": _content(content, f"content of a message of {name}"), **others}


def _content(value: object, name: str) -> str:
    """Read text, or a list of parts that are text."""
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(as_text(part.get("text"), name) for part in value)
    return as_text(value, name)


def _tool_calls(value: object) -> list[object]:
    """Read the calls of tools; arguments given as JSON text become what they say, which is what templates expect."""
    if not isinstance(value, list):
        raise BadRow("tool_calls is not a list", shown(value))
    calls: list[object] = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(call, dict) and isinstance(function, dict) and isinstance(arguments, str):
            call = {**call, "function": {**function, "arguments": _from_json(arguments, "arguments of a tool call")}}
        calls.append(call)
    return calls


def _from_json(value: str, name: str) -> object:
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRow(f"{name} are not valid JSON") from error


def tools_of(values: Mapping[str, object]) -> tuple[dict[str, Any], ...]:
    """Read the row's `tools` column: a list of JSON schemas, or the JSON text of one."""
    value = values.get("tools")
    if value in (None, "", []):
        return ()
    tools = _from_json(value, "tools") if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools is not a list of JSON schemas", shown(value))
    return tuple(tools)


def assistant_turn(content: str) -> Message:
    """Make a message of the assistant."""
    return {"role": "assistant", "content": content}


def thought_of(message: Message) -> tuple[str | None, str]:
    """Split the assistant's message into its thought, if it has one, and what it says then."""
    content = message["content"]
    for name in THOUGHTS:
        if isinstance(message.get(name), str) and message[name].strip():
            return message[name], content
    thought, closed, rest = content.partition("</think>")
    thought = thought.strip().removeprefix("<think>")
    return (thought, rest) if closed and thought.strip() else (None, content)


def same_message(first: Message, second: Message) -> bool:
    """Say whether two messages say the same, whatever else their rows note of them."""
    return all(first.get(key) == second.get(key) for key in ("role", "content", "tool_calls"))


def shared_turns(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Count the messages that two conversations have in common at their start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if not same_message(a, b)), min(len(first), len(second)))


def with_system(conversation: list[Message], values: Mapping[str, object]) -> list[Message]:
    """The conversation with the row's `system` column as its first message, where it has one."""
    system = values.get("system")
    if system is None or system == "" or conversation[0]["role"] == "system":
        return conversation
    return [{"role": "system", "content": as_text(system, "system")}, *conversation]


def split_answer(conversation: list[Message], name: str) -> tuple[list[Message], Message]:
    """Split off the last message, which must be the assistant's, and must say or call something."""
    *before, last = conversation
    check_answer(last, name)
    return before, last


def check_answer(message: Message, name: str) -> None:
    """Check that the message is the assistant's and says or calls something."""
    if message["role"] != "assistant":
        raise BadRow(f"the last message of {name} is not the assistant's")
    if not message.get("tool_calls"):
        some_text(message["content"], name)


def more_than_text(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages of a completion, or nothing where it is one message that is nothing but its text."""
    return () if len(messages) == 1 and set(messages[0]) == WRITTEN_BY_ALL else tuple(messages)


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
