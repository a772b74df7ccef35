"""Draw J against KL, of the comparisons on people's pairs:  python benchmarks/compare_detox_chart.py

Reads benchmarks/results/compare_detox.json and compare_detox_800.json, and writes docs/images/compare_detox.svg and
compare_detox_800.svg. From 2,000 rewrites it draws the first seed of every arm, as four arms have no other; from 800
the mean of the seeds. The intervals are 95 %.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
NAMES = {
    "dpo": "DPO",
    "ppo": "PPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "sft": "more SFT",
    "online_dpo": "online DPO",
    "rejection_sampling": "rejection\nsampling",
}
NAMES_800 = {
    "dpo": "DPO",
    "dpo_rate_1e-6": "DPO, rate 1e-6",
    "ppo": "PPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "grpo_kl_in_reward": "GRPO, its KL\nin the reward",
}


def main() -> None:
    """Draw both charts."""
    to_the_left = ("rloo", "online_dpo", "dpo", "rejection_sampling")  # arms whose names have no room on the right
    draw("compare_detox", NAMES, right=14, low=0.44, to_the_left=to_the_left, first_seed=True)
    draw("compare_detox_800", NAMES_800, right=19, low=0.4, to_the_left=("rloo",))


def draw(
    name: str,
    names: Mapping[str, str],
    *,
    right: float,
    low: float,
    to_the_left: Collection[str] = (),
    first_seed: bool = False,
) -> None:
    """Draw the chart of a file of results: every arm in `names`, up to a KL of `right` nats and from a J of `low`."""
    comparison: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    plt.rcParams["svg.hashsalt"] = name
    figure, axes = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
    for arm, label in names.items():
        result = comparison["arms"][arm]
        shown = result["seeds"][0] if first_seed else result
        j = shown["suites"]["detox"]["j"]
        value, bounds = j["value"], [[j["value"] - j["low"]], [j["high"] - j["value"]]]
        axes.errorbar(shown["kl"], value, yerr=bounds, fmt="o", capsize=3, color="#2a5db0")
        side, offset = ("right", -7) if arm in to_the_left else ("left", 7)
        axes.annotate(
            label,
            (shown["kl"], value),
            xytext=(offset, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=9,
        )
    start = comparison["start_model"]["suites"]["detox"]
    for value, label in ((start["j"]["value"], "SFT, the start"), (start["human_j"]["value"], "people")):
        axes.axhline(value, color="#888888", linewidth=0.8, linestyle="--")
        axes.annotate(
            label, (right, value), xytext=(-2, 2), textcoords="offset points", fontsize=9, color="#666666", ha="right"
        )
    axes.set_xlim(0, right)
    axes.set_ylim(low, 0.78)
    axes.set_xlabel("KL to the start, nats per completion")
    axes.set_ylabel("J")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
