"""The plan of a run: its memory and operations, whether it fits, and the changes if it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.run import ShardingConfig
from rlhf.config.sections import RunConfiguration
from rlhf.errors import ModelError
from rlhf.planning.arithmetic import Bytes
from rlhf.planning.cures import CURES, SHARDED, Cure, with_settings, written
from rlhf.planning.layout import Layout, Lengths, make_layout, planned_dtype, trained_section
from rlhf.planning.machine import GB, LIBRARIES
from rlhf.planning.memory import Memory, least_memory, memory_of
from rlhf.planning.seconds import operations, seconds

RULE = "does-not-fit"
"""The name that guard.allow takes to start a run that the plan says cannot fit."""
TIGHT = 0.9
"""Share of the memory above which a run may not fit: the plan is within a tenth of the measured memory."""
ZERO_MODES = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run: `device` is cpu or cuda; `memory` is the memory of one GPU, or of the machine, in bytes."""

    device: str = "cuda"
    memory: Bytes | None = None
    processes: int = 1


@dataclass(frozen=True)
class CurePlan:
    """A cure, the settings that it takes, its saving, and the peak with it and those before it."""

    cure: Cure
    settings: str
    saving: Bytes
    peak: Bytes
    config: RunConfiguration
    """The run with the cure and those before it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the cure as plain data; sizes are bytes."""
        names = {"name": self.cure.name, "cost": self.cure.cost, "settings": self.settings}
        return {**names, "saves": self.saving, "peak": self.peak}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a run, on one process."""

    config: RunConfiguration
    machine: Machine
    lengths: Lengths
    layout: Layout
    memory: Memory
    rates: Mapping[str, Bytes]

    @property
    def peak(self) -> Bytes:
        """Return the bytes that the tensors of the run take at its peak, on one process."""
        return self.memory.peak

    @property
    def needed(self) -> Bytes:
        """Return the bytes of the process at its peak: the tensors and the libraries."""
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
        """Return the largest batch.micro_batch_size that fits; None if not even one row fits.

        No size is larger than a process's whole share of an optimizer step.
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
        """Yield the cures that apply, the cheapest first: each with its own saving, and all so far."""
        config, peak, left = self.config, self.peak, list(CURES)
        saves = True
        while saves:  # a cure that saves nothing at the peak may save once others have moved it
            saves = False
            for cure in list(left):
                changed = cure.applied(config)
                after = make_plan(changed, self.machine, self.lengths).peak
                if after < peak:
                    yield CurePlan(cure, written(cure.settings(config)), peak - after, after, changed)
                    config, peak, saves = changed, after, True
                    left.remove(cure)

    def sharded(self) -> Iterator[CurePlan]:
        """Yield the ways of DeepSpeed to split the run as it is over the GPUs, or to move parts of it to the CPU."""
        for cure in SHARDED if self.machine.device == "cuda" else ():
            if settings := cure.settings(self.config):
                changed = cure.applied(self.config)
                after = make_plan(changed, self.machine, self.lengths).peak
                if after < self.peak:
                    yield CurePlan(cure, written(settings), self.peak - after, after, changed)

    def shares(self) -> dict[str, Bytes]:
        """Return the bytes of a process at its peak under each ZeRO stage."""
        peaks = {}
        for mode in ZERO_MODES:
            sharding = ShardingConfig(mode=mode)
            changed = self.config.model_copy(update={"sharding": sharding})
            peaks[mode] = make_plan(changed, self.machine, self.lengths).peak
        return peaks

    def operations(self) -> dict[str, Bytes]:
        """Return the floating-point operations of a step by phase, over all processes."""
        return operations(self.layout)

    def seconds(self) -> dict[str, Bytes] | None:
        """Return the seconds of a step by phase; None if this machine was not probed."""
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
            "cures": [cure.as_dict() for cure in self.cures()],
            "sharded": [cure.as_dict() for cure in self.sharded()],
            "operations": self.operations(),
            "seconds_per_step": step,
            "seconds_per_run": None if step is None or layout.steps is None else sum(step.values()) * layout.steps,
        }


def make_plan(
    config: RunConfiguration,
    machine: Machine,
    lengths: Lengths | None = None,
    *,
    rates: Mapping[str, Bytes] | None = None,
    may_make: bool = False,
) -> Plan:
    """Plan a run.

    Args:
        machine: the device, its memory, and the number of processes.
        lengths: the tokens to assume; None: the limits of the configuration.
        rates: operations per second by phase, as a probe measured them.
        may_make: whether transformers may make a model of an unknown family on the meta device.

    Raises:
        ModelError: the shape of a model is not known before it is loaded.
    """
    lengths = lengths or Lengths()
    layout = make_layout(config, device=machine.device, processes=machine.processes, lengths=lengths, may_make=may_make)
    layout, memory = _with_halved_passes(layout, machine)
    return Plan(config=config, machine=machine, lengths=lengths, layout=layout, memory=memory, rates=rates or {})


def _with_halved_passes(layout: Layout, machine: Machine) -> tuple[Layout, Memory]:
    """Halve the passes of annotate until they fit, like a run on one GPU that runs out of memory."""
    memory = memory_of(layout)
    while (
        layout.halves_annotate
        and layout.annotate is not None
        and layout.annotate.rows > 1
        and machine.memory is not None
        and memory.of("annotate") + LIBRARIES[machine.device] > machine.memory
    ):
        halved = -(-layout.annotate.rows // 2)
        layout = replace(layout, annotate=layout.annotate.of(halved))
        memory = memory_of(layout)
    if layout.annotate is None or layout.annotate.rows == layout.step.rows or not layout.halves_annotate:
        return layout, memory
    note = f"the run halves its passes without gradient until they fit: {layout.annotate.rows} rows"
    return replace(layout, notes=(*layout.notes, note)), memory


def gigabytes(size: Bytes) -> str:
    """Write bytes in GB, three digits of them."""
    value = size / GB
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def dtype_of(config: RunConfiguration, device: str) -> str:
    """Return the dtype of a run's arithmetic on a device."""
    return planned_dtype(trained_section(config), device)


SHORTEST = Lengths(prompt=1, completion=1)


def least_of(config: RunConfiguration, machine: Machine) -> Bytes | None:
    """Return the bytes without which the run cannot take one step; None if a model's shape is not known."""
    try:
        return least_memory(make_plan(config, machine, SHORTEST).layout)
    except ModelError:
        return None
