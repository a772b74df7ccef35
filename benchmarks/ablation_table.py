"""Tabulate a comparison whose arms each change one thing: every arm's difference to one of them, paired.

    rlhf compare configs/lab/ablate_ppo.yaml
    python benchmarks/ablation_table.py runs/ablate-ppo [--against ppo] [--out benchmarks/results/ablate_ppo.json]

Differences are paired by seed and prompt; intervals resample both. Two arms are compared on their
common seeds. Writes JSON and prints the rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from rlhf.evaluation.win_rate import Interval, bootstrap_crossed

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Judged:
    """The scores of an arm with one seed, its KL and its time."""

    scores: Float[Tensor, " P"]
    kl: float
    seconds: float


def read_cell(folder: Path) -> Judged | None:
    """Read a cell's judgment and its training's cost; None if it has not been judged."""
    file = folder / "judged.json"
    if not file.is_file():
        return None
    judged = json.loads(file.read_text(encoding="utf-8"))
    costs = (folder / "costs.jsonl").read_text(encoding="utf-8").splitlines()
    scores = torch.tensor([row["score"] for row in judged["rows"]], dtype=torch.float64)
    return Judged(scores, float(judged["metrics"]["eval/kl"]), float(json.loads(costs[-1])["seconds"]))


def read_arms(folder: Path) -> dict[str, dict[int, Judged]]:
    """Read the judged cells of all trained arms."""
    settings = yaml.safe_load((folder / "compare.yaml").read_text(encoding="utf-8"))
    cells = {
        name: {seed: read_cell(folder / name / f"seed-{seed}") for seed in settings["seeds"]}
        for name, arm in settings["arms"].items()
        if arm is not None
    }
    return {name: {seed: cell for seed, cell in arm.items() if cell is not None} for name, arm in cells.items()}


def describe(arm: dict[int, Judged], default: dict[int, Judged]) -> dict[str, Any]:
    """Compare an arm with the default on the seeds of both."""
    seeds = sorted(set(arm) & set(default))
    scores, base = (torch.stack([cells[seed].scores for seed in seeds]) for cells in (arm, default))
    interval: Interval = bootstrap_crossed(scores - base)
    return {
        "seeds": seeds,
        "score": float(scores.mean()),
        "difference": interval.value,
        "low": interval.low,
        "high": interval.high,
        "by_seed": (scores - base).mean(dim=1).tolist(),
        "kl": sum(arm[seed].kl for seed in seeds) / len(seeds),
        "seconds": sum(arm[seed].seconds for seed in seeds) / len(seeds),
    }


def row(name: str, result: dict[str, Any]) -> str:
    """Return the row of the table; a difference whose interval excludes 0 is bold."""
    low, high = (result[key] for key in ("low", "high"))
    mark = "**" if low > 0 or high < 0 else ""
    shown = f"{mark}{result['difference']:+.2f}{mark} [{low:+.2f}, {high:+.2f}]"
    return f"| `{name}` | {shown} | {result['kl']:.1f} | {result['seconds']:.0f} | {len(result['seeds'])} |"


def main() -> None:
    """Read, compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", default="ppo")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ablate_ppo.json")
    options = parser.parse_args()
    arms = read_arms(options.folder)
    budget = yaml.safe_load((options.folder / "compare.yaml").read_text(encoding="utf-8"))["budget"]
    results = {name: describe(cells, arms[options.against]) for name, cells in arms.items() if cells}
    content = {"budget": budget, "against": options.against, "arms": results}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{options.against} scores {results[options.against]['score']:.2f}")  # noqa: T201
    for name, result in results.items():
        print(row(name, result))  # noqa: T201


if __name__ == "__main__":
    main()
