"""Which source each row of a mixture comes from: exact quotas, without chance and without state."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

LONGEST_PERIOD = 65_536  # rows; shares that would need a longer one are rounded to multiples of 1 / LONGEST_PERIOD


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in proportion to `weights`, whose sum is the period of the schedule.

    Weights are read as the decimal numbers they are written as, so 0.7 and 0.3 are exactly 7 and 3. If the sum would
    exceed LONGEST_PERIOD, the shares are rounded to multiples of 1 / LONGEST_PERIOD by largest remainders, at least one
    to each source.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= LONGEST_PERIOD:
        return tuple(whole)
    shares = [Fraction(weight, sum(whole)) * (LONGEST_PERIOD - len(whole)) for weight in whole]
    rounded = [1 + int(share) for share in shares]
    remainders = sorted(range(len(shares)), key=lambda source: (int(shares[source]) - shares[source], source))
    for source in remainders[: LONGEST_PERIOD - sum(rounded)]:
        rounded[source] += 1
    return tuple(rounded)


@dataclass(frozen=True)
class QuotaSchedule:
    """The endless sequence of sources in which every source has its share, of any beginning and of any window.

    With k sources of shares w_1, …, w_k the sequence is that of Tijdeman (1980, "The chairman assignment problem"): row
    n (from 1) goes to the source i for which, among those with

        n·w_i − x_i ≥ 1 / (2k − 2),         x_i: rows of source i among the first n − 1

    (1 − 1/(2k − 2) − (n·w_i − x_i)) / w_i is least, that is, whose deadline is first. Then for every source and every n

        |x_i(n) − n·w_i| ≤ 1 − 1 / (2k − 2),

    which no sequence can better for all weights; so in any window of L rows each source has L·w_i rows but for fewer
    than two. After as many rows as the whole-number weights sum to, every quota is met exactly, and the sequence
    repeats: row n is a function of n alone.
    """

    weights: tuple[int, ...]

    @property
    def period(self) -> int:
        """Return the number of rows after which the sequence repeats."""
        return sum(self.weights)

    @cached_property
    def _sequence(self) -> bytes | tuple[int, ...]:
        sequence = _one_period(self.weights)
        return bytes(sequence) if len(self.weights) <= 256 else tuple(sequence)

    @cached_property
    def _places(self) -> tuple[list[int], ...]:
        """List, for each source, its positions in one period."""
        places: tuple[list[int], ...] = tuple([] for _ in self.weights)
        for position, source in enumerate(self._sequence):
            places[source].append(position)
        return places

    def source(self, position: int) -> int:
        """Return the source of the row at `position`, from 0."""
        return self._sequence[position % self.period]

    def count(self, source: int, rows: int) -> int:
        """Count the rows of `source` among the first `rows` ones."""
        periods, rest = divmod(rows, self.period)
        return periods * self.weights[source] + bisect_left(self._places[source], rest)


def _one_period(weights: Sequence[int]) -> list[int]:
    """Compute one period of the schedule in whole numbers: every quantity times its denominator."""
    if len(weights) == 1:
        return [0] * weights[0]
    total, k2 = sum(weights), 2 * len(weights) - 2
    drawn, sequence = [0] * len(weights), []
    for n in range(1, total + 1):
        behind = [k2 * (weight * n - total * count) for weight, count in zip(weights, drawn, strict=True)]
        best = -1
        for source, weight in enumerate(weights):
            if behind[source] < total:
                continue
            slack = (k2 - 1) * total - behind[source]  # over the weight: time to the deadline
            if best < 0 or slack * weights[best] < ((k2 - 1) * total - behind[best]) * weight:
                best = source
        drawn[best] += 1
        sequence.append(best)
    return sequence
