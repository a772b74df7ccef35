"""Run the quickstart on several seeds and tabulate the results:   python benchmarks/quickstart.py --seeds 0 1 2

Each seed is a run of its own (`rlhf quickstart --seed S --out FOLDER/seed-S`); a finished one is not repeated.
Writes FOLDER/quickstart.json and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]

ROWS = {
    "gold of SFT": lambda r: f"{r['gold_sft']:.2f} (std {r['gold_std_sft']:.2f})",
    "gold of PPO": lambda r: f"{r['gold_ppo']:.2f}",
    "gain, standard deviations of SFT": lambda r: f"{r['gain_in_std']:+.2f}",
    "win rate over SFT [95 %]": lambda r: "{:.3f} [{:.3f}, {:.3f}]".format(*r["win_rate"]),
    "KL, last fifth (target 4), nats per sequence": lambda r: f"{r['kl_last_fifth']:.2f}",
    "KL on held-out prompts": lambda r: f"{r['kl_held_out']:.2f}",
    "critic's explained variance, last fifth": lambda r: f"{r['explained_variance']:.2f}",
    "reward model accuracy on the held-out labels": lambda r: f"{r['rm_accuracy']:.3f}",
    "the same in expectation over their noise / best possible": lambda r: (
        f"{r['rm_expected_accuracy']:.3f} / {r['rm_best_accuracy']:.3f} = "
        f"{r['rm_expected_accuracy'] / r['rm_best_accuracy']:.3f}"
    ),
    "seconds": lambda r: f"{r['seconds']:.0f}",
}


def result_of(seed: int, folder: Path) -> Result:
    """Return the result of the quickstart with this seed, and run it first if it has not finished before."""
    out = folder / f"seed-{seed}"
    path = out / "result.json"
    if not path.is_file():
        command = [sys.executable, "-m", "rlhf", "quickstart", "--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True)
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def table(results: dict[int, Result]) -> str:
    """Format a Markdown table with a row per figure and a column per seed."""
    lines = [
        "| | " + " | ".join(f"seed {seed}" for seed in results) + " |",
        "|---" * (len(results) + 1) + "|",
        *(f"| {name} | " + " | ".join(show(r) for r in results.values()) + " |" for name, show in ROWS.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the missing seeds, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart-seeds"))
    args = parser.parse_args()
    results = {seed: result_of(seed, args.folder) for seed in args.seeds}
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    versions = {name: version(name) for name in ("torch", "transformers")}
    (args.folder / "quickstart.json").write_text(
        json.dumps({**machine, **versions, "seeds": results}, indent=2) + "\n", encoding="utf-8"
    )
    sys.stdout.write(table(results) + "\n")


if __name__ == "__main__":
    main()
