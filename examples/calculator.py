"""Sums of two steps, such as (3 + 4) * 6, with tools that compute one step. `python calculator.py` writes examples."""

import json
import random
import re

from rlhf.environments.tools import ToolEnvironment, tool_guide


def question(seed):
    """Make a sum of two steps; return it, its first step and its answer."""
    draw = random.Random(seed)
    a, b, c = draw.randint(2, 40), draw.randint(2, 40), draw.randint(2, 9)
    return f"({a} + {b}) * {c}", (a, b, c), (a + b) * c


class Calculator:
    """A class of tools: public methods are what the policy may call, and get_reward() scores its answer."""

    def reset(self, sum: str = "", **row):
        """Take the sum from the data row."""
        self.sum = sum
        a, b, c = map(int, re.findall(r"\d+", sum))
        self.answer, self.results = (a + b) * c, []
        return None

    def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        self.results.append(int(a) + int(b))
        return str(self.results[-1])

    def multiply(self, a: int, b: int) -> str:
        """Multiply two whole numbers."""
        self.results.append(int(a) * int(b))
        return str(self.results[-1])

    def get_reward(self, answer: str = "") -> float:
        """Return 1 for the right answer, the last number that the policy wrote."""
        numbers = re.findall(r"-?\d+", answer)
        return float(bool(numbers) and int(numbers[-1]) == self.answer)


def call(name, **arguments):
    """Write a call of a tool as the policy has to write it."""
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


def demonstration(seed, rules):
    """Work a sum out with the tools; a third of them stop after the first step, so that there is something to learn."""
    text, (a, b, c), answer = question(seed)
    messages = [
        {"role": "user", "content": f"Compute {text}. Answer with the number alone.\n\n{rules}"},
        {"role": "assistant", "content": call("add", a=a, b=b)},
        {"role": "user", "content": str(a + b)},
    ]
    if seed % 3 == 0:
        return [*messages, {"role": "assistant", "content": str(a + b)}]
    return [
        *messages,
        {"role": "assistant", "content": call("multiply", a=a + b, b=c)},
        {"role": "user", "content": str(answer)},
        {"role": "assistant", "content": str(answer)},
    ]


def write_sums(sums="sums.jsonl", prompts="questions.jsonl", count=600):
    """Write sums worked out with the tools, and prompts; training writes the tools below each prompt in this way."""
    rules = tool_guide(ToolEnvironment(Calculator()).tool_schemas)
    with open(sums, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": demonstration(seed, rules)}) + "\n" for seed in range(count))
    with open(prompts, "w", encoding="utf-8") as file:
        for seed in range(10_000, 10_256):
            text, _, _ = question(seed)
            file.write(json.dumps({"prompt": f"Compute {text}. Answer with the number alone.", "sum": text}) + "\n")


if __name__ == "__main__":
    write_sums()
