"""Successive halving by hand: sizes, shares, survivors and the winner; and the draws of the trials."""

from __future__ import annotations

import pytest

from rlhf.comparison.tuning.plan import (
    check_default,
    choose,
    draw_trials,
    full_budget,
    promote,
    round_limits,
    round_sizes,
    value_at,
)
from rlhf.config.compare import Choices, Factor, Range
from rlhf.errors import ConfigError


@pytest.mark.parametrize(
    "trials, keep, sizes",
    [
        (2, 2, [2]),
        (3, 2, [3, 2]),
        (5, 2, [5, 3, 2]),
        (8, 2, [8, 4, 2]),
        (9, 3, [9, 3]),
        (10, 3, [10, 4, 2]),
        (4, 4, [4]),
        (6, 9, [6]),
    ],
)
def test_the_sizes_of_the_rounds(trials: int, keep: int, sizes: list[int]) -> None:
    assert round_sizes(trials, keep) == sizes


def test_eight_trials_by_hand() -> None:
    """8, 4 and 2 trials: every round costs 8 of 24, so 1 + 2 + 4 sevenths of a run of 7."""
    sizes = [8, 4, 2]
    assert full_budget(sizes, 7.0) == 24
    assert round_limits(sizes, 24.0) == [1, 3, 7]
    assert round_limits(sizes, 12.0) == [0.5, 1.5, 3.5]
    assert round_limits([4], 20.0) == [5]


@pytest.mark.parametrize("trials, keep", [(3, 2), (7, 2), (8, 2), (27, 3), (11, 4)])
def test_the_rounds_spend_the_budget_in_equal_parts(trials: int, keep: int) -> None:
    sizes = round_sizes(trials, keep)
    limits = round_limits(sizes, 3000.0)
    added = [after - before for before, after in zip([0, *limits], limits, strict=False)]
    assert [size * amount for size, amount in zip(sizes, added, strict=True)] == pytest.approx(
        [3000 / len(sizes)] * len(sizes)
    )
    assert round_limits(sizes, full_budget(sizes, 640.0))[-1] == pytest.approx(640)


def test_the_default_goes_on_and_so_do_the_best_of_the_others() -> None:
    assert promote({0: -9.0, 1: 1.0, 2: 3.0, 3: 2.0}, 2) == [0, 2]
    assert promote({0: -9.0, 1: 1.0, 2: 3.0, 3: 2.0}, 3) == [0, 2, 3]
    assert promote({0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0}, 2) == [0, 1]  # of equals the earlier
    assert promote({0: None, 1: 1.0, 2: None, 3: 2.0}, 3) == [1, 3]  # a failed trial goes no further
    assert promote({0: None, 1: None}, 1) == []


def test_the_winner_and_its_ties() -> None:
    assert choose({0: 1.0, 3: 2.0}) == 3
    assert choose({0: 2.0, 3: 2.0}) == 0
    assert choose({0: None, 3: -5.0}) == 3
    assert choose({2: 1.0, 4: 1.0}) == 2
    assert choose({0: None, 3: None}) == choose({}) == 0


def test_values_by_hand() -> None:
    assert value_at(Range(low=1e-4, high=1e-2), 0.5, 0.5) == 1e-3
    assert value_at(Range(low=1e-4, high=1e-2), 0.5, 0.0) == 1e-4
    assert value_at(Range(low=0.0, high=4.0, scale="linear"), 0.5, 0.25) == 1.0
    assert [value_at(Factor(factor=10), 3e-4, u) for u in (0.0, 0.5, 0.75)] == [3e-5, 3e-4, 9.487e-4]
    assert [value_at(Choices(choices=["a", None, 2]), "a", u) for u in (0.0, 0.5, 0.99)] == ["a", None, 2]
    assert value_at(Range(low=1, high=8, scale="linear"), 2, 0.5) == 4  # whole if the arm's own is whole
    assert value_at(Factor(factor=8), 2, 0.0) == 1  # a count does not become 0
    assert isinstance(value_at(Range(low=1, high=8, scale="linear"), 2, 0.3), int)


def test_draws_depend_on_seed_trial_and_setting_alone() -> None:
    lr, beta = {"policy.lr": Factor(factor=10)}, {"algorithm.loss.beta": Range(low=0.01, high=1)}
    drawn = draw_trials(lr, {"policy.lr": 1e-3}, 6, 0)
    assert drawn == draw_trials(lr, {"policy.lr": 1e-3}, 6, 0)
    assert drawn != draw_trials(lr, {"policy.lr": 1e-3}, 6, 1)
    assert drawn[0] == {}
    assert len({trial["policy.lr"] for trial in drawn[1:]}) == 5
    assert all(1e-4 <= float(str(trial["policy.lr"])) <= 1e-2 for trial in drawn[1:])
    assert drawn[:3] == draw_trials(lr, {"policy.lr": 1e-3}, 3, 0)  # more trials leave the first as they are
    both = draw_trials({**beta, **lr}, {"policy.lr": 1e-3, "algorithm.loss.beta": 0.1}, 6, 0)
    assert [trial["policy.lr"] for trial in both[1:]] == [trial["policy.lr"] for trial in drawn[1:]]
    other_arm = draw_trials(lr, {"policy.lr": 1e-6}, 6, 0)  # the same quantiles around another value
    rates, others = ([float(str(trial["policy.lr"])) for trial in trials[1:]] for trials in (drawn, other_arm))
    assert rates == pytest.approx([1000 * rate for rate in others], rel=1e-3)
    assert drawn[1] == {"policy.lr": 3.885e-4}  # the same on every machine and in every version


def test_no_configuration_is_tried_twice() -> None:
    space = {"batch.epochs": Choices(choices=[1, 2, 3, 4])}
    drawn = draw_trials(space, {"batch.epochs": 2}, 4, 0)
    assert sorted(str(trial.get("batch.epochs", 2)) for trial in drawn) == ["1", "2", "3", "4"]
    with pytest.raises(ConfigError, match=r"tune.trials is 5, but the space \(batch.epochs\) has only 4"):
        draw_trials(space, {"batch.epochs": 2}, 5, 0)


@pytest.mark.parametrize("default", [0.0, None, "auto", True])
def test_nothing_is_within_a_factor_of_what_is_no_positive_number(default: object) -> None:
    with pytest.raises(ConfigError, match=r"policy.lr is .* in this arm"):
        check_default("policy.lr", Factor(factor=2), default)
    check_default("policy.lr", Choices(choices=[1]), default)
