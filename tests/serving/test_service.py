"""Our server's routes: their refusals, and their answers to a client that knows vLLM's fields alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_model, online, ppo_tree, trained
from servers import listening, served, service_of

from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.service import SAMPLERS, BadRequest
from rlhf.serving.http import JsonHttp, ServerDown, ServerRefused
from rlhf.serving.own import OwnServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy") / "model")


def test_a_request_with_vllm_s_fields_alone(model: Path) -> None:
    body = {"prompt": [4, 5], "n": 3, "seed": 7, "max_tokens": 5, "stop_token_ids": [2], "prompt_logprobs": 0}
    answers = [service_of(model).answer("POST", "/v1/completions", body) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert len({tuple(choice["token_ids"]) for choice in answers[0]["choices"]}) > 1
    for choice in answers[0]["choices"]:
        assert choice["prompt_token_ids"] == [4, 5]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 5
        assert (choice["finish_reason"] == "stop") == (choice["token_ids"][-1] == 2)
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]["5"]["logprob"] < 0


def test_requests_of_many_settings_leave_few_samplers(model: Path) -> None:
    service = service_of(model)
    for length in range(1, 8):
        service.answer("POST", "/v1/completions", {"prompt": [4], "max_tokens": length})
    assert service._sampler.cache_info().currsize == SAMPLERS


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "red one"}, "token ids"),
        ({"prompt": [[]]}, "token ids"),
        ({"prompt": [4, 99]}, "not in the vocabulary of 10"),
        ({"prompt": [4], "top_p": 0.9}, "samples from the whole distribution"),
        ({"prompt": [4], "top_k": 50}, "samples from the whole distribution"),
        ({"prompt": [4], "max_tokens": "many"}, "max_tokens"),
        ({"prompt": [4], "max_tokens": 0}, "max_tokens: 0"),
        ({"prompt": [4], "n": -1}, "n: -1"),
        ({"prompt": [4], "temperature": -0.5}, "temperature: -0.5"),
        ({"prompt": [4] * 60, "max_tokens": 5}, "60 tokens and max_tokens=5 are more than the model's context of 64"),
    ],
)
def test_what_is_refused(model: Path, body: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        service_of(model).answer("POST", "/v1/completions", body)


def test_a_folder_of_another_model_is_refused_and_nothing_is_sampled_after(model: Path, tmp_path: Path) -> None:
    service = service_of(model)
    with pytest.raises(BadRequest, match="cannot read weights"):
        service.answer(
            "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        )
    with pytest.raises(BadRequest, match="the last push broke"):
        service.answer("POST", "/v1/completions", {"prompt": [4]})


def test_a_broken_request_gets_an_answer(model: Path) -> None:
    """A connection that breaks would look like a dead server, which the trainer waits for."""
    broken: list[dict[str, Any]] = [
        {"rlhf": {"width": None}},
        {"rlhf": {"rows": [0, 1, 2]}},
        {"stop_token_ids": 5},
        {"seed": 2**70},
    ]
    with listening(service_of(model)) as url:
        http = JsonHttp(url, timeout_s=5.0)
        for wrong in broken:
            with pytest.raises(ServerRefused, match=r"HTTP [45]00"):
                http.post("/v1/completions", {"prompt": [[4], [5]], "max_tokens": 2, **wrong})


@pytest.mark.parametrize("url", ["http://host:port", "http://host:99999", "http://[::1", "http://.x", "host:8001"])
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.server\.urls"):
        JsonHttp(url, timeout_s=5.0)


def test_a_secret_that_no_header_can_hold_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKEN", "secret\n")
    with pytest.raises(ConfigError, match=r"sampling\.server\.token_env.*TOKEN"):
        ServerPool(OwnServer(urls=["http://a"], token_env="TOKEN"), tmp_path, dtype="float32", pad_id=0)


def test_a_token_and_an_address(model: Path) -> None:
    with listening(service_of(model), token="secret") as url:
        with pytest.raises(ServerRefused, match="401"):
            JsonHttp(url, timeout_s=5.0).get("/weights")
        assert JsonHttp(url, timeout_s=5.0, secret="secret").get("/weights")["version"] == "start"
    with pytest.raises(ServerDown):
        JsonHttp(url, timeout_s=5.0).get("/health")
    with pytest.raises(ConfigError, match=r"sampling\.server\.urls"):
        JsonHttp("ftp://x", timeout_s=5.0)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"sampling": {"backend": "server"}}, "no server is named"),
        ({"sampling": served("http://a"), "sharding": "zero3"}, "zero3 splits them"),
        ({"sampling": served("http://a", type="vllm", params={"top_p": 0.9})}, "top_p leaves tokens out"),
        ({"sampling": served("http://a", type="vllm", params={"logit_bias": {}})}, "changes the distribution"),
        ({"sampling": served("http://a", type="vllm", params={"seed": 1})}, "set by the trainer"),
        ({"sampling": {"correction": "token_mask", "old_log_probs": "sampler"}}, "trainer's own log-probabilities"),
        ({"sampling": {"correction": {"type": "token_mask", "cap": 0.5}}}, "greater than or equal to 1"),
        ({"sampling": {"correction": "token"}}, "token_truncate"),
    ],
)
def test_combinations_that_are_refused(tmp_path: Path, overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        train_config(ppo_tree(tmp_path, **overrides))


@pytest.mark.parametrize("name", ["none", "sequence_mask"])
def test_a_rounded_sampler_is_corrected(tmp_path: Path, name: str) -> None:
    """8-bit weights in the server alone: the run goes on, and says how much the weights change."""
    model = make_model(tmp_path / "model")
    service = service_of(model, weights="int8")
    with listening(service) as url:
        sampling = {**served(url, canary={"bound": 1.0}), "correction": {"type": name}}
        run = trained(ppo_tree(tmp_path, policy={"model": str(model)}, sampling=sampling), "schedule.steps=2")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert ("correction/ess" in text) == (name != "none")
    assert run.servers is not None
    assert service.version == run.servers.version


def test_stale_samples_are_corrected_by_the_same_weights(tmp_path: Path) -> None:
    """overlap.ahead with token_truncate at its cap equals overlap.ratio_cap."""
    model = make_model(tmp_path / "model")
    runs = []
    for name, extra in (
        ("old", []),
        ("new", ["sampling.correction.type=token_truncate", "sampling.correction.cap=2.0"]),
    ):
        (tmp_path / name).mkdir()
        tree = ppo_tree(tmp_path / name, policy={"model": str(model)}, overlap={"ahead": True})
        runs.append(trained(tree, *extra))
    old, new = (dict(run.models.policy.state_dict()) for run in runs)
    assert all(torch.equal(old[key], new[key]) for key in old)


def test_a_finished_run_is_sampled_in_this_process(tmp_path: Path) -> None:
    """Without its servers a run can still be evaluated: only training asks them."""
    run = online(ppo_tree(tmp_path, sampling=served("http://127.0.0.1:1")))
    assert run.servers is not None
    run.session.recorder.close()
