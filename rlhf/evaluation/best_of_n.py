"""Best-of-n sampling: draw n completions of a prompt and keep the one of the highest proxy score, without training."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def kl_bound(n: int) -> float:
    """Compute the upper bound on KL(best of n || start), in nats per completion.

        log n - (n - 1) / n

    It is the KL itself where no two completions tie and each is unlikely (Stiennon et al. 2020, appendix G.3), and an
    upper bound in general (Beirami et al. 2024, theorem 1).
    """
    return math.log(n) - (n - 1) / n


def expected_best(gold: Float[Tensor, "P N"], proxy: Float[Tensor, "P N"], n: int) -> Float[Tensor, " P"]:
    """Estimate the expected gold score of the best of n by the proxy, without bias, from N >= n samples of each prompt.

    This is the mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I): with the samples in
    ascending order of the proxy,

        sum_{i=n}^{N}  C(i - 1, n - 1) / C(N, n) * gold_(i)

    Samples with equal proxy scores share their weights equally, as if ties were broken at random.

    Args:
        gold: the score to estimate.
        proxy: the score by which the best is chosen.
        n: from 1 to N.

    Returns:
        One expectation for each prompt, float64.
    """
    total = gold.shape[1]
    assert 1 <= n <= total, f"the best of {n} cannot be estimated from {total} samples"
    weights = torch.tensor(
        [math.comb(i - 1, n - 1) / math.comb(total, n) for i in range(1, total + 1)], dtype=torch.float64
    )
    ordered, order = proxy.double().sort(dim=1)
    golds = gold.double().gather(1, order)
    return (golds * _average_ties(weights.expand_as(ordered), ordered)).sum(dim=1)


def _average_ties(weights: Float[Tensor, "P N"], ordered: Float[Tensor, "P N"]) -> Float[Tensor, "P N"]:
    """Replace each weight by the mean weight over its run of equal values; `ordered` is sorted along dim 1."""
    starts = torch.ones_like(ordered, dtype=torch.long)
    starts[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    group = starts.cumsum(dim=1) - 1
    zeros = torch.zeros_like(weights)
    sums = zeros.scatter_add(1, group, weights)
    sizes = zeros.scatter_add(1, group, torch.ones_like(weights))
    return sums.gather(1, group) / sizes.gather(1, group)


def picks(proxy: Float[Tensor, "P N"], n: int) -> Int[Tensor, " P"]:
    """Return the index of the best of the first n samples of each prompt by the proxy; ties go to the first."""
    return proxy[:, :n].argmax(dim=1)


def curve_sizes(total: int) -> list[int]:
    """Return the values of n for a curve up to `total`: 1, 2, 3, 4, 6, 8, 12, … and `total` itself."""
    sizes = {size for k in range(total.bit_length()) for size in (2**k, 3 * 2**k // 2) if 1 <= size <= total}
    return sorted(sizes | {total})
