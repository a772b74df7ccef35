"""Make preference pairs of rated texts: two texts whose ratings differ by at least a gap; the higher rated is chosen.

    python scripts/prepare_snippet_pairs.py RATED.jsonl.gz PAIRS.jsonl [--rounds 4] [--min-gap 1] [--seed 0]

Input rows have `text` and a rating (`human_sentiment`); output rows have `prompt`, `chosen`, `rejected` and `margin`,
the difference of the ratings. In one round a text is in at most one pair: with `--rounds 1`, as for a test set, the
pairs are independent of each other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

Rated = tuple[str, float]

ATTEMPTS = 5  # shuffles per round: texts that one leaves unpaired, their ratings too close, are tried in the next


def read(path: Path, column: str) -> list[Rated]:
    """Read text and rating of every row."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [(str(row["text"]).strip(), float(row[column])) for row in rows]


def pair_up(rated: Sequence[Rated], *, min_gap: float, rounds: int, seed: int) -> Iterator[tuple[Rated, Rated]]:
    """Yield pairs (higher, lower) of different texts whose ratings differ by at least `min_gap`.

    No pair occurs twice, and no text twice in a round.
    """
    seen: set[tuple[int, int]] = set()
    for number in range(rounds):
        unpaired = list(range(len(rated)))
        for attempt in range(ATTEMPTS):
            random.Random(f"{seed}/{number}/{attempt}").shuffle(unpaired)
            paired = set()
            for i, j in zip(unpaired[0::2], unpaired[1::2], strict=False):
                high, low = (i, j) if rated[i][1] > rated[j][1] else (j, i)
                if rated[high][1] - rated[low][1] >= min_gap and (high, low) not in seen:
                    paired |= {i, j}
                    seen.add((high, low))
                    yield rated[high], rated[low]
            unpaired = [i for i in unpaired if i not in paired]


def main(argv: Sequence[str] | None = None) -> None:
    """Read the rated texts, pair them and write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rated", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--column", default="human_sentiment", help="the rating")
    parser.add_argument("--prompt", default="Review:", help="the prompt of every pair")
    parser.add_argument("--min-gap", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1, help="how often each text is paired up, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not args.rated.is_file():
        parser.error(f"no such file: {args.rated}")
    rated = read(args.rated, args.column)
    pairs = list(pair_up(rated, min_gap=args.min_gap, rounds=args.rounds, seed=args.seed))
    args.pairs.parent.mkdir(parents=True, exist_ok=True)
    with args.pairs.open("w", encoding="utf-8") as file:
        for high, low in pairs:
            row = {
                "prompt": args.prompt,
                "chosen": f" {high[0]}",
                "rejected": f" {low[0]}",
                "margin": round(high[1] - low[1], 4),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    sys.stdout.write(f"{args.pairs}: {len(pairs)} pairs from {len(rated)} texts\n")


if __name__ == "__main__":
    main()
