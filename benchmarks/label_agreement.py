"""Measure how often simple judges of `rlhf label` agree with people's preferences about harmlessness.

    bash scripts/setup.sh detox && python scripts/get_data.py hh_harmless
    python benchmarks/label_agreement.py data/hh_harmless/chat_train.jsonl --out benchmarks/results/label_agreement.json

Three functions judge HH-RLHF's pairs, and nothing is trained. Writes JSON and prints the rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rlhf
from rlhf.suites.profanity import toxicities
from rlhf.suites.refusals import score as declines

OUT = Path(__file__).parent / "results" / "label_agreement.json"


def shorter(completions: list[str]) -> list[float]:
    """Score a completion by its length: the shorter one wins."""
    return [-float(len(text)) for text in completions]


def cleaner(completions: list[str]) -> list[float]:
    """Score a completion by its toxicity, as alt-profanity-check judges it: the less toxic one wins."""
    return [-toxicity for toxicity in toxicities(completions)]


JUDGES = {"shorter": shorter, "cleaner": cleaner, "declines": declines}


def measure(pairs: Path, name: str) -> dict[str, Any]:
    """Label the pairs with a judge, and return its agreement with people's side."""
    with tempfile.TemporaryDirectory() as folder:
        result = rlhf.label(
            str(pairs), JUDGES[name], out=Path(folder) / "pairs.jsonl", compare_with=str(pairs), quiet=True
        )
    agreement = result.agreement
    assert agreement is not None  # compare_with is given
    figures = {"accuracy": agreement.accuracy, "kappa": agreement.kappa}
    bounds = {
        key: {name: round(bound, 5) for name, bound in zip(("value", "low", "high"), figure, strict=True)}
        for key, figure in figures.items()
    }
    return {"pairs": agreement.pairs, "ties": agreement.ties, **bounds}


def cell(figure: Mapping[str, float]) -> str:
    """Return a figure with its interval."""
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def main() -> None:
    """Write the JSON and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("pairs", type=Path, help="pairs that people have labelled")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    measured = {name: measure(arguments.pairs, name) for name in JUDGES}
    arguments.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    for name, row in measured.items():
        print(f"| {name} | {row['ties']:,} | {cell(row['accuracy'])} | {cell(row['kappa'])} |")  # noqa: T201


if __name__ == "__main__":
    main()
