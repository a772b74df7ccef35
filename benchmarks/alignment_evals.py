"""Collect the figures of `rlhf eval --suite` on several models into one JSON file and one table.

    rlhf eval MODEL --suite blimp --data data/blimp --limit 670 dtype=bfloat16 --out runs/alignment/start/blimp.json
    python benchmarks/alignment_evals.py start=runs/alignment/start ppo=runs/alignment/ppo

Each folder has one file for each suite, as --out wrote it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.suites.suite import find_suite

OUT = Path(__file__).parent / "results" / "alignment_evals.json"
LEFT_OUT = ("length", "truncated", "distinct_2")
FIRST = {"harmful": "refused", "xstest": "refused_safe"}  # the figure of the table; else the suite's first


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the folders, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="a model's name and the folder of its results")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where to write (default: {OUT.name} in results)")
    parsed = parser.parse_args(arguments)
    models = {name: read_folder(Path(folder)) for name, _, folder in (entry.partition("=") for entry in parsed.models)}
    content = {"command": "rlhf eval MODEL --suite NAME --data DATA --limit LIMIT KEY=VALUE", "models": models}
    parsed.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(models))  # noqa: T201


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the figures of each suite, with the settings that are not the suite's defaults."""
    return {path.stem: summary(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))}


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of rows, the settings and the figures of a result, to five digits."""
    suite, _ = find_suite(str(result["suite"]))
    config = result["config"]
    defaults = suite.model_construct().model_dump(mode="json")
    dataset = {key: config["dataset"][key] for key in ("limit",) if config.get("dataset")}
    settings = {
        key: value for key, value in config.items() if key not in ("dataset", "labels") and value != defaults.get(key)
    }
    return {
        "rows": result["n"],
        "settings": {**settings, **dataset},
        "figures": {name: rounded(figure) for name, figure in result["figures"].items() if name not in LEFT_OUT},
        "versions": {name: result["versions"][name] for name in ("rlhf", "torch") if name in result["versions"]},
    }


def rounded(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return value, interval and number of rows."""
    values = {key: figure[key] for key in ("value", "low", "high")}
    return {key: None if value is None else round(value, 5) for key, value in values.items()} | {"n": figure["n"]}


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table: a row for each model, a column for the main figure of each suite."""
    suites = sorted({suite for results in models.values() for suite in results})
    lines = ["| model | " + " | ".join(suites) + " |", "|---" * (len(suites) + 1) + "|"]
    for name, results in models.items():
        cells = [cell(suite, results.get(suite)) for suite in suites]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(suite: str, result: Mapping[str, Any] | None) -> str:
    """Return the main figure of a suite with its interval; empty if it was not measured."""
    if result is None:
        return ""
    name = FIRST.get(suite) or next(iter(result["figures"]))
    figure = result["figures"][name]
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


if __name__ == "__main__":
    main()
