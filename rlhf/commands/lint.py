"""rlhf lint: the settings of a run that will not learn, may lose data, or are outside what papers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf.comparison.plan import Plan, make_plan
from rlhf.config.load import load_any
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.config.shipped import locate_config
from rlhf.errors import ConfigError
from rlhf.guard.lint import RULES, explain_errors, lint
from rlhf.guard.rule import RunConfiguration, Violation

STYLES = {"error": "red", "warning": "yellow"}


def run_lint(path: str | Path, overrides: Sequence[str], console: Console) -> None:
    """Print what is wrong with a configuration; of a comparison, with each of its arms.

    Raises:
        ConfigError: the configuration is invalid, or breaks a rule whose level is error.
    """
    violations = {name: lint(config) for name, config in runs_of(path, overrides).items()}
    print_violations(violations, console)
    errors = [violation for broken in violations.values() for violation in broken if violation.rule.level == "error"]
    if errors:
        raise ConfigError(explain_errors(errors))
    if not any(violations.values()):
        console.print(f"nothing to say: none of {len(RULES)} rules is broken")


def runs_of(path: str | Path, overrides: Sequence[str]) -> Mapping[str, RunConfiguration]:
    """Return the runs that a configuration describes: itself under the empty name, or the arms of a comparison."""
    config = load_any(path, overrides)
    if isinstance(config, OnlineConfig | OfflineConfig | RewardModelConfig):
        return {"": config}
    plan = make_plan(config, beside=locate_config(path).parent, lab_files=False)
    return trained_arms(plan)


def trained_arms(plan: Plan) -> dict[str, RunConfiguration]:
    """Return the runs of a comparison's trained arms, one for all its seeds."""
    return {f"arms.{cell.arm}": cell.config.train for cell in plan.cells if cell.config.budget is not None}


def print_violations(violations: Mapping[str, Sequence[Violation]], console: Console) -> None:
    """Print the violations of each run, by its name."""
    for name, broken in violations.items():
        for violation in broken:
            level, where = violation.rule.level, f"{name}: " if name else ""
            console.print(Text(f"{level}: {where}{violation}", style=STYLES[level]), soft_wrap=True)
