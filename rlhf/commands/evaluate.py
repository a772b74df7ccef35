"""rlhf eval: a finished run against the model it started from, or another one, on held-out prompts.

With --suite: a named alignment evaluation of a run's model, or of any causal language model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from rlhf.commands.notices import warn_of_rounding
from rlhf.config.load import load_run
from rlhf.config.sections import RewardModelConfig
from rlhf.data.files import count_rows
from rlhf.errors import ConfigError
from rlhf.evaluation.win_rate import LengthControlled
from rlhf.factory.evaluation import (
    START,
    PairwiseComparison,
    PolicyComparison,
    compare_models,
    evaluate_suite,
    load_model_for_suite,
    write_result,
)
from rlhf.factory.reward_card import compute_report_card
from rlhf.report.terminal import Terminal
from rlhf.suites.questions import Estimate, SuiteResult
from rlhf.suites.suite import Suite
from rlhf.tracking.metrics import METRICS, format_fixed, format_significant
from rlhf.tracking.run_folder import write_atomically
from rlhf.tracking.trackers import to_json


def run_eval(path: str, overrides: Sequence[str], console: Console, *, against: str = START) -> None:
    """Evaluate the run in `path` against another model, print the result, and write eval.json into the run folder.

    For a reward model's run the report card on its held-out pairs is computed and printed instead.

    Args:
        overrides: key=value settings on top of the run's own.
        against: the run or model to compare with, which then names the file; `start` is the model that the
            run started from.

    Raises:
        UserError: there is nothing to evaluate on, a model cannot be loaded, or `against` is given for a reward model.
    """
    config = load_run(path, overrides)
    if isinstance(config, RewardModelConfig):
        if against != START:
            raise ConfigError(
                f"{path} is a reward model's run: it writes nothing that could be set --against {against}"
            )
        warn_of_rounding(path)
        card = compute_report_card(config, path)
        Terminal(console).card(card)
        pairs = config.data.eval_preferences
        if pairs is not None and card["n"] < (rows := count_rows(pairs)):
            _print_line(console, f"{card['n']:,} of {rows:,} rows of {pairs.path}")
        return
    comparison = compare_models(config, path, against)
    _print(comparison, console)
    out = Path(path) / _file_name(against)
    write_atomically(out, json.dumps(to_json(asdict(comparison)), indent=2, ensure_ascii=False) + "\n")
    console.print(Text(f"written to {out}"), soft_wrap=True)


def _file_name(against: str) -> str:
    """Return eval.json, or a name made from the last parts of the path that the run is compared with."""
    if against == START:
        return "eval.json"
    end = "/".join(Path(against).parts[-3:]).strip("./") or Path(against).resolve().name  # `.` has no name itself
    return f"eval-{re.sub(r'[^A-Za-z0-9.]+', '-', end).strip('-.')}.json"


def _print(comparison: PolicyComparison, console: Console) -> None:
    other = "reference" if comparison.against == START else comparison.against
    table = Table("on held-out prompts", escape(other), "this run", "unit", box=None, pad_edge=False)
    for name in [*comparison.run, *(name for name in comparison.reference if name not in comparison.run)]:
        values = (format_fixed(metrics.get(name)) for metrics in (comparison.reference, comparison.run))
        table.add_row(name, *values, METRICS[name].unit)
    console.print(table)
    left_out = comparison.prompts < comparison.data_rows
    rows = f"of {comparison.data_rows:,} rows of {comparison.data}" if left_out else "prompts"
    basis = f"95 % interval, {comparison.prompts:,} {rows}"
    if comparison.win_rate is not None and comparison.length_controlled is not None:
        _print_line(console, f"win rate over {_opponent(comparison)} {comparison.win_rate} ({basis})")
        _print_line(console, f"at equal length {_at_equal_length(comparison.length_controlled)}")
        _print_line(console, f"mean score difference {comparison.difference}")
    if comparison.pairwise is not None:
        basis = f"95 % interval, {len(comparison.rows)} prompts"
        for line in _pairwise_lines(comparison, comparison.pairwise, basis):
            _print_line(console, line)
    for note in comparison.notes:
        console.print(Text(f"warning: {note}", style="yellow"), soft_wrap=True)


def _print_line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _opponent(comparison: PolicyComparison) -> str:
    return "the reference" if comparison.against == START else comparison.against


def _at_equal_length(win_rate: LengthControlled) -> str:
    if win_rate.extrapolated:
        return f"{win_rate} (a guess: one side is longer on every prompt)"
    return str(win_rate)


def _pairwise_lines(comparison: PolicyComparison, pairs: PairwiseComparison, basis: str) -> list[str]:
    unreadable = f", {pairs.unreadable} of {pairs.answers} answers could not be read" if pairs.unreadable else ""
    return [
        f"{pairs.judge}: win rate over {_opponent(comparison)} {pairs.win_rate} ({basis}), "
        f"at equal length {_at_equal_length(pairs.length_controlled)}",
        f"{pairs.judge}: {pairs.inconsistent:.1%} of the pairs judged differently when swapped (counted as ties), "
        f"{pairs.first_shown:.1%} of the verdicts for the side shown first{unreadable}",
    ]


MAX_GROUPS = 40


def run_suite(target: str, name: str, settings: Suite, *, task: str, out: str | None, console: Console) -> None:
    """Evaluate a model with a suite, print the result, and write it as JSON.

    Args:
        target: a run, a model folder or a hub id.
        name: a suite, or lm-eval:TASK, as given by the user.
        settings: the settings of that suite (see checks.suite_settings).
        task: the task of lm-eval:TASK, else empty.
        out: the JSON file; None writes evals/<suite>.json in the run's folder.

    Raises:
        UserError: the data or the model is missing or invalid.
    """
    subject = load_model_for_suite(settings, target)
    result = evaluate_suite(settings, subject, task)
    _print_suite(name, target, result, console)
    file = _result_file(target, name, out)
    if file is None:
        message = f"{target} is no run folder, so nothing was written; --out FILE writes the results"
        console.print(Text(message), soft_wrap=True)
        return
    write_result(file, name, target, result, settings, subject)
    console.print(Text(f"written to {file}"), soft_wrap=True)


def _result_file(target: str, name: str, out: str | None) -> Path | None:
    if out is not None:
        return Path(out).expanduser()
    run = Path(target).expanduser()
    return (
        run / "evals" / f"{name.replace(':', '-').replace('/', '-')}.json" if (run / "config.yaml").is_file() else None
    )


def _print_suite(name: str, target: str, result: SuiteResult, console: Console) -> None:
    skipped = sum(result.skipped.values())
    rows = f"{result.n:,} rows, {skipped:,} skipped" if skipped else f"{result.n:,} rows"
    console.print(Text(f"{name} of {target}: {rows}"), soft_wrap=True)
    columns = (Column(name, no_wrap=True) for name in ("figure", "value", "95 % interval", "rows"))
    table = Table(*columns, "what it is", box=None, pad_edge=False)
    for figure in result.figures:
        table.add_row(
            *map(
                Text,
                (figure.name, format_significant(figure.value), _interval(figure), f"{figure.n:,}", figure.meaning),
            )
        )
    if result.figures:
        console.print(table)
    if result.groups:
        _print_groups(result.groups, console)
    for omission in result.left_out:
        console.print(Text(f"left out: {omission.what}: {omission.why}", style="yellow"), soft_wrap=True)
    for message in result.notes:
        console.print(Text(message), soft_wrap=True)


def _print_groups(groups: Mapping[str, Sequence[Estimate]], console: Console) -> None:
    table = Table("of which", "figure", "value", "95 % interval", "rows", box=None, pad_edge=False)
    for name, figures in list(groups.items())[:MAX_GROUPS]:
        for figure in figures[:1]:
            table.add_row(
                *map(Text, (name, figure.name, format_significant(figure.value), _interval(figure), f"{figure.n:,}"))
            )
    console.print(table)
    if len(groups) > MAX_GROUPS:
        console.print(Text(f"and {len(groups) - MAX_GROUPS:,} more"))


def _interval(figure: Estimate) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{format_significant(figure.low)} to {format_significant(figure.high)}"
