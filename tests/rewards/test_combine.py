"""Several rewards in one score: combinations by hand, sources that do not apply, GDPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import completions_of, tokenizer
from torch import Tensor

from rlhf.algo.advantages import group_centered, group_normalized
from rlhf.errors import NonFiniteScores, RewardError
from rlhf.rewards.ensemble import EnsembleMode, EnsembleReward, combine, disagreement, normalize_then_sum
from rlhf.rewards.function import FunctionReward
from rlhf.training.rollout import part_metrics
from rlhf.types import Completions, Scores

NAN = math.nan
# Three sources, four completions; weights 1, 2, 4. Weighted columns: (1, 4, 8), (3, 2), (5), nothing.
SCORES = torch.tensor([[1.0, 3.0, NAN, NAN], [2.0, 1.0, NAN, NAN], [2.0, NAN, 1.25, NAN]], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
STD = [math.sqrt(74 / 9), 0.5, 0.0]  # of (1, 4, 8): mean 13/3, squares 81/3; of (3, 2); of (5)


@pytest.mark.parametrize(
    "how, expected",
    [
        ("sum", [13.0, 5.0, 5.0]),
        ("mean", [13 / 3, 2.5, 5.0]),
        ("weighted_mean", [13 / 7, 5 / 3, 1.25]),
        ("minimum", [1.0, 2.0, 5.0]),
        ("mean_minus_std", [13 / 3 - 0.5 * STD[0], 2.5 - 0.25, 5.0]),
        ("gdpo", [13.0, 5.0, 5.0]),
    ],
)
def test_what_does_not_apply_is_left_out_of_every_combination(how: EnsembleMode, expected: list[float]) -> None:
    combined = combine(SCORES, WEIGHTS, how=how, std_coef=0.5)
    assert combined[:3].tolist() == pytest.approx(expected, rel=1e-12)
    assert combined[3].isnan()
    assert disagreement(SCORES, WEIGHTS).tolist() == pytest.approx([*STD, 0.0], rel=1e-12)


def test_gdpo_by_hand() -> None:
    """Two groups of two. Source 0: (0, 2), (5, 5); source 1: (0, 0.1), (1, 3). Each becomes -1, 1 or 0, 0."""
    scores = torch.tensor([[0.0, 2.0, 5.0, 5.0], [0.0, 0.1, 1.0, 3.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    small, one, tenth = 1 / 1.0001, 1 / 1.0001, 0.05 / (0.05 + 1e-4)
    total = torch.tensor([-one - 0.5 * tenth, one + 0.5 * tenth, -0.5 * small, 0.5 * small], dtype=torch.float64)
    expected = total / (total.square().mean().sqrt() + 1e-4)
    torch.testing.assert_close(normalize_then_sum(scores, weights, 2), expected, rtol=1e-12, atol=1e-12)


def test_gdpo_of_one_source_is_grpo_up_to_the_batch() -> None:
    scores = torch.randn(1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages = normalize_then_sum(scores, torch.ones(1, dtype=torch.float64), 4)
    grpo = group_normalized(scores[0], 4)
    torch.testing.assert_close(advantages * (grpo.std(correction=0) + 1e-4), grpo, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(group_centered(advantages, 4), advantages, rtol=0, atol=1e-12)


def test_gdpo_does_not_depend_on_the_scale_of_a_source() -> None:
    """This is its purpose: summed first, a reward of large spread hides the others."""
    scores = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.ones(2, dtype=torch.float64)
    scaled = scores * torch.tensor([[1.0], [1000.0]]) + torch.tensor([[3.0], [-7.0]])
    torch.testing.assert_close(
        normalize_then_sum(scaled, weights, 8), normalize_then_sum(scores, weights, 8), rtol=0, atol=2e-3
    )


def test_gdpo_ignores_rows_that_a_source_does_not_apply_to() -> None:
    scores = torch.tensor([[1.0, 3.0, NAN, NAN], [0.0, 1.0, 2.0, NAN]], dtype=torch.float64)
    advantages = normalize_then_sum(scores, torch.tensor([1.0, 0.0], dtype=torch.float64), 4)
    # of source 0 the two live rows are -1 and 1, the third has only the source of weight 0
    assert advantages[0] == pytest.approx(-advantages[1].item())
    assert advantages[2] == 0.0
    assert advantages[3].isnan()
    # which is no part of the batch over which they are standardized
    assert advantages[:3].square().mean() == pytest.approx(1, abs=1e-3)
    assert normalize_then_sum(torch.full((1, 2), NAN), torch.ones(1), 2).isnan().all()
    equal = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert normalize_then_sum(equal, torch.ones(1, dtype=torch.float64), 3).tolist() == [0.0, 0.0, 0.0]


BATCH = completions_of([[5], [5], [6], [6]], [[3], [4], [3], [4]])


class Fixed:
    """Always these scores."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values: Tensor = torch.tensor(values)

    def __call__(self, completions: Completions) -> Scores:
        return Scores(values=self.values, parts={})


def test_a_completion_that_nobody_scores_is_an_error_with_its_row() -> None:
    members = [Fixed([1.0, NAN, 2.0, 1.0]), Fixed([1.0, NAN, NAN, 1.0])]
    with pytest.raises(NonFiniteScores, match=r"none of the ensemble's 2 sources \(a, b\).*1 of 4.*row 1"):
        EnsembleReward(members, how="sum", names=["a", "b"])(BATCH)
    scores = EnsembleReward(members, how="sum", names=["a", "b"], may_abstain=True)(BATCH)
    assert scores.values.isnan().tolist() == [False, True, False, False]


def test_each_source_is_logged_with_the_share_that_it_applies_to() -> None:
    scores = EnsembleReward(
        [Fixed([1.0, NAN, 3.0, NAN]), Fixed([4.0, 4.0, 4.0, 4.0])], how="sum", names=["style", "facts"]
    )(BATCH)
    metrics = part_metrics(scores).values()
    assert metrics["part/style/mean"] == 2.0
    assert metrics["part/style/std"] == 1.0
    assert metrics["part/style/applicable"] == 0.5
    assert metrics["part/facts/mean"] == 4.0
    assert metrics["part/facts/applicable"] == 1.0
    assert "part/disagreement/mean" not in metrics
    odd = Scores(values=torch.zeros(2), parts={"right (%)": torch.ones(2)})
    assert part_metrics(odd).values()["part/right ___/mean"] == 1.0


def test_gdpo_scores_a_group_and_leaves_evaluation_its_sum() -> None:
    members = [Fixed([0.0, 2.0, 1.0, 1.0]), Fixed([0.0, 0.0, 0.0, 10.0])]
    source = EnsembleReward(members, how="gdpo")
    grouped = source(replace(BATCH, group_size=2))
    assert grouped.values.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], rel=1e-3)
    assert grouped.parts["weighted_sum"].tolist() == [0.0, 2.0, 1.0, 11.0]
    assert source(replace(BATCH, group_size=1)).values.tolist() == [0.0, 2.0, 1.0, 11.0]


def sometimes(completions: list[str]) -> list[Any]:
    """Applies to texts with t3 only."""
    return [1.0 if "t3" in text else None for text in completions]


def broken(completions: list[str]) -> list[Any]:
    """None if it does not apply, infinity if it breaks."""
    return [None, None, None, math.inf]


def test_none_of_a_function_means_not_applicable_in_an_ensemble_only() -> None:
    target = "test_combine:sometimes"
    scores = FunctionReward(target, {}, tokenizer(), may_abstain=True)(BATCH)
    assert scores.values.isnan().tolist() == [False, True, False, True]
    with pytest.raises(NonFiniteScores, match="only a source in an ensemble may leave a completion"):
        FunctionReward(target, {}, tokenizer())(BATCH)
    with pytest.raises(RewardError, match="1 scores of 4 that are not finite"):
        FunctionReward("test_combine:broken", {}, tokenizer(), may_abstain=True)(BATCH)
