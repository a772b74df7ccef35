"""The suites of a cell: run on its final model, read back, and summarized over the seeds of an arm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from rlhf.comparison.results import SuiteFigure, Suites
from rlhf.config.compare import START_FOLDER, CellConfig
from rlhf.config.load import dump, validate
from rlhf.evaluation.win_rate import Interval, bootstrap_crossed
from rlhf.factory.suites import evaluate_suite, load_model_for_suite, write_result
from rlhf.suites.settings import AnswerSettings, SuiteSettings, find_suite
from rlhf.tracking.run_folder import write_atomically

FOLDER = "evals"


@dataclass(frozen=True)
class SuiteScores:
    """The scores of one suite on one model: its figures, and where a figure has one, the number of every row."""

    figures: Mapping[str, SuiteFigure]
    rows: Mapping[str, Sequence[float]]


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
            write_atomically(file, reused)
            continue
        subject = load_model_for_suite(settings, target)
        write_result(file, name, target, evaluate_suite(settings, subject, task), settings, subject)


def _measured_before(cell: CellConfig, folder: Path, name: str, settings: SuiteSettings) -> str | None:
    """Return the start model's result under another seed, where the suite's answers are greedy and so the same."""
    if cell.arm != START_FOLDER or not (isinstance(settings, AnswerSettings) and settings.greedy):
        return None
    for path in sorted(folder.parent.glob(f"*/{FOLDER}/{name}")):
        text = path.read_text(encoding="utf-8")
        if {**json.loads(text)["config"], "seed": settings.seed} == dump(settings):
            return text
    return None


def read_suites(folder: Path) -> dict[str, SuiteScores]:
    """Read the results that `run_suites` wrote for a cell: suite -> scores."""
    return {path.stem: _read_scores(path) for path in sorted((folder / FOLDER).glob("*.json"))}


def _read_scores(path: Path) -> SuiteScores:
    content = json.loads(path.read_text(encoding="utf-8"))
    figures = {
        name: SuiteFigure(value=figure["value"], low=figure.get("low"), high=figure.get("high"))
        for name, figure in content["figures"].items()
    }
    return SuiteScores(figures, content["rows"])


def summarize_suites(
    results: Sequence[Mapping[str, SuiteScores]], starts: Sequence[Mapping[str, SuiteScores]]
) -> Suites:
    """Summarize the suites of an arm over its seeds.

    Args:
        results: the suite scores of every finished seed.
        starts: the start model's, of the same seeds.

    Returns:
        For each suite and figure the mean over seeds, and the gain: the paired difference from the start model.
        Intervals are over prompts and seeds, for one seed the suite's own; None for a figure that has no number for
        each row.
    """
    names = [name for name in (results[0] if results else {}) if all(name in seed for seed in results)]
    return {name: _summarize([seed[name] for seed in results], [seed.get(name) for seed in starts]) for name in names}


def _summarize(results: Sequence[SuiteScores], starts: Sequence[SuiteScores | None]) -> dict[str, SuiteFigure]:
    figures = {}
    for name in results[0].figures:
        low, high = _bounds(results, name)
        value = fmean(result.figures[name].value for result in results)
        figures[name] = SuiteFigure(value=value, low=low, high=high, gain=_gain(results, starts, name))
    return figures


def _bounds(results: Sequence[SuiteScores], name: str) -> tuple[float | None, float | None]:
    """Return the ends of a figure's interval."""
    if len(results) == 1:
        figure = results[0].figures[name]
        return figure.low, figure.high
    interval = _bootstrap([result.rows.get(name) for result in results])
    return (None, None) if interval is None else (interval.low, interval.high)


def _bootstrap(rows: Sequence[Sequence[float] | None]) -> Interval | None:
    """Compute the interval over seeds and rows; None unless every seed has a number for the same rows."""
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or any(len(row) != len(known[0]) for row in known):
        return None
    return bootstrap_crossed(torch.tensor(known, dtype=torch.float64))


def _gain(results: Sequence[SuiteScores], starts: Sequence[SuiteScores | None], name: str) -> Interval | None:
    after = [result.rows.get(name) for result in results]
    before = [start.rows.get(name) if start is not None else None for start in starts]
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a is not None and b is not None and len(a) == len(b)]
    if len(pairs) < len(after):
        return None
    differences = [torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64) for a, b in pairs]
    return bootstrap_crossed(torch.stack(differences))
