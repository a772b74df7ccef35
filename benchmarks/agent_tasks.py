"""The tasks of benchmarks/agents_learn.py: an environment, what a run reads and writes in it, and play to imitate.

The play to imitate has the form of the task and is poor at it: three actions in four are random, or stop halfway.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.data.conversation import Message
from rlhf.environments.load import load_environment
from rlhf.environments.protocol import checked_reset, checked_step
from rlhf.environments.tools import tool_guide

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HELD_OUT = 10**6  # row numbers from here on are held out
GOOD = 0.25  # of the actions to imitate; the others are random, or stop halfway

Play = Callable[[list[str], Mapping[str, Any], random.Random], str]
"""Writes an action from the conversation so far, the data row and a random generator."""


@dataclass(frozen=True)
class Task:
    """An environment, the limits of its episodes, and play to imitate."""

    name: str
    target: str  # environment.target
    turns: int
    tokens: int  # of the longest action
    play: Play
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    row: Callable[[int], dict[str, Any]] = lambda number: {"prompt": "Play."}
    epochs: int = 4  # of imitation, before anything else
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its runs, over the common ones

    def rows(self, count: int, *, held_out: bool = False) -> list[dict[str, Any]]:
        """Return rows that episodes begin with."""
        first = HELD_OUT if held_out else 0
        return [self.row(first + number) for number in range(count)]

    def games(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return conversations of poor play, on rows that are not held out."""
        make = load_environment(self.target, self.kwargs)
        return [{"messages": self._game(make(), number, seed)} for number in range(count)]

    def _game(self, environment: Any, number: int, seed: int) -> list[Message]:
        draw, row = random.Random(f"{seed} {number}"), self.row(number)
        random.seed(f"{seed} {number}")  # some environments draw from the global generator
        begun = checked_reset(environment.reset(seed=draw.randrange(2**31), options=row))
        tools = getattr(environment, "tool_schemas", ())
        parts = (row["prompt"], str(begun.observation), tool_guide(tools) if tools else "")
        messages: list[Message] = [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]
        for _ in range(self.turns):
            action = self.play([str(message["content"]) for message in messages], row, draw)
            messages.append({"role": "assistant", "content": action})
            answer = checked_step(environment.step(action))
            if answer.terminated or answer.truncated:
                break
            messages.append({"role": "user", "content": str(answer.observation)})
        return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def guess(
    read: list[str], row: Mapping[str, Any], draw: random.Random, *, highest: int = 20, good: float = GOOD
) -> str:
    """Choose any number; a share of the guesses, `good`, heed all answers so far."""
    low, high = 1, highest
    for number, answer in zip(map(int, read[1::2]), read[2::2], strict=True):
        low, high = (max(low, number + 1), high) if answer == "Higher." else (low, min(high, number - 1))
    heeds = draw.random() < good and low <= high
    return str(draw.randint(low, high) if heeds else draw.randint(1, highest))


def sum_of(number: int) -> dict[str, Any]:
    """Return the row of a sum of two steps; sums whose number is held out are no others' sums."""
    draw = random.Random(number)
    while True:
        a, b, c = draw.randint(2, 40), draw.randint(2, 40), draw.randint(2, 9)
        if ((a + 3 * b + 7 * c) % 5 == 0) == (number >= HELD_OUT):
            return {"prompt": f"Compute ({a} + {b}) * {c}.", "sum": f"({a} + {b}) * {c}"}


def numbers_of(row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the three numbers of a sum."""
    a, b, c = map(int, re.findall(r"\d+", row["sum"]))
    return a, b, c


def calculate(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Compute a sum by calls of tools; most stop after the first step and give its result as the answer."""
    a, b, c = numbers_of(row)
    if len(read) == 1:
        return f'<tool>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool>'
    if len(read) == 3 and draw.random() < GOOD:
        return f'<tool>{{"name": "multiply", "arguments": {{"a": {a + b}, "b": {c}}}}}</tool>'
    return read[-1]


def reckon(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Answer a sum without a tool; most answers are the result of its first step."""
    a, b, c = numbers_of(row)
    return str((a + b) * c if draw.random() < GOOD else a + b)


class Mental:
    """Sums without a tool: one turn, and 1 for the right answer."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Take the sum from the data row."""
        a, b, c = numbers_of(options or {})
        self.answer = (a + b) * c
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare the last number of the text, as the class of tools does."""
        numbers = re.findall(r"-?\d+", action)
        return "", float(bool(numbers) and int(numbers[-1]) == self.answer), True, False, {}


def accept_or_not(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Choose to accept or refuse by the toss of a coin."""
    return draw.choice(("[accept]", "[continue]"))


def shuffle(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Answer with the numbers to sort, some in the right order, most in any."""
    numbers = re.findall(r"-?\d+\.\d+", read[0].partition("order: ")[2].partition("\n")[0])
    if draw.random() < GOOD:
        return str(sorted(numbers, key=float, reverse="descending" in read[0]))
    return str(draw.sample(numbers, len(numbers)))


SORT = {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 99}
GUESS = f"{EXAMPLES / 'guess_number.py'}:GuessNumber"
TASKS = {
    task.name: task
    for task in (
        Task("guess_7", GUESS, 3, 4, partial(guess, highest=7, good=0.0), {"highest": 7, "guesses": 3, "price": 0.0}),
        Task("guess_20", GUESS, 5, 4, guess, {"price": 0.0}),
        Task("calculator", f"{EXAMPLES / 'calculator.py'}:Calculator", 4, 40, calculate, row=sum_of),
        Task("no_tool", f"{Path(__file__).resolve()}:Mental", 1, 6, reckon, row=sum_of),
        Task("sorting", "reasoning_gym:number_sorting", 1, 32, shuffle, SORT),
        Task("secretary", "textarena:Secretary-v0", 5, 6, accept_or_not),
    )
}
