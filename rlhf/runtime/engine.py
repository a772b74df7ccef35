"""The machine a run is on: its device, and the models trained on it. Sharding comes behind this seam."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig, RunConfig
from rlhf.errors import ConfigError


class Trained:
    """A module with its optimizer: backward, gradient norm, step."""

    def __init__(self, name: str, module: nn.Module, config: OptimizerConfig, *, terms: Sequence[str]) -> None:
        """`terms` are the loss terms whose gradient reaches this module."""
        self.name = name
        self.module = module
        self.config = config
        self.terms = tuple(terms)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.parameters, config)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to what is there."""
        torch.autograd.backward(loss)

    def grad_norm(self) -> float:
        """Global 2-norm of the gradient."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip by the norm, step, forget the gradient; returns the learning rate used."""
        grads = [p for p in self.parameters if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(grads, self.config.max_grad_norm, torch.tensor(norm))
        lr = self.config.lr * lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.drop_gradient()
        return lr

    def drop_gradient(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """The optimizer's state; weights are saved apart."""
        return dict(self.optimizer.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` returned."""
        self.optimizer.load_state_dict(state)


def _optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.adam_eps, weight_decay=config.weight_decay
    )


class Engine:
    """Where the run computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def train(self, name: str, module: nn.Module, config: OptimizerConfig, *, terms: Sequence[str]) -> Trained:
        """Move a module here and give it an optimizer."""
        return Trained(name, module.to(self.device), config, terms=terms)

    def peak_memory_mb(self) -> float:
        """Largest memory so far, in MB: the GPU's where there is one, else the process's resident set."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return _peak_resident_mb()


def _peak_resident_mb() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return float("nan")


def make_engine(config: RunConfig) -> Engine:
    """The engine for this process.

    Raises:
        ConfigError: a GPU is asked for and there is none, or several processes were launched.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this version trains in one process: start it without torchrun / accelerate launch")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device is cuda but torch sees no GPU; set run.device=cpu or auto")
    use_gpu = config.device != "cpu" and torch.cuda.is_available()
    return Engine(torch.device("cuda" if use_gpu else "cpu"))


def lr_factor(step: int, *, steps: int, warmup_steps: int, decay: str) -> float:
    """The share of the peak learning rate at `step` (from 1): linear warm-up, then constant or a fall towards 0.

    warm-up: step / warmup_steps.   linear: (steps - step + 1) / (steps - warmup_steps).   cosine: its half wave.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    left = (steps - step + 1) / max(steps - warmup_steps, 1)
    match decay:
        case "linear":
            return left
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
        case _:
            return 1.0
