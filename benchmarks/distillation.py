"""Distillation in the lab beside SFT on the teacher's samples and GRPO:   python benchmarks/distillation.py

Makes missing parts of runs/distill: the start (configs/lab/sft.yaml), the teacher (configs/lab/distill_teacher.yaml)
and its samples of the training prompts; then runs configs/lab/compare_distill.yaml. Writes a JSON file (--out) with the
final scores of every seed and the score after every evaluation against completions and FLOPs, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rlhf
from rlhf.lab.gold import gold_reward
from rlhf.lab.world import prompts
from rlhf.tracking.trackers import read_jsonl

ROOT = Path(__file__).parent.parent
LAB = ROOT / "configs" / "lab"
RUNS = Path("runs/distill")
PROMPTS = 2048  # the training prompts of the lab, as rlhf.lab.build has them
COUNT = 2  # samples of each


def command(*words: str) -> None:
    """Run a verb of rlhf."""
    subprocess.run([sys.executable, "-m", "rlhf", *words], check=True)


def make_inputs(folder: Path) -> None:
    """Train the start and the teacher, and sample the teacher, if these are missing."""
    if not (folder / "start" / "complete.json").is_file():
        command("train", str(LAB / "sft.yaml"), f"run.out_dir={folder / 'start'}")
    if not (folder / "teacher" / "complete.json").is_file():
        command("train", str(LAB / "distill_teacher.yaml"))
    if not (folder / "samples.jsonl").is_file():
        asked = [request.text for request in prompts(0, "train", PROMPTS)]
        answers = rlhf.sample(folder / "teacher", asked, count=COUNT, seed=1)
        rows = [
            {"prompt": prompt, "completion": text}
            for prompt, texts in zip(asked, answers, strict=True)
            for text in texts
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "samples.jsonl").write_text(lines, encoding="utf-8")


def score_of_samples(folder: Path) -> float:
    """Compute the mean gold score of the teacher's samples."""
    rows = list(read_jsonl(folder / "samples.jsonl"))
    asked, answers = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    return statistics.mean(gold_reward(prompts=asked, completions=answers, references=[{}] * len(rows)))


def curve(run: Path) -> list[dict[str, float]]:
    """Return the held-out score after each evaluation of a run, and its cost so far."""
    costs = {row["step"]: row for row in read_jsonl(run / "costs.jsonl")}
    points = []
    for row in read_jsonl(run / "metrics.jsonl"):
        if "eval/score" not in row:
            continue
        cost = costs.get(row["step"], {"completions": 0, "flops": 0.0, "tokens": 0, "seconds": 0.0})
        known = {name: row[name] for name in ("kl/teacher", "kl/teacher_sequence", "teacher/agreement") if name in row}
        points.append(
            {"step": row["step"], "score": row["eval/score"], **known}
            | {name: cost[name] for name in ("completions", "tokens", "flops", "seconds")}
        )
    return points


def main() -> None:
    """Run the missing parts, and write and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RUNS / "compare_distill.json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the comparison")
    parsed = parser.parse_args()
    make_inputs(RUNS)
    command("compare", str(LAB / "compare_distill.yaml"), *parsed.overrides)
    results = json.loads((RUNS / "compare" / "results.json").read_text(encoding="utf-8"))
    arms: dict[str, Any] = {}
    for name, arm in results["arms"].items():
        runs = {seed["seed"]: RUNS / "compare" / name / f"seed-{seed['seed']}" for seed in arm["seeds"]}
        arms[name] = {
            "seeds": arm["seeds"],
            "score": arm["score"],
            "curves": {str(seed): curve(run) for seed, run in runs.items()},
        }
    record = {
        "command": " ".join(["python benchmarks/distillation.py", *parsed.overrides]),
        "torch": version("torch"),
        "start": results["start_model"]["score"],
        "teacher_samples": score_of_samples(RUNS),
        "budget": results["budget"],
        "arms": arms,
    }
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(record)


def print_table(record: dict[str, Any]) -> None:
    """Print the final scores, and the score at a third of the budget."""
    print(f"start {record['start']:.2f}, the teacher's samples {record['teacher_samples']:.2f}\n")  # noqa: T201
    print("| arm | score at a third | score | FLOPs |\n|---|---|---|---|")  # noqa: T201
    for name, arm in record["arms"].items():
        curves = list(arm["curves"].values())
        third = [min(points, key=lambda p: abs(p["completions"] - record["budget"]["limit"] / 3)) for points in curves]
        early = statistics.mean(point["score"] for point in third)
        flops = statistics.mean(points[-1]["flops"] for points in curves)
        scores = ", ".join(f"{seed['score']:.2f}" for seed in arm["seeds"])
        print(f"| {name} | {early:.2f} | {scores} | {flops:.2e} |")  # noqa: T201


if __name__ == "__main__":
    main()
