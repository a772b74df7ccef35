"""rlhf plan: how much memory and time a run takes, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf.config.load import load_any
from rlhf.config.sections import RunConfiguration
from rlhf.lab.build import resolve_lab_paths
from rlhf.planning.options import PlanOptions
from rlhf.planning.plan import Plan
from rlhf.planning.text import describe_plan


def plans_of(path: str | Path, overrides: Sequence[str], options: PlanOptions) -> dict[str, Plan]:
    """Plan a run, or each arm of a comparison, by its name.

    Raises:
        UserError: the configuration or an option is wrong, or the shape of a model is not known.
    """
    config = load_any(path, overrides)
    if isinstance(config, RunConfiguration):
        return {"": options.plan(resolve_lab_paths(config))}
    from rlhf.commands.lint import runs_of  # of a comparison; it imports torch

    return {name: options.plan(resolve_lab_paths(arm)) for name, arm in runs_of(path, overrides).items()}


def run_plan(
    path: str | Path, overrides: Sequence[str], options: PlanOptions, console: Console, *, as_json: bool = False
) -> int:
    """Print the plan; return 1 if a run does not fit into the memory that was named, else 0.

    Raises:
        UserError: as `plans_of`.
    """
    plans = plans_of(path, overrides, options)
    if as_json:
        content = {name: plan.as_dict() for name, plan in plans.items()}
        print(json.dumps(content.get("", content), indent=2))  # noqa: T201
    else:
        for name, plan in plans.items():
            if name:
                console.rule(name)
            console.print(Text("\n".join(describe_plan(plan))), soft_wrap=True)
    return 1 if any(plan.fits is False for plan in plans.values()) else 0
