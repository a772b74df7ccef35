"""The machine a run is on: its device, its processes, and the models trained on it, whole or sharded."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig, RunConfig
from rlhf.config.sharding import ShardingConfig, deepspeed_json
from rlhf.errors import ConfigError, install_hint
from rlhf.runtime.allocator import keep_memory
from rlhf.runtime.gauge import memory_gauge
from rlhf.runtime.optimizers import make_optimizer, put_state, state_of
from rlhf.runtime.ranks import ALONE, Ranks, launched, meet

M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class Trained(Protocol):
    """A module with its optimizer: backward, gradient norm, step."""

    name: str
    module: nn.Module
    terms: tuple[str, ...]
    parameters: list[nn.Parameter]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` to what is there; `last`: the step's gradient is then complete."""

    def grad_norm(self) -> float:
        """Global 2-norm of the gradient, added up over the processes."""

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip by the norm, step, forget the gradient; returns the learning rate used."""

    def drop_gradient(self) -> None:
        """Forget the gradient."""

    def state(self) -> dict[str, Any]:
        """The optimizer's state by parameter name, whole whatever the sharding; empty but in the main process."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` returned, under this or any other sharding."""


class LocalTrained:
    """A Trained whose weights and optimizer are whole in every process."""

    def __init__(
        self, name: str, module: nn.Module, config: OptimizerConfig, *, terms: Sequence[str], ranks: Ranks = ALONE
    ) -> None:
        """`terms` are the loss terms whose gradient reaches this module."""
        self.name = name
        self.module = module
        self.config = config
        self.terms = tuple(terms)
        self.ranks = ranks
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.optimizer = make_optimizer(self.parameters, config)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See Trained."""
        torch.autograd.backward(loss)
        if last:
            self.ranks.add_gradients([p.grad for p in self.parameters if p.grad is not None])

    def grad_norm(self) -> float:
        """See Trained."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def step(self, *, norm: float, lr_factor: float) -> float:
        """See Trained."""
        if norm > self.config.max_grad_norm - 1e-6:  # below, torch would multiply by 1
            moving = [p for p in self.parameters if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(moving, self.config.max_grad_norm, torch.tensor(norm))
        lr = self.config.lr * lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.drop_gradient()
        return lr

    def drop_gradient(self) -> None:
        """See Trained."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """See Trained."""
        return state_of(self.optimizer, self.named, self.config.optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """See Trained."""
        put_state(self.optimizer, self.named, state, self.config.optimizer)


class Engine:
    """Where the run computes, and in how many processes."""

    def __init__(self, device: torch.device, *, ranks: Ranks = ALONE, sharding: ShardingConfig | None = None) -> None:
        self.device = device
        self.ranks = ranks
        self.sharding = sharding or ShardingConfig()
        self.written: dict[str, dict[str, Any]] = {}  # DeepSpeed's JSON of each model
        self.memory = memory_gauge(device)
        self._zero = importlib.import_module("rlhf.runtime.zero") if self.sharding.uses_deepspeed else None

    @property
    def splits_weights(self) -> bool:
        """Whether a process holds a part of each weight only (ZeRO-3)."""
        return self.sharding.stage == 3

    def train(self, name: str, module: nn.Module, config: OptimizerConfig, *, terms: Sequence[str]) -> Trained:
        """Move a module here, or its share, and give it an optimizer."""
        if self._zero is None:
            return LocalTrained(name, module.to(self.device), config, terms=terms, ranks=self.ranks)
        settings = deepspeed_json(self.sharding, processes=self.ranks.world, max_grad_norm=config.max_grad_norm)
        self.written[name] = settings
        trained: Trained = self._zero.ZeroTrained(
            name, module, config, terms=terms, ranks=self.ranks, settings=settings, cpu_adam=self.sharding.cpu_adam
        )
        return trained

    def place(self, module: M) -> M:
        """A module that is to be trained, where its forward passes can be made at once; whole until `train`."""
        return module if self.splits_weights else module.to(self.device)

    def freeze(self, name: str, module: M) -> M:
        """Move a module here, or its share, that is only read."""
        if self._zero is None or not self.splits_weights:
            return module.to(self.device)
        settings = deepspeed_json(self.sharding, processes=self.ranks.world, max_grad_norm=None)
        self.written[name] = settings
        self._zero.freeze(module, settings)
        return module

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Inside, all weights of `module` are in every process, which may then make passes of its own; read only."""
        if self._zero is None or not self.splits_weights:
            yield
            return
        with self._zero.gathered(module):
            yield

    @contextmanager
    def whole_weights(self, module: nn.Module) -> Iterator[None]:
        """Gather the weights of a part of a model in every process; call its `forward` then, not the module."""
        if self._zero is None or not self.splits_weights:
            yield
            return
        with self._zero.gathered_weights(module):
            yield

    def full_state(self, module: nn.Module) -> dict[str, Tensor] | None:
        """The state dict with whole weights, on the CPU, in the main process; None where the module has them."""
        if self._zero is None or not self.splits_weights:
            return None
        found: dict[str, Tensor] = self._zero.full_state(module, keep=self.ranks.is_main)
        return found

    def part(self, parameter: nn.Parameter) -> Tensor:
        """What this process holds of a weight."""
        return parameter.detach() if self._zero is None else self._zero.part(parameter)

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """What of `whole`, shaped as the weight, belongs to this process."""
        return whole if self._zero is None else self._zero.part_of(parameter, whole)

    def forget_gathered(self, module: nn.Module) -> None:
        """The parts of the weights were changed by hand: what was gathered of them before is out of date."""
        if self._zero is not None and self.splits_weights:
            self._zero.release(module)

    def peak_memory_mb(self) -> float:
        """Largest memory so far, in MB: the GPU's where there is one, else the process's resident set."""
        return self.memory.peak_mb()


def make_engine(config: RunConfig, sharding: ShardingConfig | None = None) -> Engine:
    """The engine for this process; with several processes, or DeepSpeed, they meet here.

    Raises:
        ConfigError: a GPU is asked for and there is none, or DeepSpeed is asked for and not installed.
    """
    sharding = sharding or ShardingConfig()
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device is cuda but torch sees no GPU; set run.device=cpu or auto")
    if sharding.uses_deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"sharding={sharding.mode} needs DeepSpeed, which is not installed: {install_hint('deepspeed')}, "
            "or set sharding=ddp"
        )
    device = _device(config)
    if config.keep_memory and device.type == "cpu":
        keep_memory()
    if launched() == 1 and not sharding.uses_deepspeed:
        return Engine(device, sharding=sharding)
    if sharding.uses_deepspeed and device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
    return Engine(device, ranks=meet(device, timeout_s=sharding.timeout_s), sharding=sharding)


def _device(config: RunConfig) -> torch.device:
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if launched() == 1:
        return torch.device("cuda")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


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
