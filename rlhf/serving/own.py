"""Our own server: `rlhf serve-policy`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar, Literal

from rlhf.serving.http import JsonHttp, ServerRefused
from rlhf.serving.routes import EXACT, Answer, Ask, choices_of, read_choice, score
from rlhf.serving.server import Launch, Push, Server

SHORT_S = 30.0  # for what takes no computation
PAUSED = "paused"  # in place of a version: the trainer pushes again, which ends the pause


class OwnServer(Server):
    """`rlhf serve-policy`: our sampler in another process or on another machine.

    It gives the completions that sampling in the trainer's process gives: on a CPU bit for bit, if both have the same
    kind of machine and the same number of threads; on a GPU up to rounding.
    """

    takes_changes: ClassVar[bool] = True
    returns_support: ClassVar[bool] = True

    type: Literal["rlhf"] = "rlhf"

    def command(self, launch: Launch) -> list[str]:
        """Start this package's server, with the trainer's arithmetic and threads: the last bits depend on them."""
        program = self.launch.program if self.launch is not None else None
        command = [program or sys.executable, "-m", "rlhf", "serve-policy", launch.model, "--port", str(launch.port)]
        command += ["--dtype", launch.dtype, "--device", launch.device, "--threads", str(launch.threads)]
        command += [] if launch.tf32 else ["--no-tf32"]
        return command if self.token_env is None else [*command, "--token-env", self.token_env]

    def generate(self, http: JsonHttp, ask: Ask) -> Answer:
        """Complete all prompts in one request, with the keys of their draws."""
        body = {
            "prompt": [list(ids) for ids in ask.prompts],
            "n": ask.group_size,
            "seed": ask.key,
            "temperature": ask.temperature,
            "max_tokens": ask.max_new_tokens,
            "stop_token_ids": list(ask.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            **EXACT,
            **ask.limits,
            "rlhf": {
                "rows": list(ask.rows),
                "width": ask.width,
                "greedy": ask.greedy,
                "pad_id": ask.pad_id,
                "batch_size": ask.batch_size,
                "frozen": ask.frozen,
                "support": bool(ask.limits),
            },
        }
        answer = http.post("/v1/completions", body)
        choices = choices_of(answer, len(ask.prompts) * ask.group_size)
        ids, logprobs, prompts = (list(column) for column in zip(*map(read_choice, choices), strict=True))
        supports = [str(choice["support"]) for choice in choices] if ask.limits else None
        return Answer(
            ids=ids, logprobs=logprobs, prompts=prompts, version=answer.get("weight_version"), supports=supports
        )

    def score(self, http: JsonHttp, ids: list[int], *, adapted: bool) -> list[float]:
        """Ask for prompt_logprobs."""
        del adapted  # the server has one model

        return score(http, ids, model=None, timeout_s=self.timeout_s)

    def version(self, http: JsonHttp) -> str | None:
        """Ask /weights; a server that a broken push has left paused has no version to sample from."""
        status = http.get("/weights", timeout_s=SHORT_S)
        if not isinstance(status, Mapping) or "version" not in status:
            raise ServerRefused(200, f"/weights has no version: {status!r:.200}")
        return PAUSED if status.get("paused") else str(status["version"])

    def push(self, http: JsonHttp, push: Push) -> None:
        """Pause, load the folder, resume; the server answers no completion if the load breaks half way."""
        http.post("/pause", timeout_s=self.timeout_s)
        arguments = {"weights_path": push.path, "version": push.version, "base": push.base}
        http.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
        http.post("/reset_prefix_cache", timeout_s=SHORT_S)
        http.post("/resume", timeout_s=SHORT_S)

    def digests(self, http: JsonHttp) -> Mapping[str, str] | None:
        """Ask /weights for the digest of every tensor in the server's memory."""
        digests: Mapping[str, str] = http.get("/weights?digests=1")["digests"]
        return digests

    def describe_arithmetic(self, http: JsonHttp) -> str | None:
        """Ask /weights."""
        status = http.get("/weights", timeout_s=SHORT_S)
        return f"{status['dtype']}, weights {status['weights']}"
