"""The Lagrange multiplier: its step and its combination by hand, its bounds, and refusals of the configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algo_cases import close, table
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.lagrange import Lagrange
from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.errors import ConfigError

TREE: dict[str, Any] = {
    "policy": {"model": "m"},
    "data": {"prompts": {"path": "p"}},
    "reward": {"source": {"type": "model", "path": "rm"}, "cost": {"source": {"type": "model", "path": "cm"}}},
    "algorithm": {"preset": "ppo_lag"},
}


def test_a_step_by_hand() -> None:
    """Cost 3.5 at a limit of 3 and a multiplier of 2: ln λ rises by 0.1 · 2 · 0.5."""
    lagrange = Lagrange(cost_limit=3.0, lr=0.1)
    assert lagrange.next_multiplier(2.0, cost=3.5) == pytest.approx(2.0 * math.exp(0.1))
    assert lagrange.next_multiplier(2.0, cost=2.0) == pytest.approx(2.0 * math.exp(-0.2))
    assert lagrange.next_multiplier(2.0, cost=3.0) == pytest.approx(2.0)


def test_the_step_ascends_the_lagrangian_in_log_space() -> None:
    log_multiplier = torch.tensor(math.log(0.7), dtype=torch.float64, requires_grad=True)
    (log_multiplier.exp() * (4.2 - 1.2)).backward()
    assert log_multiplier.grad is not None
    moved = Lagrange(cost_limit=1.2, lr=0.05, start=0.7).next_multiplier(0.7, cost=4.2)
    assert math.log(moved) == pytest.approx(math.log(0.7) + 0.05 * log_multiplier.grad.item())


def test_the_step_is_projected() -> None:
    lagrange = Lagrange(cost_limit=0.0, lr=1.0, lowest=0.5, highest=4.0)
    assert lagrange.next_multiplier(3.0, cost=10.0) == pytest.approx(4.0)
    assert lagrange.is_at_limit(lagrange.next_multiplier(3.0, cost=10.0))
    assert lagrange.next_multiplier(1.0, cost=-10.0) == pytest.approx(0.5)
    assert not lagrange.is_at_limit(3.9)


@given(st.floats(0.001, 20.0), st.floats(-1e6, 1e6))
def test_a_multiplier_stays_within_its_bounds(multiplier: float, cost: float) -> None:
    moved = Lagrange().next_multiplier(multiplier, cost=cost)
    assert 0.001 * (1 - 1e-9) <= moved <= 20.0 * (1 + 1e-9)
    assert (moved - multiplier) * cost >= -1e-9


def test_the_multiplier_in_use_is_ahead_by_hand() -> None:
    """Learned multiplier 2, violation 0.5, 5 steps of lr 0.1 ahead: ln λ is higher by 0.1 · 5 · 2 · 0.5."""
    lagrange = Lagrange(cost_limit=3.0, lr=0.1, lookahead=5.0)
    assert lagrange.in_use(2.0, violation=0.5) == pytest.approx(2.0 * math.exp(0.5))
    assert lagrange.in_use(2.0, violation=-0.1) == pytest.approx(2.0 * math.exp(-0.1))
    assert lagrange.in_use(2.0, violation=0.0) == pytest.approx(2.0)
    assert Lagrange(lookahead=0.0).in_use(2.0, violation=0.5) == pytest.approx(2.0)
    assert lagrange.in_use(2.0, violation=100.0) == pytest.approx(20.0)
    assert lagrange.in_use(2.0, violation=-100.0) == pytest.approx(0.001)


def swing(lookahead: float) -> float:
    """Return the largest violation in steps 200 to 300 of a cost that falls by 0.1 (ln λ - ln 2) a step."""
    lagrange = Lagrange(cost_limit=0.0, start=1.0, lr=0.1, lookahead=lookahead)
    learned, violation, swings = lagrange.start, 0.0, []
    for _ in range(300):
        cost = violation - 0.1 * math.log(lagrange.in_use(learned, violation=violation) / 2.0)
        learned, violation = lagrange.next_multiplier(learned, cost=cost), cost
        swings.append(abs(cost))
    return max(swings[200:])


def test_a_cost_that_integrates_the_multiplier_swings_without_looking_ahead_only() -> None:
    assert swing(0.0) > 0.3
    assert swing(10.0) < 1e-3


def test_the_combination_by_hand() -> None:
    """λ = 3: (4 - 3 · 2) / 4 and (1 - 3 · (-1)) / 4."""
    close(Lagrange().combine(table([4.0, 1.0])[0], table([2.0, -1.0])[0], 3.0), [-0.5, 1.0])


@given(st.floats(0.001, 20.0))
def test_a_cost_that_is_the_negative_score_changes_nothing(multiplier: float) -> None:
    """(s + λ s) / (1 + λ) = s: the scale of the training score does not grow with the multiplier."""
    scores = table([0.3, -1.0, 2.0])[0]
    close(Lagrange().combine(scores, -scores, multiplier), scores)


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        train_config(merge(TREE, changes))
    return str(caught.value)


def test_the_preset_needs_a_cost() -> None:
    assert "reward.cost.source" in refused(reward={"cost": None})
    assert train_config(TREE).algorithm.lagrange == Lagrange()


def test_what_does_not_go_together_is_refused() -> None:
    rescue = {"hints": [{"column": "hint"}]}
    groups = {"sampling": {"completions_per_prompt": 4}, "algorithm": {"preset": "grpo", "lagrange": {}}}
    assert train_config(merge(TREE, groups)).algorithm.lagrange is not None
    assert "algorithm.rescue tells successes" in refused(**merge(groups, {"algorithm": {"rescue": rescue}}))
    curriculum = {"algorithm": {"curriculum": {"type": "variance"}}}
    assert "algorithm.curriculum tells successes" in refused(**merge(groups, curriculum))
    gdpo = {"type": "ensemble", "how": "gdpo", "sources": [{"type": "model", "path": "a"}]}
    assert "no mean to limit" in refused(reward={"cost": {"source": gdpo}})
    centered = merge(groups, {"algorithm": {"advantage": {"baseline": "centered"}}})
    assert "cannot be weighed" in refused(**merge(centered, {"reward": {"source": gdpo}}))
    plain = merge(centered, {"algorithm": {"lagrange": None}, "reward": {"source": gdpo, "cost": None}})
    for part in ({"rescue": rescue}, curriculum["algorithm"]):
        refusal = refused(**merge(plain, {"algorithm": part}))
        assert "tell no success from a failure: " in refusal
        assert "reward.source.how=sum" in refusal
        summed = merge(plain, {"algorithm": part, "reward": {"source": {"how": "sum"}}})
        assert train_config(merge(TREE, summed)).algorithm.advantage.only_centers, "as the refusal advises"
    distill = {"algorithm": {"preset": "distill", "lagrange": {}}, "teacher": {"model": "t"}, "critic": None}
    assert "policy_loss.type=distill reads neither" in refused(**distill)
    assert "lagrange.start is 30" in refused(algorithm={"lagrange": {"start": 30}})
