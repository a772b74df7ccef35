"""Run the suites of `rlhf eval` on every final model of a comparison, and compare them with the start model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlhf.build.suites import find_suite, subject_of, write_result
from rlhf.config.compare import START, CellConfig
from rlhf.config.load import dump, validate
from rlhf.evaluation.suites.settings import AnswerSettings, SuiteSettings
from rlhf.evaluation.win_rate import bootstrap_crossed
from rlhf.runtime.run_folder import write_aside

Json = dict[str, Any]

FOLDER = "evals"


def run_suites(cell: CellConfig, folder: Path, path: str | None) -> None:
    """Run the suites of a cell that have no result yet, on the model in `path` (None: the start model)."""
    target = path or cell.train.policy.model
    for name, values in cell.suites.items():
        file = folder / FOLDER / f"{name}.json"
        if file.is_file():
            continue
        suite, task = find_suite(name)
        settings = validate(suite.settings, values)
        reused = _measured_before(cell, folder, file.name, settings)
        if reused is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_aside(file, reused)
            continue
        subject = subject_of(settings, target)
        write_result(file, name, target, suite.run(settings, subject, task), settings, subject)


def _measured_before(cell: CellConfig, folder: Path, name: str, settings: SuiteSettings) -> str | None:
    """Return the start model's result under another seed, where the suite's answers are greedy and so the same."""
    if cell.arm != START or not (isinstance(settings, AnswerSettings) and settings.greedy):
        return None
    for path in sorted(folder.parent.glob(f"*/{FOLDER}/{name}")):
        text = path.read_text(encoding="utf-8")
        if {**json.loads(text)["config"], "seed": settings.seed} == dump(settings):
            return text
    return None


def read_suites(folder: Path) -> dict[str, Json]:
    """Read the results that `run_suites` wrote for a cell: suite -> result."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / FOLDER).glob("*.json"))
    }


def summarize_suites(results: Sequence[Mapping[str, Json]], starts: Sequence[Mapping[str, Json]]) -> Json:
    """Summarize the suites of an arm over its seeds.

    Args:
        results: the suite results of every finished seed.
        starts: the start model's, of the same seeds.

    Returns:
        suite -> figure -> value (the mean over seeds), low and high, and gain: the same for the paired difference from
        the start model. Intervals are over prompts and seeds, for one seed the suite's own; null for a figure that has
        no number for each row.
    """
    names = [name for name in (results[0] if results else {}) if all(name in seed for seed in results)]
    return {name: _summary([seed[name] for seed in results], [seed.get(name) for seed in starts]) for name in names}


def _summary(results: Sequence[Json], starts: Sequence[Json | None]) -> Json:
    return {
        figure: {"value": fmean(result["figures"][figure]["value"] for result in results)}
        | _interval(results, figure)
        | {"gain": _gain(results, starts, figure)}
        for figure in results[0]["figures"]
    }


def _interval(results: Sequence[Json], figure: str) -> Json:
    if len(results) == 1:
        return {key: results[0]["figures"][figure].get(key) for key in ("low", "high")}
    rows = [result["rows"].get(figure) for result in results]
    if any(row is None or len(row) != len(rows[0]) for row in rows):
        return {"low": None, "high": None}
    interval = bootstrap_crossed(torch.tensor(rows, dtype=torch.float64))
    return {"low": interval.low, "high": interval.high}


def _gain(results: Sequence[Json], starts: Sequence[Json | None], figure: str) -> Json | None:
    after = [result["rows"].get(figure) for result in results]
    before = [start["rows"].get(figure) if start is not None else None for start in starts]
    if any(a is None or b is None or len(a) != len(b) for a, b in zip(after, before, strict=True)):
        return None
    differences = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    interval = bootstrap_crossed(differences)
    return {"value": interval.value, "low": interval.low, "high": interval.high}
