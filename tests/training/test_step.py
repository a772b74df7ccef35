"""One optimizer step: the micro-batch cannot change it, NaN cannot reach the weights, clip and rate are as set."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.algo.masked import Mean
from rlhf.batching import Batch
from rlhf.config.run import RunConfig
from rlhf.config.sections import OptimizerConfig
from rlhf.errors import ConfigError
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.engine import Engine, TrainableModel, lr_factor, make_engine
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training import step
from rlhf.training.step import LossBatch, optimizer_step


@dataclass(frozen=True, kw_only=True)
class Points(Batch):
    """Inputs, targets, and how much each row counts."""

    x: Float[Tensor, "B D"]
    y: Float[Tensor, " B"]
    weight: Float[Tensor, " B"]


@dataclass
class Regression:
    """A weighted squared error on one module, an absolute one on another; each has a norm of its own."""

    policy: nn.Module
    critic: nn.Module

    def denominators(self, batch: Points) -> dict[str, float]:
        return {"policy": batch.weight.sum().item(), "value": float(len(batch))}

    def terms(self, micro: Points) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        errors = self.policy(micro.x).squeeze(-1) - micro.y
        gaps = self.critic(micro.x).squeeze(-1) - micro.y
        sums = {"policy": (micro.weight * errors**2).sum(), "value": gaps.abs().sum()}
        return sums, {"loss/value": Mean.of(gaps.abs())}


def points(rows: int = 7) -> Points:
    torch.manual_seed(0)
    return Points(x=torch.randn(rows, 3).double(), y=torch.randn(rows).double(), weight=torch.arange(1.0, rows + 1))


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 1).double()


def trained(name: str, module: nn.Module, term: str, **config: object) -> TrainableModel:
    settings = OptimizerConfig(**{"optimizer": "sgd", "lr": 0.1, "max_grad_norm": 1e9, **config})  # type: ignore[arg-type]
    return Engine(torch.device("cpu")).train(name, module, settings, terms=[term])


def weights(*modules: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def two_models(**config: object) -> tuple[Regression, list[TrainableModel]]:
    policy, critic = linear(1), linear(2)
    both = [trained("policy", policy, "policy", **config), trained("critic", critic, "value", **config)]
    return Regression(policy, critic), both


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_micro_batch_size_cannot_change_a_step(optimizer: str) -> None:
    after, seen = [], []
    for size in (1, 3, 7, 100):
        loss, models = two_models(optimizer=optimizer)
        for _ in range(3):
            metrics = optimizer_step([LossBatch(points(), loss)], models, micro_batch_size=size, lr_factor=1.0)
        after.append(weights(loss.policy, loss.critic))
        seen.append((metrics["loss/total"], metrics["loss/value"], metrics["policy/grad_norm"]))
    for one, numbers in zip(after[1:], seen[1:], strict=True):
        torch.testing.assert_close(one, after[0], rtol=0, atol=1e-10)
        assert numbers == pytest.approx(seen[0], abs=1e-10)


def test_a_step_is_the_gradient_of_the_whole() -> None:
    loss, models = two_models()
    batch, before = points(), weights(loss.policy).clone()
    loss.policy.zero_grad()
    whole = (batch.weight * (loss.policy(batch.x).squeeze(-1) - batch.y) ** 2).sum() / batch.weight.sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(whole, list(loss.policy.parameters()))])
    metrics = optimizer_step([LossBatch(batch, loss)], models, micro_batch_size=2, lr_factor=0.5)
    torch.testing.assert_close(weights(loss.policy), before - 0.05 * gradient, rtol=0, atol=1e-12)
    assert metrics["policy/grad_norm"] == pytest.approx(gradient.norm().item())
    assert metrics["policy/lr"] == pytest.approx(0.05)


def test_the_norm_of_gradients_in_bfloat16_is_not_rounded_to_it() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(50))).bfloat16()
    model = trained("policy", module, "policy")
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    exact = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in module.parameters() if p.grad is not None))
    assert float(model.grad_norm()) == pytest.approx(exact, rel=1e-6)  # rounding to bfloat16 may cost 4e-3


def test_a_dummy_pass_is_in_no_figure() -> None:
    """A rank with fewer rows repeats one, to keep the ranks in step: it has no gradient, and no place in a figure."""
    drawn: list[str] = []

    class Drawn(Regression):
        def terms(self, micro: Points) -> tuple[dict[str, Tensor], dict[str, Mean]]:
            drawn.append("pass")
            return super().terms(micro)

        def draw(self) -> None:
            drawn.append("drawn")

    loss, models = two_models()
    shorter = Distributed(rank=1, world=2)  # of seven rows it has three, and four passes
    parts = [LossBatch(points(), Drawn(loss.policy, loss.critic))]
    step._compute_gradients(parts, models, AdaptiveMicroBatch(1), 1, shorter)
    assert drawn == [*["pass", "drawn"] * 3, "pass"]


def test_parts_add_up() -> None:
    """The loss of two parts is the sum of their means, each over its own norm."""
    (loss, models), (other, others) = two_models(), two_models()
    first, second = points(), points().rows(slice(0, 3))
    total = optimizer_step([LossBatch(first, loss), LossBatch(second, loss)], models, micro_batch_size=4, lr_factor=1.0)
    alone = [
        optimizer_step([LossBatch(p, other)], others, micro_batch_size=4, lr_factor=1e-300)["loss/total"]
        for p in (first, second)
    ]
    assert total["loss/total"] == pytest.approx(sum(alone))


def test_gaps_are_returned_where_a_step_needs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each part, and before the backward passes of the second, beside the gradients of the first.

    A step of one part returns nothing.
    """
    loss, models = two_models()
    has_gradients: list[bool] = []
    monkeypatch.setattr(step, "return_gaps", lambda: has_gradients.append(models[0].parameters[0].grad is not None))
    for parts, calls in ((1, []), (2, [False] + [True] * 4)):  # three micro-batches in the second
        optimizer_step([LossBatch(points(), loss)] * parts, models, micro_batch_size=3, lr_factor=1.0)
        assert has_gradients == calls


def test_a_model_gets_the_gradient_of_its_own_terms_only() -> None:
    loss, models = two_models()
    before = weights(loss.policy).clone()
    optimizer_step([LossBatch(points(), loss)], models[1:], micro_batch_size=3, lr_factor=1.0)
    assert torch.equal(weights(loss.policy), before)


@dataclass
class Poisoned:
    """A loss whose one term is spoiled for the row of weight 5."""

    inner: Regression
    term: str
    spoil: Callable[[Tensor], Tensor]

    def denominators(self, batch: Points) -> dict[str, float]:
        return self.inner.denominators(batch)

    def terms(self, micro: Points) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        sums, observed = self.inner.terms(micro)
        if (micro.weight == 5.0).any():
            sums[self.term] = self.spoil(sums[self.term])
        return sums, observed


@pytest.mark.parametrize("micro_batch_size", [2, 100])
@pytest.mark.parametrize("term", ["policy", "value"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda total: total * math.nan, id="nan"),
        pytest.param(lambda total: total * math.inf, id="inf"),
        pytest.param(lambda total: total + (total * 0).sqrt(), id="gradient-only"),
    ],
)
def test_a_step_that_is_not_finite_moves_no_model(
    spoil: Callable[[Tensor], Tensor], term: str, micro_batch_size: int
) -> None:
    loss, models = two_models(optimizer="adamw")
    before = weights(loss.policy, loss.critic).clone()
    metrics = optimizer_step(
        [LossBatch(points(), Poisoned(loss, term, spoil))], models, micro_batch_size=micro_batch_size, lr_factor=1.0
    )
    assert torch.equal(weights(loss.policy, loss.critic), before)
    assert metrics["skipped/nonfinite"] == 1.0
    assert "policy/lr" not in metrics
    assert all(p.grad is None for model in models for p in model.parameters)
    # The next step equals a step of a run in which nothing happened.
    clean, fresh = two_models(optimizer="adamw")
    metrics = optimizer_step([LossBatch(points(), loss)], models, micro_batch_size=3, lr_factor=1.0)
    optimizer_step([LossBatch(points(), clean)], fresh, micro_batch_size=3, lr_factor=1.0)
    assert "skipped/nonfinite" not in metrics
    torch.testing.assert_close(weights(loss.policy, loss.critic), weights(clean.policy, clean.critic), rtol=0, atol=0)


@dataclass
class Slope:
    """Sum of 3 w_0 + 4 w_1: a gradient of (3, 4), norm 5."""

    module: nn.Linear

    def denominators(self, batch: Points) -> dict[str, float]:
        return {"policy": float(len(batch))}

    def terms(self, micro: Points) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        w = self.module.weight[0]
        return {"policy": len(micro) * (3 * w[0] + 4 * w[1])}, {}


@pytest.mark.parametrize(
    "limit, moved", [(10.0, (-0.3, -0.4)), (5.1, (-0.3, -0.4)), (2.5, (-0.15, -0.2)), (1.0, (-0.06, -0.08))]
)
def test_the_gradient_is_clipped_by_its_norm(limit: float, moved: tuple[float, float]) -> None:
    module = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    model = trained("policy", module, "policy", max_grad_norm=limit)
    metrics = optimizer_step([LossBatch(points(), Slope(module))], [model], micro_batch_size=2, lr_factor=1.0)
    assert metrics["policy/grad_norm"] == pytest.approx(5.0)  # before clipping
    assert module.weight[0].tolist() == pytest.approx(moved, rel=1e-5)


def test_each_model_is_clipped_by_its_own_norm() -> None:
    loss, models = two_models()
    plain = {m.name: weights(m.module).clone() for m in models}
    clipped, limited = two_models()
    limited[1] = trained("critic", clipped.critic, "value", max_grad_norm=0.1)
    optimizer_step([LossBatch(points(), loss)], models, micro_batch_size=7, lr_factor=1.0)
    optimizer_step([LossBatch(points(), clipped)], limited, micro_batch_size=7, lr_factor=1.0)
    assert torch.equal(weights(clipped.policy), weights(loss.policy))
    assert (weights(clipped.critic) - plain["critic"]).norm().item() == pytest.approx(0.1 * 0.1, rel=1e-4)


def test_frozen_parameters_stay() -> None:
    module = linear()
    module.bias.requires_grad_(False)
    before = module.bias.item()
    model = trained("policy", module, "policy", weight_decay=0.5)
    loss = Regression(module, linear())
    optimizer_step([LossBatch(points(), loss)], [model], micro_batch_size=7, lr_factor=1.0)
    assert module.bias.item() == before
    assert [p.shape for p in model.parameters] == [torch.Size([1, 3])]


def test_the_optimizers_state_can_be_put_back() -> None:
    loss, models = two_models(optimizer="adamw")
    optimizer_step([LossBatch(points(), loss)], models, micro_batch_size=3, lr_factor=1.0)
    other, others = two_models(optimizer="adamw")
    other.policy.load_state_dict(loss.policy.state_dict())
    other.critic.load_state_dict(loss.critic.state_dict())
    for model, saved in zip(others, models, strict=True):
        model.load_state(copy.deepcopy(saved.state()))  # as a checkpoint would hold it
    for regression, both in ((loss, models), (other, others)):
        optimizer_step([LossBatch(points(), regression)], both, micro_batch_size=3, lr_factor=0.5)
    assert torch.equal(weights(loss.policy, loss.critic), weights(other.policy, other.critic))


def test_adam_by_hand() -> None:
    """The first AdamW step is lr * (decay * w + g / (|g| + eps)), eps outside the root."""
    module = nn.Linear(2, 1, bias=False).double()
    nn.init.constant_(module.weight, 2.0)
    model = trained("policy", module, "policy", optimizer="adamw", adam_eps=1.0, weight_decay=0.25)
    optimizer_step([LossBatch(points(), Slope(module))], [model], micro_batch_size=7, lr_factor=1.0)
    expected = [2.0 - 0.1 * (0.25 * 2.0 + g / (g + 1.0)) for g in (3.0, 4.0)]
    assert module.weight[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "decay, expected",
    [
        # 2 steps of warm-up, then 4 of decay
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
    ],
)
def test_the_learning_rate_by_hand(decay: str, expected: list[float]) -> None:
    rates = [lr_factor(step, steps=6, warmup_steps=2, decay=decay) for step in range(1, 7)]
    assert rates == pytest.approx(expected)


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    for decay in ("constant", "linear", "cosine"):
        assert lr_factor(1, steps=4, warmup_steps=0, decay=decay) == 1.0
    assert lr_factor(1, steps=1, warmup_steps=1, decay="linear") == 1.0


def test_the_engine_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert make_engine(RunConfig(device="cpu")).device == torch.device("cpu")
    assert make_engine(RunConfig(device="cpu")).peak_memory_mb() > 10
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"run\.device"):
        make_engine(RunConfig(device="cuda"))


def test_a_gradient_of_exactly_zero_moves_nothing_and_is_counted() -> None:
    """Neither momentum nor weight decay; the other model goes on."""
    loss, models = two_models(optimizer="adamw", weight_decay=0.1)
    optimizer_step([LossBatch(points(), loss)], models, micro_batch_size=3, lr_factor=1.0)
    before = weights(loss.policy).clone(), weights(loss.critic).clone()
    nothing = points()
    nothing = replace(nothing, weight=torch.zeros(len(nothing)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "denominators", lambda batch: {"policy": 1.0, "value": float(len(batch))})
        metrics = optimizer_step([LossBatch(nothing, loss)], models, micro_batch_size=3, lr_factor=1.0)
    assert torch.equal(weights(loss.policy), before[0])
    assert not torch.equal(weights(loss.critic), before[1])
    assert metrics["skipped/zero_gradient"] == 1.0
    assert metrics["policy/grad_norm"] == 0.0
    assert "policy/lr" not in metrics
    assert metrics["critic/lr"] == 0.1
