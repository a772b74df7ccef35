"""Pushes by NCCL to a real vLLM 0.32 on a CPU, in one process: `python real_transfer.py MODEL`, by vLLM's interpreter.

Both sides are vLLM's own: the trainer's engine, the group's meeting, the routes, the worker's loading of weights. NCCL
itself is a stand-in that hands tensors over in the group's TCPStore; streams of CUDA do nothing. Prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from functools import partial
from typing import Any

import torch
import uvicorn
import vllm.distributed.device_communicators.pynccl as pynccl
from fastapi import FastAPI, Request
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.entrypoints.rl.online.api_router import router

from rlhf.errors import SamplingError
from rlhf.serving.http import JsonHttp
from rlhf.serving.server import Push
from rlhf.serving.vllm import VllmServer

IDS = [3, 5, 7, 9, 1, 4, 6, 8]


class Handed:
    """The stand-in for a communicator of NCCL."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        is_sender = self.group.rank == src
        came = self.group.broadcast_obj(tensor if is_sender else None, src)
        if not is_sender:
            tensor.copy_(came)

    def destroy(self) -> None:
        pass


def without_gpus() -> None:
    stream = type("Stream", (), {"__init__": lambda self, device: None, "synchronize": lambda self: None})
    for module, name, value in (
        (pynccl, "PyNcclCommunicator", Handed),
        (torch.cuda, "Stream", stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda device: None),
        (torch.cuda, "set_device", lambda device: None),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda: None),
    ):
        setattr(module, name, value)


class EngineClient:
    """vLLM's engine as its routes call it."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.vllm_config = llm, llm.llm_engine.vllm_config

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **settings: Any) -> Any:
            if name in ("pause_generation", "resume_generation"):
                return None
            return getattr(self.llm, name)(*arguments, **settings)

        return call


def listen(llm: LLM, asked: list[str]) -> str:
    app = FastAPI()
    app.state.engine_client = EngineClient(llm)
    app.include_router(router)

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        asked.append(request.url.path)
        return await call_next(request)

    @app.post("/reset_prefix_cache")
    async def reset() -> dict[str, Any]:
        llm.reset_prefix_cache()
        return {}

    @app.post("/collective_rpc")
    async def call(request: Request) -> dict[str, Any]:
        llm.collective_rpc((await request.json())["method"])
        return {}

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


class Trainer:
    """A model, and its pusher."""

    def __init__(self, path: str, llm: LLM, url: str) -> None:
        self.model, self.llm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), llm
        self.config = VllmServer(urls=[url], transfer="nccl", after_reload=["resync_head"], timeout_s=60.0)
        self.config.check_trainer("cuda", trains_adapter=False)
        self.http = JsonHttp(url, timeout_s=60.0)
        self.link = self.config.link(self.http)
        self.tensors = {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}

    @torch.no_grad()
    def change(self) -> None:
        for tensor in self.tensors.values():
            tensor += 0.02 * torch.randn_like(tensor)

    def push(self, version: str, **more: torch.Tensor) -> None:
        assert self.link is not None
        self.link.connect({**self.tensors, **more}, self.config.version(self.http))
        send = partial(self.link.send, version)
        self.config.push(self.http, Push(path="", version=version, base=None, is_adapter=False, send=send))

    @torch.no_grad()
    def difference(self) -> float:
        logits = self.model(torch.tensor([IDS])).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None]).squeeze(1)
        settings = SamplingParams(max_tokens=1, prompt_logprobs=0)
        entries = self.llm.generate({"prompt_token_ids": IDS}, settings, use_tqdm=False)[0].prompt_logprobs[1:]
        served = [entry[token].logprob for entry, token in zip(entries, IDS[1:], strict=True)]
        return float((own - torch.tensor(served)).abs().max())


def main(path: str) -> None:
    without_gpus()
    llm = LLM(
        path,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        weight_transfer_config={"backend": "nccl"},
        worker_extension_cls="policy_extension.Extension",
    )
    asked: list[str] = []
    url = listen(llm, asked)
    first, pushes = Trainer(path, llm, url), []
    for number in (1, 2):
        first.change()
        before = first.difference()
        first.push(f"first.{number}")
        pushes.append((before, first.difference(), first.config.version(first.http)))
    second = Trainer(path, llm, url)  # a trainer that starts while the server goes on
    second.push("second.1")
    pushes.append((0.1, second.difference(), second.config.version(second.http)))
    asked.clear()
    error = ""
    try:
        second.push("second.2", nobody=torch.zeros(2, 3))
    except SamplingError as caught:
        error = str(caught)
    sys.stdout.write(json.dumps({"pushes": pushes, "error": error, "asked_in_vain": asked}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads of a transfer that broke are not waited for


if __name__ == "__main__":
    main(sys.argv[1])
