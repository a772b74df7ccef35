"""Mean and standard deviation of all values seen so far, from one batch after another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlhf.batching import widen


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The moments of the values so far; a batch of several ranks is one batch, so all ranks have the same."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared deviations from the mean

    @property
    def std(self) -> float:
        """Return the population's standard deviation; 0 before there are values."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def with_batch(self, values: Float[Tensor, " B"]) -> Moments:
        """Return the moments with the values of a batch added (Chan et al. 1979, eq. 2.1).

            n = n_a + n_b,   δ = mean_b - mean_a,   mean = mean_a + δ n_b / n,   S = S_a + S_b + δ² n_a n_b / n

        They are the moments of all values together, however these were split into batches.
        """
        values = widen(values.detach())
        added = float(values.numel())
        if not added:
            return self
        mean, count = float(values.mean()), self.count + added
        squares, delta = float(((values - mean) ** 2).sum()), mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * added / count,
            squares=self.squares + squares + delta**2 * self.count * added / count,
        )
