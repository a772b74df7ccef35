"""rlhf lint: the settings of a run that will not learn, may lose data, or are outside what papers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf.comparison.plan import plan_cells, trained_arms
from rlhf.config.files import locate_config
from rlhf.config.load import load_any
from rlhf.config.sections import RunConfiguration
from rlhf.errors import ConfigError
from rlhf.guard.lint import all_rules, how_to_allow, lint
from rlhf.guard.rule import Violation, read_facts
from rlhf.planning.layout import trained_section
from rlhf.report.terminal import STYLES


def run_lint(path: str | Path, overrides: Sequence[str], console: Console) -> None:
    """Print the violations of a configuration; of a comparison, the violations of each arm.

    Raises:
        ConfigError: the configuration is invalid, or breaks a rule whose level is error.
    """
    runs = runs_of(path, overrides)
    violations = {name: lint(config) for name, config in runs.items()}
    for name, broken in violations.items():
        for violation in broken:
            print_in_full(violation, name, console)
    unknown = [config for config in runs.values() if read_facts(config).parameters is None]
    for model in sorted({trained_section(config).model for config in unknown}):
        console.print(f"learning rates were not checked: the size of {model} is not known before it is there")
    rules = [violation.rule for broken in violations.values() for violation in broken]
    errors = [rule.name for rule in rules if rule.level == "error"]
    warnings = len(rules) - len(errors)
    console.print(f"{len(all_rules())} rules: {_count(len(errors), 'error')}, {_count(warnings, 'warning')}")
    if errors:
        raise ConfigError(f"{path} would be refused. {how_to_allow(errors)}")


def print_in_full(violation: Violation, name: str, console: Console) -> None:
    """Print a violation as a paragraph: level and rule, key and value with the reason, source, fix."""
    rule = violation.rule
    head = Text(f"{rule.level}  ", style=f"bold {STYLES[rule.level]}").append(rule.name, style="bold")
    console.print(head.append(f"  ({name})" if name else "", style="not bold"))
    for line in (f"{violation.setting}. {rule.reason}", f"source: {rule.source}", f"fix:    {rule.fix}"):
        console.print(Padding(Text(line), (0, 0, 0, 4)))
    console.print()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def runs_of(path: str | Path, overrides: Sequence[str]) -> Mapping[str, RunConfiguration]:
    """Return the runs that a configuration describes: itself under the empty name, or the arms of a comparison."""
    config = load_any(path, overrides)
    if isinstance(config, RunConfiguration):
        return {"": config}
    plan = plan_cells(config, beside=locate_config(path).parent, lab_files=False)
    return trained_arms(plan)
