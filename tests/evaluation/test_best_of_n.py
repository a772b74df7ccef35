"""Best-of-n's estimator against its definition, and its KL bound; the frontier's readings; crossed bootstrap."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.evaluation.frontier import curve_sizes, expected_best, kl_bound, overoptimized, picks, score_at_kl
from rlhf.evaluation.win_rate import bootstrap, bootstrap_crossed


def table(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def by_definition(gold: list[float], proxy: list[float], n: int) -> float:
    """The mean over all subsets of n of the gold of the subset's best by the proxy, a tie being broken at random."""
    values = []
    for subset in combinations(range(len(gold)), n):
        top = max(proxy[i] for i in subset)
        best = [gold[i] for i in subset if proxy[i] == top]
        values.append(sum(best) / len(best))
    return sum(values) / len(values)


def test_by_hand() -> None:
    gold, proxy = table([3.0, 0.0, 6.0]), table([0.2, 0.1, 0.9])
    # Of the three pairs, two contain the third sample (gold 6); the other one's best is the first (gold 3).
    assert expected_best(gold, proxy, 2).tolist() == pytest.approx([5.0])
    assert expected_best(gold, proxy, 1).tolist() == pytest.approx([3.0])
    assert expected_best(gold, proxy, 3).tolist() == pytest.approx([6.0])


scores = st.integers(-3, 3).map(float)


@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=7), st.data())
def test_it_is_the_mean_over_all_subsets(rows: list[tuple[float, float]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(rows)))
    gold, proxy = [g for g, _ in rows], [p for _, p in rows]
    best = expected_best(table(gold), table(proxy), n)
    assert best.tolist() == pytest.approx([by_definition(gold, proxy, n)])


@given(st.lists(scores, min_size=2, max_size=12))
def test_the_best_by_itself_grows_with_n(proxy: list[float]) -> None:
    values = [float(expected_best(table(proxy), table(proxy), n)[0]) for n in range(1, len(proxy) + 1)]
    assert all(after >= before - 1e-12 for before, after in pairwise(values))
    assert values[-1] == pytest.approx(max(proxy))


def test_more_than_there_is_cannot_be_estimated() -> None:
    with pytest.raises(AssertionError, match="cannot be estimated"):
        expected_best(table([1.0]), table([1.0]), 2)


def test_picks_are_among_the_first_n() -> None:
    proxy = table([0.0, 2.0, 2.0, 9.0], [5.0, 1.0, 1.0, 1.0])
    assert picks(proxy, 3).tolist() == [1, 0]
    assert picks(proxy, 4).tolist() == [3, 0]


def test_the_bound() -> None:
    assert kl_bound(1) == 0.0
    assert kl_bound(2) == pytest.approx(math.log(2) - 0.5)
    assert kl_bound(64) == pytest.approx(4.158883 - 63 / 64)


@pytest.mark.parametrize("total, sizes", [(1, [1]), (5, [1, 2, 3, 4, 5]), (16, [1, 2, 3, 4, 6, 8, 12, 16])])
def test_sizes_of_the_curve(total: int, sizes: list[int]) -> None:
    assert curve_sizes(total) == sizes


def test_the_score_at_a_kl_is_read_between_evaluations() -> None:
    points = [(0.0, 1.0), (2.0, 3.0), (1.0, 9.0), (4.0, 5.0)]
    assert score_at_kl(points, 1.0) == pytest.approx(2.0)  # at its first crossing, not the later 9
    assert score_at_kl(points, 2.0) == pytest.approx(3.0)
    assert score_at_kl(points, 3.0) == pytest.approx(9.0 - 4.0 * 2 / 3)
    assert score_at_kl(points, 4.5) is None
    assert score_at_kl([], 1.0) is None


def test_gaming_is_the_proxy_up_and_the_gold_clearly_down() -> None:
    proxy, gold = [0.0, 1.0, 2.0, 3.0, 1.0], [0.0, 5.0, 4.9, 3.0, 1.0]
    assert overoptimized(proxy, gold, [0.5] * 5) == [False, False, False, True, False]


def test_crossed_resampling_with_one_seed_is_over_prompts() -> None:
    values = torch.linspace(-1, 2, 60, dtype=torch.float64)
    one, flat = bootstrap_crossed(values[None]), bootstrap(values)
    assert one.value == pytest.approx(flat.value)
    assert (one.low, one.high) == pytest.approx((flat.low, flat.high), abs=0.05)


def test_seeds_that_disagree_widen_the_interval() -> None:
    noise = torch.randn(1, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = bootstrap_crossed(noise.expand(3, 400))
    apart = bootstrap_crossed(noise + torch.tensor([[-1.0], [0.0], [1.0]]))
    assert apart.value == pytest.approx(same.value)
    assert apart.high - apart.low > 5 * (same.high - same.low)
    assert (apart.low, apart.high) == pytest.approx((same.value - 1, same.value + 1), abs=0.15)  # all of one seed


def test_rows_and_columns_are_drawn_apart() -> None:
    """v = a_s + b_p has the variance Var(a) / S + Var(b) / P, not the variance of S x P independent cells."""
    draw = torch.Generator().manual_seed(1)
    rows, columns = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((8, 1), (1, 50)))
    interval = bootstrap_crossed(rows + columns)
    expected = (rows.var(correction=0) / 8 + columns.var(correction=0) / 50) ** 0.5
    assert (interval.high - interval.low) / (2 * 1.96) == pytest.approx(float(expected), rel=0.1)
