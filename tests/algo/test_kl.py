"""KL estimates against the exact divergence, and the two controllers against their papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
from algo_cases import close, grids, table
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algo.kl import kl_estimate
from rlhf.algo.policy_loss import kl_old_new
from rlhf.algorithms.kl import AdaptiveKl, FixedKl
from rlhf.algorithms.penalty import PenaltyLoss

LOG2 = math.log(2.0)
seeds = st.integers(0, 2**31 - 1)


def two_policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of two categoricals over 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, 5, generator=generator, dtype=torch.float64)
    first, second = logits.log_softmax(dim=-1)
    return first, second


@pytest.mark.parametrize(
    "p, ref, k1, k2, k3",
    [
        (0.5, 0.25, LOG2, LOG2**2 / 2, 0.5 - 1 + LOG2),
        (0.25, 0.5, -LOG2, LOG2**2 / 2, 2 - 1 - LOG2),
        (0.3, 0.3, 0.0, 0.0, 0.0),
        (1.0, 0.1, math.log(10), math.log(10) ** 2 / 2, 0.1 - 1 + math.log(10)),
    ],
)
def test_estimators_by_hand(p, ref, k1, k2, k3):
    logprobs, ref_logprobs = table([math.log(p)]), table([math.log(ref)])
    close(kl_estimate(logprobs, ref_logprobs, "k1"), [[k1]])
    close(kl_estimate(logprobs, ref_logprobs, "k2"), [[k2]])
    close(kl_estimate(logprobs, ref_logprobs, "k3"), [[k3]])


@given(grids())
def test_k2_and_k3_are_never_negative_and_estimate_zero_for_equal_policies(grid):
    for estimator in ("k2", "k3"):
        assert (kl_estimate(grid.first, grid.second, estimator) >= 0).all()
        assert (kl_estimate(grid.first, grid.first, estimator) == 0).all()


def test_expected_k1_and_k3_by_hand():
    p = table([0.5, 0.25, 0.25])
    ref = table([0.25, 0.25, 0.5])
    for estimator in ("k1", "k3"):  # KL = .5 log 2 + .25 log .5
        close((p * kl_estimate(p.log(), ref.log(), estimator)).sum(), 0.25 * LOG2)


@given(seeds)
def test_k1_and_k3_are_unbiased(seed):
    p, ref = two_policies(seed)
    exact = (p.exp() * (p - ref)).sum()
    for estimator in ("k1", "k3"):
        close((p.exp() * kl_estimate(p[None], ref[None], estimator)[0]).sum(), exact)


def expected_gradient(logits, ref, estimator):
    """Of the estimate as a loss: the samples' probabilities are not differentiated."""
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.detach().exp() * kl_estimate(logprobs[None], ref[None], estimator)[0]).sum()
    return torch.autograd.grad(loss, logits)[0]


@given(seeds)
def test_expected_gradients_as_losses(seed):
    p, ref = two_policies(seed)
    logits = p.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    forward = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((ref.exp() * (ref - logprobs)).sum(), logits)[0]
    close(expected_gradient(logits, ref, "k1"), torch.zeros_like(ref))
    close(expected_gradient(logits, ref, "k2"), forward)
    close(expected_gradient(logits, ref, "k3"), reverse)


@given(seeds)
def test_kl_old_new_is_unbiased_with_an_exact_gradient(seed):
    old, new = two_policies(seed)
    logits = new.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    mask = torch.ones(1, 5, dtype=torch.bool)
    estimate = (old.exp() * kl_old_new(logprobs[None], old[None], mask)[0]).sum()
    exact = (old.exp() * (old - logprobs)).sum()
    close(estimate, exact)
    close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], torch.autograd.grad(exact, logits)[0])


def test_kl_old_new_by_hand():
    old = table([0.2, 0.2, 0.2]).log()
    new = table([0.4, 0.1, 0.9]).log()
    mask = torch.tensor([[True, True, False]])
    close(kl_old_new(new, old, mask), [[2 - 1 - LOG2, 0.5 - 1 + LOG2, 0.0]])


@pytest.mark.parametrize(
    "kl, expected",
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * 1.00256),  # e = .1, 256 of 10,000 completions
        (5.4, 0.2 * 0.99744),
        (7.2, 0.2 * 1.00512),  # e = .2, the most it can be
        (60.0, 0.2 * 1.00512),
        (4.8, 0.2 * 0.99488),
        (0.0, 0.2 * 0.99488),
        (-3.0, 0.2 * 0.99488),  # the sampled KL can be negative
    ],
)
def test_adaptive_coefficient_by_hand(kl, expected):
    controller = AdaptiveKl(target=6.0, horizon=10_000.0)
    assert controller.next_coef(0.2, kl=kl, completions=256) == pytest.approx(expected, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    assert FixedKl().next_coef(0.2, kl=60.0, completions=256) == 0.2


def test_adaptive_coefficient_never_turns_negative():
    assert AdaptiveKl(target=6.0, horizon=100.0).next_coef(0.2, kl=0.0, completions=1000) == 0.0


@given(st.floats(0, 50), st.floats(0.1, 20), st.integers(1, 500), st.floats(0.001, 10))
def test_adaptive_coefficient_moves_against_the_error_and_little(kl, target, completions, coef):
    after = AdaptiveKl(target=target, horizon=1000.0).next_coef(coef, kl=kl, completions=completions)
    assert (after - coef) * (kl - target) >= 0
    assert abs(after / coef - 1) <= 0.2 * completions / 1000.0 + 1e-12
    doubled = AdaptiveKl(target=2 * target, horizon=1000.0).next_coef(coef, kl=2 * kl, completions=completions)
    assert doubled == pytest.approx(after, rel=1e-12)


@pytest.mark.parametrize(
    "kl, expected",
    [(0.0, 1.0), (1.99, 1.0), (2.0, 2.0), (3.0, 2.0), (4.5, 2.0), (4.51, 4.0), (99.0, 4.0)],
)
def test_penalty_coefficient_by_hand(kl, expected):
    assert PenaltyLoss(target=3.0).next_coef(2.0, kl=kl) == expected


def test_the_penalty_coefficient_comes_back_from_a_long_run_on_one_side() -> None:
    """After 1,100 halvings it was 0, and stayed 0; after as many doublings it was infinite, and the loss NaN."""
    loss = PenaltyLoss(coef=0.5, target=0.01)
    lowest = highest = 0.5
    for _ in range(1200):
        lowest, highest = loss.next_coef(lowest, kl=0.0), loss.next_coef(highest, kl=1.0)
    assert (lowest, highest) == (0.5e-6, 0.5e6)
    assert loss.next_coef(lowest, kl=1.0) == 1e-6


def test_a_kl_that_is_no_number_leaves_the_coefficients() -> None:
    """NaN went into the coefficient, and from there into every later reward."""
    controller = AdaptiveKl(target=6.0, horizon=100.0)
    assert controller.next_coef(0.2, kl=math.nan, completions=10) == 0.2
    assert PenaltyLoss(target=0.01).next_coef(0.2, kl=math.nan) == 0.2
    assert AdaptiveKl(target=6.0, horizon=100.0).next_coef(0.2, kl=math.inf, completions=10) == pytest.approx(
        0.2 * 1.02
    )
