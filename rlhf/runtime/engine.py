"""The device and the ranks of a run, and models trained on them, replicated or sharded by DeepSpeed.

Gradients are summed over the ranks bucket by bucket, while the backward pass that completes them goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from rlhf.batching import Number
from rlhf.config.run import RunConfig, ShardingConfig, deepspeed_json
from rlhf.config.sections import OptimizerConfig
from rlhf.errors import ConfigError, install_hint
from rlhf.planning.machine import host_memory
from rlhf.process import silence_loggers
from rlhf.runtime.device import choose_device, set_products
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed, in_buckets, init_distributed, world_size_from_env
from rlhf.runtime.memory import bound_product_caches, keep_memory, make_memory_profiler
from rlhf.runtime.optimizers import load_optimizer_state, make_optimizer, moments_of, optimizer_state
from rlhf.runtime.stochastic_rounding import StochasticRounding

M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class TrainableModel(Protocol):
    """A module with its gradient; how it steps is its own affair (SteppingModel, or rlhf.training.step's search)."""

    name: str
    module: nn.Module
    terms: tuple[str, ...]
    parameters: list[nn.Parameter]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`; after the step's `last` call the gradient is complete."""

    def grad_norm(self) -> Number:
        """Compute the global 2-norm of the gradient summed over the ranks; on a GPU it may stay there."""

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""

    def state(self) -> dict[str, Any]:
        """Return the optimizer state by parameter name, unsharded; under sharding only for the rank's weights."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`, under this or any other sharding."""


@runtime_checkable
class SteppingModel(TrainableModel, Protocol):
    """A trained model with an optimizer that steps by the gradient alone."""

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip the gradient given its norm, step, drop the gradient; return the learning rate used."""


@runtime_checkable
class HoldsMoments(Protocol):
    """A trained model whose optimizer state is whole in this process."""

    def moments(self) -> list[Tensor]:
        """Return the optimizer's moments, as far as steps have made them."""


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
        self.optimizer: torch.optim.Optimizer | StochasticRounding = (
            StochasticRounding(self.named, config, make_optimizer, key=name)
            if any(parameter.dtype == torch.bfloat16 for parameter in self.parameters)
            else make_optimizer(self.parameters, config)
        )

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`; sum it over the ranks while the `last` call computes it."""
        with sum_gradients(self.parameters, self.ranks) if last else nullcontext():
            torch.autograd.backward(loss)

    def grad_norm(self) -> Number:
        """Compute the global 2-norm of the gradient; 0 without one. On a GPU it stays there."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return 0.0
        # Of 16-bit gradients torch would round each tensor's norm, and the sum of their squares, to 16 bits.
        wide = [torch.linalg.vector_norm(g, dtype=torch.float32) if g.dtype == torch.bfloat16 else g for g in grads]
        norm: Tensor = torch.nn.utils.get_total_norm(wide)
        return norm if norm.is_cuda else float(norm)

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip the gradient given its norm, step, drop the gradient; return the learning rate used."""
        if norm > self.config.max_grad_norm - 1e-6:  # otherwise torch would multiply by 1
            _scale_gradients(self.parameters, self.config.max_grad_norm, norm)
        lr = self.config.lr * lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.zero_grad()
        return lr

    def zero_grad(self) -> None:
        """Discard the accumulated gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def moments(self) -> list[Tensor]:
        """Return the optimizer's moments, as far as steps have made them."""
        optimizer = self.optimizer.inner if isinstance(self.optimizer, StochasticRounding) else self.optimizer
        return moments_of(optimizer, self.config.optimizer)

    def state(self) -> dict[str, Any]:
        """Return the optimizer state by parameter name."""
        if isinstance(self.optimizer, StochasticRounding):
            return self.optimizer.saved_state()
        return optimizer_state(self.optimizer, self.named, self.config.optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the optimizer state that `state` returned."""
        if isinstance(self.optimizer, StochasticRounding):
            self.optimizer.load_saved_state(state)
        else:
            load_optimizer_state(self.optimizer, self.named, state, self.config.optimizer)


def _scale_gradients(parameters: Sequence[nn.Parameter], max_norm: float, norm: float) -> None:
    """Clip the gradients, whose norm is known on the host, to at most `max_norm`."""
    with_grad = [p for p in parameters if p.grad is not None]
    if not any(p.grad.is_cuda for p in with_grad if p.grad is not None):
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, torch.tensor(norm))
        return
    # The same factor, but as a number: torch would copy its tensor to the device and wait.
    factor = float((max_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0))
    torch._foreach_mul_([p.grad for p in with_grad if p.grad is not None], factor)


class Engine:
    """The device and the ranks a run computes on; it creates trained models and gathers sharded weights."""

    def __init__(
        self, device: torch.device, *, ranks: Distributed = SINGLE_PROCESS, sharding: ShardingConfig | None = None
    ) -> None:
        self.device = device
        self.ranks = ranks
        self.sharding = sharding or ShardingConfig()
        self.written: dict[str, dict[str, Any]] = {}  # DeepSpeed's JSON of each model
        self.notes: list[str] = []  # for the user, logged when the run begins
        self.frozen: list[nn.Module] = []  # the models that are only read
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
        self.frozen.append(module)
        if self._zero is None or not self.splits_weights:
            return module.to(self.device)
        settings = deepspeed_json(self.sharding, processes=self.ranks.world, max_grad_norm=None)
        self.written[name] = settings
        self._zero.freeze(module, settings)
        return module

    def partition(self, module: nn.Module, read: Callable[[str, int, int], Tensor]) -> None:
        """Shard a module whose weights are on the meta device (ZeRO-3): each rank reads its own part of every weight.

        `read(name, start, stop)` returns the elements [start, stop) of a weight, counted in its flattened form.
        """
        assert self._zero is not None, "weights are split under ZeRO-3 only"
        settings = deepspeed_json(self.sharding, processes=self.ranks.world, max_grad_norm=None)
        self._zero.partition(module, settings, read)

    @property
    def samples_in_layers(self) -> bool:
        """Return whether rollouts gather a layer at a time, so that all ranks must run the same forward passes."""
        return self.splits_weights and self.sharding.rollout == "layered"

    @contextmanager
    def whole(self, module: nn.Module, dtype: str = "float32") -> Iterator[None]:
        """Gather all weights of `module` on every rank, read-only, so that ranks may run independent forward passes.

        If `dtype` is bfloat16, the arithmetic of the passes, matrices that are cast to it for every product arrive
        in it. Under sharding.rollout=layered nothing is gathered here.
        """
        if self._zero is None or not self.splits_weights or self.samples_in_layers:
            yield
            return
        with self._zero.gathered(module, torch.bfloat16 if dtype == "bfloat16" else None):
            yield

    @contextmanager
    def whole_weights(self, module: nn.Module) -> Iterator[None]:
        """Gather the weights of a submodule on every rank; inside, call its `forward`, not the module."""
        if self._zero is None or not self.splits_weights:
            yield
            return
        with self._zero.gathered_weights(module):
            yield

    def owned_weights(self, module: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
        """Return whole CPU copies of the weights that this rank owns under ZeRO-3; every rank must call it.

        Each weight has one owner, and all ranks own about as much, so that together they write a checkpoint without
        any of them holding the model. Tied weights are there once, under their first name.
        """
        assert self._zero is not None, "every rank has all weights"
        named = {name: p for name, p in module.named_parameters() if p.requires_grad or not trained_only}
        owners = self.ranks.owners({name: self._zero.full_size(parameter) for name, parameter in named.items()})
        weights: dict[str, Tensor] = self._zero.copies(named, lambda name: owners[name] == self.ranks.rank)
        return weights

    def full_state(self, module: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor] | None:
        """Return the unsharded state dict on the CPU of the main rank, empty on others; None if nothing is sharded.

        With `trained_only` the weights that are not trained are left out.
        """
        if self._zero is None or not self.splits_weights:
            return None
        keep = self.ranks.is_main
        state: dict[str, Tensor] = self._zero.full_state(module, keep=keep, trained_only=trained_only)
        return state

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of a weight; the whole weight if it is not sharded."""
        return parameter.detach() if self._zero is None else self._zero.part(parameter)

    def first_element(self, parameter: nn.Parameter) -> int:
        """Return the index in the flattened weight of the first element of this rank's shard."""
        return 0 if self._zero is None else self._zero.first_element(parameter)

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's shard of `whole`, a tensor of the weight's full shape."""
        return whole if self._zero is None else self._zero.part_of(parameter, whole)

    def release_gathered(self, module: nn.Module) -> None:
        """Discard gathered copies of the weights after their shards were changed in place."""
        if self._zero is not None and self.splits_weights:
            self._zero.release(module)

    def total_memory(self) -> float | None:
        """Return the bytes that a run may use: all of the GPU, or the free memory of the machine; None if not known."""
        if self.device.type == "cuda":
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return host_memory() if self.device.type == "cpu" else None

    def peak_memory_mb(self) -> float:
        """Return the peak memory so far in MB: allocated on the GPU if there is one, else the resident set size."""
        return self.memory.peak_mb()


def make_engine(config: RunConfig, sharding: ShardingConfig | None = None) -> Engine:
    """Create the engine of this process, initializing torch.distributed for several ranks or DeepSpeed.

    Raises:
        ConfigError: a GPU is requested and there is none, or DeepSpeed is requested and not installed.
    """
    silence_loggers()
    sharding = sharding or ShardingConfig()
    device = _device(config)
    _check_available(device, sharding)
    if device.type == "cpu":
        bound_product_caches()
        if config.keep_memory:
            keep_memory()
    set_products(device, tf32=config.tf32)
    if world_size_from_env() == 1 and not sharding.uses_deepspeed:
        return Engine(device, sharding=sharding)
    if sharding.uses_deepspeed and device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
    return Engine(device, ranks=init_distributed(device, timeout_s=sharding.timeout_s), sharding=sharding)


def _check_available(device: torch.device, sharding: ShardingConfig) -> None:
    """Check that the device can run the sharding, and that the package which that needs is installed.

    Raises:
        ConfigError: an Apple GPU is to run several processes, or DeepSpeed is requested and not installed.
    """
    if device.type == "mps" and (world_size_from_env() > 1 or sharding.uses_deepspeed):
        raise ConfigError(
            "run.device is mps, which runs one process without DeepSpeed: start it without a launcher and with "
            "sharding=none, or set run.device=cpu"
        )
    if sharding.uses_deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"sharding={sharding.mode} needs DeepSpeed, which is not installed: {install_hint('deepspeed')}, "
            "or set sharding=ddp"
        )


def _device(config: RunConfig) -> torch.device:
    device = choose_device(config.device, key="run.device")
    if device.type != "cuda" or world_size_from_env() == 1:
        return device
    device = local_device(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
    os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the number of the GPU
    torch.cuda.set_device(device)
    return device


def local_device(local_rank: int, visible: int) -> torch.device:
    """Return the GPU of a process: launchers show it all of the node's GPUs, or (Slurm, Ray) its own alone.

    Raises:
        ConfigError: it sees several GPUs, but fewer than there are processes on the node.
    """
    if visible > 1 and local_rank >= visible:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this process sees {visible}. Start at most one process per GPU of a "
            "node, or let each process see one GPU alone (CUDA_VISIBLE_DEVICES, --gpus-per-task=1)"
        )
    return torch.device("cuda", local_rank % visible)


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


@contextmanager
def sum_gradients(parameters: Sequence[nn.Parameter], ranks: Distributed) -> Iterator[None]:
    """Run the last backward pass of a step in this context: at its end gradients are summed over the ranks.

    A bucket's sum starts as soon as its gradients are complete, the parameters that come last in the model first, so
    that all but the last one overlap with the pass. Buckets and their order depend on the parameters alone and so are
    the same on every rank, for any order in which gradients arrive.

    Raises:
        RuntimeError: a gradient changed after its bucket's sum had started.
    """
    if ranks.world == 1:
        yield
        return
    buckets = _Buckets(parameters, ranks)
    # Only for this pass: a parameter with a hook of its own keeps layers from being written out (supports_fused).
    hooks = [parameter.register_post_accumulate_grad_hook(buckets.arrived) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    buckets.finish()


class _Buckets:
    """The parameters in buckets, from the last to the first, and the sums that have been started."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Distributed) -> None:
        self._ranks = ranks
        self._buckets: list[list[Tensor]] = list(in_buckets(parameters[::-1]))
        self._bucket_of = {id(p): index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        self._sums: list[Callable[[], None]] = []
        self._started = 0

    def arrived(self, parameter: Tensor) -> None:
        """Record that a gradient is complete, and start the sums that wait for nothing else."""
        index = self._bucket_of[id(parameter)]
        if index < self._started:
            raise RuntimeError("a gradient changed after its sum over the ranks had started")
        self._missing[index].discard(id(parameter))
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start()

    def finish(self) -> None:
        """Start the sums of gradients that only earlier passes reached, and wait for all sums."""
        while self._started < len(self._buckets):
            self._start()
        for wait in self._sums:
            wait()

    def _start(self) -> None:
        gradients = [parameter.grad for parameter in self._buckets[self._started] if parameter.grad is not None]
        self._started += 1
        if gradients:
            self._sums.append(self._ranks.start_sum(gradients))
