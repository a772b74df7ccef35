"""Build what moves tensors between the device and the machine's memory during an online run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from rlhf.config.offload import OffloadConfig
from rlhf.factory.context import RunContext
from rlhf.runtime.engine import Engine, HoldsMoments, TrainableModel
from rlhf.runtime.offload import Movable, Offload, store_of
from rlhf.sampling.fast.engine import FastSampler
from rlhf.sampling.sampler import Sampler


def build_offload(
    config: OffloadConfig, context: RunContext, trained: Mapping[str, TrainableModel], sampler: Sampler
) -> Offload:
    """Build what moves the tensors that the section names; on a CPU it moves nothing, and the run says so.

    Args:
        context: the run's context; its engine knows the frozen models.
        sampler: the sampler itself, without a wrapper.
    """
    store = store_of(context.engine.device)
    if store is None:
        if config.is_on:
            context.notes.append("offload: nothing is moved, for this run computes in the machine's memory")
        return Offload()
    frozen = Movable(lambda: frozen_tensors(context.engine, trained.values()), store, is_constant=True)
    moments = Movable(lambda: moments_of_all(trained.values()), store, is_constant=False)
    offload = Offload(
        frozen=frozen if config.frozen_models else None,
        moments=moments if config.optimizer else None,
        free_sampler=sampler.release if config.sampler and isinstance(sampler, FastSampler) else None,
    )
    offload.rest()
    return offload


def frozen_tensors(engine: Engine, trained: Iterable[TrainableModel]) -> list[Tensor]:
    """Return the weights and buffers of the frozen models, each once, without those that a trained model shares."""
    used = {id(tensor) for model in trained for tensor in _tensors(model.module)}
    frozen = {id(tensor): tensor for module in engine.frozen for tensor in _tensors(module)}
    return [tensor for key, tensor in frozen.items() if key not in used]


def moments_of_all(trained: Iterable[TrainableModel]) -> list[Tensor]:
    """Return the moments of all optimizers."""
    return [tensor for model in trained if isinstance(model, HoldsMoments) for tensor in model.moments()]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
