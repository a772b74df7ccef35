"""Win rates with intervals, from paired scores or outcomes; at equal length too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from rlhf.runtime.seeding import generator
from rlhf.tracking.metrics import format_interval

Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal
RESAMPLES = 2000
RESAMPLES_AT_ONCE = 250  # regressions fitted together; affects memory only
DRAWS_AT_ONCE = 2**22  # indices drawn together; affects memory only
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


NO_INTERVAL = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class LengthControlled(Interval):
    """A length-controlled win rate, and the fitted effect of length behind it."""

    length_effect: float  # phi: log-odds of winning at a large length difference; above 0, longer wins
    extrapolated: bool  # one side is longer on every prompt: no data near equal length


def outcomes(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 1 if A scores higher than B, 0 if lower, 0.5 if they tie; NaN if one has no score."""
    wins = (a > b).double() + 0.5 * (a == b).double()
    return torch.where(a.isnan() | b.isnan(), torch.nan, wins)


def win_rate(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> Interval:
    """Compute the share of prompts on which A scores higher than B; a tie counts half."""
    return bootstrap(outcomes(a, b), shares=True)


def wilson(successes: int | float, total: int) -> tuple[float, float]:
    """Compute the 95 % score interval of a share (Wilson 1927); `successes` may count a tie half.

    (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n
    """
    assert 0 <= successes <= total, (successes, total)
    assert total, "no rows"
    share, z2 = successes / total, Z95**2
    center = share + z2 / (2 * total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    low, high = (center - half) / scale, (center + half) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding may put 1 of 1 above its interval


def independent_difference(a: Interval, b: Interval) -> Interval:
    """Compute a - b and its interval from the intervals of two independent estimates (Newcombe 1998, method 10).

    a - b - sqrt((a - low_a)² + (high_b - b)²)  to  a - b + sqrt((high_a - a)² + (b - low_b)²)
    """
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    return Interval(value, low, value + math.hypot(a.high - a.value, b.value - b.low))


def length_controlled_win_rate(wins: Float[Tensor, "S P"], longer: Float[Tensor, "S P"]) -> LengthControlled:
    """Estimate the win rate A would have if its completions were as long as B's (Dubois et al. 2024, sec. 3).

        P(win) = sigmoid(theta + phi * tanh(longer / std(longer))),   result = sigmoid(theta)

    This is a logistic regression of the outcomes on the length difference, evaluated at difference zero. With two
    models, the paper's model terms reduce to theta; its term for prompt difficulty needs many models and is left out.
    `RIDGE` / 2 * (theta^2 + phi^2) is subtracted from the log-likelihood, which would otherwise have no maximum if
    length alone separates wins from losses. Swapping the sides gives one minus the result. If all outcomes are 0 or
    all are 1, there is nothing to control: the result is the plain rate with Wilson's interval.

    Args:
        wins: 1, 0.5 or 0 for A, NaN if it is not known, which is left out; seeds by prompts, resampled as in
            `bootstrap_crossed`.
        longer: length of A's completion minus the length of B's, in any one unit.
    """
    wins, longer = wins.double(), longer.double()
    known = ~wins.isnan()
    extrapolated = bool((longer[known] > 0).all() or (longer[known] < 0).all())
    plain = bootstrap_crossed(wins, shares=True)
    if plain.value in (0.0, 1.0):
        return LengthControlled(**vars(plain), length_effect=0.0, extrapolated=extrapolated)
    scale = longer[known].std(correction=0)
    # A constant difference has no scale: tanh(c / 0) is the sign of c.
    features = torch.tanh(longer / scale) if scale > 0 else longer.sign()
    cells, index = torch.stack([features[known], wins[known]]).unique(dim=1, return_inverse=True)
    estimate = fit_logistic(torch.bincount(index, minlength=cells.shape[1]).double()[None], cells[0], cells[1])[0]
    thetas = []
    for by_seed, by_prompt in _crossed_counts(*wins.shape, at_once=RESAMPLES_AT_ONCE):
        weights = torch.zeros(len(by_seed), cells.shape[1], dtype=torch.float64)
        for row, cell_index in enumerate(index.split(known.sum(dim=1).tolist())):
            weights.index_add_(1, cell_index, by_seed[:, row, None] * by_prompt[:, known[row]])
        weights = weights[weights.sum(dim=1) > 0]  # a resample of unknown outcomes alone is none
        thetas.append(fit_logistic(weights, cells[0], cells[1])[:, 0])
    theta = torch.cat(thetas)
    low, high = torch.quantile(theta.sigmoid(), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return LengthControlled(
        value=float(estimate[0].sigmoid()),
        low=low,
        high=high,
        length_effect=float(estimate[1]),
        extrapolated=extrapolated,
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


def mean_difference(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> Interval:
    """Compute the mean of A - B, paired by prompt; of a single prompt the interval is unbounded."""
    difference = bootstrap(a.double() - b.double())
    is_single = int((~(a - b).isnan()).sum()) == 1
    return replace(difference, low=-math.inf, high=math.inf) if is_single else difference


def bootstrap(values: Float[Tensor, " N"], *, seed: int = 0, shares: bool = False) -> Interval:
    """Compute the mean of `values` and its 95 % percentile interval over 2,000 resamples with replacement.

    A NaN is left out; if there is nothing else, the interval is NaN. If all values are 0 or all are 1, so are all
    resamples: then `shares` have Wilson's interval.
    """
    values_f64 = values.double()
    values_f64 = values_f64[~values_f64.isnan()]
    if not len(values_f64):
        return NO_INTERVAL
    means = torch.cat([values_f64[rows].mean(dim=1) for rows in resamples(len(values_f64), seed=seed)])
    return _interval(float(values_f64.mean()), means, len(values_f64) if shares else None)


def _interval(value: float, means: Float[Tensor, " R"], rows: int | None) -> Interval:
    """Return the percentile interval of the means of resamples, or Wilson's of none or all of `rows`."""
    if rows is not None and value in (0.0, 1.0):
        return Interval(value, *wilson(value * rows, rows))
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(value, low, high)


def resamples(count: int, *, seed: int = 0, key: str = "bootstrap") -> Iterator[Int[Tensor, "R N"]]:
    """Yield the row indices of 2,000 resamples of `count` rows, in parts that fit in memory.

    Args:
        count: the rows; at least one.
        seed: of the draws.
        key: tells these draws from others with the same seed.
    """
    random = generator(seed, key)
    for size in _parts(DRAWS_AT_ONCE // count):
        yield torch.randint(count, (size, count), generator=random)


def bootstrap_crossed(values: Float[Tensor, "S P"], *, shares: bool = False) -> Interval:
    """Compute the mean of `values` [seeds, prompts] and its interval, resampling seeds and prompts independently.

    All seeds share the prompts, so the two are crossed: each of the 2,000 resamples draws S seeds and P prompts with
    replacement and takes the mean over all their pairs (Owen 2007). With one seed this is the interval over prompts;
    with two or three, the variance between seeds is only roughly estimated. A NaN is left out of every mean; if
    there is nothing else, the interval is NaN. `shares` as in `bootstrap`, over prompts.
    """
    values_f64 = values.double()
    known = ~values_f64.isnan()
    if not known.any():
        return NO_INTERVAL
    means = torch.cat(
        [
            _crossed_mean(values_f64, known, by_seed, by_prompt)
            for by_seed, by_prompt in _crossed_counts(*values.shape, at_once=DRAWS_AT_ONCE // values.shape[1])
        ]
    )
    means = means[~means.isnan()]  # a resample of missing values alone
    prompts = int(known.any(dim=0).sum())
    return _interval(float(values_f64[known].mean()), means, prompts if shares else None)


def _crossed_mean(
    values: Float[Tensor, "S P"],
    known: Bool[Tensor, "S P"],
    by_seed: Float[Tensor, "R S"],
    by_prompt: Float[Tensor, "R P"],
) -> Float[Tensor, " R"]:
    """Compute the mean over the drawn cells, from counts: counts_s^T V counts_p / (S P), over the known share."""
    seeds, prompts = values.shape

    def mean(cells: Float[Tensor, "S P"]) -> Float[Tensor, " R"]:
        total: Tensor = ((by_seed @ cells / seeds) * by_prompt).sum(dim=1)
        return total / prompts

    return mean(values) if known.all() else mean(values.where(known, 0.0)) / mean(known.double())


def _crossed_counts(
    seeds: int, prompts: int, *, at_once: int
) -> Iterator[tuple[Float[Tensor, "R S"], Float[Tensor, "R P"]]]:
    """Yield how often every resample draws each seed and each prompt, for at most `at_once` resamples at a time."""
    random = generator(0, "bootstrap")
    rows = torch.randint(seeds, (RESAMPLES, seeds), generator=random)
    done = 0
    for size in _parts(at_once):
        columns = torch.randint(prompts, (size, prompts), generator=random)
        yield _counts(rows[done : done + size], seeds), _counts(columns, prompts)
        done += size


def _parts(at_once: int) -> list[int]:
    """Divide the resamples into parts of at most `at_once`, at least one."""
    size = max(1, at_once)
    return [min(size, RESAMPLES - start) for start in range(0, RESAMPLES, size)]


def _counts(drawn: Int[Tensor, "R K"], size: int) -> Float[Tensor, "R K"]:
    """Count how often each index below `size` was drawn in each row."""
    return torch.zeros(len(drawn), size, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )
