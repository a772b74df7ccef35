"""Reward against KL: what a run had reached at a given KL, and where it was gaming the reward it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def at_kl(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """The score where a run first reached `kl` nats: linear between the two evaluations around it; None: it never did.

    Args:
        points: (KL, score) of the evaluations, in the order of training.
        kl: nats.
    """
    if points and points[0][0] >= kl:
        return points[0][1]
    for (left, before), (right, after) in pairwise(points):
        if left < kl <= right:
            share = (kl - left) / (right - left)
            return before + share * (after - before)
    return None


def overoptimized(proxy: Sequence[float], gold: Sequence[float], margin: Sequence[float]) -> list[bool]:
    """At which evaluations the proxy is above, and the gold clearly below, what it was when the gold was best so far.

    That is the sign of over-optimization (Gao et al. 2023): the proxy still rises and the gold falls. `margin` is how
    far below counts as clear, in units of gold: noise should not.
    """
    found, best = [], 0
    for i in range(len(gold)):
        if gold[i] > gold[best]:
            best = i
        found.append(proxy[i] > proxy[best] and gold[i] < gold[best] - margin[i])
    return found
