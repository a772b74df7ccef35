"""Frozen models and moments off the device: their moves, that no number changes, and that a run resumes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_model, online, ppo_tree, trained, weights
from torch import Tensor

from rlhf.config.load import train_config
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ConfigError
from rlhf.factory import offload as factory
from rlhf.models.scalar_head import load_scalar_head
from rlhf.runtime.engine import LocalModel
from rlhf.runtime.offload import HostStore, Movable, Offload, store_of
from rlhf.sampling.fast.engine import FastSampler
from rlhf.training.online import train


class Elsewhere:
    """A store that stands in for the memory beside a GPU's: tensors in it have no numbers on the device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.away: dict[int, Tensor] = {}
        self.most = 0

    def put(self, tensors: Sequence[Tensor], kept: Sequence[Tensor] | None) -> list[Tensor]:
        hosts = list(kept) if kept is not None else [tensor.detach().clone() for tensor in tensors]
        self.log.append(f"put {len(hosts)}{' again' if kept is not None else ''}")
        for tensor, host in zip(tensors, hosts, strict=True):
            self.away[id(tensor)] = host
            tensor.data = self.stand_in(tensor, host)
        self.most = max(self.most, len(self.away))
        return hosts

    def stand_in(self, tensor: Tensor, host: Tensor) -> Tensor:
        """A frozen weight has no numbers while it is away, so that to read one raises; a checkpoint reads moments."""
        is_read_away = not isinstance(tensor, torch.nn.Parameter) and tensor.dtype == torch.float32
        return host if is_read_away and tensor.ndim > 0 else torch.empty(0, dtype=tensor.dtype)

    def get_back(self, tensors: Sequence[Tensor]) -> None:
        self.log.append(f"get {len(tensors)}")
        for tensor in tensors:
            tensor.data = self.away.pop(id(tensor)).clone()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    store = Elsewhere()
    monkeypatch.setattr(factory, "store_of", lambda device: store)
    return store


def tree_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """PPO with a reference, a critic and a reward model, each a model of its own."""
    tree = ppo_tree(folder, **changes)
    if not (folder / "reward").is_dir():
        make_model(folder / "start", seed=5)
        tokenizer = load_tokenizer(str(folder / "start"))
        load_scalar_head(str(folder / "start"), tokenizer, new_head="normal").save(tokenizer, folder / "reward")
    tree["reward"] = {"source": {"type": "model", "path": str(folder / "reward")}}
    tree["critic"] = {**tree.get("critic", {}), "init": "policy"}
    return tree


BOTH = {"frozen_models": True, "optimizer": True, "sampler": True}


def final(run: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, model in (("policy", run.models.policy), ("critic", run.models.critic))
        for key, value in weights(model).items()
    }


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_run_is_the_same_bit_for_bit_and_resumes_so(
    tmp_path: Path, elsewhere: Elsewhere, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    change: dict[str, Any] = {"policy": {"optimizer": optimizer}, "batch": {"epochs": 1, "minibatches": 1}}
    plain = final(trained(tree_of(tmp_path / "plain", **change)))
    assert elsewhere.log == []
    tree = tree_of(tmp_path / "moved", offload=BOTH, **change)
    run = trained(tree)
    moved = final(run)
    assert_equal(plain, moved)
    lines = [(tmp_path / name / "run" / "metrics.jsonl").read_bytes() for name in ("plain", "moved")]
    assert lines[0] == lines[1]

    shutil.rmtree(tmp_path / "moved" / "run" / "checkpoints" / "step-000004")
    again = trained(tree)
    assert again.session.resumed
    assert_equal(plain, final(again))
    shutil.rmtree(tmp_path / "moved" / "run" / "checkpoints" / "step-000004")
    without = trained({**tree, "offload": {}})  # memory is no part of a run's identity
    assert without.session.resumed
    assert_equal(plain, final(without))


def test_frozen_models_and_moments_are_where_they_are_read(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = online(tree_of(tmp_path, offload=BOTH))
    offload = run.offload
    assert offload.frozen is not None
    assert offload.moments is not None
    places: dict[str, set[tuple[bool, bool]]] = {}

    def seen(name: str, owner: Any, method: str) -> None:
        before = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            assert offload.frozen is not None
            assert offload.moments is not None
            places.setdefault(name, set()).add((offload.frozen.is_here, offload.moments.is_here))
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, method, call)

    seen("rollout", FastSampler, "sample")
    seen("annotate", run.models, "reference_logprobs")
    seen("update", LocalModel, "step")
    train(run)
    assert places == {"rollout": {(False, False)}, "annotate": {(True, False)}, "update": {(False, True)}}
    reference, scorer = run.models.reference, run.reward.source.source.model  # type: ignore[attr-defined]
    frozen = {id(t) for module in (reference, scorer) for t in (*module.parameters(), *module.buffers())}
    assert {id(tensor) for tensor in factory.frozen_tensors(run.models.engine, [run.policy, run.critic])} == frozen
    assert not elsewhere.away.keys() & {id(p) for p in run.models.policy.parameters()}
    assert elsewhere.log.count(f"put {len(frozen)}") == 1  # they never change: one copy serves always


def test_the_base_that_a_trained_model_stands_on_stays(tmp_path: Path, elsewhere: Elsewhere) -> None:
    pytest.importorskip("bitsandbytes")
    kept = {"lora": {"r": 2}, "weights": "nf4"}
    tree = tree_of(tmp_path, policy=kept, reference={"model": str(tmp_path / "model"), "weights": "nf4"}, offload=BOTH)
    run = online(tree)
    shared = {id(tensor) for tensor in run.models.reference.buffers()}  # type: ignore[union-attr]
    assert shared
    assert not shared & {id(t) for t in factory.frozen_tensors(run.models.engine, [run.policy])}


def test_a_cpu_has_nothing_to_move_and_says_so(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path, offload=BOTH))
    assert not run.offload.is_on
    notes = (tmp_path / "run" / "notes.jsonl").read_text(encoding="utf-8")
    assert "offload: nothing is moved" in notes
    assert store_of(torch.device("cpu")) is None


def test_the_store_moves_the_numbers_of_the_same_tensors() -> None:
    store, tensor = HostStore(torch.device("cpu")), torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    before = tensor.data_ptr()
    movable = Movable(lambda: [tensor], store, is_constant=True)
    movable.come()
    movable.leave()
    assert tensor.data_ptr() != before
    first = tensor.data_ptr()
    movable.leave()
    movable.come()
    assert torch.equal(tensor.detach(), torch.arange(3.0))
    movable.leave()
    assert tensor.data_ptr() == first  # the copy that was kept
    with Offload(frozen=movable).update():
        assert not movable.is_here
    assert movable.is_here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offload": {"frozen_models": True}, "sharding": "zero3"}, "set sharding=ddp, or offload.frozen_models=false"),
        ({"offload": {"optimizer": True}, "sharding": "zero2"}, "set sharding=zero2_offload"),
        ({"offload": {"frozen_models": True}, "overlap": {"reward_parts": 2}}, "set overlap.reward_parts=1"),
        ({"offload": {"optimizer": True}, "overlap": {"ahead": True}}, "set overlap.ahead=false"),
        ({"offload": {"sampler": True}, "overlap": {"ahead": True}}, "offload.sampler=false"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train_config(ppo_tree(tmp_path, **change))


def test_decoding_without_a_copy_of_the_weights_draws_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    drawn = []
    for copies in (True, False):
        kept = {"lora": {"r": 2}, "weights": "nf4"}
        run = online(ppo_tree(tmp_path, policy=kept, sampling={"copy_weights": copies}))
        completions = run.sampler.sample(run.prompts(1), key=3, group_size=2)
        assert isinstance(run.sampler, FastSampler)
        assert run.sampler.uses == ("lean" if copies else "model")
        drawn.append(completions)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert torch.equal(drawn[0].completion_ids, drawn[1].completion_ids)
    assert torch.allclose(drawn[0].sampler_logprobs, drawn[1].sampler_logprobs, atol=1e-5)
    sampler: Any = run.sampler
    sampler.kept.decoder = sampler.kept.steps[sampler] = object()
    sampler.release()
    assert sampler.kept.decoder is None
    assert not sampler.kept.steps
