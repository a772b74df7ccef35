"""Win rates with intervals, from paired scores or outcomes; at equal length too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from rlhf.runtime.seeding import generator
from rlhf.tracking.metrics import format_interval

RESAMPLES = 2000
RESAMPLES_AT_ONCE = 250  # regressions fitted together; affects memory only
RIDGE = 0.01  # a hundredth of the weight of one prompt
MAX_NEWTON_STEPS, MAX_STEP_HALVINGS = 100, 40


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % percentile-bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return `value [low, high]` with three significant digits."""
        return format_interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class LengthControlled(Interval):
    """A length-controlled win rate, and the fitted effect of length behind it."""

    length_effect: float  # phi: log-odds of winning at a large length difference; above 0, longer wins
    extrapolated: bool  # one side is longer on every prompt: no data near equal length


def outcomes(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 1 where A scores higher than B, 0 where lower, 0.5 where they tie."""
    return (a > b).double() + 0.5 * (a == b).double()


def win_rate(a: Float[Tensor, " N"], b: Float[Tensor, " N"], *, seed: int = 0) -> Interval:
    """Compute the share of prompts on which A scores higher than B; a tie counts half."""
    return bootstrap(outcomes(a, b), seed=seed)


def length_controlled_win_rate(wins: Float[Tensor, "S P"], longer: Float[Tensor, "S P"]) -> LengthControlled:
    """Estimate the win rate A would have if its completions were as long as B's (Dubois et al. 2024, sec. 3).

        P(win) = sigmoid(theta + phi * tanh(longer / std(longer))),   result = sigmoid(theta)

    This is a logistic regression of the outcomes on the length difference, evaluated at difference zero. With two
    models, the paper's model terms reduce to theta; its term for prompt difficulty needs many models and is left out.
    `RIDGE` / 2 * (theta^2 + phi^2) is subtracted from the log-likelihood, which would otherwise have no maximum where
    length alone separates wins from losses. Swapping the sides gives one minus the result.

    Args:
        wins: 1, 0.5 or 0 for A; seeds by prompts, resampled as in `bootstrap_crossed`.
        longer: length of A's completion minus that of B's, in any one unit.
    """
    wins, longer = wins.double(), longer.double()
    scale = longer.std(correction=0)
    # A constant difference has no scale: tanh(c / 0) is the sign of c.
    features = torch.tanh(longer / scale) if scale > 0 else longer.sign()
    cells, index = torch.stack([features.flatten(), wins.flatten()]).unique(dim=1, return_inverse=True)
    rows, columns = _crossed_draws(*wins.shape)
    by_seed, by_prompt = _counts(rows, len(wins)), _counts(columns, wins.shape[1])
    weights = torch.zeros(RESAMPLES, cells.shape[1], dtype=torch.float64)
    for row, cell_index in enumerate(index.view(wins.shape)):
        weights.index_add_(1, cell_index, by_seed[:, row, None] * by_prompt)
    estimate = fit_logistic(torch.bincount(index, minlength=cells.shape[1]).double()[None], cells[0], cells[1])[0]
    theta = torch.cat([fit_logistic(part, cells[0], cells[1])[:, 0] for part in weights.split(RESAMPLES_AT_ONCE)])
    low, high = torch.quantile(theta.sigmoid(), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return LengthControlled(
        value=float(estimate[0].sigmoid()),
        low=low,
        high=high,
        length_effect=float(estimate[1]),
        extrapolated=bool((longer > 0).all() or (longer < 0).all()),
    )


def fit_logistic(
    weights: Float[Tensor, "R K"], features: Float[Tensor, " K"], targets: Float[Tensor, " K"]
) -> Float[Tensor, "R 2"]:
    """Fit R weighted ridge logistic regressions at once and return theta and phi of each.

        max over (theta, phi) of  sum_k w_k (y_k log p_k + (1 - y_k) log(1 - p_k)) - RIDGE / 2 (theta^2 + phi^2),
        p_k = sigmoid(theta + phi x_k)

    The fit uses Newton's method and halves a step until the objective rises. The objective is strictly concave, so
    the maximum is unique.
    """
    design = torch.stack([torch.ones_like(features), features], dim=1)
    ridge = RIDGE * torch.eye(2, dtype=torch.float64)

    def objective(parameters: Float[Tensor, "R 2"]) -> Float[Tensor, " R"]:
        logits = parameters @ design.T
        log_likelihood: Tensor = (weights * (targets * logits - softplus(logits))).sum(dim=1)
        return log_likelihood - 0.5 * RIDGE * (parameters**2).sum(dim=1)

    estimate = torch.zeros(len(weights), 2, dtype=torch.float64)
    for _ in range(MAX_NEWTON_STEPS):
        p = (estimate @ design.T).sigmoid()
        gradient = (weights * (targets - p)) @ design - RIDGE * estimate
        curvature = torch.einsum("rk,ki,kj->rij", weights * p * (1 - p), design, design) + ridge
        step: Tensor = torch.linalg.solve(curvature, gradient)
        if bool((step.abs() <= 1e-8 * (1 + estimate.abs())).all()):  # convergence is quadratic
            return estimate + step
        current = objective(estimate)
        for _ in range(MAX_STEP_HALVINGS):
            falls = objective(estimate + step) < current - 1e-12 * (1 + current.abs())  # by more than rounding
            if not bool(falls.any()):
                break
            step = torch.where(falls[:, None], 0.5 * step, step)
        estimate = estimate + step
    return estimate


def mean_difference(a: Float[Tensor, " N"], b: Float[Tensor, " N"], *, seed: int = 0) -> Interval:
    """Compute the mean of A - B, paired by prompt."""
    return bootstrap(a.double() - b.double(), seed=seed)


def bootstrap(values: Float[Tensor, " N"], *, seed: int = 0) -> Interval:
    """Compute the mean of `values` and its 95 % percentile interval over 2,000 resamples with replacement."""
    index = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator(seed, "bootstrap"))
    means = values.double()[index].mean(dim=1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(values.double().mean()), low, high)


def bootstrap_crossed(values: Float[Tensor, "S P"]) -> Interval:
    """Compute the mean of `values` [seeds, prompts] and its interval, resampling seeds and prompts independently.

    All seeds share the prompts, so the two are crossed: each of the 2,000 resamples draws S seeds and P prompts with
    replacement and takes the mean over all their pairs (Owen 2007). With one seed this is the interval over prompts;
    with two or three, the variance between seeds is only roughly estimated.
    """
    seeds, prompts = values.shape
    rows, columns = _crossed_draws(seeds, prompts)
    values_f64 = values.double()
    # The mean over the drawn cells, from counts: counts_s^T V counts_p / (S P).
    by_seed = _counts(rows, seeds) @ values_f64 / seeds
    means = (by_seed * _counts(columns, prompts)).sum(dim=1) / prompts
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(values_f64.mean()), low, high)


def _crossed_draws(seeds: int, prompts: int) -> tuple[Int[Tensor, "R S"], Int[Tensor, "R P"]]:
    """Draw the indices of the seeds and of the prompts of every resample."""
    random = generator(0, "bootstrap")
    rows = torch.randint(seeds, (RESAMPLES, seeds), generator=random)
    return rows, torch.randint(prompts, (RESAMPLES, prompts), generator=random)


def _counts(drawn: Int[Tensor, "R K"], size: int) -> Float[Tensor, "R K"]:
    """Count how often each index below `size` was drawn in each row."""
    return torch.zeros(len(drawn), size, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )
