"""Intervals of large data in little memory, and of data in which some scores are missing."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.evaluation import win_rate
from rlhf.evaluation.frontier import expected_best, picks
from rlhf.evaluation.win_rate import (
    Interval,
    bootstrap,
    bootstrap_crossed,
    length_controlled_win_rate,
    outcomes,
)
from rlhf.runtime.seeding import generator

NAN = math.nan


def test_resamples_in_parts_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    index = torch.randint(700, (win_rate.RESAMPLES, 700), generator=generator(5, "bootstrap"))
    means = values[0][index].mean(dim=1)  # all at once
    ends = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    whole, crossed = bootstrap(values[0], seed=5), bootstrap_crossed(values)
    assert [whole.low, whole.high] == ends
    monkeypatch.setattr(win_rate, "DRAWS_AT_ONCE", 10_000)  # 14 resamples of 700
    assert bootstrap(values[0], seed=5) == whole
    parts = bootstrap_crossed(values)
    assert [parts.low, parts.high] == pytest.approx([crossed.low, crossed.high], rel=1e-12)


def test_no_part_is_larger_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = torch.randint

    def counting(*args: object, **kwargs: object) -> torch.Tensor:
        result: torch.Tensor = original(*args, **kwargs)  # type: ignore[call-overload]
        drawn.append(result.numel())
        return result

    monkeypatch.setattr(torch, "randint", counting)
    monkeypatch.setattr(win_rate, "DRAWS_AT_ONCE", 50_000)
    bootstrap(torch.arange(600.0))
    bootstrap_crossed(torch.arange(1200.0).view(2, 600))
    assert max(drawn) <= 50_000


def test_an_outcome_without_a_score_is_neither_won_nor_lost() -> None:
    a, b = torch.tensor([1.0, NAN, 1.0, 2.0]), torch.tensor([0.0, 1.0, NAN, 2.0])
    assert outcomes(a, b).nan_to_num(-1).tolist() == [1.0, -1.0, -1.0, 0.5]


def test_intervals_are_of_what_has_a_score() -> None:
    known = torch.arange(40.0)
    missing = torch.cat([torch.tensor([NAN]), known, torch.tensor([NAN])])
    assert bootstrap(missing) == bootstrap(known)
    table = torch.arange(60.0).view(2, 30).clone()
    table[0, 3] = NAN
    interval = bootstrap_crossed(table)
    assert interval.value == pytest.approx(float(table.nanmean()))
    assert interval.low < interval.value < interval.high
    full = bootstrap_crossed(torch.arange(60.0).view(2, 30))
    assert abs(interval.low - full.low) < 1
    assert abs(interval.high - full.high) < 1


def test_a_resample_without_any_score_is_no_resample() -> None:
    table = torch.full((1, 3), NAN)
    table[0, 0] = 2.0
    assert bootstrap_crossed(table) == Interval(2.0, 2.0, 2.0)


def test_a_resample_without_any_outcome_is_no_fit_at_equal_length() -> None:
    wins = torch.full((1, 3), NAN)
    wins[0, 0] = 0.75
    rate = length_controlled_win_rate(wins, torch.zeros(1, 3))
    assert 0.7 < rate.low <= rate.value <= rate.high  # and not 0.5, of the resamples that draw the others alone


def test_the_length_of_what_has_no_score_does_not_count() -> None:
    wins = torch.tensor([[1.0, 0.0, 1.0, 0.5, 1.0]])
    longer = torch.tensor([[3.0, -2.0, 1.0, 0.0, 2.0]])
    padded = torch.cat([wins, torch.tensor([[NAN]])], dim=1)
    lengths = torch.cat([longer, torch.tensor([[500.0]])], dim=1)
    a, b = length_controlled_win_rate(wins, longer), length_controlled_win_rate(padded, lengths)
    assert (b.value, b.length_effect) == pytest.approx((a.value, a.length_effect))
    assert b.low < b.value < b.high


def test_the_best_of_n_is_never_one_that_the_proxy_does_not_score() -> None:
    proxy = torch.tensor([[NAN, 1.0, 3.0], [NAN, NAN, NAN]])
    assert picks(proxy, 2).tolist() == [1, 0]
    gold = torch.tensor([[9.0, 1.0, 3.0], [1.0, 2.0, 6.0]])
    assert expected_best(gold, proxy, 3).tolist() == pytest.approx([3.0, 3.0])  # of equals each is as likely
    gold = torch.tensor([[9.0, 1.0, NAN], [NAN, NAN, NAN]])
    best = expected_best(gold, torch.tensor([[0.0, 1.0, 2.0]] * 2), 2)
    # Of the pairs, one has the second sample as its best, two have the third, which the gold does not score.
    assert best[0] == 1.0
    assert best[1].isnan()


def test_nothing_but_missing_scores_has_no_interval() -> None:
    nothing = torch.full((2, 3), NAN, dtype=torch.float64)
    for interval in (bootstrap(nothing[0]), bootstrap_crossed(nothing)):
        assert [math.isnan(number) for number in (interval.value, interval.low, interval.high)] == [True] * 3


def test_wins_alone_leave_the_share_uncertain() -> None:
    better, worse = torch.arange(5) + 1.0, torch.arange(5) * 1.0
    assert win_rate.win_rate(better, worse) == Interval(1.0, *win_rate.wilson(5, 5))
    assert win_rate.wilson(5, 5)[0] == pytest.approx(0.5655, abs=1e-4)  # z² / (5 + z²) less than 1
    assert win_rate.win_rate(better, better) == Interval(0.5, 0.5, 0.5)  # one model beside itself
    of_seeds = bootstrap_crossed(torch.tensor([[0.0, 0, 0, NAN], [0, 0, 0, NAN]]), shares=True)
    assert of_seeds == Interval(0.0, *win_rate.wilson(0, 3))  # seeds share the prompts
    mixed = bootstrap(outcomes(better, worse.flip(0)))
    assert win_rate.win_rate(better, worse.flip(0)) == mixed


def test_one_prompt_says_nothing_of_the_spread_of_differences() -> None:
    single = win_rate.mean_difference(torch.tensor([2.0, 1.0]), torch.tensor([1.5, NAN]))
    assert single == Interval(0.5, -math.inf, math.inf)
