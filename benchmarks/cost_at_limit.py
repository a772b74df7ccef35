"""Tabulate the cost of the arms of a comparison: does a Lagrange multiplier hold it at its limit?

    rlhf compare configs/lab/compare_lag.yaml
    python benchmarks/cost_at_limit.py runs/compare-lag [--limit 1.5] [--out benchmarks/results/compare_lag.json]

Per arm and seed: the mean cost of the last 30 % of the steps, the final multiplier, and score, cost and KL of the final
model on the held-out prompts. Writes JSON, with the cost, multiplier and score of every step, and prints the rows of a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

LAST = 0.3  # share of the steps


def read_seed(folder: Path) -> dict[str, Any] | None:
    """Read the final figures of a trained cell; None if it has not been judged."""
    if not (folder / "judged.json").is_file():
        return None
    judged = json.loads((folder / "judged.json").read_text(encoding="utf-8"))["metrics"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    costs, multipliers, scores = (
        [line[name] for line in lines if name in line] for name in ("cost/mean", "lagrange/multiplier", "score/mean")
    )
    late = costs[-max(1, round(LAST * len(costs))) :]
    return {
        "late_cost": sum(late) / len(late),
        "multiplier": multipliers[-1] if multipliers else None,
        "eval_score": judged["eval/score"],
        "eval_cost": judged["eval/cost"],
        "eval_cost_se": judged["eval/cost_se"],
        "eval_kl": judged["eval/kl"],
        "costs": [round(cost, 4) for cost in costs],
        "multipliers": [round(multiplier, 4) for multiplier in multipliers],
        "scores": [round(score, 4) for score in scores],
    }


def read_arms(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the judged seeds of all trained arms."""
    settings = yaml.safe_load((folder / "compare.yaml").read_text(encoding="utf-8"))
    arms = {}
    for name, arm in settings["arms"].items():
        if arm is not None:
            seeds = {str(seed): read_seed(folder / name / f"seed-{seed}") for seed in settings["seeds"]}
            arms[name] = {seed: row for seed, row in seeds.items() if row is not None}
    return arms


def cell(rows: list[dict[str, Any]], key: str, digits: int = 2) -> str:
    """Return a figure of every seed, separated by dots."""
    return " · ".join("–" if row[key] is None else f"{row[key]:.{digits}f}" for row in rows)


def main() -> None:
    """Print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arms = read_arms(arguments.folder)
    print("| arm | cost, last 30 % of the steps | final λ | held-out score | held-out cost | KL, nats |")  # noqa: T201
    print("|---|---|---|---|---|---|")  # noqa: T201
    for name, seeds in arms.items():
        rows = list(seeds.values())
        columns = [("late_cost", 2), ("multiplier", 2), ("eval_score", 2), ("eval_cost", 2), ("eval_kl", 1)]
        print(f"| `{name}` | " + " | ".join(cell(rows, key, digits) for key, digits in columns) + " |")  # noqa: T201
    if arguments.out is not None:
        text = json.dumps({"limit": arguments.limit, "last": LAST, "arms": arms}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
