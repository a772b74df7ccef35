"""Natural gradient steps within a trust region: conjugate gradients, the softmax's Fisher matrix, the line search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Vector = Float[Tensor, " N"]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The result of conjugate gradients."""

    x: Vector
    remainder: Vector  # b - A x, as the recursion keeps it

    def residual(self, b: Vector) -> float:
        """Compute |b - A x| / |b|: 0 is solved, 1 is no better than x = 0; 0 if b is 0."""
        norm = float(b.norm())
        return float(self.remainder.norm()) / norm if norm > 0 else 0.0


def conjugate_gradient(
    product: Callable[[Vector], Vector], b: Vector, *, iterations: int, tolerance: float = 1e-10
) -> Solution:
    """Compute the x of A x = b for a symmetric, positive definite A known by its products (Hestenes & Stiefel 1952).

        x = 0,  r = p = b;   a = r.r / p.Ap,  x += a p,  r' = r - a Ap,  p = r' + (r'.r' / r.r) p,  r = r'

    In exact arithmetic N iterations solve it; k iterations give the minimizer of x.Ax / 2 - b.x over the span of
    b, Ab, ..., A^(k-1) b. It stops early at |r| <= tolerance * |b|, and if p.Ap is not positive: the rest of A is then
    smaller than rounding errors.

    Args:
        product: returns A v.
        b: the right-hand side.
        iterations: products to compute, at most.
        tolerance: the residual at which to stop, relative to |b|.
    """
    x, remainder, direction = torch.zeros_like(b), b.clone(), b.clone()
    squared = float(remainder @ remainder)
    goal = tolerance**2 * squared
    for _ in range(iterations):
        if squared <= goal:
            break
        image = product(direction)
        curvature = float(direction @ image)
        if not curvature > 0:  # NaN too
            break
        step = squared / curvature
        x = x + step * direction
        remainder = remainder - step * image
        before, squared = squared, float(remainder @ remainder)
        direction = remainder + (squared / before) * direction
    return Solution(x=x, remainder=remainder)


def softmax_fisher_product(
    log_pi: Float[Tensor, "*shape V"], tangent: Float[Tensor, "*shape V"]
) -> Float[Tensor, "*shape V"]:
    """Compute the product of the Fisher matrix of each row's softmax, in its logits, with a vector.

        F_softmax u = p * (u - sum_v p_v u_v),     F_softmax = diag(p) - p p'

    The Fisher matrix of the weights is J' F_softmax J with J = d logits / d weights (the Gauss-Newton form). At the
    policy itself it *is* the Hessian of KL(pi_old || pi): the term with the logits' second derivatives is multiplied by
    p - p_old = 0 (Pascanu & Bengio 2014, sec. 3; Martens 2020, sec. 9.2).
    """
    pi = log_pi.exp()
    return pi * (tangent - (pi * tangent).sum(dim=-1, keepdim=True))


def undamped_curvature(solution: Solution, b: Vector, *, damping: float) -> float:
    """Compute x.Fx for an x that solves (F + damping) x = b up to its remainder r, without another product with F.

    x.Fx = x.(b - r) - damping * x.x
    """
    x = solution.x
    return float(x @ (b - solution.remainder)) - damping * float(x @ x)


def step_length(curvature: float, *, max_kl: float) -> float:
    """Compute the length of a step x at which the quadratic model of the KL equals max_kl (Schulman et al. 2015, C).

        KL(pi_old || pi_(theta + s x)) = s^2 x.Fx / 2 + O(s^3)   so   s = sqrt(2 max_kl / x.Fx)

    0 if the curvature x.Fx is not a positive number: the direction does not move the policy, or is noise.
    """
    return math.sqrt(2.0 * max_kl / curvature) if 0.0 < curvature < math.inf else 0.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The effect of a step of some length."""

    length: float
    kl: float  # KL(old || new), exact, nats per token
    improvement: float  # of the loss: before minus after


@dataclass(frozen=True, kw_only=True)
class LineSearch:
    """The result of a line search."""

    first: Trial  # the full step
    last: Trial  # the one taken, if any was accepted
    accepted: bool
    backtracks: int


def is_acceptable(trial: Trial, *, max_kl: float) -> bool:
    """Return whether a step lowers the loss and stays within the trust region; a NaN does neither."""
    return trial.improvement > 0.0 and trial.kl <= max_kl


def backtrack(
    attempt: Callable[[float], Trial], length: float, *, max_kl: float, shrink: float, backtracks: int
) -> LineSearch:
    """Find the longest acceptable step of lengths s, s * shrink, s * shrink^2, ... (Schulman et al. 2015, app. C).

    The quadratic model that gave the full length ignores the third order, and the surrogate is trusted only if
    KL(old || new) <= max_kl: neither is assumed, both are evaluated.

    Args:
        attempt: returns the effect of a step of this length.
        length: of the full step.
        max_kl: the trust region, in nats per token.
        shrink: the factor between two lengths, below 1.
        backtracks: how many shorter steps are tried after the full one.
    """
    first = trial = attempt(length)
    for number in range(backtracks + 1):
        if number > 0:
            trial = attempt(length * shrink**number)
        if is_acceptable(trial, max_kl=max_kl):
            return LineSearch(first=first, last=trial, accepted=True, backtracks=number)
    return LineSearch(first=first, last=trial, accepted=False, backtracks=backtracks)
