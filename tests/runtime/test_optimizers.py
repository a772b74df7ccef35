"""Optimizers by name: 8-bit AdamW beside AdamW, and what a checkpoint keeps of each."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.errors import CheckpointError, ConfigError
from rlhf.runtime.engine import LocalModel
from rlhf.runtime.optimizers import make_optimizer


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
