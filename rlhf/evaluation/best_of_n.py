"""Best-of-n: n completions of a prompt, the one that the proxy likes best is kept. No training; paid at every use."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def kl_bound(n: int) -> float:
    """The bound log n - (n - 1) / n, in nats per completion, on KL(best of n || start).

    It is the KL itself where no two completions tie and each is unlikely (Stiennon et al. 2020, appendix G.3), and an
    upper bound in general (Beirami et al. 2024, theorem 1).
    """
    return math.log(n) - (n - 1) / n


def expected_best(gold: Float[Tensor, "P N"], proxy: Float[Tensor, "P N"], n: int) -> Float[Tensor, " P"]:
    """The expected gold of the best of n by the proxy, estimated without bias from N >= n samples of each prompt.

    The mean over all subsets of n of the N samples (Nakano et al. 2021, appendix I): with the samples in ascending
    order of the proxy,

        sum_{i=n}^{N}  C(i - 1, n - 1) / C(N, n) * gold_(i)

    Samples whose proxies tie share their weights equally: the pick among them is at random.

    Args:
        gold: the score that counts.
        proxy: the score that is picked by.
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
    return (golds * _shared(weights.expand_as(ordered), ordered)).sum(dim=1)


def _shared(weights: Float[Tensor, "P N"], ordered: Float[Tensor, "P N"]) -> Float[Tensor, "P N"]:
    """Each weight replaced by the mean weight of its run of equal values."""
    starts = torch.ones_like(ordered, dtype=torch.long)
    starts[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
    group = starts.cumsum(dim=1) - 1
    zeros = torch.zeros_like(weights)
    sums = zeros.scatter_add(1, group, weights)
    sizes = zeros.scatter_add(1, group, torch.ones_like(weights))
    return sums.gather(1, group) / sizes.gather(1, group)


def picks(proxy: Float[Tensor, "P N"], n: int) -> Int[Tensor, " P"]:
    """Which of the first n samples of each prompt the proxy likes best; of equals, the first."""
    return proxy[:, :n].argmax(dim=1)


def curve_sizes(total: int) -> list[int]:
    """The n of a curve up to `total`: 1, 2, 3, 4, 6, 8, 12, … and `total` itself."""
    sizes = {size for k in range(total.bit_length()) for size in (2**k, 3 * 2**k // 2) if 1 <= size <= total}
    return sorted(sizes | {total})
