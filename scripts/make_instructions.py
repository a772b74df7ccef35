"""Generate prompts with constraints that a program can check, for rlhf.constraints.reward:score.

    python scripts/make_instructions.py PROMPTS.jsonl [--rows 2000] [--seed 0] [--skip 0]

Rows have IFEval's columns `prompt`, `instruction_id_list`, `kwargs` and `key`. They follow its kinds and proportions,
and share no run of eight words with its prompts. The same seed gives the same rows; --skip leaves out that many rows at
the start, so that two files of one seed can be kept disjoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from instructions import generate_instructions


def main(argv: Sequence[str] | None = None) -> int:
    """Generate the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0)
    args = parser.parse_args(argv)
    if args.rows < 1 or args.skip < 0:
        parser.error("--rows must be 1 or more, --skip 0 or more")
    rows = generate_instructions(args.rows, seed=args.seed, start=args.skip)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{args.rows} prompts in {args.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
