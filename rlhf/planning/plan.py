"""The plan of a run: its memory and operations, whether it fits, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.run import ShardingConfig
from rlhf.errors import ModelError
from rlhf.planning.cures import CURES, SHARDED, Cure, with_settings, written
from rlhf.planning.layout import Layout, Lengths, RunConfiguration, make_layout, planned_dtype, trained_section
from rlhf.planning.machine import GB, LIBRARIES
from rlhf.planning.memory import Memory, least_memory, memory_of
from rlhf.planning.seconds import operations, seconds

RULE = "does-not-fit"
"""The name that guard.allow takes to start a run that the plan says cannot fit."""
TIGHT = 0.9
"""Share of the memory above which a run may not fit: the plan is within a tenth of what is measured."""
ZERO_MODES = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a run is to be: `device` is cpu or cuda; `memory` is that of one GPU, or of the machine, in bytes."""

    device: str = "cuda"
    memory: float | None = None
    processes: int = 1


@dataclass(frozen=True)
class CurePlan:
    """A cure, the settings that it takes, its saving, and the peak with it and those before it."""

    cure: Cure
    settings: str
    saving: float
    peak: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs, on one process."""

    config: RunConfiguration
    machine: Machine
    lengths: Lengths
    layout: Layout
    memory: Memory
    rates: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Return the bytes that the tensors of the run take at its peak, on one process."""
        return self.memory.peak

    @property
    def needed(self) -> float:
        """Return the bytes of the process at its peak: the tensors, and what the libraries take."""
        return self.peak + LIBRARIES[self.machine.device]

    @property
    def fits(self) -> bool | None:
        """Return whether the process fits into the memory; None if none was named."""
        return None if self.machine.memory is None else self.needed <= self.machine.memory

    @property
    def is_tight(self) -> bool:
        """Return whether the process fits, but by less than the plan's own error."""
        memory = self.machine.memory
        return memory is not None and TIGHT * memory < self.needed <= memory

    def largest_micro_batch(self) -> int | None:
        """Return the largest batch.micro_batch_size that fits; None if not even one row does.

        A size that holds a process's whole share of an optimizer step is the largest there is.
        """
        most = max(1, self.layout.passes * self.layout.update.rows)
        if not self._fits_with(1):
            return None
        low, high = 1, most
        while low < high:
            middle = -(-(low + high) // 2)
            low, high = (middle, high) if self._fits_with(middle) else (low, middle - 1)
        return low

    def _fits_with(self, size: int) -> bool:
        changed = with_settings(self.config, {"batch.micro_batch_size": size, "batch.micro_batch_tokens": None})
        return bool(make_plan(changed, self.machine, self.lengths).fits)

    def cures(self) -> Iterator[CurePlan]:
        """Yield the cures that apply, in the order of what they cost: each with its own saving, and all so far."""
        config, processes = self.config, self.machine.processes
        for cure in (*CURES, *(SHARDED if self.machine.device == "cuda" else ())):
            if cure in SHARDED[:2] and processes == 1:
                continue
            settings = cure.settings(config)
            if not settings:
                continue
            before = make_plan(config, self.machine, self.lengths).peak
            changed = with_settings(config, settings)
            after = make_plan(changed, self.machine, self.lengths).peak
            if after >= before:
                continue
            config = changed
            yield CurePlan(cure, written(settings), before - after, after)

    def shares(self) -> dict[str, float]:
        """Return the bytes of a process at its peak under each ZeRO stage."""
        found = {}
        for mode in ZERO_MODES:
            sharding = ShardingConfig(mode=mode)  # type: ignore[arg-type]
            changed = self.config.model_copy(update={"sharding": sharding})
            found[mode] = make_plan(changed, self.machine, self.lengths).peak
        return found

    def operations(self) -> dict[str, float]:
        """Return the floating-point operations of a step by phase, over all processes."""
        return operations(self.layout)

    def seconds(self) -> dict[str, float] | None:
        """Return the seconds of a step by phase; None where this machine was not probed."""
        return seconds(self.operations(), self.rates)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data; sizes are bytes."""
        memory, layout = self.memory, self.layout
        step = self.seconds()
        return {
            "device": self.machine.device,
            "processes": self.machine.processes,
            "memory": self.machine.memory,
            "tokens": {"prompt": layout.step.prompt, "completion": layout.step.completion},
            "micro_batch_rows": layout.update.rows,
            "notes": list(layout.notes),
            "models": {
                role.name: {"parameters": role.shape.parameters, "trained": role.trained, "adapters": role.adapters}
                for role in layout.roles
            },
            "items": [vars(item) for item in memory.items],
            "phases": {phase: memory.of(phase) for phase in memory.phases},
            "peak": memory.peak,
            "peak_phase": memory.peak_phase,
            "libraries": LIBRARIES[self.machine.device],
            "needed": self.needed,
            "fits": self.fits,
            "largest_micro_batch": None if self.machine.memory is None else self.largest_micro_batch(),
            "shares": self.shares() if self.machine.processes > 1 else None,
            "cures": [
                {"name": cure.cure.name, "settings": cure.settings, "cost": cure.cure.cost, "saves": cure.saving, "peak": cure.peak}
                for cure in self.cures()
            ],
            "operations": self.operations(),
            "seconds_per_step": step,
            "seconds_per_run": None if step is None or layout.steps is None else sum(step.values()) * layout.steps,
        }


def make_plan(
    config: RunConfiguration,
    machine: Machine,
    lengths: Lengths | None = None,
    *,
    rates: Mapping[str, float] | None = None,
    may_make: bool = False,
) -> Plan:
    """Plan a run.

    Args:
        config: the run.
        machine: the device, its memory, and the number of processes.
        lengths: the tokens to assume; None: the limits of the configuration.
        rates: operations per second by phase, as a probe measured them.
        may_make: whether transformers may make a model of an unknown family on the meta device.

    Raises:
        ModelError: the shape of a model is not known before it is loaded.
    """
    lengths = lengths or Lengths()
    layout = make_layout(
        config, device=machine.device, processes=machine.processes, lengths=lengths, may_make=may_make
    )
    return Plan(
        config=config, machine=machine, lengths=lengths, layout=layout, memory=memory_of(layout), rates=rates or {}
    )


def gigabytes(size: float) -> str:
    """Write bytes in GB, three digits of them."""
    value = size / GB
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def dtype_of(config: RunConfiguration, device: str) -> str:
    """Return the dtype of a run's arithmetic on a device."""
    return planned_dtype(trained_section(config), device)


SHORTEST = Lengths(prompt=1, completion=1)


def least_of(config: RunConfiguration, machine: Machine) -> float | None:
    """Return the bytes without which the run cannot take one step; None where a model's shape is not known."""
    try:
        return least_memory(make_plan(config, machine, SHORTEST).layout)
    except ModelError:
        return None


def refusal(config: RunConfiguration, machine: Machine) -> str | None:
    """Explain why a run cannot fit into the memory of its device, with the plan and the cures; None if it may fit.

    It counts only what is there at once in any case: weights, gradients and moments. What a run needs for rows and
    caches shrinks with micro-batches, so a run is never refused for it.
    """
    if machine.memory is None or RULE in config.guard.allow:
        return None
    least = least_of(config, machine)
    if least is None or least <= machine.memory:
        return None
    plan = make_plan(config, replace(machine, processes=machine.processes))
    where = "GPU" if machine.device == "cuda" else "machine"
    lines = [
        f"{RULE}: weights, gradients and moments alone take {gigabytes(least)} GB, and the {where} has "
        f"{gigabytes(machine.memory)} GB. Nothing was loaded. The plan:",
        *table(plan),
        *cure_lines(plan),
        f"To run it nevertheless: guard.allow=[{RULE}]",
    ]
    return "\n".join(lines)


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
    marked = {phase: f"{gigabytes(memory.of(phase))}{'*' if phase == memory.peak_phase else ''}" for phase in memory.phases}
    rows.append(["all", "", *marked.values()])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) if number < 2 else cell.rjust(w) for number, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _cell(size: float) -> str:
    return gigabytes(size) if size >= GB / 1000 else "" if size == 0 else "0.000"


def cure_lines(plan: Plan) -> list[str]:
    """Return a line for each cure, in the order of what it costs, up to the first with which the run fits."""
    lines = []
    memory = plan.machine.memory
    for cure in plan.cures():
        needed = cure.peak + LIBRARIES[plan.machine.device]
        lines.append(
            f"  {cure.settings}: saves {gigabytes(cure.saving)} GB, then {gigabytes(needed)} GB are needed "
            f"({cure.cure.name}; {cure.cure.cost})"
        )
        if memory is not None and needed <= memory:
            lines.append("    with these the run fits")
            break
    if not lines:
        return ["No setting saves memory here: take a smaller model, shorter rows, or more GPUs."]
    return ["What to change, the cheapest first; each line adds to those above it:", *lines]
