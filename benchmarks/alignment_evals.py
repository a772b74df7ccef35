"""Measure models with alignment suites, and collect the figures in one JSON file and one table.

    python benchmarks/alignment_evals.py start=models/smollm2-135m-instruct ppo=runs/ppo \\
      --suite blimp=data/blimp --suite xstest=data/xstest --limit 670 --set dtype=bfloat16
    python benchmarks/alignment_evals.py runs/compare --suite blimp=data/blimp      # the start model and every arm
    python benchmarks/alignment_evals.py ppo=runs/alignment/ppo                     # results that exist already

Results are kept in RESULTS/NAME/SUITE.json, as `rlhf eval --out` writes them: an interrupted call goes on. A folder may
also hold such files itself, or in `evals`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.cli import main as rlhf
from rlhf.errors import ConfigError
from rlhf.suites.suite import find_suite

OUT = Path(__file__).parent / "results" / "alignment_evals.json"
RESULTS = Path("runs/alignment")
LEFT_OUT = ("length", "truncated", "distinct_2")
FIRST = {"harmful": "refused", "xstest": "refused_safe"}  # the figure of the table; else the suite's first


@dataclass(frozen=True)
class Model:
    """A row of the table: its name, its folder, and the argument of `rlhf eval` that measures it (None: no model)."""

    name: str
    folder: Path
    target: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure missing results, write the JSON file and print the table; return 1 if a suite could not be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "models", nargs="+", metavar="NAME=FOLDER", help="a name with a run, model or results; or a comparison's folder"
    )
    parser.add_argument("--suite", action="append", default=[], metavar="NAME=DATA", help="measure this suite")
    parser.add_argument("--limit", type=int, help="rows of each suite that is measured (default: all)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the suites")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default: {RESULTS})")
    parser.add_argument("--out", type=Path, default=OUT, help=f"file to write (default: {OUT.name} in results)")
    parsed = parser.parse_args(arguments)
    models = [model for entry in parsed.models for model in models_of(entry)]
    limit = [] if parsed.limit is None else ["--limit", str(parsed.limit)]
    is_whole = True
    for model in models:
        for suite, _, data in (entry.partition("=") for entry in parsed.suite):
            given = [*(["--data", data] if data else []), *limit, *parsed.set]
            is_whole &= measure(model, suite, given, parsed.results)
    figures = {model.name: read_folder(model.folder) | read_folder(parsed.results / model.name) for model in models}
    figures = {name: suites for name, suites in figures.items() if suites}
    content = {"command": "rlhf eval MODEL --suite NAME --data DATA --limit LIMIT KEY=VALUE", "models": figures}
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(figures))  # noqa: T201
    return 0 if is_whole else 1


def models_of(entry: str) -> Iterator[Model]:
    """Yield the model of NAME=FOLDER, or the start model and the arms of a comparison's folder, seed by seed."""
    name, named, path = entry.partition("=")
    if named:
        yield Model(name, Path(path), path)
        return
    cells = sorted(Path(entry).glob("*/seed-*/cell.yaml"), key=lambda cell: (cell.parts[-3] != "start", cell))
    if not cells:
        raise SystemExit(f"{entry}: no comparison there; give a single model as NAME={entry}")
    for cell in cells:
        folder = cell.parent
        trained = str(folder) if (folder / "model").is_dir() else None
        start = yaml.safe_load(cell.read_text(encoding="utf-8"))["train"]["policy"]["model"]
        yield Model(f"{cell.parts[-3]}-{cell.parts[-2]}", folder, start if cell.parts[-3] == "start" else trained)


def measure(model: Model, suite: str, given: Sequence[str], results: Path) -> bool:
    """Run a suite on a model unless its result is there; return False if that fails."""
    name = suite.replace(":", "-")
    if model.target is None or suite in read_folder(model.folder) or (results / model.name / f"{name}.json").is_file():
        return True
    out = results / model.name / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    return rlhf(["eval", model.target, "--suite", suite, *given, "--out", str(out)]) == 0


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the figures of each suite, with the settings that are not the suite's defaults."""
    figures: dict[str, Any] = {}
    for path in sorted([*folder.glob("evals/*.json"), *folder.glob("*.json")]):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and is_suite(content.get("suite")):
            figures[str(content["suite"])] = summary(content)
    return figures


def is_suite(name: object) -> bool:
    """Check whether this is the name of a suite; a run's folder has other JSON files too."""
    try:
        find_suite(str(name))
    except ConfigError:
        return False
    return True


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of rows, the settings and the figures of a result, to five digits."""
    suite, _ = find_suite(str(result["suite"]))
    config = {**result["config"], "dtype": result["dtype"]}  # the one used, which the CPU may have chosen
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
    interval = "" if figure["low"] is None else f" [{figure['low']:.3f}, {figure['high']:.3f}]"
    return f"{figure['value']:.3f}{interval}"


if __name__ == "__main__":
    raise SystemExit(main())
