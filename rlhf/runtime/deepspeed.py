"""Models sharded by DeepSpeed's ZeRO. The only module that imports DeepSpeed; written against 0.19."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state, safe_set_local_optimizer_state
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.optimizers import MOMENTS, make_optimizer, parse_state

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# torch 2.13 deprecates the names by which DeepSpeed 0.19 calls collectives.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed\.|torch\.distributed")

GATHER_AT_ONCE = 50_000_000  # elements gathered at a time when collecting the whole state dict

_OFFLOADS: WeakKeyDictionary[nn.Module, DeepSpeedZeRoOffload] = WeakKeyDictionary()  # by module sharded with ZeRO-3
_GATHER_DEPTH: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many `gathered` contexts are open


def initialize(module: nn.Module, settings: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Any:
    """Create DeepSpeed's engine around a module; the process group must be initialized."""
    if not torch.cuda.is_available():
        # Otherwise it would compile its shared-memory collectives (a minute of g++); on the CPU gloo does them all.
        deepspeed.ops.__dict__.setdefault("__compatible_ops__", {"deepspeed_shm_comm": False})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    if settings["zero_optimization"]["stage"] == 3:
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        for submodule in (module, *module.children()):
            _OFFLOADS[submodule] = offload
    return engine


def freeze(module: nn.Module, settings: dict[str, Any]) -> None:
    """Shard a module that is only read; a forward pass gathers its weights layer by layer."""
    initialize(module, settings, None)


class ZeroModel:
    """A rlhf.runtime.engine.TrainableModel whose optimizer state, gradient or weights are sharded over the ranks."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        config: OptimizerConfig,
        *,
        terms: Sequence[str],
        ranks: Distributed,
        settings: dict[str, Any],
        cpu_adam: bool,
    ) -> None:
        """Create the optimizer and the engine; `settings` is DeepSpeed's JSON configuration."""
        self.name = name
        self.module = module
        self.config = config
        self.terms = tuple(terms)
        self.ranks = ranks
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.stage = int(settings["zero_optimization"]["stage"])
        self.engine = initialize(module, settings, _optimizer(self.parameters, config, cpu_adam=cpu_adam))
        self.optimizer = self.engine.optimizer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`; after the step's `last` call it is complete.

        Modules are called directly, so the preparation in DeepSpeed's own forward is done here.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.optimizer.clear_backward_seen_flag()
        self.optimizer.backward_prologue()
        self.optimizer.enter_backward()
        self.engine.backward(loss * self.ranks.world)  # DeepSpeed averages over the ranks; ours is a sum

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Compute the global 2-norm of the gradient; infinite if it is not a number."""
        if self.stage == 3:
            return float(combine_grad_norm_groups(self.optimizer._get_norm_groups()))
        return float(self.optimizer.scaled_global_norm())

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Clip the gradient, step, drop the gradient; return the learning rate used.

        DeepSpeed clips by the norm that it computes itself, which equals `norm`.
        """
        lr = self.config.lr * lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return lr

    def zero_grad(self) -> None:
        """Discard the gradient by reporting its norm as infinite, which makes DeepSpeed skip the step."""
        norm_method = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        infinite = torch.tensor(float("inf"))
        setattr(self.optimizer, norm_method, lambda: [infinite] if self.stage == 3 else infinite)
        try:
            self.engine.step()
        finally:
            delattr(self.optimizer, norm_method)

    def state(self) -> dict[str, Any]:
        """Return the unsharded optimizer state by parameter name, whole on the main rank; every rank must call it."""
        states = [self.optimizer.state[flat] for flat in self._flat()]
        steps = [int(state["step"]) for state in states if "step" in state]
        step = int(self.ranks.largest(max(steps, default=0)))
        moments: dict[str, dict[str, Tensor]] = {}
        if step and self.config.optimizer == "adamw":
            for key in MOMENTS:
                moments[key] = {}
                for name, parameter in self.named.items():
                    value = safe_get_full_optimizer_state(parameter, key)
                    if self.ranks.is_main:
                        moments[key][name] = value.cpu().clone()
        return {"step": step, "moments": moments}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the optimizer state; every rank must be given the whole state."""
        step, moments = parse_state(state, self.named, self.config.optimizer)
        if not moments:
            return
        for flat in self._flat():
            flat_state = self.optimizer.state[flat]
            flat_state["step"] = step if _is_cpu_adam(self.optimizer.optimizer) else torch.tensor(float(step))
            flat_state |= {key: torch.zeros_like(flat) for key in MOMENTS}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
        for key, named in moments.items():
            for name, whole in named.items():
                parameter = self.named[name]
                if self.stage == 3:
                    safe_set_local_optimizer_state(parameter, part_of(parameter, whole), key)
                else:
                    safe_set_full_optimizer_state(parameter, whole, key)

    def _flat(self) -> list[Tensor]:
        """Return the flat tensors that the optimizer steps: this rank's shards of many parameters, concatenated."""
        if self.stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)


def _optimizer(parameters: list[nn.Parameter], config: OptimizerConfig, *, cpu_adam: bool) -> torch.optim.Optimizer:
    if not cpu_adam or config.optimizer == "sgd":
        return make_optimizer(parameters, config)
    fused: torch.optim.Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        adamw_mode=True,
    )
    return fused


def _is_cpu_adam(optimizer: object) -> bool:
    return isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the weights on every rank inside the context, with the hooks that gather and free them removed."""
    offload = _OFFLOADS[module]
    _GATHER_DEPTH[module] = _GATHER_DEPTH.get(module, 0) + 1
    try:
        if _GATHER_DEPTH[module] > 1:
            yield
            return
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            for parameter in module.parameters():
                parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]  # DeepSpeed adds these
            for hook in offload.forward_hooks + offload.backward_hooks:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload._register_deepspeed_module(offload.module)
    finally:
        _GATHER_DEPTH[module] -= 1


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """Gather the weights of a submodule on every rank; its hooks stay active, so call its `forward`."""
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        yield


def full_state(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the unsharded state dict on the CPU if `keep`, else an empty one; every rank must call it."""
    named = dict(module.named_parameters(remove_duplicate=False))
    whole: dict[int, Tensor] = {}
    for group in _gather_groups(list({id(p): p for p in named.values()}.values())):
        with deepspeed.zero.GatheredParameters(group):
            if keep:
                whole |= {id(p): p.detach().cpu().clone() for p in group}
    if not keep:
        return {}
    state = module.state_dict()
    return {name: whole[id(named[name])] if name in named else value.cpu() for name, value in state.items()}


def _gather_groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    group: list[nn.Parameter] = []
    for parameter in parameters:
        if group and sum(p.ds_numel for p in (*group, parameter)) > GATHER_AT_ONCE:  # type: ignore[attr-defined]
            yield group
            group = []
        group.append(parameter)
    if group:
        yield group


def part(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a weight; the whole weight if it is not sharded."""
    shard = getattr(parameter, "ds_tensor", parameter)
    assert isinstance(shard, Tensor)
    return shard.detach()


def part_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's shard of `whole`: DeepSpeed flattens and pads a weight and cuts it into equal shards."""
    if not hasattr(parameter, "ds_tensor"):
        return whole
    size = parameter.ds_tensor.numel()
    start = torch.distributed.get_rank() * size
    shard = whole.flatten()[start : start + size]
    return torch.nn.functional.pad(shard, (0, size - shard.numel())).to(parameter.ds_tensor.device)


def release(module: nn.Module) -> None:
    """Free gathered weights, so that the next pass gathers them again."""
    _OFFLOADS[module].partition_all_parameters()
