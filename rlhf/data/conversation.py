"""Read conversations in the common formats as lists of `{"role": ..., "content": ...}` plus their other fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlhf.data.rows import BadRow

Message = dict[str, Any]  # role, content (text), and any other fields: tool_calls, name, reasoning_content, ...
Prompt = str | list[Message]
Span = tuple[int, int]  # start and end character, the end not included

REQUIRED_FIELDS = {"role", "content"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_ROLE_AND_CONTENT_KEYS = {"role", "content", "from", "value"}

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
    """Return the text in column `name`.

    Raises:
        BadRow: there is no such column, or it is not valid text.
    """
    if name not in values:
        raise BadRow(f"no {name}")
    return as_text(values[name], name)


def as_text(value: object, name: str) -> str:
    """Return `value` as text that a tokenizer can encode.

    Raises:
        BadRow: it is missing, not a string, or not valid Unicode.
    """
    if value is None:
        raise BadRow(f"no {name}")
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text", f"a {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can contain
        raise BadRow(f"{name} is not valid Unicode") from error
    return value


def some_text(value: object, name: str) -> str:
    """Return `value` as text that is more than white space.

    Raises:
        BadRow: it is not valid text, or empty.
    """
    content = as_text(value, name)
    if not content.strip():
        raise BadRow(f"empty {name}")
    return content


def describe_value(value: object) -> str:
    """Format any JSON value for an error message: short scalars as they are, anything else by its type."""
    return repr(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def is_messages(value: object) -> bool:
    """Return whether `value` has the form of one message or of a list of messages."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(m, dict) for m in value))


def messages(value: object, name: str) -> list[Message]:
    """Parse one message or a list of messages, with `role`/`content` or ShareGPT's `from`/`value`.

    Raises:
        BadRow: it is no list of messages, or a message has an unknown role or no text.
    """
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not items:
        raise BadRow(f"{name} is not a list of messages")
    return [_parse_message(item, name) for item in items]


def _parse_message(item: object, name: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"{name} is not a list of messages")
    role = item.get("role", item.get("from"))
    standard_role = ROLES.get(role.lower()) if isinstance(role, str) else None
    if standard_role is None:
        raise BadRow(f"a message of {name} has no known role", describe_value(role))
    extras = {
        str(key): value
        for key, value in item.items()
        if key not in _ROLE_AND_CONTENT_KEYS and value not in (None, [], "")
    }
    if "tool_calls" in extras:
        extras["tool_calls"] = _parse_tool_calls(extras["tool_calls"])
    _check_texts(extras, f"a field of a message of {name}")
    content = item.get("content", item.get("value"))
    if content is None and "tool_calls" in extras:
        content = ""
    return {"role": standard_role, "content": _parse_content(content, f"content of a message of {name}"), **extras}


def _check_texts(value: object, name: str) -> None:
    """Check that all texts in a JSON value are valid Unicode, since a template may write them."""
    if isinstance(value, str):
        as_text(value, name)
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_texts(part, name)


def _parse_content(value: object, name: str) -> str:
    """Return the text of a content that is a string or a list of text parts."""
    if isinstance(value, list) and value and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(as_text(part.get("text"), name) for part in value)
    return as_text(value, name)


def _parse_tool_calls(value: object) -> list[object]:
    """Parse tool calls; arguments given as JSON text are decoded, because chat templates expect objects."""
    if not isinstance(value, list):
        raise BadRow("tool_calls is not a list", describe_value(value))
    calls: list[object] = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(call, dict) and isinstance(function, dict) and isinstance(arguments, str):
            call = {**call, "function": {**function, "arguments": _decode_json(arguments, "arguments of a tool call")}}
        elif isinstance(call, dict) and function is None and isinstance(call.get("arguments"), str):
            call = {**call, "arguments": _decode_json(call["arguments"], "arguments of a tool call")}
        calls.append(call)
    return calls


def with_arguments_as_text(conversation: Sequence[Message]) -> list[Message]:
    """Write the arguments of every tool call as JSON text, which some templates (DeepSeek's) join to their own text."""

    def write(call: object) -> object:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(arguments, dict):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [write(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in conversation
    ]


def without(conversation: Sequence[Message], name: str) -> list[Message]:
    """Return the conversation with the field `name` removed from its messages."""
    return [{key: value for key, value in message.items() if key != name} for message in conversation]


def _decode_json(value: str, name: str) -> object:
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRow(f"{name} are not valid JSON") from error


def tools_of(values: Mapping[str, object]) -> tuple[dict[str, Any], ...]:
    """Parse the row's `tools` column: a list of JSON schemas, or that list as JSON text."""
    value = values.get("tools")
    if value in (None, "", []):
        return ()
    tools = _decode_json(value, "tools") if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools is not a list of JSON schemas", describe_value(value))
    _check_texts(tools, "tools")
    return tuple(tools)


def assistant_turn(content: str) -> Message:
    """Build an assistant message."""
    return {"role": "assistant", "content": content}


def split_thought(message: Message) -> tuple[str | None, str]:
    """Split an assistant message into its reasoning (None if it has none) and its answer."""
    content = message["content"]
    for name in THOUGHTS:
        if isinstance(message.get(name), str) and message[name].strip():
            return message[name], content
    thought, end_tag, answer = content.partition("</think>")
    thought = thought.strip().removeprefix("<think>")
    return (thought, answer) if end_tag and thought.strip() else (None, content)


def same_message(first: Message, second: Message) -> bool:
    """Return whether two messages have the same role, content and tool calls, ignoring their other fields."""
    return all(first.get(key) == second.get(key) for key in ("role", "content", "tool_calls"))


def shared_turns(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Count the leading messages that two conversations have in common."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if not same_message(a, b)), min(len(first), len(second)))


def with_system(conversation: list[Message], values: Mapping[str, object]) -> list[Message]:
    """Prepend the row's `system` column to the conversation, if it has text and there is no system message yet."""
    system = values.get("system")
    if system is None or system == "" or conversation[0]["role"] == "system":
        return conversation
    return [{"role": "system", "content": as_text(system, "system")}, *conversation]


def split_answer(conversation: list[Message], name: str) -> tuple[list[Message], Message]:
    """Split off the last message, which must be an assistant message with text or tool calls.

    Raises:
        BadRow: it is another message.
    """
    *before, last = conversation
    check_answer(last, name)
    return before, last


def check_answer(message: Message, name: str) -> None:
    """Check that the message is an assistant message with text or tool calls.

    Raises:
        BadRow: it is another message.
    """
    if message["role"] != "assistant":
        raise BadRow(f"the last message of {name} is not the assistant's")
    if not message.get("tool_calls"):
        some_text(message["content"], name)


def messages_unless_plain(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages of a completion, or an empty tuple if it is a single message with nothing but text."""
    return () if len(messages) == 1 and set(messages[0]) == REQUIRED_FIELDS else tuple(messages)


def check_user_speaks(conversation: Sequence[Message], name: str) -> None:
    """Check that there is a user's message in the conversation.

    Raises:
        BadRow: there is none.
    """
    if not any(message["role"] == "user" for message in conversation):
        raise BadRow(f"{name} has no user message to answer")


def check_prompt(conversation: list[Message], name: str) -> list[Message]:
    """Check that the assistant is next to speak in the conversation, and return it.

    Raises:
        BadRow: there is no user message, or the assistant has the last one.
    """
    check_user_speaks(conversation, name)
    if conversation[-1]["role"] == "assistant":
        raise BadRow(f"{name} leaves the assistant nothing to answer")
    return conversation


def without_final_answers(conversation: list[Message], name: str) -> list[Message]:
    """Return the conversation without the assistant messages at its end.

    Raises:
        BadRow: the rest is not a prompt for the assistant.
    """
    end = len(conversation)
    while end and conversation[end - 1]["role"] == "assistant":
        end -= 1
    return check_prompt(conversation[:end], name)


@dataclass(frozen=True)
class CompletionText:
    """The text of the turns that follow a prompt, and the spans of it to train on."""

    before: str
    text: str
    learned: tuple[Span, ...]

    @property
    def is_learned_whole(self) -> bool:
        """Return whether all of the text is trained on."""
        return self.learned == ((0, len(self.text)),)

    def starting_at(self, start: int) -> CompletionText:
        """Return the same turns with the text beginning at character `start` of the conversation.

        The added text becomes part of the first span.
        """
        added = self.before[start:]
        (first, end), *others = self.learned
        learned = ((first, end + len(added)), *((a + len(added), b + len(added)) for a, b in others))
        return CompletionText(self.before[:start], added + self.text, learned)


def segments(length: int, spans: Sequence[Span]) -> list[tuple[Span, bool]]:
    """Cut a text of `length` characters where spans begin and end; return each part and whether it is inside a span."""
    cuts = sorted({0, length, *(edge for span in spans for edge in span)})
    return [((a, b), any(start <= a and b <= end for start, end in spans)) for a, b in pairwise(cuts) if b > a]


MARK = re.compile(r"content\d+of7c1e5f")


def mark(number: int) -> str:
    """Return a word in place of a message's content, which no template changes."""
    return f"content{number}of7c1e5f"


def with_marks(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return the messages with `mark(i)` in place of each content, and the contents."""
    marked, contents = list[Message](), list[str]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            marked.append({**message, "content": mark(len(contents))})
            contents.append(content)
        else:
            marked.append(message)
    return marked, contents


def to_next_mark(text: str) -> str:
    """Return the text before the next mark; all of it without one."""
    return MARK.split(text, maxsplit=1)[0]
