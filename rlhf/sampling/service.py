"""Our sampler behind vLLM's routes, for another process or machine: the server of `rlhf serve-policy`.

Beyond vLLM's fields it takes `rlhf: {rows, width, greedy, pad_id, batch_size, frozen, support}` in /v1/completions,
with which it draws exactly the trainer's tokens, and answers GET /weights with the version and the digests of
its weights.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.algo.support import SamplingLimits
from rlhf.config.sections import SamplingConfig
from rlhf.data.tokenizer import as_completions, left_pad
from rlhf.errors import SamplingError, UserError
from rlhf.models.adapters import is_adapted
from rlhf.models.backbone import CausalLM, context_length, load_adapter
from rlhf.models.policy_models import Models
from rlhf.sampling.fast.engine import KeptSteps
from rlhf.sampling.push import ADAPTER_SETTINGS, load_tensors, pushed_tensors, read_push, tensor_digest
from rlhf.sampling.sampler import Sampler, make_sampler
from rlhf.sampling.support import to_text
from rlhf.types import Completions, Prompts

Weights = Literal["exact", "int8"]
START = "start"  # the version of the weights that the server was started with
WAIT_S = 600.0  # a request waits this long for the end of a pause
SAMPLERS = (
    4  # that are kept, of as many settings: on a GPU each has recorded steps, and all have one copy of the weights
)
MOST_BYTES = 256 * 2**20  # of a request


class BadRequest(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@torch.no_grad()
def round_to_int8(weight: Tensor) -> Tensor:
    """Round a matrix to 8 bits a weight, symmetrically, with a scale for each row of outputs.

    w' = s round(w / s),   s = max |w| / 127 of the row
    """
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round() * scale


class PolicyService:
    """A model and the samplers on it; one request at a time computes."""

    def __init__(self, model: CausalLM, *, dtype: str, device: torch.device, weights: Weights = "exact") -> None:
        """Take the model, which stays on its device, with its weights.

        Args:
            dtype: of the arithmetic, as policy.dtype.
            weights: int8: matrices are rounded to 8 bits a weight, in this server only.
        """
        self.model = model.eval()
        self.dtype, self.device, self.weights = dtype, device, weights
        self.version = START
        self.broken: str | None = None
        self._is_base_pushed = False  # so that no adapter fits it any more
        self._adapter: dict[str, Any] = {}  # the settings of the adapter
        self._exact: dict[str, str] = {}  # digests before rounding
        self._lock = threading.RLock()
        self._running = threading.Event()
        self._running.set()
        self._forget_samplers()
        self._round(pushed_tensors(self.model))
        self._trained = [weight for weight in self.model.parameters() if weight.requires_grad]

    def _forget_samplers(self) -> None:
        """Drop all samplers and their shared copy of the weights; the next request makes them again."""
        self._kept = KeptSteps()
        self._sampler = lru_cache(SAMPLERS)(self._make_sampler)

    def _make_sampler(
        self,
        temperature: float,
        length: int,
        batch_size: int,
        limits: SamplingLimits,
        stop_ids: tuple[int, ...],
        pad_id: int,
    ) -> Sampler:
        config = SamplingConfig(
            temperature=temperature, max_new_tokens=length, batch_size=batch_size, **dataclasses.asdict(limits)
        )
        return make_sampler(
            self.model,
            config,
            eos_ids=stop_ids,
            pad_id=pad_id,
            dtype=self.dtype,
            device=self.device,
            kept=self._kept,
        )

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer /v1/completions.

        Raises:
            BadRequest: a field is missing or invalid, or a prompt is longer than the model's context.
        """
        ours = _field(body, "rlhf", dict, {})
        prompts = _prompts(body)
        size, vocabulary = _count(body, "n", 1), self.model.get_input_embeddings().weight.shape[0]
        length, context = _count(body, "max_tokens", 16), context_length(self.model)
        if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
            raise BadRequest(400, f"prompt: a token id is not in the vocabulary of {vocabulary}")
        longest = max(map(len, prompts))
        if context is not None and longest + length > context:
            raise BadRequest(
                400, f"prompt: {longest} tokens and max_tokens={length} are more than the model's context of {context}"
            )
        rows = [int(row) for row in ours.get("rows", range(len(prompts)))]
        if len(rows) != len(prompts):
            raise BadRequest(400, f"rlhf.rows: {len(rows)} numbers for {len(prompts)} prompts")
        limits = _limits(body, returns_support=bool(ours.get("support", False)))
        temperature = float(_field(body, "temperature", (int, float), 1.0))
        if not temperature >= 0:
            raise BadRequest(400, f"temperature: {temperature} is not valid")
        greedy = bool(ours.get("greedy", temperature == 0))
        self._check_whole()
        if not self._running.wait(WAIT_S):
            raise BadRequest(503, "paused")
        with self._lock:
            self._check_whole()
            scored = [self._score(ids) for ids in prompts] if body.get("prompt_logprobs") is not None else None
            completions = self.sample(
                prompts,
                rows=rows,
                width=int(ours.get("width", 0)),
                size=size,
                key=int(_field(body, "seed", int, 0)),
                greedy=greedy,
                frozen=bool(ours.get("frozen", False)),
                settings=(
                    temperature if temperature > 0 else 1.0,
                    length,
                    int(ours.get("batch_size", 256)),
                    limits,
                    tuple(int(token) for token in body.get("stop_token_ids") or ()),
                    int(ours.get("pad_id", 0)),
                ),
            )
            version = self.version
        choices = [_choice(completions, row, prompts[row // size], scored) for row in range(len(completions))]
        return {
            "id": f"cmpl-{time.time_ns():x}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": choices,
            "weight_version": version,
        }

    def sample(
        self,
        prompts: list[list[int]],
        *,
        rows: list[int],
        width: int,
        size: int,
        key: int,
        greedy: bool,
        frozen: bool,
        settings: tuple[float, int, int, SamplingLimits, tuple[int, ...], int],
    ) -> Completions:
        """Sample `size` completions of each prompt, whose draws are keyed by `key` and the prompts' `rows`.

        `frozen` says whether the trainer samples from weights that need no gradient. None is computed either way, but
        torch chooses its kernels by it, and their last bits differ.
        """
        for weight in self._trained:
            weight.requires_grad_(not frozen)
        ids, mask = left_pad(prompts, settings[-1])
        missing = width - ids.shape[1]
        if missing > 0:
            ids = torch.nn.functional.pad(ids, (missing, 0), value=settings[-1])
            mask = torch.nn.functional.pad(mask, (missing, 0), value=False)
        batch = Prompts(
            prompt_ids=ids, prompt_mask=mask, row_ids=torch.tensor(rows), references=tuple({} for _ in prompts)
        )
        return self._sampler(*settings).sample(batch, key=key, group_size=size, greedy=greedy)

    @torch.no_grad()
    def _score(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1."""
        rows = as_completions([ids[:1]], [ids[1:]], pad_id=0)
        models = Models(policy=self.model, temperature=1.0, dtype=self.dtype, device=self.device)
        values: list[float] = models.policy_tokens(rows.to(self.device)).logprobs[0].cpu().tolist()
        return values

    def load(self, path: str, *, version: str | None = None, base: str | None = None) -> None:
        """Load pushed weights: all of them, or none and nothing is answered any more.

        Raises:
            BadRequest: the folder is broken, is not of this model, or changes other weights than the server has.
        """
        with self._lock:
            if base is not None and base != self.version:
                raise BadRequest(409, f"the folder changes version {base}, but this server has {self.version}")
            try:
                tensors, manifest, is_adapter = read_push(Path(path))
                if is_adapter:
                    self._use_adapter(Path(path))
                self._is_base_pushed |= not is_adapted(self.model)
                self.apply(tensors)
                self._round(tensors)
            except Exception as error:
                self.broken = f"{type(error).__name__}: {error}"
                raise BadRequest(500, self.broken) from error
            self.version, self.broken = str(version or manifest["version"]), None

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into the model."""
        load_tensors(self.model, tensors)

    def _use_adapter(self, folder: Path) -> None:
        """Put the adapter onto the weights of the start, instead of one with other settings.

        Raises:
            SamplingError: the server no longer has the weights of the start.
        """
        settings: dict[str, Any] = json.loads((folder / ADAPTER_SETTINGS).read_text(encoding="utf-8"))
        if is_adapted(self.model) and settings == self._adapter:
            return
        if self._is_base_pushed:
            raise SamplingError(
                "another run has pushed all weights to this server, and an adapter needs the weights of its start"
            )
        if is_adapted(self.model):
            self.model.delete_adapter(self.model.active_adapter)  # or unload() would keep the modules trained whole
            self.model = self.model.unload()
        assert isinstance(self.model, PreTrainedModel)
        self.model, self._adapter = load_adapter(self.model, folder).eval(), settings
        self._exact = {}  # of the base, which nobody pushes any more
        self._forget_samplers()
        self._trained = [weight for weight in self.model.parameters() if weight.requires_grad]

    def _round(self, tensors: Mapping[str, Tensor]) -> None:
        """Round matrices in the server's memory, and remember their numbers."""
        if self.weights == "exact":
            return
        own = pushed_tensors(self.model)
        for name in tensors:
            self._exact[name] = tensor_digest(own[name])
            if own[name].dim() == 2:
                if self.dtype == "bfloat16":  # as the trainer's products see them: small updates are lost there first
                    own[name].copy_(own[name].bfloat16())
                own[name].copy_(round_to_int8(own[name]))

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor in memory; of rounded ones, before the rounding."""
        with self._lock:
            return {name: tensor_digest(tensor) for name, tensor in pushed_tensors(self.model).items()} | self._exact

    def _check_whole(self) -> None:
        if self.broken is not None:
            raise BadRequest(500, f"the last push broke, so nothing is sampled: {self.broken}")

    def pause(self) -> None:
        """Let no request begin until `resume`, and wait for those that compute."""
        self._running.clear()
        with self._lock:
            pass

    def resume(self) -> None:
        """Let requests begin again."""
        self._running.set()

    def answer(self, method: str, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request.

        Raises:
            BadRequest: there is no such route, or the request is invalid.
        """
        match method, route.partition("?")[0]:
            case "GET", "/health" | "/version":
                return {"status": "ok", "version": self.version}
            case "GET", "/weights":
                about: dict[str, Any] = {"version": self.version, "dtype": self.dtype, "weights": self.weights}
                about["paused"] = not self._running.is_set()
                return about | ({"digests": self.digests()} if "digests" in route else {})
            case "POST", "/v1/completions":
                return self.complete(body)
            case "POST", "/pause":
                self.pause()
            case "POST", "/resume":
                self.resume()
            case "POST", "/reset_prefix_cache":
                pass  # no keys or values outlive a request
            case "POST", "/collective_rpc":
                self.call(str(body.get("method")), _field(body, "kwargs", dict, {}))
            case _:
                raise BadRequest(404, f"no such route: {method} {route}")
        return {}

    def call(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Call a method by name, like /collective_rpc.

        Raises:
            BadRequest: there is no such method, or it fails.
        """
        if method != "reload_weights":
            raise BadRequest(404, f"no such method: {method}")
        path = _field(arguments, "weights_path", str, None)
        self.load(path, version=arguments.get("version"), base=arguments.get("base"))


def _choice(completions: Completions, row: int, prompt: list[int], scored: list[list[float]] | None) -> dict[str, Any]:
    length = int(completions.completion_mask[row].sum())
    ids: list[int] = completions.completion_ids[row, :length].tolist()
    logprobs: list[float] = completions.sampler_logprobs[row, :length].tolist()
    choice: dict[str, Any] = {
        "index": row,
        "text": "",
        "token_ids": ids,
        "prompt_token_ids": prompt,
        "logprobs": {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": logprobs},
        "finish_reason": "stop" if bool(completions.finished[row]) else "length",
    }
    if completions.sampler_support is not None:
        choice["support"] = to_text(completions.sampler_support[row, :length])
    if scored is not None:
        values = scored[row // completions.group_size]
        entries = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], values, strict=True)]
        choice["prompt_logprobs"] = [None, *entries]
    return choice


def _limits(body: Mapping[str, Any], *, returns_support: bool) -> SamplingLimits:
    """Return the limits that leave tokens out.

    Raises:
        BadRequest: there are some, and the client does not ask for the tokens left.
    """
    given: dict[str, Any] = {}
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("repetition_penalty", 1)):
        value = _field(body, name, (int, float), neutral)
        if value in (neutral, -1):
            continue
        if name == "repetition_penalty" or not returns_support:
            raise BadRequest(400, f"{name}: this server samples from the whole distribution: leave it out")
        given[name] = int(value) if name == "top_k" else float(value)
    return SamplingLimits(**given)


def _prompts(body: Mapping[str, Any]) -> list[list[int]]:
    prompt = body.get("prompt")
    rows = [prompt] if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else prompt
    if not isinstance(rows, list) or not rows or not all(_is_ids(row) for row in rows):
        raise BadRequest(400, "prompt: give token ids, or a list of lists of them; this server reads no text")
    return rows


def _is_ids(row: object) -> bool:
    return isinstance(row, list) and bool(row) and all(type(token) is int for token in row)


def _field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = default if body.get(name) is None else body[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequest(400, f"{name}: {value!r} is not valid")
    return value


def _count(body: Mapping[str, Any], name: str, default: int) -> int:
    """Return a number of at least 1.

    Raises:
        BadRequest: it is none.
    """
    value: int = _field(body, name, int, default)
    if value < 1:
        raise BadRequest(400, f"{name}: {value} is not valid")
    return value


Answering = Callable[[str, str, Mapping[str, Any]], dict[str, Any]]
"""Returns the answer to a request from its method, route and body: `PolicyService.answer`."""


def make_policy_server(answer: Answering, host: str, port: int, *, token: str | None = None) -> ThreadingHTTPServer:
    """Listen for the requests of a trainer; the result answers them by `answer` once it serves.

    Raises:
        OSError: the address cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply("GET", lambda: {})

        def do_POST(self) -> None:
            self._reply("POST", self._body)

        def _body(self) -> Mapping[str, Any]:
            length = int(self.headers.get("Content-Length") or 0)
            if length > MOST_BYTES:
                raise BadRequest(413, f"the request is larger than {MOST_BYTES} bytes")
            try:
                body = json.loads(self.rfile.read(length) or b"{}")
            except ValueError as error:
                raise BadRequest(400, f"the request is not JSON: {error}") from error
            if not isinstance(body, dict):
                raise BadRequest(400, "the request is not a JSON object")
            return body

        def _reply(self, method: str, read: Callable[[], Mapping[str, Any]]) -> None:
            try:
                self._check_token()
                status, reply = 200, answer(method, self.path, read())
            except BadRequest as error:
                status, reply = error.status, {"error": str(error)}
            except (UserError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError) as error:
                status, reply = 500, {"error": f"{type(error).__name__}: {error}"}
            content = json.dumps(reply).encode()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has gone
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def _check_token(self) -> None:
            given = self.headers.get("Authorization") or ""
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise BadRequest(401, "this server needs a token: Authorization: Bearer ...")

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    ThreadingHTTPServer.allow_reuse_address = True
    return ThreadingHTTPServer((host, port), Handler)
