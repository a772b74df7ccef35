"""vLLM, with its development routes (VLLM_SERVER_DEV_MODE=1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf.errors import ConfigError
from rlhf.serving.http import JsonHttp
from rlhf.serving.routes import EXACT, Answer, Ask, choices_of, read_choice, score
from rlhf.serving.server import Launch, Link, Push, Server

SHORT_S = 60.0
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM knows
TRUNCATING = ("top_p", "top_k", "min_p")
CHANGING = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "bad_words")
OURS = ("prompt", "n", "seed", "temperature", "max_tokens", "stop_token_ids", "logprobs", "return_token_ids", "model")


class VllmServer(Server):
    """vLLM 0.32 or later, started with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs."""

    type: Literal["vllm"] = "vllm"
    model: str = "policy"
    """The name that vLLM serves the model by (--served-model-name)."""
    adapter: str = "policy-adapter"
    """The name of the pushed adapter, if the policy has one (--enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)."""
    transfer: Literal["folder", "nccl"] = "folder"
    """How whole weights reach vLLM. folder: it reads files. nccl: the trainer's GPU sends them to vLLM's own GPUs, with
    vLLM in both environments (--weight-transfer-config '{"backend": "nccl"}'); written from vLLM's sources, and never
    run on a GPU."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    """Requests at the same time; each completion is one request."""
    after_reload: list[str] = []
    """Methods of a worker extension to call after a reload. [resync_head] is needed on a CPU, where vLLM keeps the old
    output head of a model with tied embeddings."""
    params: dict[str, Any] = {}
    """Further fields of every request."""

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        for name in params:
            if name in TRUNCATING:
                raise ValueError(
                    f"{name} leaves tokens out, and vLLM's log-probabilities are those after it: ratios would be wrong "
                    f"by the probability left out. Remove {name}; lower sampling.temperature instead"
                )
            if name in CHANGING:
                raise ValueError(f"{name} changes the distribution that is sampled from: remove it")
            if name in OURS:
                raise ValueError(f"{name} is set by the trainer: remove it")
        return params

    def command(self, launch: Launch) -> list[str]:
        """Start vLLM; launch.arguments has the further needs of a GPU or a CPU."""
        program = self.launch.program if self.launch is not None else None
        command = [program or "vllm", "serve", launch.model, "--served-model-name", self.model]
        command += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
        command += ["--logprobs-mode", "processed_logprobs"]
        if self.transfer == "nccl":
            command += ["--weight-transfer-config", '{"backend": "nccl"}']
        if launch.lora_rank is None:
            return command
        rank = next((rank for rank in LORA_RANKS if rank >= launch.lora_rank), launch.lora_rank)
        return [*command, "--enable-lora", "--max-lora-rank", str(rank)]

    def launch_environment(self, launch: Launch) -> Mapping[str, str]:
        """Open the routes that load weights."""
        lora = {} if launch.lora_rank is None else {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        return {"VLLM_SERVER_DEV_MODE": "1", **lora}

    def check_trainer(self, device: str, *, trains_adapter: bool) -> None:
        """Check that whole weights are on a GPU, and that vLLM is here, if they go by NCCL."""
        if self.transfer == "folder":
            return
        if trains_adapter:
            raise ConfigError(
                "sampling.server.transfer=nccl sends whole weights, but policy.lora trains an adapter, which vLLM "
                "loads from a folder: leave transfer out"
            )
        if device != "cuda":
            raise ConfigError(
                f"sampling.server.transfer=nccl sends weights from GPU to GPU, but the trainer runs on {device}: set "
                "run.device=cuda, or sampling.server.transfer=folder"
            )
        from rlhf.serving.nccl import trainer_side

        trainer_side()

    def link(self, http: JsonHttp) -> Link | None:
        """Return the NCCL group, if weights go by one."""
        if self.transfer == "folder":
            return None
        from rlhf.serving.nccl import NcclLink

        return NcclLink(http)

    def generate(self, http: JsonHttp, ask: Ask) -> Answer:
        """Complete each row by a request of its own, seeded by its key, so that no row depends on another."""
        from concurrent.futures import ThreadPoolExecutor

        rows = [(prompt, row * ask.group_size + i) for prompt, row in zip(ask.prompts, ask.rows, strict=True)
                for i in range(ask.group_size)]  # fmt: skip
        with ThreadPoolExecutor(min(self.concurrency, len(rows))) as pool:
            read = list(pool.map(lambda entry: self._complete(http, ask, *entry), rows))
        ids, logprobs, prompts = (list(column) for column in zip(*read, strict=True))
        return Answer(ids=ids, logprobs=logprobs, prompts=prompts, version=None)

    def _complete(self, http: JsonHttp, ask: Ask, prompt: Any, row: int) -> tuple[list[int], list[float], list[int]]:
        seed = int.from_bytes(hashlib.sha256(f"{ask.key}/{row}".encode()).digest()[:8], "big") >> 1
        body = {
            "model": self._asked(ask.adapted),
            "prompt": list(prompt),
            "n": 1,
            "seed": seed,
            "temperature": 0.0 if ask.greedy else ask.temperature,
            "max_tokens": ask.max_new_tokens,
            "stop_token_ids": list(ask.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            **EXACT,
            **self.params,
        }
        (choice,) = choices_of(http.post("/v1/completions", body), 1)
        return read_choice(choice)

    def score(self, http: JsonHttp, ids: list[int], *, adapted: bool) -> list[float]:
        """Ask for prompt_logprobs."""
        return score(http, ids, model=self._asked(adapted), timeout_s=self.timeout_s)

    def version(self, http: JsonHttp) -> str | None:
        """Return the version that the last push by NCCL set; of folders vLLM knows none, and only has to answer."""
        if self.transfer == "nccl":
            return str(http.get("/weight_info", timeout_s=SHORT_S)["weight_version"])
        http.get("/health", timeout_s=SHORT_S)
        return None

    def push(self, http: JsonHttp, push: Push) -> None:
        """Load an adapter under its name, or pause, load all weights, forget cached prefixes, and resume.

        vLLM confirms an adapter by a sentence, not by JSON.
        """
        if push.is_adapter:
            body = {"lora_name": self.adapter, "lora_path": push.path, "load_inplace": True}
            http.tell("/v1/load_lora_adapter", body)
            http.tell("/reset_prefix_cache", timeout_s=SHORT_S)
            return
        http.tell("/pause", timeout_s=self.timeout_s)
        if push.send is None:
            http.tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": push.path}})
        else:
            push.send()
        for method in self.after_reload:
            http.tell("/collective_rpc", {"method": method})
        http.tell("/reset_prefix_cache", timeout_s=SHORT_S)
        http.tell("/resume", timeout_s=SHORT_S)
        if push.send is not None:  # last: a push that broke before has no version
            http.tell("/update_weight_version", {"new_version": push.version}, timeout_s=SHORT_S)

    def _asked(self, adapted: bool) -> str:
        return self.adapter if adapted else self.model
