"""Put the seeds of the SmolLM2 comparison together: one JSON, and the chart of gain against KL in README and docs.

    python benchmarks/compare_smollm2_seeds.py

PPO's and GRPO's second seeds were run on other days than the rest. Of these two arms the gain is the mean over both
seeds, and the ends of its interval are the means of the seeds' ends, which is wider than the interval of the mean.
Writes benchmarks/results/compare_smollm2_seeds.json and docs/images/compare_smollm2.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "compare_smollm2.svg"
NAMES = {"online_dpo": "online DPO", "dpo": "DPO", "ppo": "PPO", "grpo": "GRPO"}
SECOND = {"ppo": "ppo_smollm2_seed_1.json", "grpo": "grpo_smollm2_seed_1.json"}
GRPO_SECOND_KL = 4.0  # nats, from the log of that run; its JSON has no KL


def main() -> None:
    """Write the JSON and the chart."""
    together = read("compare_smollm2.json")
    start = together["start_model"]["suites"]["ifeval"]["prompt_strict"]
    arms = {name: arm(name, together["arms"][name]) for name in NAMES}
    content = {"command": "rlhf compare configs/real/compare_smollm2.yaml", "start": points(start), "arms": arms}
    (RESULTS / "compare_smollm2_seeds.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(arms)


def read(name: str) -> dict[str, Any]:
    """Read a file of results."""
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def points(figure: dict[str, float]) -> list[float]:
    """Return value and interval of a share in percentage points."""
    return [round(100 * figure[key], 2) for key in ("value", "low", "high")]


def arm(name: str, first: dict[str, Any]) -> dict[str, Any]:
    """Return the gain, in points, and the KL, in nats, of an arm over its two seeds."""
    gain = first["suites"]["ifeval"]["prompt_strict"]["gain"]
    if name not in SECOND:
        return {"gain": points(gain), "kl": round(first["kl"], 2), "by_seed": None}
    second = read(SECOND[name])
    kls = [first["kl"], second.get("kl", GRPO_SECOND_KL)]
    gains = [points(gain), points(second["prompt_strict_gain"])]
    means = [round(fmean(ends), 2) for ends in zip(*gains, strict=True)]
    return {"gain": means, "kl": round(fmean(kls), 2), "by_seed": gains}


def draw(arms: dict[str, dict[str, Any]]) -> None:
    """Draw gain against KL, with intervals."""
    plt.rcParams["svg.hashsalt"] = "compare_smollm2"
    figure, axes = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
    for name, values in arms.items():
        value, low, high = values["gain"]
        axes.errorbar(values["kl"], value, yerr=[[value - low], [high - value]], fmt="o", capsize=3, color="#2a5db0")
        beside = name == "grpo"  # whose bar is next to PPO's
        place, offset = ((values["kl"], value), (28, 5)) if beside else ((values["kl"], high), (0, 3))
        axes.annotate(NAMES[name], place, xytext=offset, textcoords="offset points", ha="center")
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_xlabel("KL to the start model, nats per completion")
    axes.set_ylabel("gain on IFEval, points")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()
