"""The options of a plan besides the configuration: the machine, and the tokens to assume."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.sections import RunConfiguration
from rlhf.errors import UserError, command_or_call
from rlhf.planning.layout import Lengths
from rlhf.planning.machine import has_gpu, host_memory, parse_size, read_rates
from rlhf.planning.plan import Machine, Plan, dtype_of, make_plan


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `rlhf plan` besides the configuration; None: the value of the configuration or of this machine."""

    memory: str | None = None
    gpus: int | None = None
    device: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def check(self) -> None:
        """Check the numbers and the device.

        Raises:
            UserError: one is out of range.
        """
        for name in ("gpus", "prompt_tokens", "completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{_shown(name)} is {value}: it has to be at least 1")
        if self.device not in (None, "cpu", "cuda"):
            raise UserError(f"device is {self.device!r}: a plan is for cpu or cuda")

    @property
    def lengths(self) -> Lengths:
        """Return the tokens to assume."""
        return Lengths(prompt=self.prompt_tokens, completion=self.completion_tokens)

    def machine(self, config: RunConfiguration) -> Machine:
        """Return the machine that these options describe, or this one.

        Raises:
            UserError: an option is out of range.
        """
        self.check()
        device = self.device or (config.run.device if config.run.device in ("cpu", "cuda") else None)
        if device is None:
            is_named = self.gpus is not None or self.memory is not None
            device = "cuda" if is_named or has_gpu() else "cpu"
        memory = parse_size(self.memory) if self.memory is not None else None
        if memory is None and device == "cpu":
            memory = host_memory()
        return Machine(device=device, memory=memory, processes=self.gpus or 1)

    def plan(self, config: RunConfiguration) -> Plan:
        """Plan a run whose paths of the lab are resolved.

        Raises:
            UserError: an option is out of range, or the shape of a model is not known.
        """
        machine = self.machine(config)
        rates = read_rates(config.run.cache_dir, machine.device, dtype_of(config, machine.device))
        plan = make_plan(config, machine, self.lengths, rates=rates, may_make=True)
        step, context = plan.layout.step, plan.layout.roles[0].shape.context
        if context is not None and step.length > context and self.lengths != Lengths():
            raise UserError(
                f"{_shown('prompt_tokens')}, {_shown('completion_tokens')}: rows of {step.prompt} + {step.completion} "
                f"tokens are longer than the model's context of {context}: write smaller numbers"
            )
        return plan


def _shown(option: str) -> str:
    return command_or_call(f"--{option.replace('_', '-')}", option)
