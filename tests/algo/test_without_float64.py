"""On a device without float64 (an Apple GPU) a batch and its losses are float32; here the CPU plays that device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from algo_cases import ALGORITHMS, COEFS, experience, online, outputs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf import batching
from rlhf.algo.masked import Mean
from rlhf.batching import widen
from rlhf.objective import Objective
from rlhf.runtime.seeding import uniforms
from rlhf.training.offline import sum_logprobs


class RefuseFloat64(TorchDispatchMode):
    """Fails if a float64 tensor is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            assert not isinstance(tensor, Tensor) or tensor.dtype != torch.float64, f"{func} makes a float64 tensor"
        return made


@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "NO_FLOAT64", frozenset({"cpu"}))


def test_a_float64_tensor_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="makes a float64 tensor"), RefuseFloat64():
        widen(torch.ones(2))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_loss_of_an_online_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = online(**ALGORITHMS[name])
    wide = experience(algorithm, seed=3)
    objective = Objective(algorithm, max_tokens=5)
    expected, _ = objective.loss(wide, outputs(wide), COEFS)
    monkeypatch.setattr(batching, "NO_FLOAT64", frozenset({"cpu"}))
    batch = wide.to("cpu")
    assert batch.advantages.dtype == torch.float32
    narrow = type(outputs(wide))(
        **{
            key: value if value is None else value.detach().float().requires_grad_()
            for key, value in vars(outputs(wide)).items()
        }
    )
    with RefuseFloat64():
        terms, _ = objective.loss(batch, narrow, COEFS)
        sum(terms.values()).backward()  # type: ignore[union-attr]
    for key, term in terms.items():
        torch.testing.assert_close(term.double(), expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_float64")
def test_sums_and_means() -> None:
    logprobs, learned = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[True, True, False]])
    with RefuseFloat64():
        assert sum_logprobs(logprobs, learned).tolist() == [-3.0]
        assert Mean.of(logprobs, learned).value == -1.5
        assert Mean.of(learned).value == pytest.approx(2 / 3)


def test_random_numbers_are_the_same_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are float64 on the CPU then, and the token is drawn there."""
    rows, positions = torch.arange(6), torch.arange(6) * 7
    expected = uniforms(11, rows, positions)
    monkeypatch.setattr(batching, "NO_FLOAT64", frozenset({"cpu"}))
    drawn = uniforms(11, rows, positions)
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn, expected)
