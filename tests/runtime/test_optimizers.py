"""Optimizers by name: 8-bit AdamW beside AdamW, and their state in a checkpoint."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.errors import CheckpointError, ConfigError
from rlhf.runtime.engine import LocalModel
from rlhf.runtime.optimizers import MOMENTS, adam_state, load_optimizer_state, make_optimizer


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))  # 6,144 weights each: kept in 8 bits


def loss_of(net: nn.Module, step: int) -> Tensor:
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    loss: Tensor = (net(data) - data.flip(1)).square().mean()
    return loss


def trained(kind: str) -> LocalModel:
    return LocalModel("m", module(), OptimizerConfig(lr=3e-3, optimizer=kind), terms=("loss",))


def run(one: LocalModel, steps: range) -> float:
    for step in steps:
        loss = loss_of(one.module, step)
        one.backward(loss, last=True)
        one.step(norm=one.grad_norm(), lr_factor=1.0)
    return float(loss_of(one.module, 1000).detach())


@pytest.mark.parametrize("place", ["cpu", "meta"])  # meta: a device that is not the CPU, on a machine without a GPU
def test_adam_s_count_of_steps_is_where_its_weights_are(place: str) -> None:
    """The fused kernel of a GPU reads the count there; a run continued under ZeRO gave it one on the CPU."""
    flat = torch.ones(7, device=place)
    state = adam_state(flat, 5)
    assert {name: tensor.device for name, tensor in state.items()} == dict.fromkeys(("step", *MOMENTS), flat.device)
    assert state["step"].dtype == torch.float32
    if place == "cpu":
        assert float(state["step"]) == 5
        assert not state["exp_avg"].any()
        assert state["exp_avg"].shape == flat.shape


def test_deepspeed_s_adam_takes_the_count_as_a_number() -> None:
    assert adam_state(torch.ones(3), 5, as_number=True)["step"] == 5
    assert not isinstance(adam_state(torch.ones(3), 5, as_number=True)["step"], Tensor)


def test_a_continued_adamw_has_its_count_beside_each_weight() -> None:
    """As on a GPU, here on the meta device: of the state in a checkpoint, which is on the CPU, nothing stays there."""
    one = trained("adamw")
    run(one, range(2))
    net = module().to("meta")
    named = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
    load_optimizer_state(optimizer, named, one.state(), "adamw")
    places = {tensor.device.type for slots in optimizer.state.values() for tensor in slots.values()}
    assert places == {"meta"}


def test_8_bit_adamw_learns_as_adamw_does_with_a_quarter_of_the_state() -> None:
    pytest.importorskip("bitsandbytes")
    whole, eight = trained("adamw"), trained("adamw_8bit")
    before = float(loss_of(whole.module, 1000).detach())
    losses = run(whole, range(200)), run(eight, range(200))
    assert losses[0] < 0.7 * before
    assert abs(losses[1] - losses[0]) < 0.05 * (before - losses[0])
    sizes = [
        sum(t.numel() * t.element_size() for named in one.state()["moments"].values() for t in named.values())
        for one in (whole, eight)
    ]
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "sgd"])
def test_one_that_is_put_back_goes_on_to_the_same_weights(kind: str) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    whole, again = trained(kind), trained(kind)
    run(whole, range(5))
    state = copy.deepcopy(whole.state())
    again.module.load_state_dict(whole.module.state_dict())
    again.load_state(state)
    run(whole, range(5, 9))
    run(again, range(5, 9))
    for a, b in zip(whole.parameters, again.parameters, strict=True):
        assert torch.equal(a, b)
    assert whole.state()["step"] == again.state()["step"] == (0 if kind == "sgd" else 9)


def test_the_state_of_another_optimizer_is_refused_by_name() -> None:
    one, other = trained("adamw"), trained("sgd")
    run(one, range(1))
    with pytest.raises(CheckpointError, match="of adamw, but the configuration says sgd"):
        other.load_state(one.state())


def test_without_the_package_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(ConfigError, match=r"bash scripts/setup\.sh eightbit"):
        make_optimizer(list(module().parameters()), OptimizerConfig(optimizer="adamw_8bit"))
