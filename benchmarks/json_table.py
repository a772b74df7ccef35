"""Tabulate the comparison on strict JSON: how many answers parse, and how many meet every constraint.

    rlhf compare configs/real/compare_json.yaml
    python benchmarks/json_table.py runs/compare-json [--json benchmarks/results/compare_json.json] \\
        [--chart docs/images/compare_json.svg]

Per arm and seed: the share of held-out prompts whose answer parses, is right, and is right and nothing else (with
Wilson's 95 % intervals), the KL to the start, the answers' length, the mean effective sample size of importance
weights, and the training's time and memory. Writes JSON, with the variance that the critic explains in each half of
the run (over all tokens, and among tokens at one position) and the share of right answers in each eighth of training,
and prints the rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rlhf.suites.questions import share_estimate

PARTS = ("parses", "keys", "right", "only", "full")


def read_cell(folder: Path) -> dict[str, Any]:
    """Read the judged answers of an arm and seed."""
    judged = json.loads((folder / "judged.json").read_text(encoding="utf-8"))
    rows: dict[str, Any] = {}
    for part in PARTS:
        share = share_estimate(part, [row["parts"][part] for row in judged["rows"]], "")
        rows[part] = {"value": share.value, "low": share.low, "high": share.high}
    metrics = judged["metrics"]
    kl = metrics["eval/kl_exact"] if "eval/kl_exact" in metrics else metrics["eval/kl"]
    rows |= {"score": metrics["eval/score"], "kl": kl, "length": metrics["eval/length"], "prompts": len(judged["rows"])}
    if costs := read_lines(folder / "costs.jsonl"):
        rows["costs"] = costs[-1]
    if peaks := [line["peak_memory_mb"] for line in read_lines(folder / "timings.jsonl")]:
        rows["peak_memory_mb"] = max(peaks)
    lines = read_lines(folder / "metrics.jsonl")
    if sizes := [line["correction/ess"] for line in lines if "correction/ess" in line]:
        rows["effective_sample_size"] = statistics.mean(sizes)
    for name in ("explained_variance", "explained_beyond_position"):
        explained = [line[f"critic/{name}"] for line in lines if f"critic/{name}" in line]
        if half := len(explained) // 2:
            rows[name] = [statistics.mean(explained[:half]), statistics.mean(explained[half:])]
    met = [line["part/full/mean"] for line in lines if "part/full/mean" in line]
    if len(met) >= 8:
        rows["full_in_training"] = [statistics.mean(met[i * len(met) // 8 : (i + 1) * len(met) // 8]) for i in range(8)]
    return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file; none if it is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def read_comparison(folder: Path) -> dict[str, dict[str, Any]]:
    """Read every arm that has been judged, by seed."""
    arms: dict[str, dict[str, Any]] = {}
    for judged in sorted(folder.glob("*/seed-*/judged.json")):
        arms.setdefault(judged.parent.parent.name, {})[judged.parent.name.removeprefix("seed-")] = read_cell(
            judged.parent
        )
    return arms


def percent(share: dict[str, float]) -> str:
    """Write a share and its interval in percent."""
    return f"{100 * share['value']:.0f} [{100 * share['low']:.0f}, {100 * share['high']:.0f}]"


NAMES = {
    "start": "the start",
    "ppo": "PPO",
    "grpo": "GRPO",
    "sft": "SFT",
    "rloo": "RLOO",
    "online_dpo": "online DPO",
    "rejection_sampling": "rejection sampling",
    "best_of_n": "best of 8",
    "lora": "GRPO, LoRA",
    "qlora": "GRPO, LoRA on nf4",
    "none_2": "GRPO, two steps old",
    "token_2": "the same, token_truncate",
    "sequence_2": "the same, sequence_mask",
    "int8": "GRPO, 8-bit sampler",
    "distill": "distillation",
    "sft_samples": "SFT on the teacher's samples",
}


def draw(arms: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the share of answers that meet everything against the KL to the start, one point per arm and seed."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "compare_json"
    figure, axes = plt.subplots(figsize=(6.0, 3.2), layout="constrained")
    for name, seeds in arms.items():
        for place, cell in enumerate(seeds.values()):
            value, low, high = (100 * cell["full"][key] for key in ("value", "low", "high"))
            kl = cell["kl"] or 0.0
            axes.errorbar(kl, value, yerr=[[value - low], [high - value]], fmt="o", capsize=3, color="#2a5db0")
            if place == 0:
                axes.annotate(NAMES[name], (kl, value), xytext=(6, 3), textcoords="offset points", fontsize=9)
    axes.set_xlim(left=-0.3)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("KL to the start, nats per completion")
    axes.set_ylabel("answers that meet everything, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    args = parser.parse_args()
    arms = read_comparison(args.folder)
    head = "| | parses, % | right, % | and nothing else, % | KL, nats | tokens | sample size | minutes | GB |"
    lines = [head, "|---" * 9 + "|"]
    for name, seeds in arms.items():
        for seed, cell in seeds.items():
            shares = " | ".join(percent(cell[part]) for part in ("parses", "right", "full"))
            kl = "" if cell["kl"] is None else f"{cell['kl']:.1f}"
            size, peak = cell.get("effective_sample_size"), cell.get("peak_memory_mb")
            seconds = cell.get("costs", {}).get("seconds")
            rest = [
                f"{cell['length']:.0f}",
                "" if size is None else f"{size:.2f}",
                "" if seconds is None else f"{seconds / 60:.0f}",
                "" if peak is None else f"{peak / 1024:.1f}",
            ]
            lines.append(f"| {name}, seed {seed} | {shares} | {kl} | {' | '.join(rest)} |")
    sys.stdout.write("\n".join(lines) + "\n")
    if args.chart is not None:
        draw(arms, args.chart)
    if args.json is not None:
        args.json.write_text(json.dumps(arms, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
