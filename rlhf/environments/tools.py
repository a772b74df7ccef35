"""Environments made of tools: a class in TRL's form, or plain functions; calls are read from the policy's text.

A tool is a function with type hints and a docstring. If the chat template has no form of its own for tools (SmolLM2's),
or another one than Hermes' and Qwen's (Llama 3.1's), a call is one line of text, and its result comes back as the next
observation:

    <tool>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool>
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlhf.environments.coroutines import result_of
from rlhf.environments.protocol import TOOL_CALLS, TOOL_ERRORS, Observation, checked_reset

CALL = re.compile(r"<tool(?:_call)?>(.*?)</tool(?:_call)?>", re.DOTALL)
"""A call in the plain-text grammar; the form of Qwen's and Hermes' templates has another tag."""
OPENING = re.compile(r"<(tool(?:_call)?)>\s*(?:\{|\Z)")
"""The start of a call, which may be cut right behind its tag; a tag with prose behind it is no call."""
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", tuple: "array", dict: "object"}
TYPES |= {set: "array", frozenset: "array", Sequence: "array", Mapping: "object"}
GUIDE = "You may call these tools, each by a line"
FORM = '<tool>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool>'
RESET = "reset"
REWARD = "get_reward"
LONGEST_ERROR = 200  # characters of a tool's error that the policy reads


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    function: Callable[..., Any]
    description: str
    parameters: Mapping[str, str | None]  # name -> JSON type; None: any

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        signature = inspect.signature(self.function).parameters
        required = [name for name in self.parameters if signature[name].default is inspect.Parameter.empty]
        properties = {name: {"type": kind} if kind else {} for name, kind in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": required},
            },
        }


def tool_of(function: Callable[..., Any], name: str = "") -> Tool:
    """Read a tool from a function's type hints and the first line of its docstring.

    Raises:
        ValueError: it has no docstring, or an argument without a type hint.
    """
    name = name or function.__name__
    description = (inspect.getdoc(function) or "").strip().partition("\n")[0]
    if not description:
        raise ValueError(f"the tool {name!r} needs a docstring, which the policy reads")
    hints = get_type_hints(function)
    missing = [argument for argument in inspect.signature(function).parameters if argument not in hints]
    if missing:
        raise ValueError(f"the tool {name!r} needs a type hint for its argument {missing[0]!r}")
    parameters = {argument: _json_type(hints[argument]) for argument in inspect.signature(function).parameters}
    return Tool(name, function, description, parameters)


def _json_type(hint: Any) -> str | None:
    """Return the JSON type of a hint, None for Any.

    None beside another type is left out, and a choice has the type of its values.
    """
    origin = get_origin(hint)
    if hint is Any:
        return None
    if origin not in (Union, UnionType, Literal):
        bases = getattr(origin or hint, "__mro__", ())  # a TypedDict is a dict
        return next((TYPES[base] for base in bases if base in TYPES), "string")
    inner = [type(value) for value in get_args(hint)] if origin is Literal else get_args(hint)
    kinds = {_json_type(kind) for kind in inner if kind is not type(None)}
    if kinds == {"integer", "number"}:
        return "number"
    return kinds.pop() if len(kinds) == 1 else "string"


def is_tool_class(made: Any) -> bool:
    """Return whether this is a class in TRL's form: with reset and public methods, and without step."""
    return isinstance(made, type) and hasattr(made, RESET) and not hasattr(made, "step") and bool(_tool_names(made))


def _tool_names(kind: Any) -> list[str]:
    names = (name for name in dir(kind) if not name.startswith("_") and name not in (RESET, REWARD, "close"))
    return [name for name in names if inspect.isroutine(getattr(kind, name))]


def tools_of(instance: Any) -> list[Tool]:
    """Return the public methods of an instance as tools, in the order of their names."""
    return [tool_of(getattr(instance, name), name) for name in _tool_names(type(instance))]


@dataclass(frozen=True)
class Call:
    """A call that was read from a text."""

    name: str
    arguments: Mapping[str, Any]


def read_calls(text: str) -> list[Call | str]:
    """Read the calls of a text in the plain-text grammar; a malformed one is the reason, as text.

    A last call without its closing tag, which was cut or is not well formed, is malformed as well.
    """
    calls = [_read_call(body) for body in CALL.findall(text)]
    unclosed = OPENING.search(CALL.sub("", text))
    return calls if unclosed is None else [*calls, f"the call has no end: write </{unclosed[1]}> behind it"]


def _read_call(body: str) -> Call | str:
    try:
        content = json.loads(body.strip())
    except (ValueError, RecursionError) as error:  # also brackets in brackets without end
        return f"the call is no JSON: {error}"
    if not isinstance(content, Mapping) or not isinstance(content.get("name"), str):
        return 'a call is {"name": ..., "arguments": {...}}'
    arguments = content.get("arguments", {})
    return Call(content["name"], arguments) if isinstance(arguments, Mapping) else "arguments has to be an object"


def run_call(call: Call | str, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """Run a call; return the result for the policy to read, and whether the call worked."""
    if isinstance(call, str):
        return f"error: {call}", False
    tool = tools.get(call.name)
    if tool is None:
        return f"error: no tool {call.name!r}; there are {', '.join(tools)}", False
    try:
        inspect.signature(tool.function).bind(**call.arguments)
        result = result_of(tool.function(**call.arguments))
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False), True
    except Exception as error:  # the policy's mistake, which it may mend
        return f"error: {type(error).__name__}: {str(error)[:LONGEST_ERROR]}", False


class ToolEnvironment:
    """Runs a class in TRL's form: `reset(**row)`, public methods as tools, and `get_reward()`.

    An action with calls gets their results as the observation. One without ends the episode, and get_reward() is then
    its reward. It is asked too if a limit of the run ends the episode, with an empty answer.
    """

    def __init__(self, instance: Any) -> None:
        """Take an instance of the class."""
        self.instance = instance
        self.tools = {tool.name: tool for tool in tools_of(instance)}

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return [tool.schema() for tool in self.tools.values()]

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset the instance with the columns of the row that its reset takes."""
        row = dict(options or {})
        returned = result_of(self.instance.reset(**_taken(self.instance.reset, row, seed)))
        return checked_reset(returned).observation, {}

    def step(self, action: str) -> tuple[Observation, Any, bool, bool, dict[str, Any]]:
        """Run the calls of an action, or end the episode with the instance's reward."""
        calls = read_calls(action)
        if not calls:
            return "", self._reward(action), True, False, {}
        return _run_calls(calls, self.tools)

    def reward_at_limit(self) -> Any:
        """Return the instance's reward after a limit of the run has ended the episode."""
        return self._reward("")

    def _reward(self, answer: str) -> Any:
        """Ask the instance for its reward; get_reward may have an argument `answer`, the text without a call."""
        function = getattr(self.instance, REWARD)
        return result_of(function(**_taken(function, {"answer": answer}, None)))


def _run_calls(calls: Sequence[Call | str], tools: Mapping[str, Tool]) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Run the calls of an action; the results are the observation."""
    results = [run_call(call, tools) for call in calls]
    failed = sum(not worked for _, worked in results)
    text = "\n".join(text for text, _ in results)
    return text, 0.0, False, False, {TOOL_CALLS: len(results), TOOL_ERRORS: failed}


def tool_guide(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools and the grammar of calls, for a prompt whose template has no form for tools."""
    return "\n".join([GUIDE, FORM, *(_line(schema["function"]) for schema in schemas)])


def _line(function: Mapping[str, Any]) -> str:
    properties = function["parameters"]["properties"]
    arguments = ", ".join(f"{name}: {kind['type']}" if kind else name for name, kind in properties.items())
    return f"{function['name']}({arguments}): {function['description']}"


def _taken(function: Callable[..., Any], row: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """Return the row's columns that a function takes, and the seed if it takes that."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = row if takes_all else {name: value for name, value in row.items() if name in parameters}
    return {**given, "seed": seed} if "seed" in parameters and "seed" not in row else given


class FunctionTools:
    """An environment of plain functions: calls are run, and `reward(answer, row)` scores the text without a call.

    If a limit of the run ends the episode, it scores an empty answer.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], reward: Callable[[str, Mapping[str, Any]], float]) -> None:
        """Take the tools, and the function that scores the answer."""
        self.tools = {tool.name: tool for tool in map(tool_of, tools)}
        self.reward = reward
        self.row: Mapping[str, Any] = {}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Keep the row for the reward; the prompt stays as it is, with the tools."""
        self.row = dict(options or {})
        return "", {}

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return [tool.schema() for tool in self.tools.values()]

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls of an action, or score it as the answer."""
        calls = read_calls(action)
        if not calls:
            return "", self._score(action), True, False, {}
        return _run_calls(calls, self.tools)

    def reward_at_limit(self) -> float:
        """Score an episode without an answer, which a limit of the run has ended."""
        return self._score("")

    def _score(self, answer: str) -> float:
        return float(result_of(self.reward(answer, self.row)))
