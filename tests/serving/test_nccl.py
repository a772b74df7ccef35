"""Weights that go from GPU to GPU, with stand-ins for vLLM and NCCL: the requests to the server, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_transfer import Engine, TransferService, install
from runs import make_model, online, ppo_tree
from servers import listening, service_of
from tiny_models import saved, tiny

from rlhf.config.load import train_config
from rlhf.errors import ConfigError, SamplingError
from rlhf.models.backbone import load_causal_lm
from rlhf.models.policy_models import Models
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.push import PushedPolicy, pushed_tensors
from rlhf.serving.server import Launch
from rlhf.serving.vllm import VllmServer
from rlhf.training.online import train

CPU = torch.device("cpu")
PROMPTS = [[4, 5], [6]]
OPENS = ["/get_world_size", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
SENDS = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"]
PUSH = [*SENDS, "/update_weight_version"]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nccl") / "model"
    return Path(saved(tiny(dtype=torch.float32, tie_word_embeddings=True), folder))


def service(model: Path) -> TransferService:
    made = service_of(model, TransferService)
    assert isinstance(made, TransferService)
    return made


def policy_of(model: Path) -> PushedPolicy:
    return PushedPolicy(Models(policy=load_causal_lm(str(model)), temperature=1.0, dtype="float32", device=CPU))


def pool_of(folder: Path, *urls: str) -> ServerPool:
    config = VllmServer(urls=list(urls), transfer="nccl", timeout_s=60.0)
    return ServerPool(config, folder / "weights", dtype="float32", pad_id=0)


@torch.no_grad()
def push(pool: ServerPool, policy: PushedPolicy) -> tuple[float, float]:
    """The canary's difference and the MB sent, after a change of the weights."""
    for tensor in policy.tensors().values():
        tensor += 0.1 * torch.randn(tensor.shape)
    with pool.sampling_from(policy, PROMPTS):
        metrics = pool.take_metrics()
        return metrics["server/canary"], metrics["server/pushed_mb"]


def test_a_push_asks_what_vllm_expects_in_its_order(model: Path, tmp_path: Path) -> None:
    server, policy = service(model), policy_of(model)
    own = pushed_tensors(policy.model)
    assert "lm_head.weight" not in own, "tied to the embeddings, and sent once"
    with listening(server) as url:
        pool = pool_of(tmp_path, url)
        assert push(pool, policy)[0] < 1e-4
        assert server.routes == ["/weight_info", *OPENS, *PUSH]
        first, asked = pool.version, dict(server.asked)
        canary, mb = push(pool, policy)
        assert canary < 1e-4
        assert server.routes[11:] == ["/weight_info", *PUSH], "the group is the same"
        pool.close()
    info = asked["/init_weight_transfer_engine"]["init_info"]
    assert info["master_address"] == "127.0.0.1"
    assert (info["rank_offset"], info["world_size"]) == (1, 3), "the trainer, and two workers"
    assert asked["/update_weights"]["update_info"] == {
        "names": list(own),
        "dtype_names": ["float32"] * len(own),
        "shapes": [list(tensor.shape) for tensor in own.values()],
    }
    assert asked["/update_weight_version"] == {"new_version": first}
    assert server.weight_version == pool.version != first
    assert mb == pytest.approx(sum(tensor.nbytes for tensor in own.values()) / 1e6)
    assert not (tmp_path / "weights").exists(), "no folder is written"
    assert Engine.made[0].left.is_set()


def test_weights_that_have_not_changed_are_not_sent_again(model: Path, tmp_path: Path) -> None:
    server, policy = service(model), policy_of(model)
    with listening(server) as url:
        pool = pool_of(tmp_path, url)
        push(pool, policy)
        with pool.sampling_from(policy, PROMPTS):
            pass
    assert server.routes[11:] == ["/weight_info"]


def test_each_server_has_a_group_and_a_restarted_one_a_new_one(model: Path, tmp_path: Path) -> None:
    one, two, policy = service(model), service(model), policy_of(model)
    with listening(one) as first, listening(two) as second:
        pool = pool_of(tmp_path, first, second)
        push(pool, policy)
        assert [engine.info.world_size for engine in Engine.made] == [3, 3]
        assert one.group != two.group
        two.group, two.weight_version = None, "default"  # as after its start
        assert push(pool, policy)[0] < 1e-4
    assert [server.routes.count("/init_weight_transfer_engine") for server in (one, two)] == [1, 2]
    assert [engine.left.is_set() for engine in Engine.made] == [False, True, False]


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_transfer_that_breaks_stops_and_leaves_the_server_paused(model: Path, tmp_path: Path, route: str) -> None:
    server, policy = service(model), policy_of(model)
    wanted = (
        r"did not get all weights of version \w+\.2 by NCCL: HTTP 500.*no such luck.*its log says why.*stays paused"
    )
    with listening(server) as url:
        pool = pool_of(tmp_path, url)
        push(pool, policy)
        server.fails_at = route, 2
        with pytest.raises(SamplingError, match=wanted):
            push(pool, policy)
    assert server.routes[-1] == route
    assert server.routes.count("/resume") == 1
    assert Engine.made[0].left.is_set(), "nobody waits in NCCL any more"
    assert server.weight_version.endswith(".1")


def test_a_server_without_a_transfer_is_told_which_flag_it_needs(model: Path, tmp_path: Path) -> None:
    server = service(model)
    server.fails_at = "/init_weight_transfer_engine", 1
    wanted = r"cannot be sent weights by NCCL: HTTP 500.*--weight-transfer-config .*transfer=folder"
    with listening(server) as url, pytest.raises(SamplingError, match=wanted):
        push(pool_of(tmp_path, url), policy_of(model))
    assert "/pause" not in server.routes
    Engine.made[0].left.set()


def test_the_canary_says_what_it_cannot_try(model: Path, tmp_path: Path) -> None:
    server, policy = service(model), policy_of(model)
    with listening(server) as url:
        pool = pool_of(tmp_path, url)
        push(pool, policy)
        server.applies = False
        with pytest.raises(SamplingError, match=r"Likely: .*old weights, which are in no folder, were not tried"):
            push(pool, policy)


def test_a_run_whose_transfer_breaks_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmServer, "check_trainer", lambda self, device, trains_adapter: None)
    model = make_model(tmp_path / "model")
    server = service(model)
    server.fails_at = "/update_weights", 2
    with listening(server) as url:
        run = online(tree_of(tmp_path, {"type": "vllm", "urls": [url]}, policy={"model": str(model), "lr": 1e-2}))
        with pytest.raises(SamplingError, match=r"stays paused.*The run is saved at step 1"):
            train(run)
        run.session.recorder.close()
    assert server.routes[-1] == "/update_weights"


def tree_of(folder: Path, server: dict[str, Any], **sections: Any) -> dict[str, Any]:
    sampling = {"backend": "server", "server": {"transfer": "nccl", **server}, "completions_per_prompt": 2}
    more: dict[str, Any] = {"algorithm": {"preset": "grpo"}, "batch": {"prompts_per_step": 4}, "eval": {"every": 0}}
    return ppo_tree(folder, **{**more, "sampling": sampling, **sections})


@pytest.mark.parametrize(
    ("server", "sections", "why"),
    [
        ({"type": "rlhf"}, {}, r"sampling\.server\.transfer"),
        ({"type": "vllm"}, {"sharding": {"mode": "zero3"}}, "zero3 splits"),
    ],
)
def test_what_cannot_be_combined(tmp_path: Path, server: dict[str, Any], sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        train_config(tree_of(tmp_path, {"urls": ["http://127.0.0.1:9"], **server}, **sections))


def test_a_trainer_that_cannot_send_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path, {"type": "vllm", "launch": {}}, policy={"model": str(tmp_path / "no model")})
    with pytest.raises(ConfigError, match=r"policy\.lora trains an adapter"):
        online({**tree, "policy": {**tree["policy"], "lora": {"r": 2}}})
    with pytest.raises(ConfigError, match=r"the trainer runs on cpu: set run\.device=cuda, or .*transfer=folder"):
        online(tree)
    monkeypatch.delitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine")
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32.*nccl_engine.*pip install vllm, or set .*transfer=folder"):
        VllmServer(launch={}, transfer="nccl").check_trainer("cuda", trains_adapter=False)
    VllmServer(launch={}).check_trainer("cpu", trains_adapter=True)


def test_a_server_that_the_run_starts_has_the_flag() -> None:
    asked = Launch(model="m", port=9000, dtype="bfloat16", device="cuda", threads=3)
    command = VllmServer(launch={}, transfer="nccl").command(asked)
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert "--weight-transfer-config" not in VllmServer(launch={}).command(asked)
