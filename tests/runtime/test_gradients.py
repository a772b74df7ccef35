"""Gradients are summed over the ranks while the backward pass goes on: all of them, once, in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.runtime import distributed
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.engine import LocalModel, sum_gradients


class Doubling(Distributed):
    """A rank whose partner has the same gradients; `log` has the events, in order."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.log: list[str] = []

    def start_sum(self, gradients: Sequence[Tensor]) -> Callable[[], None]:
        self.log.append(f"start {[gradient.numel() for gradient in gradients]}")
        doubled = [2 * gradient for gradient in gradients]

        def finish() -> None:
            self.log.append("wait")
            for gradient, total in zip(gradients, doubled, strict=True):
                gradient.copy_(total)

        return finish


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "GRADIENT_BUCKET", 4)


class Chain(nn.Module):
    """A product of three weights of 3, 2 and 4 numbers, and one that is not used.

    `log` notes when the backward pass reaches the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.arange(1.0, n + 1)) for n in (3, 2, 4))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, log: list[str] | None = None) -> Tensor:
        one = self.first.prod()
        if log is not None:
            one.register_hook(lambda _: log.append("first is reached"))
        return one * self.second.sum() * self.third.sum()


def model_of(ranks: Distributed) -> LocalModel:
    return LocalModel("policy", Chain(), OptimizerConfig(lr=0.1), terms=("policy",), ranks=ranks)


def gradients(model: LocalModel) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters]


def test_sums_start_before_the_pass_has_reached_the_first_layers() -> None:
    ranks, alone = Doubling(), model_of(SINGLE_PROCESS)
    model = model_of(ranks)
    for _ in range(2):  # two micro-batches: the first only adds
        alone.backward(alone.module(), last=True)
    model.backward(model.module(), last=False)
    assert ranks.log == []
    model.backward(model.module(ranks.log), last=True)
    # From the last to the first: `unused` never arrives, so that the rest waits for the end.
    assert ranks.log == ["first is reached", "start [4]", "start [2]", "start [3]", "wait", "wait", "wait"]
    for ours, theirs in zip(gradients(model), gradients(alone), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, 2 * theirs)


def test_without_an_unused_weight_they_overlap() -> None:
    ranks = Doubling()
    model = model_of(ranks)
    model.parameters.pop()
    model.backward(model.module(ranks.log), last=True)
    assert ranks.log == ["start [4]", "start [2]", "first is reached", "start [3]", "wait", "wait", "wait"]


@pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_sums_does_not_depend_on_the_order_of_arrival(arrival: Sequence[int]) -> None:
    weights = [nn.Parameter(torch.ones(n)) for n in (3, 2, 4)]
    ranks = Doubling()
    with sum_gradients(weights, ranks):
        for index in arrival:
            weights[index].sum().backward()
    assert [line for line in ranks.log if line != "wait"] == ["start [4]", "start [2]", "start [3]"]
    assert all(torch.equal(weight.grad, torch.full_like(weight, 2.0)) for weight in weights if weight.grad is not None)


def test_gradients_of_earlier_passes_are_summed_too() -> None:
    weights = [nn.Parameter(torch.ones(n)) for n in (3, 4)]
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    with sum_gradients(weights, Doubling()):
        weights[0].sum().backward()
    assert [float(weight.grad[0]) for weight in weights if weight.grad is not None] == [4.0, 2.0]


def test_a_bucket_with_a_weight_without_a_gradient_is_summed() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with sum_gradients([used, unused], Doubling()):
        used.sum().backward()
    assert unused.grad is None
    assert used.grad is not None
    assert used.grad.tolist() == [2.0, 2.0]


def test_a_gradient_that_changes_later_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(2))
    with sum_gradients([weight], Doubling()):
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="changed after its sum"):
            weight.sum().backward()


def test_hooks_are_there_for_the_last_pass_only() -> None:
    weight = nn.Parameter(torch.ones(2))
    with sum_gradients([weight], Doubling()):
        assert weight._post_accumulate_grad_hooks
    assert not weight._post_accumulate_grad_hooks
    with sum_gradients([weight], SINGLE_PROCESS):
        assert not weight._post_accumulate_grad_hooks
