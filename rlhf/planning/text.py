"""A plan as text: the table in GB, whether it fits, the changes, the time; and the message of a refused run."""

from __future__ import annotations

from dataclasses import replace

from rlhf.config.sections import RunConfiguration
from rlhf.errors import ModelError
from rlhf.planning.arithmetic import Bytes
from rlhf.planning.machine import GB, LIBRARIES
from rlhf.planning.plan import RULE, CurePlan, Machine, Plan, gigabytes, least_of, make_plan

WITHOUT_WRITTEN_OUT = (
    "zero2 takes more than zero1: from zero2 on the layers are the model's own, which keep more activations than the "
    "written-out layers of none and zero1"
)
SURE = 0.8  # of the memory: measured peaks are up to a tenth above the plan's (docs/memory.md)


def describe_plan(plan: Plan) -> list[str]:
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
    if largest is not None:
        lines.append(f"largest batch.micro_batch_size that fits: {largest}")
    return lines if plan.fits and not plan.is_tight else [*lines, *cure_lines(plan)]


def _shares(plan: Plan) -> list[str]:
    if plan.machine.processes == 1:
        return []
    shares = plan.shares()
    sizes = ", ".join(f"{mode} {gigabytes(size)} GB" for mode, size in shares.items())
    lines = [f"peak of each of {plan.machine.processes} processes: {sizes}"]
    return [*lines, WITHOUT_WRITTEN_OUT] if shares["zero2"] > shares["zero1"] else lines


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(plan: Plan) -> list[str]:
    counts = plan.operations()
    total = sum(counts.values())
    by_phase = ", ".join(f"{phase} {_digits(count / 1e12)}" for phase, count in counts.items())
    lines = [f"operations a step: {_digits(total / 1e12)} TFLOP ({by_phase})"]
    step = plan.seconds()
    if step is None:
        return [*lines, "seconds: not measured on this machine; --probe runs three steps"]
    shown = ", ".join(f"{phase} {_digits(value)}" for phase, value in step.items())
    lines.append(f"seconds a step: {_digits(sum(step.values()))} ({shown}), at the rates of the last probe")
    if plan.layout.steps is not None:
        lines.append(
            f"the run of {plan.layout.steps:,} steps: {sum(step.values()) * plan.layout.steps / 60:,.1f} minutes"
        )
    return lines


def refusal(config: RunConfiguration, machine: Machine) -> str | None:
    """Explain why a run cannot fit into the memory of its device, with the plan and the cures; None if it may fit.

    It counts only tensors that are there at once in any case: weights, gradients and moments. The memory for rows and
    caches shrinks with micro-batches, so a run is never refused for it.
    """
    if machine.memory is None or RULE in config.guard.allow:
        return None
    least = least_of(config, machine)
    if least is None or least <= machine.memory:
        return None
    plan = make_plan(config, machine)
    where = "GPU" if machine.device == "cuda" else "machine"
    lines = [
        f"{RULE}: weights, gradients and moments alone take {gigabytes(least)} GB, and the {where} has "
        f"{gigabytes(machine.memory)} GB. Nothing was loaded. The plan:",
        *table(plan),
        *cure_lines(plan),
        f"To run it nevertheless: guard.allow=[{RULE}]",
    ]
    return "\n".join(lines)


def larger_passes(config: RunConfiguration, machine: Machine) -> str | None:
    """Name a larger micro-batch that surely fits a GPU, by doubling the configuration's; None if there is none.

    A GPU takes few rows hardly faster than many, and the result does not depend on it.
    """
    if machine.device != "cuda" or machine.memory is None or config.batch.micro_batch_tokens is not None:
        return None
    try:
        largest = make_plan(config, replace(machine, memory=SURE * machine.memory)).largest_micro_batch()
    except ModelError:
        return None
    size = config.batch.micro_batch_size
    while largest is not None and 2 * size <= largest:
        size *= 2
    if size == config.batch.micro_batch_size:
        return None
    return f"batch.micro_batch_size={size} fits this GPU too: fewer passes are faster, and the result is the same"


def table(plan: Plan) -> list[str]:
    """Return the table of the plan: a row for each role and kind, a column for each phase, in GB."""
    memory = plan.memory
    keys = list(dict.fromkeys((item.role, item.kind) for item in memory.items))
    sizes = {(item.role, item.kind, item.phase): item.bytes for item in memory.items}
    rows = [["GB", "", *memory.phases]]
    rows += [
        [role, kind, *(_cell(sizes.get((role, kind, phase), 0.0)) for phase in memory.phases)]
        for role, kind in sorted(keys, key=lambda key: [role.name for role in plan.layout.roles].index(key[0]))
    ]
    marked = {
        phase: f"{gigabytes(memory.of(phase))}{'*' if phase == memory.peak_phase else ''}" for phase in memory.phases
    }
    rows.append(["all", "", *marked.values()])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if number < 2 else cell.rjust(w)
            for number, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cell(size: Bytes) -> str:
    return gigabytes(size) if size >= GB / 1000 else "" if size == 0 else "0.000"


def cure_lines(plan: Plan) -> list[str]:
    """Return a line for each cure, the cheapest first, up to the first with which the run fits."""
    lines: list[str] = []
    changes: list[str] = []
    for cure in plan.cures():
        lines.append(_cure_line(plan, cure))
        changes = ["What to change, the cheapest first; each line adds to those above it:", *lines]
        if _fits(plan, cure):
            return [*changes, _end(plan, cure)]
    sharded = [_cure_line(plan, cure) for cure in plan.sharded()]
    if sharded:
        changes += ["Or, without the lines above, DeepSpeed:", *sharded]
    return (
        [*changes, NOTHING_ELSE]
        if lines or sharded
        else ["No setting saves memory here: " + NOTHING_ELSE[0].lower() + NOTHING_ELSE[1:]]
    )


NOTHING_ELSE = "Take a smaller model, shorter rows, or more GPUs."


def _fits(plan: Plan, cure: CurePlan) -> bool:
    memory = plan.machine.memory
    return memory is not None and cure.peak + LIBRARIES[plan.machine.device] <= memory


def _end(plan: Plan, cure: CurePlan) -> str:
    """Return the line with the micro-batch that fits after the cures up to this one, with which the run fits."""
    largest = make_plan(cure.config, plan.machine, plan.lengths).largest_micro_batch()
    return f"  with these the run fits, and batch.micro_batch_size up to {largest}"


def _cure_line(plan: Plan, cure: CurePlan) -> str:
    needed = gigabytes(cure.peak + LIBRARIES[plan.machine.device])
    fits = ", which fits" if _fits(plan, cure) else ""
    return (
        f"  {cure.settings}: saves {gigabytes(cure.saving)} GB, then {needed} GB are needed{fits} "
        f"({cure.cure.name}; {cure.cure.cost})"
    )
