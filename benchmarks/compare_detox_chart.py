"""Draw the charts of the comparison on people's pairs:  python benchmarks/compare_detox_chart.py

docs/images/compare_detox.svg: J against KL, from benchmarks/results/compare_detox_800.json: both seeds of every arm,
with the 95 % interval over the test sentences and seeds. docs/images/detox_over_time.svg: the reward model's score and
J on the dev sentences during training, from compare_detox_800_own.json, each seed a line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
COMPLETIONS = 64  # of a step
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
    """Draw the charts."""
    draw_comparison()
    draw_training()


def draw_training() -> None:
    """Draw what the reward model and the judges say of the dev sentences while PPO and GRPO train."""
    results = read("compare_detox_800_own.json")
    arms = {"PPO": results["seeds"], "GRPO, KL in the reward": results["others"]["grpo_kl_in_reward"]["seeds"]}
    plt.rcParams["svg.hashsalt"] = "detox_over_time"
    figure, panels = plt.subplots(1, 2, figsize=(7.0, 2.6), layout="constrained")
    for (name, seeds), color in zip(arms.items(), ("#2a5db0", "#d07020"), strict=True):
        for number, cell in enumerate(seeds.values()):
            rows = cell["judge_on_256_dev_sentences"]
            steps = [COMPLETIONS * row["step"] for row in rows]
            for axes, key in zip(panels, ("reward_model", "score"), strict=True):
                axes.plot(steps, [row[key] for row in rows], color=color, linewidth=1.2, label=None if number else name)
    for axes, label in zip(panels, ("reward model's score", "J"), strict=True):
        axes.set_xlabel("completions")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(IMAGES / "detox_over_time.svg", metadata={"Date": None})


def draw_comparison() -> None:
    """Draw J against KL of every arm."""
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
    figure.savefig(IMAGES / "compare_detox.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
