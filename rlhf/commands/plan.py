"""rlhf plan: how much memory and time a run takes, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf.commands.lint import runs_of
from rlhf.errors import UserError
from rlhf.guard.rule import RunConfiguration
from rlhf.lab.build import resolve_lab_paths
from rlhf.planning.layout import Lengths
from rlhf.planning.machine import GB, LIBRARIES, has_gpu, host_memory, parse_size, read_rates
from rlhf.planning.plan import Machine, Plan, cure_lines, dtype_of, gigabytes, make_plan, table


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `rlhf plan` takes besides the configuration."""

    memory: str | None = None
    gpus: int | None = None
    device: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    json: bool = False


def machine_of(config: RunConfiguration, options: PlanOptions) -> Machine:
    """Return the machine that the options describe, or this one.

    Raises:
        UserError: an option is wrong.
    """
    for name in ("gpus", "prompt_tokens", "completion_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it has to be at least 1")
    device = options.device or (config.run.device if config.run.device in ("cpu", "cuda") else None)
    if device is None:
        device = "cuda" if options.gpus is not None or options.memory is not None or has_gpu() else "cpu"
    memory = parse_size(options.memory) if options.memory is not None else None
    if memory is None and device == "cpu":
        memory = host_memory()
    return Machine(device=device, memory=memory, processes=options.gpus or 1)


def plans_of(path: str | Path, overrides: Sequence[str], options: PlanOptions) -> dict[str, Plan]:
    """Plan a run, or each arm of a comparison, by its name.

    Raises:
        UserError: the configuration or an option is wrong, or the shape of a model is not known.
    """
    lengths = Lengths(prompt=options.prompt_tokens, completion=options.completion_tokens)
    plans = {}
    for name, unresolved in runs_of(path, overrides).items():
        config = resolve_lab_paths(unresolved)
        machine = machine_of(config, options)
        rates = read_rates(config.run.cache_dir, machine.device, dtype_of(config, machine.device))
        plans[name] = make_plan(config, machine, lengths, rates=rates, may_make=True)
    return plans


def run_plan(path: str | Path, overrides: Sequence[str], options: PlanOptions, console: Console) -> int:
    """Print the plan; return 1 if a run does not fit into the memory that was named, else 0.

    Raises:
        UserError: as `plans_of`.
    """
    plans = plans_of(path, overrides, options)
    if options.json:
        content = {name: plan.as_dict() for name, plan in plans.items()}
        print(json.dumps(content.get("", content), indent=2))  # noqa: T201
    else:
        for name, plan in plans.items():
            if name:
                console.rule(name)
            console.print(Text("\n".join(describe(plan))), soft_wrap=True)
    return 1 if any(plan.fits is False for plan in plans.values()) else 0


def describe(plan: Plan) -> list[str]:
    """Return the plan as lines of text."""
    return [*_head(plan), "", *table(plan), "", *_verdict(plan), *_shares(plan), "", *_time(plan)]


def _head(plan: Plan) -> list[str]:
    layout = plan.layout
    models = ", ".join(f"{role.name} {role.shape.parameters / 1e6:,.0f}M" for role in layout.roles)
    trained = ", ".join(f"{role.name} {role.trained / 1e6:,.1f}M" for role in layout.trained)
    where = "one process" if plan.machine.processes == 1 else f"each of {plan.machine.processes} processes"
    return [
        f"models: {models}; trained: {trained}",
        f"{where} on {plan.machine.device}; rows of {layout.step.prompt} + {layout.step.completion} tokens, "
        f"{layout.update.rows} rows a micro-batch, {layout.passes} micro-batches an optimizer step",
        *(f"note: {note}" for note in layout.notes),
    ]


def _verdict(plan: Plan) -> list[str]:
    memory, device = plan.machine.memory, plan.machine.device
    lines = [
        f"peak: {gigabytes(plan.peak)} GB in the phase {plan.memory.peak_phase}; with about "
        f"{LIBRARIES[device] / GB:.1f} GB for libraries the process needs {gigabytes(plan.needed)} GB"
    ]
    if memory is None:
        return [*lines, "whether that fits: --memory 24GB"]
    verdict = "it does not fit" if not plan.fits else "it fits, but only just" if plan.is_tight else "it fits"
    lines.append(f"memory: {gigabytes(memory)} GB; {verdict}")
    largest = plan.largest_micro_batch()
    lines.append(
        "not even one row a micro-batch fits" if largest is None else f"largest batch.micro_batch_size that fits: {largest}"
    )
    return lines if plan.fits and not plan.is_tight else [*lines, *cure_lines(plan)]


def _shares(plan: Plan) -> list[str]:
    if plan.machine.processes == 1:
        return []
    shares = (f"{mode} {gigabytes(size)} GB" for mode, size in plan.shares().items())
    return [f"peak of each of {plan.machine.processes} processes: {', '.join(shares)}"]


def _time(plan: Plan) -> list[str]:
    counts = plan.operations()
    total = sum(counts.values())
    by_phase = ", ".join(f"{phase} {count / 1e12:,.3g}" for phase, count in counts.items())
    lines = [f"operations a step: {total / 1e12:,.3g} TFLOP ({by_phase})"]
    step = plan.seconds()
    if step is None:
        return [*lines, "seconds: not measured on this machine; --probe runs three steps"]
    shown = ", ".join(f"{phase} {value:.3g}" for phase, value in step.items())
    lines.append(f"seconds a step: {sum(step.values()):.3g} ({shown}), at the rates of the last probe")
    if plan.layout.steps is not None:
        lines.append(f"the run of {plan.layout.steps:,} steps: {sum(step.values()) * plan.layout.steps / 60:,.1f} minutes")
    return lines
