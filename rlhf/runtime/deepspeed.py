"""Models sharded by DeepSpeed's ZeRO. The only module that imports DeepSpeed; written against 0.19."""

from __future__ import annotations

import logging
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from rlhf.runtime.optimizers import MOMENTS, adam_state, make_optimizer, parse_state

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# torch 2.13 deprecates the names by which DeepSpeed 0.19 calls collectives.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed\.|torch\.distributed")

GATHER_AT_ONCE = 50_000_000  # elements gathered at a time when collecting the whole state dict

_OFFLOADS: WeakKeyDictionary[nn.Module, DeepSpeedZeRoOffload] = WeakKeyDictionary()  # by module sharded with ZeRO-3
_GATHER_DEPTH: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many `gathered` contexts are open


def initialize(module: nn.Module, settings: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Any:
    """Create DeepSpeed's engine around a module; the process group must be initialized."""
    _join_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    if settings["zero_optimization"]["stage"] == 3:
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        for submodule in (module, *module.children()):
            _OFFLOADS[submodule] = offload
    return engine


def partition(module: nn.Module, settings: dict[str, Any], read: Callable[[str, int, int], Tensor]) -> None:
    """Give each weight of `module` that is on the meta device this rank's shard, which `read` returns.

    Args:
        module: weights that have memory stay as they are; `initialize` shards those.
        settings: DeepSpeed's JSON configuration.
        read: returns the elements [start, stop) of a weight by its name, counted in its flattened form.
    """
    _join_process_group()
    offload = settings["zero_optimization"].get("offload_param", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shards = deepspeed.zero.Init(
            module=nn.Module(),
            config_dict_or_path=settings,
            remote_device=offload.get("device"),
            pin_memory=bool(offload.get("pin_memory")),
        )
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.is_meta}
    done: dict[int, nn.Parameter] = {}  # tied weights are one
    for submodule in module.modules():
        for key, parameter in submodule._parameters.items():
            if parameter is not None and id(parameter) in names:
                if id(parameter) not in done:
                    done[id(parameter)] = _read_shard(shards, parameter, names[id(parameter)], read)
                submodule._parameters[key] = done[id(parameter)]
        for key, buffer in submodule._buffers.items():
            submodule._buffers[key] = None if buffer is None else buffer.to(shards.local_device)


def _read_shard(
    shards: Any, parameter: nn.Parameter, name: str, read: Callable[[str, int, int], Tensor]
) -> nn.Parameter:
    whole = nn.Parameter(_untouched(parameter.shape, parameter.dtype), requires_grad=parameter.requires_grad)
    shards._convert_to_deepspeed_param(whole)
    size = whole.aligned_size() // whole.ds_zero_partition_world_size  # type: ignore[attr-defined]
    start = min(whole.numel(), size * whole.ds_zero_partition_rank)  # type: ignore[attr-defined]
    stop = min(whole.numel(), start + size)
    whole.data.view(-1)[start:stop].copy_(read(name, start, stop))
    whole.partition()  # type: ignore[attr-defined]
    whole.data = whole.data.to(shards.local_device)  # it is empty; code that asks for the device must see this one
    return whole


def _untouched(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Map memory for a tensor: only the pages that are written take any, and all are given back with the tensor.

    Memory from the allocator may stay with the process, one shard of every weight at a time.
    """
    pages = mmap.mmap(-1, max(1, shape.numel()) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=shape.numel()).view(shape)


def _join_process_group() -> None:
    """Give DeepSpeed the process group, and leave all collectives on the CPU to gloo.

    DeepSpeed would compile its own collectives there, which takes a minute of g++.
    """
    if not torch.cuda.is_available():
        deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)


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
        """Return the unsharded optimizer state of the weights that this rank owns, by name; every rank must call it."""
        states = [self.optimizer.state[flat] for flat in self._flat()]
        steps = [int(state["step"]) for state in states if "step" in state]
        step = int(self.ranks.largest(max(steps, default=0)))
        moments: dict[str, dict[str, Tensor]] = {}
        if step and self.config.optimizer == "adamw":
            owners = self.ranks.owners({name: full_size(parameter) for name, parameter in self.named.items()})
            for key in MOMENTS:
                moments[key] = {}
                for name, parameter in self.named.items():
                    value = safe_get_full_optimizer_state(parameter, key)
                    if owners[name] == self.ranks.rank:
                        moments[key][name] = value.cpu().clone()
        return {"step": step, "moments": moments}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the optimizer state; every rank must be given the whole state, of which it reads its part."""
        step, moments = parse_state(state, self.named, self.config.optimizer)
        if not moments:
            return
        for flat in self._flat():
            flat_state = self.optimizer.state[flat]
            flat_state |= adam_state(flat, step, as_number=_is_cpu_adam(self.optimizer.optimizer))
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
def gathered(module: nn.Module, low: torch.dtype | None = None) -> Iterator[None]:
    """Gather the weights on every rank inside the context, with the hooks that gather and free them removed.

    `low` is the dtype in which the matrices of linear layers arrive, if they are used for nothing else; autocast casts
    these to it for every product, so that the results are the same.
    """
    offload = _OFFLOADS[module]
    _GATHER_DEPTH[module] = _GATHER_DEPTH.get(module, 0) + 1
    try:
        if _GATHER_DEPTH[module] > 1:
            yield
            return
        matrices = [] if low is None else _only_in_products(module)
        others = set(module.parameters()) - set(matrices)
        with deepspeed.zero.GatheredParameters([p for p in module.parameters() if p in others]):
            for parameter in module.parameters():
                parameter.ds_active_sub_modules.clear()  # type: ignore[attr-defined]  # DeepSpeed adds these
            for hook in offload.forward_hooks + offload.backward_hooks:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                with _gathered_as(matrices, low):
                    yield
            finally:
                offload._register_deepspeed_module(offload.module)
    finally:
        _GATHER_DEPTH[module] -= 1


def _only_in_products(module: nn.Module) -> list[nn.Parameter]:
    """Return the sharded matrices of plain linear layers; none of an adapted model, whose adapters are added to them.

    A matrix that is also the embedding (tied) stays as it is, and so does one that every rank has whole.
    """
    linear = {p for part in module.modules() if type(part) is nn.Linear for p in [part.weight]}
    elsewhere = {p for part in module.modules() if type(part) is not nn.Linear for p in part._parameters.values()}
    if any("lora_" in name for name, _ in module.named_parameters()):
        return []
    return [p for p in module.parameters() if p in linear - elsewhere and not p.ds_persist]  # type: ignore[attr-defined]


@contextmanager
def _gathered_as(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> Iterator[None]:
    """Give the parameters their whole weights in another dtype, each shard of which is cast before it is sent."""
    try:
        for parameter in parameters:
            shard = parameter.ds_tensor.to(dtype)  # type: ignore[attr-defined]
            world = torch.distributed.get_world_size()
            whole = torch.empty(shard.numel() * world, dtype=dtype, device=parameter.device)
            torch.distributed.all_gather_into_tensor(whole, shard.to(parameter.device))
            size, shape = parameter.ds_numel, parameter.ds_shape  # type: ignore[attr-defined]
            parameter.data = whole[:size].view(shape)
        yield
    finally:
        for parameter in parameters:
            own = parameter.ds_tensor.dtype  # type: ignore[attr-defined]
            parameter.data = torch.empty(0, dtype=own, device=parameter.device)


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """Gather the weights of a submodule on every rank; its hooks stay active, so call its `forward`.

    Contexts of the same module may be nested: the head of an adapted policy is its reference's too.
    """
    _GATHER_DEPTH[module] = _GATHER_DEPTH.get(module, 0) + 1
    try:
        nested = _GATHER_DEPTH[module] > 1
        with nullcontext() if nested else deepspeed.zero.GatheredParameters(list(module.parameters())):
            yield
    finally:
        _GATHER_DEPTH[module] -= 1


def full_state(module: nn.Module, *, keep: bool, trained_only: bool) -> dict[str, Tensor]:
    """Return the unsharded state dict on the CPU if `keep`, else an empty one; every rank must call it.

    With `trained_only` the weights that are not trained are left out.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad or not trained_only}
    whole = copies(named, lambda _: keep)
    if not keep:
        return {}
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    weights = {name: whole[names[name]] for name in names if names[name] in whole}
    buffers = {name: value.cpu() for name, value in module.state_dict().items() if name not in names}
    return weights | buffers


def copies(named: Mapping[str, nn.Parameter], keep: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return whole copies on the CPU of the weights that `keep` names; every rank must call it with the same weights.

    They are gathered a few at a time, and all ranks take part, also if they keep none.
    """
    whole: dict[str, Tensor] = {}
    for group in _gather_groups(named):
        with deepspeed.zero.GatheredParameters(list(group.values())):
            whole |= {name: parameter.detach().cpu().clone() for name, parameter in group.items() if keep(name)}
    return whole


def _gather_groups(named: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    group: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        if group and sum(p.ds_numel for p in (*group.values(), parameter)) > GATHER_AT_ONCE:  # type: ignore[attr-defined]
            yield group
            group = {}
        group[name] = parameter
    if group:
        yield group


def full_size(parameter: nn.Parameter) -> int:
    """Return the number of elements of a weight, whether it is sharded or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def part(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a weight; the whole weight if it is not sharded."""
    shard = getattr(parameter, "ds_tensor", parameter)
    assert isinstance(shard, Tensor)
    return shard.detach()


def first_element(parameter: nn.Parameter) -> int:
    """Return the index in the flattened weight of the first element of this rank's shard; 0 if it is not sharded."""
    shard = getattr(parameter, "ds_tensor", None)
    return 0 if shard is None else torch.distributed.get_rank() * int(shard.numel())


def part_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's shard of `whole`: DeepSpeed flattens and pads a weight and cuts it into equal shards."""
    if not hasattr(parameter, "ds_tensor"):
        return whole
    size, start = parameter.ds_tensor.numel(), first_element(parameter)
    shard = whole.flatten()[start : start + size]
    return torch.nn.functional.pad(shard, (0, size - shard.numel())).to(parameter.ds_tensor.device)


def release(module: nn.Module) -> None:
    """Free gathered weights, so that the next pass gathers them again."""
    _OFFLOADS[module].partition_all_parameters()
