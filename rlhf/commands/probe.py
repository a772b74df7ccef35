"""rlhf plan --probe: three steps of a run, to measure its peak memory and its seconds."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlhf.api.training import run_reward_model, run_train
from rlhf.commands.lint import runs_of
from rlhf.config.sections import RewardModelConfig, RunConfiguration
from rlhf.data.paths import check_files
from rlhf.errors import UserError
from rlhf.lab.build import resolve_lab_paths
from rlhf.planning.cures import with_settings
from rlhf.planning.layout import Lengths
from rlhf.planning.machine import LIBRARIES, write_rates
from rlhf.planning.options import PlanOptions
from rlhf.planning.plan import Plan, dtype_of, gigabytes, make_plan
from rlhf.planning.text import describe_plan
from rlhf.runtime.device import choose_device
from rlhf.tracking.run_folder import RunFolder

STEPS = 3
PHASES = {"sample": "rollout", "score": "annotate", "annotate": "annotate", "update": "update"}
"""The phases of timings.jsonl, and the plan's."""


def run_probe(
    path: str | Path, overrides: Sequence[str], options: PlanOptions, console: Console, *, as_json: bool = False
) -> int:
    """Run three steps in a temporary folder, print the plan beside the measurements, and keep the machine's rates.

    Raises:
        UserError: the configuration describes several runs, or as in training.
    """
    runs = runs_of(path, overrides)
    if "" not in runs:
        raise UserError("--probe runs one run: give the configuration of a run, not of a comparison")
    config = resolve_lab_paths(runs[""])
    check_files(config)
    device = choose_device(config.run.device, key="run.device").type
    options = replace(options, device=device)
    plan = options.plan(config)
    with tempfile.TemporaryDirectory(prefix="rlhf-probe-") as folder:
        short = shortened(config, folder)
        if isinstance(short, RewardModelConfig):
            run_reward_model(short)
        else:
            run_train(short)
        timings = RunFolder(short.run.out_dir).read_timings()
    like = as_long_as_measured(plan, timings)
    rates = measured_rates(like, timings)
    file = write_rates(config.run.cache_dir, device, dtype_of(config, device), rates)
    plan = make_plan(config, plan.machine, plan.lengths, rates=rates, may_make=True)
    measured = max(float(row["peak_memory_mb"]) for row in timings) * 2**20
    step = statistics.median(sum(row["seconds"].values()) for row in timings[1:] or timings)
    if as_json:
        figures = {"peak": measured, "seconds_per_step": step, "rates": rates}
        print(json.dumps({**plan.as_dict(), "measured": figures}, indent=2))  # noqa: T201
        return 0
    console.print(Text("\n".join([*describe_plan(plan), *_measured(like, measured, step, file)])), soft_wrap=True)
    return 0


def shortened(config: RunConfiguration, folder: str) -> RunConfiguration:
    """Return the run with three steps, in a folder of its own, without evaluation and checkpoints."""
    settings: dict[str, Any] = {
        "run.out_dir": str(Path(folder) / "run"),
        "schedule.steps": STEPS,
        "schedule.epochs": None,
        "checkpoint.every": 0,
        "checkpoint.best": None,
        "checkpoint.resume": "auto",
        "logging.every": 1,
        "logging.backends": [],
        "eval.every": 0,
    }
    settings |= {f"data.{name}": None for name in ("eval_prompts", "eval_sft", "eval_preferences")}
    return with_settings(config, settings)


def as_long_as_measured(plan: Plan, timings: Sequence[Mapping[str, Any]]) -> Plan:
    """Plan the run for rows of the mean length that the probe measured."""
    tokens = [float(row["tokens_per_second"] or 0) * sum(row["seconds"].values()) for row in timings[1:] or timings]
    step = plan.layout.step
    share = statistics.median(tokens) / (step.rows * step.length) or 1.0
    prompt, completion = (max(1, round(share * length)) for length in (step.prompt, step.completion))
    return make_plan(plan.config, plan.machine, Lengths(prompt=prompt, completion=completion), may_make=True)


def measured_rates(plan: Plan, timings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the operations per second of each phase: the plan's operations over the median seconds after step 1."""
    rows = [row["seconds"] for row in timings[1:] or timings]
    totals = [
        {
            phase: sum(float(seconds.get(name, 0.0)) for name, of in PHASES.items() if of == phase)
            for phase in PHASES.values()
        }
        for seconds in rows
    ]
    medians = {phase: statistics.median(total[phase] for total in totals) for phase in set(PHASES.values())}
    return {phase: count / medians[phase] for phase, count in plan.operations().items() if medians.get(phase)}


def _measured(plan: Plan, measured: float, step: float, file: Path) -> list[str]:
    planned = max(plan.memory.of(phase) for phase in plan.memory.phases if phase != "export")  # after the last step
    planned += 0 if plan.machine.device == "cuda" else LIBRARIES["cpu"]
    what = "allocated on the GPU" if plan.machine.device == "cuda" else "resident, libraries included"
    return [
        f"measured in {STEPS} steps: {gigabytes(measured)} GB {what}; planned for rows as long as theirs on average "
        f"({plan.layout.step.length} tokens): {gigabytes(planned)} GB ({planned / measured - 1:+.0%})",
        f"measured seconds a step: {step:.3g}, for rows of {plan.layout.step.length} tokens on average",
        f"the rates are kept in {file}",
    ]
