"""Generate prompts that ask for a JSON object with exactly given keys and types, for the verifier `json`.

    python scripts/make_json_task.py OUT.jsonl --split train [--rows 2000] [--seed 0] [--tiers flat arrays objects]

Rows have the columns `prompt`, `keys` (the type of each key, which the verifier reads), `tier`, `answer` (an object
that a program wrote), and `messages` (prompt and answer, for SFT). The splits `train`, `tune` and `test` share no key.
The same seed gives the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Type = str | dict[str, Any]
"""A type as the verifier reads it: its name, or {"enum": [...]}, {"array": type, "length": n}, {"object": {...}}."""

KEYS = {
    "train": """
        street depth codes city weight color height owner level price title rating status region amount author length
        temperature country label version email duration speed material score currency width brand category distance
        priority language capacity username species genre stock floor battery signal voltage angle planet engine wheel
        recipe flavor sauce budget tickets stadium team captain opponent season goals minutes referee district mayor
        population river altitude climate harvest tractor barn acres fertilizer crop seeds orchard irrigation rainfall
    """,
    "tune": """
        shelf publisher chapter pages isbn edition printer cover margin binding pilot runway cargo altimeter flight gate
        passengers hangar radar fuel melody tempo chorus drummer lyrics album octave rhythm verse concert
    """,
    "test": """
        museum curator exhibit visitors gallery sculpture patient dosage symptom clinic nurse diagnosis allergy recovery
        ward pulse lighthouse harbor anchor sailor voyage tide compass deck mast island robot sensor firmware torque
        payload gripper calibration uptime chassis module
    """,
}
"""The keys of each split."""

TIERS: Mapping[str, str] = {
    "flat": "strings, integers, booleans and arrays of integers",
    "arrays": "arrays of a length and of strings, and a choice of given words, besides",
    "objects": "an array of two objects, besides",
    "nested": "an object in the object, besides",
}
WORDS = ("amber", "birch", "coral", "delta", "ember", "fable", "grove", "hazel", "ivory", "jade", "lotus", "maple")
CHOICES = (("low", "medium", "high"), ("red", "green", "blue"), ("open", "closed"), ("new", "used", "broken"))
OPENINGS = (
    "Generate a JSON object with exactly these keys: {keys}.",
    "Write a JSON object. It has exactly these keys: {keys}.",
    "Return one JSON object with these keys and no others: {keys}.",
    "Give me a JSON object whose only keys are {keys}.",
)
ENDINGS = (
    " Reply with the JSON only.",
    " Write nothing else.",
    " No explanation, only JSON.",
    " Only the JSON, please.",
)
NAMES = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean (true or false)"}


def flat_type(draw: random.Random) -> Type:
    """Draw one of the four types that every tier has."""
    kind = draw.choice(("string", "string", "integer", "integer", "boolean", "array"))
    return {"array": "integer", "length": draw.randint(2, 4)} if kind == "array" else kind


def array_type(draw: random.Random) -> Type:
    """Draw an array of strings or numbers of a given length, or a choice of words."""
    if draw.random() < 0.4:
        return {"enum": list(draw.choice(CHOICES))}
    return {"array": draw.choice(("string", "integer", "number")), "length": draw.randint(2, 5)}


def describe(kind: Type) -> str:
    """Return a type in words, as the prompt has it."""
    if isinstance(kind, str):
        return NAMES[kind]
    if "enum" in kind:
        return "one of " + ", ".join(json.dumps(word) for word in kind["enum"])
    if "object" in kind:
        return "object with the keys " + listed(kind["object"])
    inner = kind["array"]
    if isinstance(inner, str):
        return f"array of {kind['length']} {NAMES[inner].partition(' ')[0]}s"
    return f"array of {kind['length']} objects, each with the keys " + listed(inner["object"])


def listed(keys: Mapping[str, Type]) -> str:
    """Return keys and their types as a list in words."""
    return ", ".join(f'"{key}" ({describe(kind)})' for key, kind in keys.items())


def example(kind: Type, draw: random.Random) -> Any:
    """Return a value of a type."""
    if isinstance(kind, str):
        makers: dict[str, Callable[[], Any]] = {
            "string": lambda: " ".join(draw.sample(WORDS, draw.randint(1, 2))).capitalize(),
            "integer": lambda: draw.randint(1, 99),
            "number": lambda: draw.randint(1, 99) + 0.5,
            "boolean": lambda: draw.random() < 0.5,
        }
        return makers[kind]()
    if "enum" in kind:
        return draw.choice(kind["enum"])
    if "object" in kind:
        return {key: example(inner, draw) for key, inner in kind["object"].items()}
    return [example(kind["array"], draw) for _ in range(kind["length"])]


def keys_of(tier: str, names: Sequence[str], draw: random.Random) -> dict[str, Type]:
    """Draw three or four keys with types; the last one is the tier's own."""
    chosen = draw.sample(list(names), 7)
    keys: dict[str, Type] = {name: flat_type(draw) for name in chosen[: draw.randint(3, 4)]}
    own = list(keys)[-1]
    inner: dict[str, Type] = {name: draw.choice(("string", "integer")) for name in chosen[4:6]}
    if tier == "arrays":
        keys[own] = array_type(draw)
    elif tier == "objects":
        keys[own] = {"array": {"object": inner}, "length": 2}
    elif tier == "nested":
        keys[own] = {"object": inner}
    return keys


def generate(rows: int, *, split: str, tiers: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Return rows of a split; the tiers take turns."""
    names, made = KEYS[split].split(), []
    for number in range(rows):
        draw = random.Random(f"json task {split} {seed} {number}")
        tier = tiers[number % len(tiers)]
        keys = keys_of(tier, names, draw)
        prompt = draw.choice(OPENINGS).format(keys=listed(keys)) + draw.choice(ENDINGS)
        answer = json.dumps({key: example(kind, draw) for key, kind in keys.items()})
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        made.append({"prompt": prompt, "keys": keys, "tier": tier, "answer": answer, "messages": messages})
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Generate the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--split", choices=list(KEYS), default="train", help="which keys; the splits share none")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", nargs="+", choices=list(TIERS), default=["flat"], help=str(dict(TIERS)))
    args = parser.parse_args(argv)
    if args.rows < 1:
        parser.error("--rows must be 1 or more")
    rows = generate(args.rows, split=args.split, tiers=args.tiers, seed=args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{args.rows} prompts in {args.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
