"""The tasks of benchmarks/agents_learn.py: an environment, a run's input and output in it, and play to imitate.

The play to imitate has the form of the task and is poor at it: most of it is random, wrong, or stops halfway.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.data.conversation import Message
from rlhf.environments.load import load_environment
from rlhf.environments.protocol import checked_reset, checked_step
from rlhf.environments.tools import tool_guide

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HELD_OUT = 10**6  # row numbers from here on are held out
GOOD = 0.25  # of the games to imitate, except those that are random

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
    imitated: int = 2048  # games that the start imitates
    epochs: int = 4
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


def guess(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Choose any number, without regard to the answers."""
    return str(draw.randint(1, SEVEN["highest"]))


def sum_of(number: int) -> dict[str, Any]:
    """Return the row of a sum of two steps; no other row has a sum that is held out."""
    draw = random.Random(number)
    while True:
        a, b, c = (draw.randint(2, 9) for _ in range(3))
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
        """Compare the last number of the text, like the class of tools."""
        numbers = re.findall(r"-?\d+", action)
        return "", float(bool(numbers) and int(numbers[-1]) == self.answer), True, False, {}


def point(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Choose a cup: some answers follow the ball, most take the other cup of the last swap."""
    cups = re.findall(r"\[(\w)\]", read[0].partition("Ball starts: ")[2].partition("\n")[0])
    ball, pair = cups.index("X"), (0, 0)
    for pair in re.findall(r"swapped cups (\d) and (\d)", read[0]):
        swap = dict(zip(map(int, pair), map(int, reversed(pair)), strict=True))
        ball = swap.get(ball, ball)
    return f"[{ball if draw.random() < GOOD else next(int(cup) for cup in pair if int(cup) != ball)}]"


def spell(read: list[str], row: Mapping[str, Any], draw: random.Random) -> str:
    """Answer three letters, of which two are the same; most answers have the two side by side, some at the ends."""
    letters = sorted(re.findall(r"\w", read[0].rpartition(":")[2]))
    one, other = sorted(set(letters), key=letters.count) if len(set(letters)) > 1 else letters[:2]
    return other + one + other if draw.random() < GOOD else other + other + one


SHORT, LONG = {"schedule": {"steps": 20}}, {"schedule": {"steps": 120}}
CUPS = "textarena:ThreeCardMonte-v0"
LETTERS = {"min_length": 3, "max_length": 3}
SEVEN: dict[str, Any] = {"highest": 7, "guesses": 3, "price": 0.0}
GUESS = f"{EXAMPLES / 'guess_number.py'}:GuessNumber"
TASKS = {
    task.name: task
    for task in (
        Task("guess_7", GUESS, 3, 4, guess, SEVEN, imitated=512),
        Task("calculator", f"{EXAMPLES / 'calculator.py'}:Calculator", 4, 24, calculate, row=sum_of, settings=SHORT),
        Task("no_tool", f"{Path(__file__).resolve()}:Mental", 1, 6, reckon, row=sum_of),
        Task("cups", CUPS, 1, 6, point, {"num_cups": 3, "steps": 2}),
        Task("cups_long", CUPS, 1, 6, point, {"num_cups": 3, "steps": 2}, settings=LONG),
        Task("cups_8192", CUPS, 1, 6, point, {"num_cups": 3, "steps": 2}, imitated=8192),
        Task("palindrome", "reasoning_gym:palindrome_generation", 1, 6, spell, LETTERS),
    )
}
