"""Draw J against KL, of the comparison on people's pairs:  python benchmarks/compare_detox_chart.py

Reads benchmarks/results/compare_detox_800.json and writes docs/images/compare_detox.svg: both seeds of every arm, with
the 95 % interval over the test sentences and seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "compare_detox.svg"
NAMES = {
    "dpo": "DPO",
    "ppo": "PPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "grpo_kl_in_reward": "GRPO,\nKL in the\nreward",
    "online_dpo": "online DPO",
    "rejection_sampling": "rejection\nsampling",
}
RIGHT = 15  # nats
ON_THE_LEFT = (
    "grpo_kl_in_reward",
    "rloo",
    "online_dpo",
    "dpo",
    "rejection_sampling",
)  # others are in the way on the right
HIGHER = {
    "grpo_kl_in_reward": 24,
    "rloo": -10,
    "rejection_sampling": -6,
}  # points, from arms with nearly the same figures


def read(name: str) -> dict[str, Any]:
    """Read a file of results."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def main() -> None:
    """Draw the chart."""
    comparison = read("compare_detox_800.json")
    plt.rcParams["svg.hashsalt"] = "compare_detox"
    figure, axes = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
    for name, label in NAMES.items():
        arm = comparison["arms"][name]
        j = arm["suites"]["detox"]["j"]
        value, low, high = j["value"], j["low"], j["high"]
        axes.errorbar(arm["kl"], value, yerr=[[value - low], [high - value]], fmt="o", capsize=3, color="#2a5db0")
        side, offset = ("right", -7) if name in ON_THE_LEFT else ("left", 7)
        axes.annotate(
            label,
            (arm["kl"], value),
            xytext=(offset, HIGHER.get(name, 0)),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=9,
        )
    start = comparison["start_model"]["suites"]["detox"]
    for value, label in ((start["j"]["value"], "SFT, the start"), (start["human_j"]["value"], "people")):
        axes.axhline(value, color="#888888", linewidth=0.8, linestyle="--")
        axes.annotate(
            label, (RIGHT, value), xytext=(-2, 2), textcoords="offset points", fontsize=9, color="#666666", ha="right"
        )
    axes.set_xlim(0, RIGHT)
    axes.set_ylim(0.42, 0.78)
    axes.set_xlabel("KL to the start, nats per completion")
    axes.set_ylabel("J")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()
