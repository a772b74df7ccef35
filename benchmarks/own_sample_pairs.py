"""Make pairs of people's rewrites and a model's own samples, beside the first pairs of ParaDetox.

    python benchmarks/own_sample_pairs.py prompts runs/own/prompts.jsonl
    rlhf sample RUN --data runs/own/prompts.jsonl --max-new-tokens 40 --temperature 0.8 --out runs/own/samples.jsonl
    python benchmarks/own_sample_pairs.py pairs runs/own/pairs.jsonl --samples runs/own/samples.jsonl

The rejected side of an own pair is written as the policy writes, so that a reward model cannot tell it by its form.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAIRS = Path("data/paradetox/preferences.jsonl")
PROMPTS, FIRST_PAIRS = 2400, 4000


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the prompts to sample, each with a person's rewrite, or the pairs of a reward model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=("prompts", "pairs"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=Path, help="of `pairs`: the completions that rlhf sample wrote")
    parsed = parser.parse_args(arguments)
    people = read(PAIRS)
    if parsed.what == "prompts":
        rewrites: dict[str, str] = {}
        for row in people:
            rewrites.setdefault(row["prompt"], row["chosen"])
        write(parsed.out, [{"prompt": prompt, "human": text} for prompt, text in list(rewrites.items())[:PROMPTS]])
    else:
        write(parsed.out, pairs(people[:FIRST_PAIRS], read(parsed.samples)))


def pairs(people: Sequence[dict[str, Any]], samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return people's pairs and those with a sample that differs from the rewrite, in a random order."""
    rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in people]
    for row in samples:
        sample = row["completion"].strip()
        if sample.lower().rstrip(".") != row["human"].lower().rstrip("."):
            rows.append({"prompt": row["prompt"], "chosen": row["human"], "rejected": sample})
    random.Random(0).shuffle(rows)
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
