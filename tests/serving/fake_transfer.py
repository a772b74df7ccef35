"""vLLM's transfer without vLLM and without GPUs: the trainer's classes, and a server that takes part.

As in NCCL, a sender waits for the other side until it comes or the group is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, Queue
from threading import Event
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlhf.sampling.service import BadRequest, PolicyService

WIRES: dict[int, Queue[Tensor]] = {}  # by the port that both sides were told
PATIENCE_S = 20.0


@dataclass
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ModuleSource:
    def __init__(self, module: Any) -> None:
        self.module = module

    def metadata(self) -> list[Meta]:
        return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.module.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.module.named_parameters())


@dataclass(kw_only=True)
class InitInfo:
    rank: int
    master_address: str
    master_port: int
    world_size: int


@dataclass
class UpdateInfo:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Engine:
    """The trainer's end."""

    made: ClassVar[list[Engine]] = []

    def __init__(self, info: InitInfo, client: Any, source: ModuleSource) -> None:
        self.info, self.client, self.source, self.left = info, client, source, Event()
        self.wire = WIRES[info.master_port] = Queue(maxsize=1)
        self.made.append(self)

    @classmethod
    def trainer_init(cls, info: InitInfo, *, client: Any, source: ModuleSource) -> Engine:
        engine = cls(info, client, source)
        with ThreadPoolExecutor(1) as pool:
            told = asdict(info) | {"rank_offset": 1, "packed": True}
            del told["rank"]
            asked = pool.submit(client.init_weight_transfer_engine, told)
            engine.put(torch.zeros(1))
            asked.result()
        return engine

    def put(self, tensor: Tensor) -> None:
        self.wire.put(tensor)
        while self.wire.unfinished_tasks:  # until the other side has it
            if self.left.wait(0.005):
                raise RuntimeError("NCCL error: aborted")

    def send_weights(self) -> None:
        meta = self.source.metadata()
        dtypes = [str(entry.dtype).removeprefix("torch.") for entry in meta]
        info = UpdateInfo([entry.name for entry in meta], dtypes, [list(entry.shape) for entry in meta])
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(self.client.update_weights, asdict(info))
        try:
            for _, tensor in self.source:
                self.put(tensor)
            asked.result()
        finally:
            pool.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.left.set()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `vllm` importable, and the calls of CUDA that surround a transfer do nothing."""
    root = "vllm.distributed.weight_transfer"
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", root, f"{root}.nccl_engine")}
    vars(modules[root]).update(ModuleSource=ModuleSource, WeightTransferTrainerFactory=Engine)
    vars(modules[f"{root}.nccl_engine"]).update(NCCLTrainerInitInfo=InitInfo)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Engine, "made", [])


class TransferService(PolicyService):
    """Our service, with the routes that vLLM 0.32 has for a transfer."""

    fails_at: tuple[str, int] | None = None  # the route that answers 500, at which of its calls
    applies = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.group: int | None = None
        self.weight_version = "default"
        self.is_updating = False
        self.came: dict[str, Tensor] = {}

    @property
    def routes(self) -> list[str]:
        return [route for route, _ in self.asked]

    def take(self) -> Tensor:
        if self.group is None:
            raise BadRequest(500, "NCCL weight transfer not initialized")
        try:
            tensor = WIRES[self.group].get(timeout=PATIENCE_S)
        except Empty:
            raise BadRequest(500, "nobody sends") from None
        copy = tensor.clone()
        WIRES[self.group].task_done()
        return copy

    def answer(self, method: str, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if route == "/v1/completions":
            return super().answer(method, route, body)
        self.asked.append((route, body))
        if self.fails_at == (route, self.routes.count(route)):
            raise BadRequest(500, "no such luck")
        match route:
            case "/weight_info":
                return {"weight_version": self.weight_version}
            case "/get_world_size":
                return {"world_size": 2}
            case "/shutdown_weight_transfer_engine":
                self.group = None
            case "/init_weight_transfer_engine":
                self.group = int(body["init_info"]["master_port"])
                self.take()
            case "/start_weight_update":
                assert not self.is_updating
                self.is_updating = True
            case "/update_weights":
                self.receive(**body["update_info"])
            case "/finish_weight_update":
                assert self.is_updating
                self.is_updating = False
                if self.applies:
                    self.apply(self.came)
            case "/update_weight_version":
                self.weight_version = str(body["new_version"])
            case _:
                return super().answer(method, route, body)
        return {"message": "done"}

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        assert self.is_updating
        self.came = {}
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            self.came[name] = self.take()
            assert self.came[name].dtype == getattr(torch, dtype)
            assert list(self.came[name].shape) == shape
