"""Tabulate and draw the cost of stale and 8-bit samples, with and without importance weights.

    rlhf compare configs/lab/compare_stale.yaml
    python benchmarks/staleness.py runs/compare-stale [--out FILE.json] [--chart FILE.svg]

    rlhf compare configs/real/compare_detox_samplers.yaml
    python benchmarks/staleness.py runs/detox/samplers --out benchmarks/results/compare_detox_samplers.json

Per arm and seed: score with its 95 % interval and KL of the final model on the held-out prompts, the mean effective
sample size of the weights, the mean |sampler - trainer| of log-probabilities, and the median seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from rlhf.evaluation.win_rate import bootstrap

ARMS = {
    "on_policy": (0, "on policy"),
    "none_1": (1, "none"),
    "token_1": (1, "token_truncate"),
    "none_2": (2, "none"),
    "token_2": (2, "token_truncate"),
    "sequence_2": (2, "sequence_mask"),
    "none_4": (4, "none"),
    "token_4": (4, "token_truncate"),
    "sequence_4": (4, "sequence_mask"),
    "int8_none": (0, "none, 8 bits in the sampler"),
    "int8_token": (0, "token_truncate, 8 bits in the sampler"),
    "bfloat16": (0, "on policy, bfloat16"),
}
Row = dict[str, Any]


def read_seed(folder: Path) -> Row:
    """Read the final figures of a run."""
    judged = json.loads((folder / "judged.json").read_text(encoding="utf-8"))
    lines = read_lines(folder / "metrics.jsonl")
    score = bootstrap(torch.tensor([row["score"] for row in judged["rows"]]))  # a row for each prompt
    steps = [sum(line["seconds"].values()) for line in read_lines(folder / "timings.jsonl")]
    return {
        "score": judged["metrics"]["eval/score"],
        "low": score.low,
        "high": score.high,
        "kl": judged["metrics"]["eval/kl_exact"],
        "ess": mean_of(lines, "correction/ess"),
        "mismatch": mean_of(lines, "kl/sampler_mismatch"),
        "seconds": statistics.median(steps) if steps else None,
    }


def read_lines(file: Path) -> list[Row]:
    """Read a file of a JSON object a line; none if there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def mean_of(lines: list[Row], key: str) -> float | None:
    """Compute the mean of a metric over the steps that have it."""
    values = [line[key] for line in lines if key in line]
    return statistics.mean(values) if values else None


def read_arms(folder: Path) -> dict[str, list[Row]]:
    """Read the seeds of every arm of the comparison."""
    seeds = {name: sorted((folder / name).glob("seed-*/judged.json")) for name in ARMS}
    return {name: [read_seed(file.parent) for file in files] for name, files in seeds.items() if files}


def draw(arms: dict[str, list[Row]], chart: Path) -> None:
    """Draw score and KL against the age of the samples: a point for each seed, a line through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for key, axis, title in (("score", axes[0], "held-out score"), ("kl", axes[1], "KL to the start, nats")):
        for kind, mark in (("none", "o"), ("token_truncate", "s"), ("sequence_mask", "^")):
            chosen = {age: arms[name] for name, (age, of) in ARMS.items() if name in arms and (of == kind or age == 0)}
            if kind == "sequence_mask":
                del chosen[0]
            ages = sorted(chosen)
            means = [statistics.mean(row[key] for row in chosen[age]) for age in ages]
            (line,) = axis.plot(ages, means, label=kind)
            for age in ages:
                axis.plot([age] * len(chosen[age]), [row[key] for row in chosen[age]], mark, color=line.get_color())
        axis.set_title(title)
        axis.set_xlabel("age of the samples, steps")
        axis.set_xticks(sorted({ARMS[name][0] for name in arms}))
    axes[0].legend(title="correction")
    figure.savefig(chart, metadata={"Date": None})


def main() -> None:
    """Print the table, and write the files that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chart", type=Path)
    arguments = parser.parse_args()
    arms = read_arms(arguments.folder)
    print("| age, steps | correction | score | KL, nats |\n|---|---|---|---|")  # noqa: T201
    for name, (age, kind) in ((name, ARMS[name]) for name in arms):
        scores = ", ".join(f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" for row in arms[name])
        kls = ", ".join(f"{row['kl']:.1f}" for row in arms[name])
        label = "" if age == 0 else f"`{kind}`"
        print(f"| {age} | {label} | {scores} | {kls} |")  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"arms": arms}, indent=1) + "\n", encoding="utf-8")
    if arguments.chart is not None:
        draw(arms, arguments.chart)


if __name__ == "__main__":
    main()
