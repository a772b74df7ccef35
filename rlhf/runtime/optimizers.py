"""Optimizers by name, and their state in checkpoints: by parameter name, unsharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.batching import Number, read_numbers
from rlhf.config.sections import OptimizerConfig
from rlhf.errors import CheckpointError, ConfigError, install_hint

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, as torch and DeepSpeed call them
QUANTIZED = ("state1", "state2", "absmax1", "absmax2")  # the same in 8 bits with a scale per block, in bitsandbytes
STATE: dict[str, tuple[str, ...]] = {"adamw": MOMENTS, "adamw_8bit": QUANTIZED, "sgd": ()}

State = dict[str, Any]
MomentTensors = Mapping[str, Mapping[str, Tensor]]
"""For each kind of state (a name in `STATE`), the tensors by parameter name."""


def make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the optimizer that `config` describes.

    Raises:
        ConfigError: the optimizer needs a package that is not installed.
    """
    return MAKERS[config.optimizer](parameters, config)


def _sgd(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.adam_eps, weight_decay=config.weight_decay, fused=True
    )


def _adamw_8bit(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer is adamw_8bit, which needs bitsandbytes: {install_hint('eightbit')}, or set it to adamw"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(  # type: ignore[no-untyped-call, unused-ignore]
        parameters, lr=config.lr, betas=config.betas, eps=config.adam_eps, weight_decay=config.weight_decay
    )
    return optimizer


MAKERS: dict[str, Callable[[list[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
}


def _number(step: Tensor | int) -> Number:
    """Return Adam's count of steps, which 8-bit AdamW keeps as an int, as a number to read."""
    return step if isinstance(step, Tensor) else float(step)


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], kind: str) -> State:
    """Return the state of an optimizer of this kind (a key of `STATE`) for a checkpoint."""
    states = {name: optimizer.state[p] for name, p in named.items() if "step" in optimizer.state[p]}
    steps = [int(step) for step in read_numbers([_number(state["step"]) for state in states.values()])]
    moments = {key: {name: state[key] for name, state in states.items() if key in state} for key in STATE[kind]}
    return {"step": max(steps, default=0), "moments": moments if states else {}}


def moments_of(optimizer: torch.optim.Optimizer, kind: str) -> list[Tensor]:
    """Return the moments in the state of an optimizer of this kind (a key of `STATE`)."""
    return [state[key] for state in optimizer.state.values() for key in STATE[kind] if key in state]


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], state: State, kind: str
) -> None:
    """Restore the optimizer state that `optimizer_state` returned.

    Raises:
        CheckpointError: it is of another model, another kind of optimizer, or another version of this program.
    """
    step, moments = parse_state(state, named, kind)
    positions = {parameter: index for index, parameter in enumerate(optimizer.param_groups[0]["params"])}
    for name in {name for values in moments.values() for name in values}:
        parameter = named[name]
        slots = optimizer.state[parameter]
        if kind == "adamw_8bit":
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, positions[parameter])  # type: ignore[attr-defined]
            slots["step"] = step
        else:
            slots["step"] = torch.tensor(float(step), device=parameter.device if kind == "adamw" else "cpu")
            slots |= {key: torch.empty_like(parameter) for key in moments}
        for key, values in moments.items():
            if name in values:
                slots[key].copy_(values[name])


def adam_state(flat: Tensor, step: int, *, as_number: bool = False) -> State:
    """Return Adam's state of a weight, or of many in one flat tensor, after `step` steps, with moments of zero.

    torch's fused kernel reads the count of steps on the device of the weights; DeepSpeed's CPU Adam takes a number.
    """
    count = step if as_number else torch.tensor(float(step), device=flat.device)
    return {"step": count} | {key: torch.zeros_like(flat) for key in MOMENTS}


def parse_state(state: State, named: Mapping[str, nn.Parameter], kind: str) -> tuple[int, MomentTensors]:
    """Validate a saved state and return its step and moments.

    Raises:
        CheckpointError: it is of another model, another kind of optimizer, or another version of this program.
    """
    if set(state) != {"step", "moments"}:
        raise CheckpointError("the optimizer's state in the checkpoint was written by another version of this program")
    moments: MomentTensors = state["moments"]
    saved_kinds = [name for name, keys in STATE.items() if keys and set(keys) == set(moments)]
    if moments and saved_kinds != [kind]:
        raise CheckpointError(
            f"the checkpoint's optimizer state is of {' or '.join(saved_kinds) or 'an unknown optimizer'}, but the "
            f"configuration says {kind}: set the optimizer back, or start in another folder"
        )
    for values in moments.values():
        unknown = sorted(set(values) - set(named))
        if unknown:
            raise CheckpointError(
                f"the checkpoint has optimizer state of parameters that are not trained: {unknown[0]}"
            )
    return int(state["step"]), moments
