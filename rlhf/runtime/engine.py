"""Where a run computes: its device, its ranks, and models trained on them, replicated or sharded by DeepSpeed."""

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
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed, init_distributed, world_size_from_env
from rlhf.runtime.memory import keep_memory, make_memory_profiler
from rlhf.runtime.optimizers import load_optimizer_state, make_optimizer, optimizer_state

M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class TrainableModel(Protocol):
    """A module with its optimizer: backward, gradient norm, step."""

    name: str
    module: nn.Module
    terms: tuple[str, ...]
    parameters: list[nn.Parameter]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`; after the step's `last` call the gradient is complete."""

    def grad_norm(self) -> float:
        """Compute the global 2-norm of the gradient summed over the ranks."""

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip the gradient given its norm, step, drop the gradient; return the learning rate used."""

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""

    def state(self) -> dict[str, Any]:
        """Return the optimizer state by parameter name, unsharded; under sharding only the main rank has it."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, under this or any other sharding."""


class LocalModel:
    """A Trained whose weights and optimizer state are replicated on every rank."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        config: OptimizerConfig,
        *,
        terms: Sequence[str],
        ranks: Distributed = SINGLE_PROCESS,
    ) -> None:
        """Create the optimizer; `terms` are the loss terms whose gradient reaches this module."""
        self.name = name
        self.module = module
        self.config = config
        self.terms = tuple(terms)
        self.ranks = ranks
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.optimizer = make_optimizer(self.parameters, config)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`, and sum it over the ranks at the `last` call."""
        torch.autograd.backward(loss)
        if last:
            self.ranks.add_gradients([p.grad for p in self.parameters if p.grad is not None])

    def grad_norm(self) -> float:
        """Compute the global 2-norm of the gradient; 0 without one."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip the gradient given its norm, step, drop the gradient; return the learning rate used."""
        if norm > self.config.max_grad_norm - 1e-6:  # otherwise torch would multiply by 1
            with_grad = [p for p in self.parameters if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(with_grad, self.config.max_grad_norm, torch.tensor(norm))
        lr = self.config.lr * lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.zero_grad()
        return lr

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return the optimizer state by parameter name."""
        return optimizer_state(self.optimizer, self.named, self.config.optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the optimizer state that `state` returned."""
        load_optimizer_state(self.optimizer, self.named, state, self.config.optimizer)


class Engine:
    """The device and the ranks a run computes on; it creates trained models and gathers sharded weights."""

    def __init__(
        self, device: torch.device, *, ranks: Distributed = SINGLE_PROCESS, sharding: ShardingConfig | None = None
    ) -> None:
        self.device = device
        self.ranks = ranks
        self.sharding = sharding or ShardingConfig()
        self.written: dict[str, dict[str, Any]] = {}  # DeepSpeed's JSON of each model
        self.memory = make_memory_profiler(device)
        self._zero = importlib.import_module("rlhf.runtime.deepspeed") if self.sharding.uses_deepspeed else None

    @property
    def splits_weights(self) -> bool:
        """Return whether each rank holds only its shard of every weight (ZeRO-3)."""
        return self.sharding.stage == 3

    def train(self, name: str, module: nn.Module, config: OptimizerConfig, *, terms: Sequence[str]) -> TrainableModel:
        """Move a module to the device, or shard it under DeepSpeed, and create its optimizer."""
        if self._zero is None:
            return LocalModel(name, module.to(self.device), config, terms=terms, ranks=self.ranks)
        settings = deepspeed_json(self.sharding, processes=self.ranks.world, max_grad_norm=config.max_grad_norm)
        self.written[name] = settings
        trained: TrainableModel = self._zero.ZeroModel(
            name, module, config, terms=terms, ranks=self.ranks, settings=settings, cpu_adam=self.sharding.cpu_adam
        )
        return trained

    def place(self, module: M) -> M:
        """Move a module that will be trained to the device, except under ZeRO-3; it stays whole until `train`."""
        return module if self.splits_weights else module.to(self.device)

    def freeze(self, name: str, module: M) -> M:
        """Move a module that is only read to the device, or shard it over the ranks under ZeRO-3."""
        if self._zero is None or not self.splits_weights:
            return module.to(self.device)
        settings = deepspeed_json(self.sharding, processes=self.ranks.world, max_grad_norm=None)
        self.written[name] = settings
        self._zero.freeze(module, settings)
        return module

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Gather all weights of `module` on every rank, read-only, so that ranks may run independent forward passes."""
        if self._zero is None or not self.splits_weights:
            yield
            return
        with self._zero.gathered(module):
            yield

    @contextmanager
    def whole_weights(self, module: nn.Module) -> Iterator[None]:
        """Gather the weights of a submodule on every rank; inside, call its `forward`, not the module."""
        if self._zero is None or not self.splits_weights:
            yield
            return
        with self._zero.gathered_weights(module):
            yield

    def full_state(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Return the unsharded state dict on the CPU of the main rank, empty on others; None if nothing is sharded."""
        if self._zero is None or not self.splits_weights:
            return None
        state: dict[str, Tensor] = self._zero.full_state(module, keep=self.ranks.is_main)
        return state

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of a weight; the whole weight if it is not sharded."""
        return parameter.detach() if self._zero is None else self._zero.part(parameter)

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's shard of `whole`, a tensor of the weight's full shape."""
        return whole if self._zero is None else self._zero.part_of(parameter, whole)

    def release_gathered(self, module: nn.Module) -> None:
        """Discard gathered copies of the weights after their shards were changed in place."""
        if self._zero is not None and self.splits_weights:
            self._zero.release(module)

    def peak_memory_mb(self) -> float:
        """Return the peak memory so far in MB: allocated on the GPU if there is one, else the resident set size."""
        return self.memory.peak_mb()


def make_engine(config: RunConfig, sharding: ShardingConfig | None = None) -> Engine:
    """Create the engine of this process, initializing torch.distributed for several ranks or DeepSpeed.

    Raises:
        ConfigError: a GPU is requested and there is none, or DeepSpeed is requested and not installed.
    """
    sharding = sharding or ShardingConfig()
    _check_available(config, sharding)
    device = _device(config)
    if config.keep_memory and device.type == "cpu":
        keep_memory()
    if world_size_from_env() == 1 and not sharding.uses_deepspeed:
        return Engine(device, sharding=sharding)
    if sharding.uses_deepspeed and device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
    return Engine(device, ranks=init_distributed(device, timeout_s=sharding.timeout_s), sharding=sharding)


def _check_available(config: RunConfig, sharding: ShardingConfig) -> None:
    """Check that this machine has the requested device and the package that the sharding needs.

    Raises:
        ConfigError: a GPU is requested and there is none, or DeepSpeed is requested and not installed.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device is cuda but torch sees no GPU; set run.device=cpu or auto")
    if sharding.uses_deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"sharding={sharding.mode} needs DeepSpeed, which is not installed: {install_hint('deepspeed')}, "
            "or set sharding=ddp"
        )


def _device(config: RunConfig) -> torch.device:
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if world_size_from_env() == 1:
        return torch.device("cuda")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def lr_factor(step: int, *, steps: int, warmup_steps: int, decay: str) -> float:
    """Compute the fraction of the peak learning rate at `step` (from 1): linear warm-up, then constant or decay.

    warm-up: step / warmup_steps.   linear: (steps - step + 1) / (steps - warmup_steps), which falls towards 0.
    cosine: half a cosine wave over the same steps.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    remaining = (steps - step + 1) / max(steps - warmup_steps, 1)
    match decay:
        case "linear":
            return remaining
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * (1.0 - remaining)))
        case _:
            return 1.0
