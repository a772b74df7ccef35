"""rlhf eval --suite: a named alignment evaluation of a run's model, or of any causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf.config.algorithm import ReferencedLoss
from rlhf.config.load import Tree, merge, parse_overrides, read_yaml, train_config, validate
from rlhf.config.reward import RewardSourceConfig
from rlhf.config.sections import OfflineConfig
from rlhf.errors import ConfigError
from rlhf.factory.suites import Suite, find_suite, load_model_for_suite, write_result
from rlhf.lab.build import resolve_lab_paths
from rlhf.suites.figures import Estimate, SuiteResult
from rlhf.suites.settings import SuiteSettings
from rlhf.tracking.formatting import format_significant

START = "start"
MAX_GROUPS = 40


def run_suite(
    target: str,
    name: str,
    *,
    data: str | None,
    limit: int | None,
    out: str | None,
    against: str,
    overrides: Sequence[str],
    console: Console,
) -> None:
    """Evaluate a model with the suite `name`, print the result, and write it as JSON.

    Args:
        target: a run, a model folder or a hub id.
        name: a suite, or lm-eval:TASK.
        data: the suite's data.
        limit: the number of rows to use, None for all.
        out: the JSON file; None writes evals/<suite>.json in the run's folder.
        against: the model to compare with; `start` is the reference of the run.
        overrides: key=value settings on top of the run's own.
        console: where the result is printed.

    Raises:
        UserError: the suite, a setting, the data or the model is missing or invalid.
    """
    suite, task = find_suite(name)
    settings = settings_of(suite, name, target, data=data, limit=limit, against=against, overrides=overrides)
    subject = load_model_for_suite(settings, target)
    result = suite.run(settings, subject, task)
    _print(name, target, result, console)
    file = _result_file(target, name, out)
    if file is None:
        message = f"{target} is no run folder, so nothing was written; --out FILE writes what was found"
        console.print(Text(message), soft_wrap=True)
        return
    write_result(file, name, target, result, settings, subject)
    console.print(Text(f"written to {file}"), soft_wrap=True)


def settings_of(
    suite: Suite,
    name: str,
    target: str,
    *,
    data: str | None,
    limit: int | None,
    against: str,
    overrides: Sequence[str],
) -> SuiteSettings:
    """Resolve the suite's settings, in rising priority: its defaults, the run's settings, the options, key=value.

    Raises:
        ConfigError: a key or a value is invalid, or the data is missing.
    """
    tree = _settings_of_run(target, suite.settings)
    data = data or suite.default_data
    options = {suite.data_key: data, suite.limit_key: limit, "reference": None if against == START else against}
    for key, value in options.items():
        if value is None:
            continue
        if key.partition(".")[0] not in suite.settings.model_fields:
            raise ConfigError(f"--against: the suite {name} compares with no other model")
        tree = merge(tree, _nested(key, value))
    tree = merge(tree, parse_overrides(overrides))
    dataset = suite.settings.model_fields.get("dataset")
    if dataset is not None and dataset.is_required() and not _has_path(tree.get("dataset")):
        raise ConfigError(f"the suite {name} needs data: --data PATH, {suite.data}")
    return resolve_lab_paths(validate(suite.settings, tree))


def _settings_of_run(target: str, kind: type[SuiteSettings]) -> Tree:
    """Return those of the suite's settings that the configuration of a run determines; empty if it is no run."""
    if not (Path(target).expanduser() / "config.yaml").is_file():
        return {}
    tree = read_yaml(Path(target).expanduser())
    if "arms" in tree:
        raise ConfigError(f"{target} is the folder of a comparison: name one of the runs in it")
    if "model" in tree and "policy" not in tree:
        raise ConfigError(
            f"{target} is a reward model's run: it writes nothing. Name a policy's; rlhf eval {target} alone"
        )
    config = train_config(tree)
    loss = config.algorithm.loss if isinstance(config, OfflineConfig) else None
    source: RewardSourceConfig | None = config.eval.source or (config.reward.source if config.reward else None)
    settings = {
        "seed": config.run.seed,
        "device": config.run.device,
        "dtype": config.policy.dtype,
        "trust_remote_code": config.policy.trust_remote_code,
        "chat_template": config.data.chat_template,
        "chat_template_kwargs": config.data.chat_template_kwargs,
        "system": config.data.system,
        "sampling": {key: getattr(config.sampling, key) for key in ("max_new_tokens", "temperature", "batch_size")},
        "reference": config.reference.model or config.policy.model,
        "source": None if source is None else source.model_dump(mode="json"),
        "beta": loss.beta if isinstance(loss, ReferencedLoss) else None,
    }
    return {key: value for key, value in settings.items() if key in kind.model_fields and value is not None}


def _nested(key: str, value: object) -> Tree:
    """Turn a dotted key into nested dictionaries."""
    first, dot, rest = key.partition(".")
    return {first: _nested(rest, value) if dot else value}


def _has_path(tree: object) -> bool:
    return isinstance(tree, Mapping) and bool(tree.get("path"))


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
