"""Collect curves, time and memory of the SmolLM2 recipes from the folders of their runs, and draw them.

    python benchmarks/recipe_curves.py dpo=runs/smollm2_135m/dpo ppo=runs/smollm2_135m/ppo …

Each argument is a recipe's name and a run folder that it wrote. Writes benchmarks/results/recipes_smollm2.json, which
`python scripts/make_hyperparameters_doc.py` quotes, and docs/images/recipes_smollm2.svg. Other
recipes in the JSON stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes_smollm2.json"
FIGURE = ROOT / "docs" / "images" / "recipes_smollm2.svg"
CURVES = {  # the curves of each recipe
    "sft": ("loss/sft",),
    "rm": ("loss/rm", "rm/accuracy", "eval/rm_accuracy"),
    "dpo": ("preference/accuracy", "preference/margin"),
    "ppo": ("score/mean", "kl/reference"),
    "grpo": ("score/mean", "kl/reference"),
    "online_dpo": ("score/mean", "kl/reference"),
}


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_run(recipe: str, folder: Path) -> dict[str, Any]:
    """Read the curves of a finished run, and its time and memory."""
    metrics, timings = read_rows(folder / "metrics.jsonl"), read_rows(folder / "timings.jsonl")
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    curves = {
        name: [[row["step"], round(row[name], 5)] for row in metrics if row.get(name) is not None]
        for name in CURVES[recipe]
    }
    card = {"report_card": read_card(folder / "report_card.json")} if recipe == "rm" else {}
    return {
        "seed": settings["run"]["seed"],
        "dtype": settings["model" if recipe == "rm" else "policy"]["dtype"],
        "steps": metrics[-1]["step"],
        "minutes": round(sum(sum(row["seconds"].values()) for row in timings) / 60, 1),
        "peak_memory_gb": round(max(row["peak_memory_mb"] for row in timings) / 1000, 1),
        "curves": curves,
        **card,
    }


def read_card(file: Path) -> dict[str, Any]:
    """Read the accuracy of a reward model and of its baselines."""
    card = json.loads(file.read_text(encoding="utf-8"))
    baselines = {name: round(baseline["accuracy"], 5) for name, baseline in card["baselines"].items()}
    return {name: card[name] for name in ("accuracy", "accuracy_low", "accuracy_high", "n")} | baselines


def draw(recipes: dict[str, Any]) -> None:
    """Draw one panel for each curve."""
    panels = [(recipe, name, points) for recipe, run in recipes.items() for name, points in run["curves"].items()]
    columns = 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(9, 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (recipe, name, points) in zip(axes.flat, panels, strict=False):
        _panel(axis, recipe, name, points)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "recipes"}):  # text as text; the same file each time
        figure.savefig(FIGURE, metadata={"Date": None})


def _panel(axis: Axes, recipe: str, name: str, points: list[list[float]]) -> None:
    steps, values = zip(*points, strict=True)
    axis.plot(steps, values, marker="o" if len(points) < 10 else None, markersize=3, linewidth=1.4, color="#1f5fbf")
    axis.set_title(f"{recipe}: {name}", fontsize=9, loc="left")
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(visible=True, linewidth=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Read the runs that are named, and write the JSON and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RECIPE=FOLDER")
    given = dict(pair.split("=", 1) for pair in parser.parse_args().runs)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    known |= {recipe: read_run(recipe, Path(folder)) for recipe, folder in given.items()}
    ordered = {recipe: known[recipe] for recipe in CURVES if recipe in known}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    draw(ordered)


if __name__ == "__main__":
    main()
