"""Conjugate gradients against a direct solver, the softmax's Fisher matrix, the steps that a line search accepts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlhf.algo.kl import kl_of_distributions
from rlhf.algo.trust_region import (
    Trial,
    backtrack,
    conjugate_gradient,
    softmax_fisher_product,
    step_length,
    undamped_curvature,
)
from rlhf.algorithms.trust_region import TrustRegionLoss

# torch scripts its rules for forward-mode differentiation, at their first use, with functions that it deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

SIZE = 12


def spd(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    return root @ root.T + 0.1 * torch.eye(SIZE, dtype=torch.float64)


def vector(seed: int = 1) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_conjugate_gradients_solve_what_a_direct_solver_solves(seed: int) -> None:
    matrix, b = spd(seed), vector(seed + 10)
    solution = conjugate_gradient(lambda v: matrix @ v, b, iterations=3 * SIZE)
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-9)
    assert solution.residual(b) < 1e-9


def test_k_iterations_minimize_over_the_krylov_space() -> None:
    matrix, b, k = spd(), vector(), 4
    basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(matrix, i) @ b for i in range(k)], dim=1)).Q
    best = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ b)
    solution = conjugate_gradient(lambda v: matrix @ v, b, iterations=k)
    torch.testing.assert_close(solution.x, best, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(solution.remainder, b - matrix @ solution.x, rtol=0, atol=1e-9)
    assert solution.residual(b) == pytest.approx(float((b - matrix @ best).norm() / b.norm()))


def test_conjugate_gradients_stop_where_there_is_nothing_left() -> None:
    calls: list[int] = []

    def identity(v: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return v

    b = vector()
    assert torch.equal(conjugate_gradient(identity, b, iterations=9).x, b)
    assert len(calls) == 1
    zero = conjugate_gradient(identity, torch.zeros(SIZE), iterations=9)
    assert len(calls) == 1
    assert zero.residual(torch.zeros(SIZE)) == 0.0


@pytest.mark.parametrize("product", [torch.zeros_like, torch.neg, lambda v: v * math.nan], ids=["0", "-1", "nan"])
def test_a_curvature_that_is_not_positive_ends_the_search(product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    solution = conjugate_gradient(product, vector(), iterations=9)
    assert not solution.x.any()
    assert solution.residual(vector()) == 1.0
    assert step_length(undamped_curvature(solution, vector(), damping=0.1), max_kl=0.1) == 0.0


def test_a_step_has_the_kl_that_was_asked_for_to_second_order() -> None:
    matrix, b, damping = spd(), vector(), 0.3
    damped = matrix + damping * torch.eye(SIZE, dtype=torch.float64)
    for iterations in (3, 40):  # early too: the remainder is accounted for
        solution = conjugate_gradient(lambda v: damped @ v, b, iterations=iterations)
        curvature = undamped_curvature(solution, b, damping=damping)
        assert curvature == pytest.approx(float(solution.x @ matrix @ solution.x))
        step = step_length(curvature, max_kl=0.02) * solution.x
        assert float(step @ matrix @ step) / 2 == pytest.approx(0.02)


@pytest.mark.parametrize("curvature", [0.0, -1.0, math.nan, math.inf])
def test_no_curvature_no_step(curvature: float) -> None:
    assert step_length(curvature, max_kl=0.01) == 0.0


def test_the_softmax_s_fisher_matrix_is_the_kl_s_hessian_and_the_covariance_of_the_score() -> None:
    logits = vector(3)
    explicit = torch.func.hessian(lambda z: kl_of_distributions(logits.log_softmax(0), z.log_softmax(0)))(logits)
    scores = torch.func.jacrev(lambda z: z.log_softmax(0))(logits)  # [V, V]: d log p_v / dz
    covariance = scores.T @ (logits.softmax(0)[:, None] * scores)
    torch.testing.assert_close(covariance, explicit)
    for seed in range(2):
        tangent = vector(seed)
        ours = softmax_fisher_product(logits.log_softmax(0)[None], tangent[None])[0]
        torch.testing.assert_close(ours, explicit @ tangent)


def world(*, limit: float, gain: float) -> Callable[[float], Trial]:
    """A loss that falls up to a length of `limit` and then rises; a KL of length^2."""
    return lambda length: Trial(length=length, kl=length**2, improvement=gain * length * (limit - length))


def test_a_line_search_takes_the_longest_step_that_both_conditions_allow() -> None:
    options = {"shrink": 0.5, "backtracks": 10}
    outcome = backtrack(world(limit=100.0, gain=1.0), 1.0, max_kl=1.0, **options)
    assert (outcome.accepted, outcome.last.length, outcome.backtracks) == (True, 1.0, 0)
    outcome = backtrack(world(limit=100.0, gain=1.0), 1.0, max_kl=0.25, **options)
    assert (outcome.accepted, outcome.last.length, outcome.backtracks) == (True, 0.5, 1)  # the KL binds, at equality
    assert outcome.first.kl == 1.0
    outcome = backtrack(world(limit=0.3, gain=1.0), 1.0, max_kl=1.0, **options)
    assert (outcome.accepted, outcome.last.length, outcome.backtracks) == (True, 0.25, 2)  # the loss binds


@pytest.mark.parametrize(
    "attempt",
    [
        world(limit=100.0, gain=-1.0),
        lambda length: Trial(length=length, kl=0.0, improvement=0.0),
        lambda length: Trial(length=length, kl=math.nan, improvement=1.0),
        lambda length: Trial(length=length, kl=0.0, improvement=math.nan),
        lambda length: Trial(length=length, kl=2.0, improvement=1.0),
    ],
    ids=["worse", "equal", "kl-nan", "loss-nan", "too-far"],
)
def test_a_line_search_that_finds_nothing_says_so(attempt: Callable[[float], Trial]) -> None:
    tried: list[float] = []

    def counted(length: float) -> Trial:
        tried.append(length)
        return attempt(length)

    outcome = backtrack(counted, 1.0, max_kl=1.0, shrink=0.8, backtracks=3)
    assert not outcome.accepted
    assert tried == pytest.approx([1.0, 0.8, 0.64, 0.512])
    assert outcome.backtracks == 3


class Slope:
    """A linear loss whose KL is `excess` times the quadratic model that gives a step its length; a StepSpace."""

    def __init__(self, *, excess: float, rising: bool = False) -> None:
        self.matrix, self.gradient, self.excess = spd(), vector(), excess
        self.uphill = -1.0 if rising else 1.0
        self.tried: list[float] = []
        self.restored = False

    def fisher_product(self, vector: torch.Tensor) -> torch.Tensor:
        return self.matrix @ vector

    def attempt(self, direction: torch.Tensor, length: float) -> Trial:
        self.tried.append(length)
        step = length * direction
        kl = self.excess * float(step @ self.matrix @ step) / 2
        return Trial(length=length, kl=kl, improvement=self.uphill * float(step @ self.gradient))

    def restore(self) -> None:
        self.restored = True


def test_the_loss_shortens_its_step_by_its_own_settings() -> None:
    full = Slope(excess=1.0)
    TrustRegionLoss(max_kl=0.02, line_search=False).search(full, lr_factor=1.0)
    space = Slope(excess=2.0)  # 0.8^2 is 0.64, 0.8^4 is 0.41: of the KL 1.28 is left, then 0.82
    metrics = TrustRegionLoss(max_kl=0.02, shrink=0.8, backtracks=2).search(space, lr_factor=1.0)
    assert space.tried == pytest.approx([full.tried[0] * 0.8**number for number in range(3)])
    assert (metrics["trust_region/accepted"], metrics["trust_region/backtracks"]) == (1.0, 2.0)
    assert metrics["policy/lr"] == space.tried[-1]
    assert metrics["trust_region/kl_full_step"] == pytest.approx(0.04, rel=0.01)
    assert metrics["trust_region/kl"] == pytest.approx(0.04 * 0.8**4, rel=0.01)
    assert not space.restored


@pytest.mark.parametrize("space", [Slope(excess=100.0), Slope(excess=1.0, rising=True)], ids=["too-far", "worse"])
def test_the_loss_takes_no_step_where_no_length_will_do(space: Slope) -> None:
    metrics = TrustRegionLoss(backtracks=3).search(space, lr_factor=1.0)
    assert space.tried == pytest.approx([space.tried[0] * 0.7**number for number in range(4)])
    assert (metrics["trust_region/accepted"], metrics["trust_region/backtracks"]) == (0.0, 3.0)
    assert "policy/lr" not in metrics
    assert space.restored
