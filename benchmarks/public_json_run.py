"""Score a published run of GRPO on SmolLM2-135M-Instruct by all conditions of its prompts, and not by parsing alone.

    git clone https://github.com/GiuseppeBellamacina/GRPO-strict-generation
    python benchmarks/public_json_run.py GRPO-strict-generation [--json benchmarks/results/public_json_run.json]

The run (20,000 completions, LoRA, MIT licence) has its 300 evaluation prompts and the completions before and after it.
Checked of an answer, beside that it parses: object or array, the named keys, the types in parentheses, and the numbers
of items that the prompt gives. Conditions that no program can read from the sentence ("a nested object describing the
change") are not checked, so that the share is an upper bound.

Other models answer the same prompts, and are scored in the same way:

    python benchmarks/public_json_run.py GRPO-strict-generation --prompts public_prompts.jsonl
    rlhf sample runs/json-4096/ppo/seed-0 --data public_prompts.jsonl --greedy --max-new-tokens 512 --out ppo-0.jsonl
    python benchmarks/public_json_run.py GRPO-strict-generation --completions ppo-0=ppo-0.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("experiments/logs/grpo/nothink/standard/smollm2-135m/eval_20260409_152243")
FILES = {"before": "completions_baseline.json", "after": "completions_grpo_checkpoint-2500.json"}
USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
KEY = re.compile(r'"(\w+)"(?: key)? \(([^)]*)\)')
CHOICE = re.compile(r"\(one of [^)]*\)")
COUNT = re.compile(r"(exactly|at least|with|of) (\d+) (?!levels|fields|domain|key-value)(\w+)")
PAIRS = re.compile(r"exactly (\d+) key-value pairs where all values are of type (\w+)")
TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def parse(completion: str) -> Any:
    """Read the answer's JSON, in a fence or bare.

    Raises:
        ValueError: the answer is no JSON.
    """
    fenced = FENCE.search(completion)
    return json.loads(fenced[1] if fenced else completion.strip())


def below(value: Any) -> Iterator[Any]:
    """Yield a value and all values in it."""
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from below(each)


def has_types(value: Any, prompt: str) -> bool:
    """Check every key that the prompt names with a type in parentheses: it is there, and each of its values fits."""
    members = [pair for inner in below(value) if isinstance(inner, dict) for pair in inner.items()]
    for key, described in KEY.findall(prompt):
        values = [each for name, each in members if name == key]
        kinds = [TYPES[word] for word in re.findall(r"\w+", described) if word in TYPES][:1]
        is_optional = "or null" in described
        if not values or not all(kind(each) or (is_optional and each is None) for kind in kinds for each in values):
            return False
    return True


def has_keys(value: Any, prompt: str) -> bool:
    """Check that every name in quotation marks is a key somewhere, except for the choices of a value."""
    keys = {name for inner in below(value) if isinstance(inner, dict) for name in inner}
    return set(re.findall(r'"(\w+)"', CHOICE.sub("", prompt))) <= keys


def has_counts(value: Any, prompt: str) -> bool:
    """Check the numbers of items: an array (or an object of so many members) of each length that the prompt gives."""
    sizes = [len(inner) for inner in below(value) if isinstance(inner, list | dict)]
    for relation, number, _ in COUNT.findall(prompt):
        fits = (size >= int(number) if relation == "at least" else size == int(number) for size in sizes)
        if not any(fits):
            return False
    pairs = PAIRS.search(prompt)
    if pairs is None:
        return True
    return isinstance(value, dict) and len(value) == int(pairs[1]) and all(map(TYPES[pairs[2]], value.values()))


def meets_all(completion: str, prompt: str) -> bool:
    """Check an answer for everything that a program can read from the prompt."""
    try:
        value = parse(completion)
    except ValueError:
        return False
    wanted = list if re.search(r"Generate a (valid )?JSON array", prompt) else dict
    return isinstance(value, wanted) and all(check(value, prompt) for check in (has_keys, has_types, has_counts))


def is_json(completion: str) -> bool:
    """Check whether an answer parses."""
    try:
        parse(completion)
    except ValueError:
        return False
    return True


def shares_of(completions: Sequence[str], prompts: Sequence[str], valid: Sequence[bool]) -> dict[str, float]:
    """Compute the share of answers that parse, and of those that meet everything that is checked."""
    full = [meets_all(completion, prompt) for completion, prompt in zip(completions, prompts, strict=True)]
    return {
        "rows": len(prompts),
        "parses, as published": sum(valid) / len(prompts),
        "everything that is checked": sum(full) / len(prompts),
    }


def read_completions(path: Path, prompts: Sequence[str]) -> list[str]:
    """Read the answers that `rlhf sample` wrote to these prompts, in their order."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(rows) != len(prompts):
        raise SystemExit(f"{path} has {len(rows)} answers to {len(prompts)} prompts")
    return [row["completion"] for row in rows]


def main() -> None:
    """Print both shares before and after the run, and of other models' answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=Path, help="write the prompts to this file, and end")
    parser.add_argument("--completions", action="append", default=[], metavar="NAME=FILE", help="of `rlhf sample`")
    args = parser.parse_args()
    shares: dict[str, dict[str, float]] = {}
    prompts: list[str] = []
    for name, file in FILES.items():
        rows = json.loads((args.clone / FOLDER / file).read_text(encoding="utf-8"))
        prompts = [match[1] for row in rows if (match := USER.search(row["prompt"]))]
        shares[name] = shares_of([row["completion"] for row in rows], prompts, [row["valid"] for row in rows])
    if args.prompts is not None:
        args.prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
        return
    for entry in args.completions:
        name, _, file = entry.partition("=")
        completions = read_completions(Path(file), prompts)
        shares[name] = shares_of(completions, prompts, [is_json(completion) for completion in completions])
    text = json.dumps(shares, indent=2)
    sys.stdout.write(text + "\n")
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
