"""Bradley-Terry by hand, and by its properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reward_model.model import bradley_terry, win_indicator

scores = st.floats(-30, 30)


def one(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize(
    "chosen, rejected, margin, centering, expected",
    [
        (0.0, 0.0, 0.0, 0.0, math.log(2)),
        (2.0, 1.0, 0.0, 0.0, math.log1p(math.exp(-1.0))),
        (1.0, 2.0, 0.0, 0.0, 1.0 + math.log1p(math.exp(-1.0))),
        (2.0, 1.0, 1.0, 0.0, math.log(2)),  # a margin as large as the gap: as if they were equal
        (2.0, 1.0, 3.0, 0.0, 2.0 + math.log1p(math.exp(-2.0))),
        (2.0, 1.0, 0.0, 0.01, math.log1p(math.exp(-1.0)) + 0.09),
        (2.0, -2.0, 0.0, 5.0, math.log1p(math.exp(-4.0))),  # a zero sum costs nothing
        (0.0, 800.0, 0.0, 0.0, 800.0),  # no overflow
    ],
)
def test_by_hand(chosen: float, rejected: float, margin: float, centering: float, expected: float) -> None:
    loss = bradley_terry(*one(chosen, rejected, margin), centering=centering)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@given(scores, scores, st.floats(0, 5))
def test_the_gradient_is_the_probability_of_the_other_outcome(chosen: float, rejected: float, margin: float) -> None:
    c, r, m = (value.requires_grad_() for value in one(chosen, rejected, margin))
    bradley_terry(c, r, m, centering=0.0).backward()
    expected = 1 / (1 + math.exp(chosen - rejected - margin))
    assert c.grad is not None
    assert r.grad is not None
    assert c.grad.item() == pytest.approx(-expected, abs=1e-12)
    assert r.grad.item() == pytest.approx(expected, abs=1e-12)


@given(scores, scores, st.floats(-20, 20))
def test_only_differences_count_without_centering(chosen: float, rejected: float, shift: float) -> None:
    here = bradley_terry(*one(chosen, rejected, 0.0), centering=0.0)
    there = bradley_terry(*one(chosen + shift, rejected + shift, 0.0), centering=0.0)
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_each_pair_has_its_own_loss() -> None:
    chosen, rejected, margins = (torch.randn(5, dtype=torch.float64) for _ in range(3))
    together = bradley_terry(chosen, rejected, margins, centering=0.3)
    for i in range(5):
        row = slice(i, i + 1)
        alone = bradley_terry(chosen[row], rejected[row], margins[row], centering=0.3)
        torch.testing.assert_close(together[row], alone)


def test_a_tie_is_half_a_win() -> None:
    assert win_indicator(torch.tensor([2.0, -1.0, 0.0, 1e-9])).tolist() == [1.0, 0.0, 0.5, 1.0]
