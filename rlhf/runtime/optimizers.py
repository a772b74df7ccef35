"""The optimizers by name, and their state as it is saved: by parameter name, whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.errors import CheckpointError, ConfigError, install_hint

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, as torch and DeepSpeed call them
QUANTIZED = ("state1", "state2", "absmax1", "absmax2")  # the same in 8 bits with a scale a block: bitsandbytes' names
STATE: dict[str, tuple[str, ...]] = {"adamw": MOMENTS, "adamw_8bit": QUANTIZED, "sgd": ()}

State = dict[str, Any]
Moments = dict[str, dict[str, Tensor]]
"""Of each kind of state, the tensors by parameter name."""


def make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` describes.

    Raises:
        ConfigError: it needs a package that is not installed.
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


def state_of(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], kind: str) -> State:
    """What a checkpoint keeps of an optimizer of this kind (a key of `STATE`)."""
    held = {name: optimizer.state[p] for name, p in named.items() if "step" in optimizer.state[p]}
    steps = [int(state["step"]) for state in held.values()]
    moments = {key: {name: own[key] for name, own in held.items() if key in own} for key in STATE[kind]}
    return {"step": max(steps, default=0), "moments": moments if held else {}}


def put_state(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], state: State, kind: str) -> None:
    """Put back what `state_of` gave.

    Raises:
        CheckpointError: it is of another model, another kind of optimizer, or another version of this program.
    """
    step, moments = unpacked(state, named, kind)
    places = {parameter: number for number, parameter in enumerate(optimizer.param_groups[0]["params"])}
    for name in {name for values in moments.values() for name in values}:
        parameter = named[name]
        own = optimizer.state[parameter]
        if kind == "adamw_8bit":
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, places[parameter])  # type: ignore[attr-defined]
            own["step"] = step
        else:
            own["step"] = torch.tensor(float(step), device=parameter.device if kind == "adamw" else "cpu")
            own |= {key: torch.empty_like(parameter) for key in moments}
        for key, values in moments.items():
            if name in values:
                own[key].copy_(values[name])


def unpacked(state: State, named: Mapping[str, nn.Parameter], kind: str) -> tuple[int, Moments]:
    """The step and the moments in a saved state.

    Raises:
        CheckpointError: it is of another model, another kind of optimizer, or another version of this program.
    """
    if set(state) != {"step", "moments"}:
        raise CheckpointError("the optimizer's state in the checkpoint was written by another version of this program")
    moments: Moments = state["moments"]
    other = [name for name, keys in STATE.items() if keys and set(keys) == set(moments)]
    if moments and other != [kind]:
        raise CheckpointError(
            f"the checkpoint's optimizer state is of {' or '.join(other) or 'an unknown optimizer'}, but the "
            f"configuration says {kind}: set the optimizer back, or start in another folder"
        )
    for values in moments.values():
        unknown = sorted(set(values) - set(named))
        if unknown:
            raise CheckpointError(
                f"the checkpoint has optimizer state of parameters that are not trained: {unknown[0]}"
            )
    return int(state["step"]), moments
