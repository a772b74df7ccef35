"""Draw J against KL, of the comparison on people's pairs:  python benchmarks/compare_detox_chart.py

Reads benchmarks/results/compare_detox.json and writes docs/images/compare_detox.svg: the first seed of every arm, with
its 95 % interval over the test sentences.
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
    "sft": "more SFT",
    "online_dpo": "online DPO",
    "rejection_sampling": "rejection\nsampling",
}
PEOPLE = 0.749  # J of their rewrites of the same 300 sentences (docs/experiments/detox.md)
BELOW = ("online_dpo", "rejection_sampling")  # whose names have no room above


def read(name: str) -> dict[str, Any]:
    """Read a file of results."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def main() -> None:
    """Draw the chart."""
    comparison = read("compare_detox.json")
    plt.rcParams["svg.hashsalt"] = "compare_detox"
    figure, axes = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
    for name, label in NAMES.items():
        arm = comparison["arms"][name]["seeds"][0]
        j = arm["suites"]["detox"]["j"]
        value, low, high = j["value"], j["low"], j["high"]
        axes.errorbar(arm["kl"], value, yerr=[[value - low], [high - value]], fmt="o", capsize=3, color="#2a5db0")
        at, offset, side = (low, -3, "top") if name in BELOW else (high, 3, "bottom")
        axes.annotate(
            label, (arm["kl"], at), xytext=(0, offset), textcoords="offset points", ha="center", va=side, fontsize=9
        )
    start = comparison["start_model"]["suites"]["detox"]["j"]["value"]
    for value, label in ((start, "SFT, the start"), (PEOPLE, "people")):
        axes.axhline(value, color="#888888", linewidth=0.8, linestyle="--")
        axes.annotate(label, (0, value), xytext=(2, 2), textcoords="offset points", fontsize=9, color="#666666")
    axes.set_xlim(left=0)
    axes.set_ylim(0.44, 0.78)
    axes.set_xlabel("KL to the start, nats per completion")
    axes.set_ylabel("J")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()
