"""Credit: by hand, by property, by identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from algo_cases import NAN, close, experience, grids, live, online, rollout, table
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algo.advantages import (
    gae,
    group_centered,
    group_normalized,
    leave_one_out,
    rewards_to_go,
    token_rewards,
    uniform_groups,
)
from rlhf.algorithms.remax import Greedy

fractions = st.floats(0, 1)


def returns_minus_baseline(rewards: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """ReMax's advantages of rows with these baselines."""
    rows, columns = mask.shape
    here = replace(rollout(groups=rows, group_size=1, tokens=columns), completion_mask=mask, baselines=baselines)
    return Greedy().compute(here, rewards)[0]


def test_token_rewards_by_hand():
    penalty = table([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.1, 0.2, 0.3])
    mask = live([1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1])
    expected = table([-0.1, -0.2, 9.7], [-0.4, 19.5, 0], [0, 0, 0], [-0.1, 0, 39.7])
    close(token_rewards(table([10, 20, 30, 40])[0], penalty, mask), expected)


@given(grids())
def test_token_rewards_sum_to_score_less_penalty(grid):
    hidden = torch.where(grid.mask, grid.first, NAN)
    rewards = token_rewards(grid.scores, hidden, grid.mask)
    assert (rewards[~grid.mask] == 0).all()
    expected = grid.scores - torch.where(grid.mask, grid.first, 0.0).sum(1)
    close(rewards.sum(1), torch.where(grid.mask.any(1), expected, 0.0))


@given(grids(shortest=1))
def test_the_score_stands_on_the_last_live_token(grid):
    rewards = token_rewards(grid.scores, torch.zeros_like(grid.first), grid.mask)
    for row, length in enumerate(grid.mask.sum(1).tolist()):
        assert rewards[row, length - 1] == grid.scores[row]
        assert rewards[row].count_nonzero() <= 1


def test_gae_by_hand():
    # Row 0: delta = 1 + .9 - .5, -1 + 1.8 - 1, 3 - 2; gamma * lambda = .72. Row 1 ends after two tokens.
    rewards = table([1, -1, 3], [2, 1, 99], [2, 99, 1])
    values = table([0.5, 1, 2], [1, 0.5, 99], [1, 99, 0.5])
    mask = live([1, 1, 1], [1, 1, 0], [1, 0, 1])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    close(advantages, table([1.7744, 0.52, 1], [1.81, 0.5, 0], [1.81, 0, 0.5]))
    close(returns, table([2.2744, 1.52, 3], [2.81, 1, 0], [2.81, 0, 1]))


def test_rewards_to_go_by_hand():
    close(
        rewards_to_go(table([1, 2, 4], [1, 2, 9]), live([1, 1, 1], [1, 1, 0]), gamma=0.5), table([3, 4, 4], [2, 2, 0])
    )


def test_reward_to_go_less_a_baseline_by_hand():
    # Greedy scores 10 and -1; to go: 7, 6, 4 | 3, 2.
    rewards, mask = table([1, 2, 4], [1, 2, 9]), live([1, 1, 1], [1, 1, 0])
    close(returns_minus_baseline(rewards, table([10, -1])[0], mask), table([-3, -4, -6], [4, 3, 0]))


@given(grids(holes=True))
def test_a_baseline_moves_a_row_by_its_own_number(grid):
    hidden = torch.where(grid.mask, grid.first, NAN)
    shifted = returns_minus_baseline(hidden, grid.scores, grid.mask)
    to_go = rewards_to_go(grid.first, grid.mask, gamma=1.0)
    close(to_go - shifted, torch.where(grid.mask, grid.scores[:, None], 0.0), atol=1e-9)


@given(grids(holes=True), fractions, fractions)
def test_gae_never_reads_what_the_mask_hides(grid, gamma, gae_lambda):
    plain = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=gae_lambda)
    hidden = [torch.where(grid.mask, x, NAN) for x in (grid.first, grid.second)]
    for ours, theirs in zip(gae(*hidden, grid.mask, gamma=gamma, gae_lambda=gae_lambda), plain, strict=True):
        close(ours, theirs)
        assert (ours[~grid.mask] == 0).all()


@given(grids(), fractions, fractions, st.integers(1, 4))
def test_gae_ignores_extra_padding(grid, gamma, gae_lambda, extra):
    def padded(x):
        return torch.nn.functional.pad(x, (0, extra), value=False if x.dtype == torch.bool else 5.0)

    plain = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=gae_lambda)
    wide = gae(padded(grid.first), padded(grid.second), padded(grid.mask), gamma=gamma, gae_lambda=gae_lambda)
    for narrow, wider in zip(plain, wide, strict=True):
        close(wider[:, : narrow.shape[1]], narrow)
        assert (wider[:, narrow.shape[1] :] == 0).all()


@given(grids(), fractions)
def test_gae_lambda_one_is_reward_to_go_minus_value(grid, gamma):
    advantages, returns = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=1.0)
    to_go = rewards_to_go(grid.first, grid.mask, gamma=gamma)
    close(returns, to_go)
    close(advantages, torch.where(grid.mask, to_go - grid.second, 0.0))


@given(grids(), fractions)
def test_gae_lambda_zero_is_the_td_error(grid, gamma):
    advantages, _ = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=0.0)
    values = torch.where(grid.mask, grid.second, 0.0)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    close(advantages, torch.where(grid.mask, grid.first + gamma * following - values, 0.0))


@given(grids(shortest=1), fractions, fractions)
def test_gae_is_the_discounted_sum_of_td_errors(grid, gamma, gae_lambda):
    errors, _ = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=0.0)
    advantages, _ = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=gae_lambda)
    powers = torch.tensor([(gamma * gae_lambda) ** k for k in range(errors.shape[1])], dtype=torch.float64)
    close(advantages[:, 0], errors @ powers)


@given(grids(shortest=1))
def test_undiscounted_rewards_to_go_start_at_the_total(grid):
    close(
        rewards_to_go(grid.first, grid.mask, gamma=1.0)[:, 0], torch.where(grid.mask, grid.first, 0.0).sum(1), atol=1e-9
    )


@given(grids(), fractions, fractions, st.randoms(use_true_random=False))
def test_gae_permutes_with_its_rows(grid, gamma, gae_lambda, random):
    order = torch.tensor(random.sample(range(len(grid.mask)), len(grid.mask)))
    advantages, returns = gae(grid.first, grid.second, grid.mask, gamma=gamma, gae_lambda=gae_lambda)
    moved = gae(grid.first[order], grid.second[order], grid.mask[order], gamma=gamma, gae_lambda=gae_lambda)
    close(moved[0], advantages[order])
    close(moved[1], returns[order])


def test_group_baselines_by_hand():
    scores = table([1, 2, 3, 6])[0]
    std = math.sqrt(3.5) + 1e-4
    close(group_centered(scores, 4), table([-2, -1, 0, 3])[0])
    close(group_normalized(scores, 4), table([-2 / std, -1 / std, 0, 3 / std])[0])
    close(leave_one_out(scores, 4), table([-8 / 3, -4 / 3, 0, 4])[0])


def test_groups_are_contiguous_and_apart():
    scores = table([1, 3, 5, 5, 10, 20])[0]
    close(group_centered(scores, 2), table([-1, 1, 0, 0, -5, 5])[0])
    close(group_normalized(scores, 2), table([-1 / 1.0001, 1 / 1.0001, 0, 0, -5 / 5.0001, 5 / 5.0001])[0])
    close(leave_one_out(scores, 2), table([-2, 2, 0, 0, -10, 10])[0])
    assert uniform_groups(scores, 2).tolist() == [False, False, True, True, False, False]
    assert uniform_groups(table([1, 1, 2])[0], 3).tolist() == [False] * 3


def test_leave_one_out_needs_others():
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(table([1, 2])[0], 1)


scores_in_groups = st.integers(2, 5).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(-50, 50), min_size=n * size, max_size=n * size)),
    )
)


@given(scores_in_groups, st.floats(-20, 20))
def test_group_advantages_sum_to_zero_and_ignore_a_shift(case, shift):
    size, values = case
    scores = torch.tensor(values, dtype=torch.float64)
    for baseline in (group_centered, group_normalized, leave_one_out):
        advantages = baseline(scores, size)
        close(advantages.view(-1, size).sum(1), torch.zeros(len(values) // size, dtype=torch.float64), atol=1e-6)
        # Rounding in a group of near-equal scores is magnified by at most 1 / 1e-4.
        close(baseline(scores + shift, size), advantages, atol=1e-8)


@given(scores_in_groups)
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(case):
    size, values = case
    scores = torch.tensor(values, dtype=torch.float64)
    close(leave_one_out(scores, size), size / (size - 1) * group_centered(scores, size), atol=1e-9)


@given(scores_in_groups)
def test_uniform_groups_have_no_advantage_and_others_have(case):
    size, values = case
    scores = torch.tensor([float(round(v / 25)) for v in values], dtype=torch.float64)
    uniform = uniform_groups(scores, size)
    assert (group_centered(scores, size)[uniform].abs() < 1e-12).all()
    others = group_centered(scores, size)[~uniform].view(-1, size)
    assert (others.abs().amax(1) > 0.1).all()


@pytest.mark.parametrize("advantage", [group_centered, group_normalized, leave_one_out])
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_the_advantage_of_a_tie_is_exactly_zero(advantage: Callable[[Tensor, int], Tensor], size: int) -> None:
    """The mean of three times 0.1 is not 0.1 in float32, and over the 1e-4 of the deviation that is an advantage."""
    scores = torch.cat([torch.full((size,), 0.1 * k) for k in range(1, 50)] + [torch.arange(size).float()])
    advantages = advantage(scores, size)
    assert advantages[:-size].abs().max() == 0.0
    assert advantages[-1] >= 0.5


@pytest.mark.parametrize("kind", ["gae", "batch_whiten", "group"])
def test_advantages_before_whitening_are_those_of_the_same_algorithm_without_it(kind: str) -> None:
    others = {"value_loss": {}} if kind == "gae" else {}
    settings = {"type": kind} if kind == "group" else {"type": kind, "whiten": True}
    whitened = experience(online(advantage=settings, **others))
    plain = whitened if kind == "group" else experience(online(advantage={**settings, "whiten": False}, **others))
    raw = online(advantage=settings, **others).advantage.before_whitening(whitened)
    torch.testing.assert_close(raw, plain.advantages)
    if kind != "group":
        live = whitened.advantages[whitened.loss_mask]
        assert abs(float(live.mean())) < 1e-9 < 0.01 < abs(float(raw[whitened.loss_mask].mean()))
