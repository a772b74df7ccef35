"""Tensors that leave the device while a step does not read them: frozen models, and the moments of the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Store(Protocol):
    """Memory beside the device's. A tensor whose numbers are in it stays the same object."""

    def put(self, tensors: Sequence[Tensor], kept: Sequence[Tensor] | None) -> list[Tensor]:
        """Move the numbers of tensors here, and return them; `kept` are from an earlier call, still valid."""

    def get_back(self, tensors: Sequence[Tensor]) -> None:
        """Move the numbers of tensors back to the device."""


class HostStore:
    """The machine's memory, page-locked so that copies to and from a CUDA GPU run at the speed of the bus."""

    def __init__(self, device: torch.device) -> None:
        """Set the device that the tensors leave."""
        self.device = device

    def put(self, tensors: Sequence[Tensor], kept: Sequence[Tensor] | None) -> list[Tensor]:
        """Move the numbers of tensors here; those that are `kept` are not copied again."""
        hosts = list(kept) if kept is not None else [self._copy(tensor) for tensor in tensors]
        self._wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.data = host
        return hosts

    def get_back(self, tensors: Sequence[Tensor]) -> None:
        """Move the numbers of tensors back to the device."""
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device, non_blocking=True)
        self._wait()  # the memory that was read here may be written next

    def _copy(self, tensor: Tensor) -> Tensor:
        locked = self.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=locked)
        return host.copy_(tensor.detach(), non_blocking=locked)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def store_of(device: torch.device) -> Store | None:
    """Return the place where tensors of a device can go; None for a CPU, which has no other memory."""
    return None if device.type == "cpu" else HostStore(device)


class Movable:
    """Tensors that leave the device and come back together."""

    def __init__(self, tensors: Callable[[], Sequence[Tensor]], store: Store, *, is_constant: bool) -> None:
        """Set the tensors, which are on the device.

        Args:
            tensors: returns them; called each time they leave, since an optimizer makes its state at its first step.
            store: the memory to which they go.
            is_constant: whether they are always the same and nothing writes to them, so that one copy serves always.
        """
        self._tensors, self._store, self._is_constant = tensors, store, is_constant
        self._away: list[Tensor] = []
        self._kept: list[Tensor] | None = None
        self.is_here = True

    def leave(self) -> None:
        """Move the tensors off the device, if they are on it."""
        if not self.is_here:
            return
        if self._kept is None:
            self._away = list(self._tensors())
        hosts = self._store.put(self._away, self._kept)
        self._kept = hosts if self._is_constant else None
        self.is_here = False

    def come(self) -> None:
        """Move the tensors back to the device, if they are not on it."""
        if self.is_here:
            return
        self._store.get_back(self._away)
        self.is_here = True


@dataclass(frozen=True)
class Offload:
    """The parts of a run that leave the device, and the times. The default moves nothing.

                    rollout    score, annotate, evaluate    update
    frozen models   away       here                         away
    moments         away       away                         here
    sampler's copy  made       freed                        freed
    """

    frozen: Movable | None = None
    moments: Movable | None = None
    free_sampler: Callable[[], None] | None = None

    @property
    def is_on(self) -> bool:
        """Return whether anything is moved."""
        return any(part is not None for part in (self.frozen, self.moments, self.free_sampler))

    def rest(self) -> None:
        """Move everything to its place between rollouts and updates."""
        if self.moments is not None:
            self.moments.leave()
        if self.frozen is not None:
            self.frozen.come()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Sample in this context: the frozen models are away."""
        if self.frozen is not None:
            self.frozen.leave()
        try:
            yield
        finally:
            if self.free_sampler is not None:
                self.free_sampler()
            self.rest()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Update in this context: the frozen models are away, and the moments are here."""
        if self.frozen is not None:
            self.frozen.leave()
        if self.moments is not None:
            self.moments.come()
        try:
            yield
        finally:
            self.rest()
