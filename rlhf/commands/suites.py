"""rlhf eval --suite: a named alignment evaluation of a run's model, or of any causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf.factory.suites import evaluate_suite, load_model_for_suite, write_result
from rlhf.suites.figures import Estimate, SuiteResult
from rlhf.suites.settings import SuiteSettings
from rlhf.tracking.formatting import format_significant

MAX_GROUPS = 40


def run_suite(target: str, name: str, settings: SuiteSettings, *, task: str, out: str | None, console: Console) -> None:
    """Evaluate a model with a suite, print the result, and write it as JSON.

    Args:
        target: a run, a model folder or a hub id.
        name: a suite, or lm-eval:TASK, as given by the user.
        settings: the settings of that suite (see checks.suite_settings).
        task: the task of lm-eval:TASK, else empty.
        out: the JSON file; None writes evals/<suite>.json in the run's folder.
        console: where the result is printed.

    Raises:
        UserError: the data or the model is missing or invalid.
    """
    subject = load_model_for_suite(settings, target)
    result = evaluate_suite(settings, subject, task)
    _print(name, target, result, console)
    file = _result_file(target, name, out)
    if file is None:
        message = f"{target} is no run folder, so nothing was written; --out FILE writes what was found"
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


def _print(name: str, target: str, result: SuiteResult, console: Console) -> None:
    skipped = sum(result.skipped.values())
    rows = f"{result.n:,} rows, {skipped:,} skipped" if skipped else f"{result.n:,} rows"
    console.print(Text(f"{name} of {target}: {rows}"), soft_wrap=True)
    name_column = Column("figure", min_width=max((len(figure.name) for figure in result.figures), default=0))
    table = Table(name_column, "value", "95 % interval", "rows", "what it is", box=None, pad_edge=False)
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
