"""Masked statistics: by hand, and properties that hold for any numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhf.algo.masked import Mean, masked_mean, masked_sum, quantiles, whiten

NAN = float("nan")
VALUES = torch.tensor([[1.0, 2.0, NAN], [3.0, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False]])
numbers = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


def test_sum_and_mean_never_read_what_is_hidden():
    assert masked_sum(VALUES, MASK).item() == 6.0
    assert masked_mean(VALUES, MASK).item() == 2.0


def test_the_hidden_have_no_gradient():
    values = VALUES.clone().requires_grad_()
    masked_mean(values, MASK).backward()
    assert values.grad.tolist() == [[1 / 3, 1 / 3, 0.0], [1 / 3, 0.0, 0.0]]


def test_mean_of_nothing_is_zero_and_keeps_the_dtype():
    nothing = masked_mean(VALUES, torch.zeros_like(MASK))
    assert nothing.item() == 0.0
    assert masked_sum(VALUES.float(), MASK).dtype == torch.float32
    assert nothing.dtype == torch.float64


@given(numbers, st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_quantiles_are_those_of_torch(values, shares):
    values = torch.tensor(values, dtype=torch.float64)
    expected = values.quantile(torch.tensor(shares, dtype=torch.float64)).tolist()
    assert quantiles(values, shares) == pytest.approx(expected, abs=1e-9)


def test_quantiles_of_more_tokens_than_torch_takes():
    tokens = 2**24
    assert quantiles(torch.arange(tokens + 1, dtype=torch.float32), (0.25,)) == [tokens / 4]


def test_whiten_by_hand():
    # Mean 2, population variance 2/3.
    unit = math.sqrt(1.5)
    expected = torch.tensor([[-unit, 0.0, 0.0], [unit, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(VALUES, MASK, eps=0.0), expected)
    kept = torch.tensor([[2.0 - unit, 2.0, 0.0], [2.0 + unit, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(VALUES, MASK, shift_mean=False, eps=0.0), kept)


def test_whiten_adds_eps_under_the_root():
    values = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    out = whiten(values, torch.ones(1, 2, dtype=torch.bool), eps=3.0)
    torch.testing.assert_close(out, torch.tensor([[-0.5, 0.5]], dtype=torch.float64))


def test_whiten_of_equal_values_is_zero():
    out = whiten(torch.full((2, 3), 7.0, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool))
    assert out.tolist() == [[0.0] * 3] * 2


@given(numbers, st.data())
def test_whitened_live_values_have_mean_zero_and_variance_one(values, data):
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    x = torch.tensor(values, dtype=torch.float64)
    assume(mask.sum() > 1 and x[mask].std(correction=0) > 1e-1)
    x[~mask] = NAN
    out = whiten(x, mask)
    assert (out[~mask] == 0).all()
    assert out[mask].mean().item() == pytest.approx(0.0, abs=1e-9)
    assert out[mask].var(correction=0).item() == pytest.approx(1.0, rel=1e-5)
    unshifted = whiten(x, mask, shift_mean=False)
    assert unshifted[mask].mean().item() == pytest.approx(x[mask].mean().item(), abs=1e-9)
    assert unshifted[mask].var(correction=0).item() == pytest.approx(1.0, rel=1e-5)


def test_mean_adds_sums_not_means():
    short, long = Mean(10.0, 1.0), Mean(2.0, 3.0)
    assert short + long == Mean(12.0, 4.0)
    assert (short + long).value == 3.0
    assert math.isnan(Mean(0.0, 0.0).value)


def test_mean_of_counts_live_entries_and_booleans():
    assert Mean.of(VALUES, MASK) == Mean(6.0, 3.0)
    assert Mean.of(torch.tensor([True, False, True, True])) == Mean(3.0, 4.0)
    assert Mean.of(torch.tensor([True, True]), torch.tensor([True, False])) == Mean(1.0, 1.0)


@given(numbers, st.integers(0, 12))
def test_the_mean_of_parts_is_the_mean_of_the_whole(values, cut):
    x = torch.tensor(values, dtype=torch.float64)
    parts = Mean.of(x[:cut]) + Mean.of(x[cut:])
    assert parts.weight == len(values)
    assert parts.value == pytest.approx(x.mean().item(), rel=1e-9, abs=1e-9)
