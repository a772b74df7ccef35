"""Collect the comparison from 800 rewrites in one JSON file, and print its table.

    python benchmarks/compare_detox_800.py runs/detox

Reads `compare`, `compare_dpo` and `sft_same*` in that folder, which the commands of docs/experiments/detox.md make.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf.comparison.results import ComparisonResults, SuiteFigure
from rlhf.comparison.trial import SuiteScores, paired_difference, read_suites, summarize_suites
from rlhf.tracking.run_folder import RunFolder

OUT = Path(__file__).parent / "results" / "compare_detox_800.json"
SUITE = "detox"
NAMES = {
    "grpo_kl_in_reward": "GRPO, its KL in the reward",
    "dpo_low": "DPO, rate 1e-6",
    "dpo_sampled": "DPO, pairs of the start's samples",
    "online_dpo": "online DPO",
    "rejection_sampling": "rejection sampling",
    "sft_same": "SFT, the same pairs",
}
# Between arms of different folders; `suite_differences` has the others.
DIFFERENCES = (("dpo_low", "dpo"), ("ppo", "dpo_low"), ("ppo", "sft_same"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file and print the table, the highest J first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="the folder of the runs")
    parser.add_argument("--out", type=Path, default=OUT, help=f"file to write (default: {OUT.name} in results)")
    parsed = parser.parse_args(arguments)
    scores = read_scores(parsed.folder)
    start = {seed: read(parsed.folder / "compare" / "start" / "seed-0") for runs in scores.values() for seed in runs}
    suites = {
        arm: summarize_suites([{SUITE: score} for score in runs.values()], [{SUITE: start[seed]} for seed in runs])
        for arm, runs in scores.items()
    }
    results = ComparisonResults.read(parsed.folder / "compare")
    content = {
        **without_the_rest(results.record()),
        "others": {
            "dpo_low": ComparisonResults.read(parsed.folder / "compare_dpo").arms["dpo"].record(),
            "sft_same": {
                "seeds": [
                    {"seed": seed, "suites": {SUITE: record(score.figures)}}
                    for seed, score in scores["sft_same"].items()
                ],
                "suites": {SUITE: record(suites["sft_same"][SUITE])},
            },
        },
        "differences": [difference(scores, a, b) for a, b in DIFFERENCES],
        "curves": {name: curve(parsed.folder / folder) for name, folder in curves_of(scores).items()},
    }
    parsed.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for arm in sorted(suites, key=lambda name: -suites[name][SUITE]["j"].value):
        row = table_row(arm, suites[arm][SUITE], scores[arm], kl_of(results, content, arm))
        sys.stdout.write(row + "\n")


def without_the_rest(results: dict[str, Any]) -> dict[str, Any]:
    """Leave out the win rates, and the other suites, which are in alignment_detox.json."""
    arms = results["arms"].values()
    for model in (results["start_model"], *arms, *(seed for arm in arms for seed in arm["seeds"])):
        model["suites"] = {name: figures for name, figures in model["suites"].items() if name == SUITE}
    return {**results, "win_rates": []}


def read_scores(folder: Path) -> dict[str, dict[int, SuiteScores]]:
    """Read the suite's scores of every finished run: arm -> seed -> scores."""
    scores: dict[str, dict[int, SuiteScores]] = {}
    for path in sorted(folder.glob(f"compare/*/seed-*/evals/{SUITE}.json")):
        cell = path.parents[1]
        if cell.parent.name != "start":
            scores.setdefault(cell.parent.name, {})[int(cell.name.removeprefix("seed-"))] = read(cell)
    scores["dpo_low"] = {0: read(folder / "compare_dpo" / "dpo" / "seed-0")}
    measured = sorted(folder.glob(f"sft_same*/evals/{SUITE}.json"))
    scores["sft_same"] = {seed: read(path.parents[1]) for seed, path in enumerate(measured)}
    return scores


def read(folder: Path) -> SuiteScores:
    """Read the suite's scores of one model."""
    return read_suites(folder)[SUITE]


def record(figures: Mapping[str, SuiteFigure]) -> dict[str, Any]:
    """Return figures as the results of a comparison have them."""
    return {name: asdict(figure) for name, figure in figures.items()}


def difference(scores: dict[str, dict[int, SuiteScores]], a: str, b: str) -> dict[str, object]:
    """Return the difference in J of two arms on their common seeds, paired by sentence."""
    seeds = sorted(scores[a].keys() & scores[b].keys())
    less = paired_difference([scores[a][seed] for seed in seeds], [scores[b][seed] for seed in seeds], "j")
    assert less is not None, (a, b)
    return {"a": a, "b": b, "seeds": seeds, **vars(less)}


def curves_of(scores: dict[str, dict[int, SuiteScores]]) -> dict[str, str]:
    """Return the folder of every run that has a curve, by `ARM, seed N`."""
    arms = {name: f"compare/{name}" for name in scores if name not in ("dpo_low", "sft_same")}
    arms["dpo_low"] = "compare_dpo/dpo"
    return {f"{arm}, seed {seed}": f"{path}/seed-{seed}" for arm, path in arms.items() for seed in scores[arm]}


def curve(run: Path) -> list[dict[str, float]]:
    """Return J and KL on the dev sentences along a run."""
    return [
        {"step": row["step"], "score": round(row["eval/score"], 4), "kl": round(row["eval/kl"], 3)}
        for row in RunFolder(run).read_metrics()
        if row.get("eval/score") is not None
    ]


def kl_of(results: ComparisonResults, content: dict[str, Any], arm: str) -> str:
    """Return an arm's KL in nats, the mean over seeds; a dash if it was not measured."""
    if arm in results.finals:
        return f"{results.finals[arm].measures.kl or 0.0:.1f}"
    kl = content["others"][arm].get("kl")
    return "–" if kl is None else f"{kl:.1f}"


def table_row(arm: str, figures: Mapping[str, SuiteFigure], runs: Mapping[int, SuiteScores], kl: str) -> str:
    """Write a row of the page: J, J by seed, the gain, style, similarity and KL."""
    j, gain = figures["j"], figures["j"].gain
    assert j.low is not None
    assert j.high is not None
    assert gain is not None
    by_seed = ", ".join(short(fmean(scores.rows["j"])) for scores in runs.values())
    cells = [
        NAMES.get(arm, arm.upper()),
        f"{short(j.value)} [{short(j.low)}, {short(j.high)}]",
        by_seed,
        f"{short(gain.value)} [{short(gain.low)}, {short(gain.high)}]",
        short(figures["style"].value),
        short(figures["similarity"].value),
        kl,
    ]
    return "| " + " | ".join(cells) + " |"


def short(value: float) -> str:
    """Format a number below 1 with three decimals and no zero before the point."""
    return f"{value:.3f}".replace("0.", ".", 1)


if __name__ == "__main__":
    main()
