"""Servers that answer, but not as they should: behind a gateway, of another kind, paused, restarted, with NaN."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from runs import make_model
from servers import CPU, listening, service_of, serving
from torch import Tensor

from rlhf.config.sections import SamplingConfig
from rlhf.errors import SamplingError
from rlhf.models.backbone import load_causal_lm
from rlhf.models.policy_models import Models
from rlhf.sampling.launched import LaunchedServer
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.push import PushedPolicy
from rlhf.sampling.served import ServedSampler
from rlhf.sampling.service import PolicyService
from rlhf.serving.http import JsonHttp, ServerDown, ServerRefused
from rlhf.serving.own import OwnServer
from rlhf.serving.routes import Answer, Ask, choices_of, read_choice
from rlhf.serving.server import LaunchConfig, Push
from rlhf.serving.vllm import VllmServer
from rlhf.types import Prompts

PROMPTS = [[4, 5], [6]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("flaky") / "model")


def policy_of(model: Path) -> PushedPolicy:
    return PushedPolicy(Models(policy=load_causal_lm(str(model)), temperature=1.0, dtype="float32", device=CPU))


def pool_of(folder: Path, *urls: str, **server: Any) -> ServerPool:
    config = OwnServer(urls=list(urls), **server)
    return ServerPool(config, folder / "weights", dtype="float32", pad_id=0)


def ask() -> Ask:
    return Ask(
        prompts=PROMPTS,
        rows=[0, 1],
        width=2,
        group_size=1,
        key=1,
        greedy=False,
        temperature=1.0,
        max_new_tokens=3,
        stop_ids=(2,),
        pad_id=0,
        batch_size=8,
    )


def drawn(pool: ServerPool, policy: PushedPolicy) -> list[list[int]]:
    """The completions of the servers."""
    with pool.sampling_from(policy, PROMPTS):
        return pool.generate([ask()], policy)[0].ids


def answering(status: int, body: str = "{}") -> AbstractContextManager[str]:
    """The address of a server that has one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_a_gateway_whose_server_restarts_is_a_server_that_is_down(status: int) -> None:
    with answering(status, "<html>Bad Gateway</html>") as url, pytest.raises(ServerDown, match=str(status)):
        JsonHttp(url, timeout_s=5.0).get("/weights")


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_what_another_try_would_not_change_is_refused(status: int) -> None:
    with answering(status) as url, pytest.raises(ServerRefused, match=str(status)):
        JsonHttp(url, timeout_s=5.0).get("/weights")


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [(404, '{"detail": "Not Found"}', "HTTP 404"), (200, "[]", "no version")],
    ids=["vllm, which has no /weights", "some other program"],
)
def test_a_server_of_another_kind_stops_the_run_with_a_sentence(
    model: Path, tmp_path: Path, status: int, body: str, why: str
) -> None:
    wanted = rf"{why}.*sampling\.server\.type"
    with answering(status, body) as url, pytest.raises(SamplingError, match=wanted):
        drawn(pool_of(tmp_path, url), policy_of(model))


def test_a_wrong_token_stops_the_run_with_a_sentence(model: Path, tmp_path: Path) -> None:
    wanted = r"401.*sampling\.server\.token_env"
    with listening(service_of(model), token="secret") as url, pytest.raises(SamplingError, match=wanted):
        drawn(pool_of(tmp_path, url), policy_of(model))


def test_a_server_that_was_paused_by_a_push_that_timed_out_goes_on(model: Path, tmp_path: Path) -> None:
    class Slow(PolicyService):
        pushes = 0

        def apply(self, tensors: Mapping[str, Tensor]) -> None:
            self.pushes += 1
            if self.pushes == 1:
                time.sleep(3.3)
            super().apply(tensors)

    service, policy = service_of(model, Slow), policy_of(model)
    warnings: list[str] = []
    with listening(service) as url:
        pool = pool_of(tmp_path, url, timeout_s=3.0, wait_s=60.0)
        pool.warn = warnings.append
        ids = drawn(pool, policy)
    assert service.pushes >= 2
    assert any("does not answer" in text and "the run waits up to 60 s for it" in text for text in warnings)
    with listening(service_of(model)) as url:
        assert ids == drawn(pool_of(tmp_path / "other", url), policy)


def test_a_server_that_restarts_before_it_loads_what_changed_gets_everything(model: Path, tmp_path: Path) -> None:
    class Restarts(PolicyService):
        loads = 0

        def load(self, path: str, *, version: str | None = None, base: str | None = None) -> None:
            self.loads += 1
            if self.loads == 2:
                self.version = "of its start"
            super().load(path, version=version, base=base)

    service, policy = service_of(model, Restarts), policy_of(model)
    with listening(service) as url:
        pool = pool_of(tmp_path, url)
        drawn(pool, policy)
        policy.model.get_output_embeddings().weight.data.mul_(1.5)
        ids = drawn(pool, policy)
    assert service.loads == 3
    with listening(service_of(model)) as url:
        assert ids == drawn(pool_of(tmp_path / "other", url), policy)


class Shared(PolicyService):
    """A server to which another run pushes before some requests for completions."""

    before: tuple[int, ...] = ()  # the numbers of these requests
    asked = 0
    other: tuple[ServerPool, PushedPolicy]

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.asked in self.before:
            pool, policy = self.other
            self.load(str(pool._write_full(policy, policy.tensors())))
        return super().complete(body)


def other_run(folder: Path, model: Path, url: str) -> tuple[ServerPool, PushedPolicy]:
    """A run with other weights, which has pushed once."""
    policy = policy_of(model)
    policy.model.get_output_embeddings().weight.data.mul_(1.5)
    pool = pool_of(folder / "other", url)
    drawn(pool, policy)
    return pool, policy


@pytest.mark.parametrize("moment", [1, 2, 3], ids=["canary completes", "canary scores", "rollout"])
def test_a_run_beside_another_on_one_server_samples_from_its_own_weights(
    model: Path, tmp_path: Path, moment: int
) -> None:
    """They are pushed again after a push of the other run, which is no mistake of the server's, and told once."""
    policy, notes = policy_of(model), list[str]()
    with listening(service_of(model)) as url:
        alone = drawn(pool_of(tmp_path / "alone", url), policy)
    service = service_of(model, Shared)
    with listening(service) as url:
        service.other = other_run(tmp_path, model, url)
        pool = pool_of(tmp_path, url)
        pool.warn = notes.append
        service.before = (service.asked + moment, service.asked + moment + 3)
        assert drawn(pool, policy) == alone
    assert service.asked > service.before[1]
    assert service.version == pool.version
    (note,) = notes
    assert note.startswith(f"the sampling server {url} has other weights than this run has pushed")
    assert "give each run a server of its own" in note


def test_a_server_that_another_run_never_leaves_stops_the_run_with_its_cause(model: Path, tmp_path: Path) -> None:
    service = service_of(model, Shared)
    with listening(service) as url:
        service.other = other_run(tmp_path, model, url)
        service.before = tuple(range(service.asked, 1000))
        wanted = r"has kept the weights of this run for 0\.1 s.*another run has pushed to it.*give each run a server"
        with pytest.raises(SamplingError, match=wanted):
            drawn(pool_of(tmp_path, url, wait_s=0.1), policy_of(model))


class Loads(VllmServer):
    """A server that reports no version, and counts pushes."""

    pushed: ClassVar[list[str]] = []

    def version(self, http: JsonHttp) -> str | None:
        return None

    def push(self, http: JsonHttp, push: Push) -> None:
        self.pushed.append(push.version)


class DiesOnce(LaunchedServer):
    """A server of the run that has died before it is looked at for the second time, and is started again."""

    looks = 0

    def ensure(self) -> bool:
        self.looks += 1
        return self.looks == 2


def test_a_server_that_the_run_starts_again_gets_the_weights_again(model: Path, tmp_path: Path) -> None:
    """Also if they have not changed, as in an evaluation after a step: it has the weights of its start."""
    config, policy = Loads(launch=LaunchConfig(), canary={"prompts": 0}), policy_of(model)
    process = DiesOnce(["vllm"], {}, port=1, log=tmp_path / "log")
    process.has_answered = True
    pool = ServerPool(config, tmp_path, dtype="float32", pad_id=0, processes=[process])
    for pushes in (1, 2, 2):
        with pool.sampling_from(policy, PROMPTS):
            assert len(config.pushed) == pushes
    assert len(set(config.pushed)) == 1


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, 3.0])
def test_a_token_without_a_log_probability_is_refused(value: float | None) -> None:
    choice = {"token_ids": [4, 5], "prompt_token_ids": [6], "logprobs": {"token_logprobs": [-1.0, value]}}
    with pytest.raises(ServerRefused, match=r"token 2 .* has the log-probability"):
        read_choice(choice)


@pytest.mark.parametrize("token", [5.5, -1, None, "5", True])
def test_a_token_id_that_is_none_is_refused(token: object) -> None:
    choice = {"token_ids": [4, token], "prompt_token_ids": [6], "logprobs": {"token_logprobs": [-1.0, -1.0]}}
    with pytest.raises(ServerRefused, match="token 2 of a completion has the id"):
        read_choice(choice)


def test_a_token_id_beyond_the_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    sampler = ServedSampler(pool_of(tmp_path, "http://unused"), policy.models, SamplingConfig(), eos_ids=(1,), pad_id=0)
    ids = torch.tensor([[3, 4]])
    prompts = Prompts(prompt_ids=ids, prompt_mask=ids > 0, row_ids=torch.arange(1), references=({},))
    answer = Answer(ids=[[5, 999_999]], logprobs=[[-1.0, -1.0]], prompts=[[3, 4]], version=None)
    with pytest.raises(SamplingError, match="token id 999999: the policy has"):
        sampler._assemble(prompts, [[3, 4]], [answer], 1)


def test_a_server_that_is_too_slow_for_the_timeout_is_told_from_one_that_is_gone(model: Path, tmp_path: Path) -> None:
    class Slow(PolicyService):
        def sample(self, *arguments: Any, **settings: Any) -> Any:
            time.sleep(1.5)
            return super().sample(*arguments, **settings)

    wanted = r"has answered for 0\.1 s .*sampling\.server\.timeout_s.*timed out"
    with listening(service_of(model, Slow)) as url, pytest.raises(SamplingError, match=wanted):
        drawn(pool_of(tmp_path, url, timeout_s=0.5, wait_s=0.1), policy_of(model))


def test_vllm_confirms_an_adapter_by_a_sentence() -> None:
    push = Push(path="weights", version="v.1", base=None, is_adapter=True)
    with answering(200, "Success: LoRA adapter 'policy-adapter' added successfully.") as url:
        VllmServer(urls=[url]).push(JsonHttp(url, timeout_s=5.0), push)
        with pytest.raises(ServerRefused, match="not JSON"):
            JsonHttp(url, timeout_s=5.0).post("/v1/completions", {})
    with answering(404, "no such route") as url, pytest.raises(ServerRefused, match="404"):
        VllmServer(urls=[url]).push(JsonHttp(url, timeout_s=5.0), push)


def test_choices_without_a_number_are_refused() -> None:
    with pytest.raises(ServerRefused, match="expected 1 choices"):
        choices_of({"choices": [{"text": "x"}]}, 1)
