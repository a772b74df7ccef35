"""Choosing rows to learn from: the best completions of a prompt, or its best and its worst; ties; the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algo_cases import CLIP_PPO, COEFS, close, experience, online, output_rows, outputs, rollout, table
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algo.selection import best_and_worst, best_worst_pairs, pair_signs, select_best
from rlhf.experience import compute_advantages, select_training_rows
from rlhf.objective import Objective
from rlhf.training.rollout import selection_metrics
from rlhf.types import Experience, SampledPairs

SCORES = table([1.0, 3.0, 2.0, 5.0, 5.0, 4.0, 7.0, 7.0, 7.0])[0]
PAIR = {"advantage": {"type": "best_and_worst"}, "policy_loss": {"type": "pair"}}


def rejection(**how: Any) -> dict[str, Any]:
    return {"advantage": {"type": "best", **how}, "policy_loss": {"type": "policy_gradient"}}


@pytest.mark.parametrize(
    "keep, min_score, rows",
    [
        (1, None, [1, 3, 6]),
        (2, None, [1, 2, 3, 4, 6, 7]),
        (3, None, list(range(9))),
        (5, None, list(range(9))),
        (1, 4.0, [3, 6]),
        (2, 3.0, [1, 3, 4, 6, 7]),
        (3, 5.0, [3, 4, 6, 7, 8]),  # 5 itself is enough
        (1, 8.0, []),
    ],
)
def test_kept_by_hand(keep: int, min_score: float | None, rows: list[int]) -> None:
    assert select_best(SCORES, 3, keep=keep, min_score=min_score).nonzero().flatten().tolist() == rows


def test_pairs_by_hand() -> None:
    """Best and worst of (1, 3, 2), (5, 5, 4), (7, 7, 7): of equal ones the first, and of all alike none."""
    best, worst = best_and_worst(SCORES, 3)
    assert (best.tolist(), worst.tolist()) == ([1, 3], [0, 5])
    assert pair_signs(SCORES, 3).tolist() == [-1, 1, 0, 1, 0, -1, 0, 0, 0]


@pytest.mark.parametrize(
    "min_gap, best, worst",
    [
        (0.0, [1, 3], [0, 5]),
        (1.0, [1, 3], [0, 5]),  # 1 itself is enough
        (1.5, [1], [0]),
        (2.0, [1], [0]),
        (2.5, [], []),
    ],
)
def test_pairs_with_a_narrow_gap_are_left_out(min_gap: float, best: list[int], worst: list[int]) -> None:
    rows = best_and_worst(SCORES, 3, min_gap=min_gap)
    assert [part.tolist() for part in rows] == [best, worst]
    signs = pair_signs(SCORES, 3, min_gap=min_gap)
    assert signs.eq(1).nonzero().flatten().tolist() == best
    assert signs.eq(-1).nonzero().flatten().tolist() == worst


def test_the_least_gap_reaches_the_pairs_and_the_loss_mask() -> None:
    """One setting decides about the pairs, the advantages and the counts of the metrics."""
    batch = rollout(groups=4, group_size=3)
    gaps = batch.scores.view(-1, 3).amax(1) - batch.scores.view(-1, 3).amin(1)
    middle = float(gaps.sort().values[1:3].mean())
    algorithm = online(advantage={"type": "best_and_worst", "min_gap": middle}, policy_loss={"type": "pair"})
    narrowed = compute_advantages(batch, algorithm, COEFS)
    wide = gaps >= middle
    assert 0 < int(wide.sum()) < 4
    assert torch.equal(narrowed.advantages.ne(0).any(dim=1).view(-1, 3).any(dim=1), wide)
    assert torch.equal(narrowed.loss_mask.any(dim=1).view(-1, 3).any(dim=1), wide)
    pairs = select_training_rows(narrowed, algorithm)
    assert isinstance(pairs, SampledPairs)
    close(pairs.margins, gaps[wide])
    metrics = selection_metrics(narrowed, algorithm)
    counts = [metrics[f"pair/{name}"] for name in ("count", "ties")]
    assert counts == [int(wide.sum()), 4 - int(wide.sum())]


def test_there_may_be_no_pair_at_all() -> None:
    best, worst = best_and_worst(torch.zeros(6), 2)
    assert (len(best), len(worst)) == (0, 0)
    assert best.dtype == torch.long  # still the names of rows


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=12, max_size=12), st.sampled_from([2, 3, 4, 6]))
def test_the_best_is_kept_and_the_worst_is_not(values: list[float], size: int) -> None:
    scores = table(values)[0]
    best, worst = best_and_worst(scores, size)
    groups = scores.view(-1, size)
    apart = groups.amax(1) > groups.amin(1)
    close(scores[best], groups.amax(1)[apart])
    close(scores[worst], groups.amin(1)[apart])
    assert (best // size).tolist() == (worst // size).tolist() == apart.nonzero().flatten().tolist()
    chosen = select_best(scores, size, keep=1)
    assert chosen[best].all()
    assert not chosen[worst].any()
    assert (chosen.view(-1, size).sum(1) == 1).all()


def test_credit_is_one_for_the_kept_and_nothing_else_is_learned() -> None:
    batch = experience(online(**rejection(keep=2)), groups=3, group_size=4)
    chosen = select_best(batch.scores, 4, keep=2)
    close(batch.advantages, (chosen[:, None] & batch.completion_mask).double())
    assert torch.equal(batch.loss_mask, chosen[:, None] & batch.completion_mask)
    learned = select_training_rows(batch, online(**rejection(keep=2)))
    assert isinstance(learned, Experience)
    assert learned.row_ids.tolist() == chosen.nonzero().flatten().tolist()
    assert torch.equal(learned.loss_mask, learned.completion_mask)


def test_a_penalty_in_the_reward_counts_in_the_choice_and_at_the_threshold() -> None:
    rows = rollout(groups=1, group_size=3, noise=2.0, seed=1)
    kl = (rows.logprobs - rows.ref_logprobs).where(rows.completion_mask, torch.zeros(())).sum(1)
    totals = rows.scores - COEFS.kl * kl
    assert int(totals.argmax()) != int(rows.scores.argmax())
    for placement, expected in (("reward", totals), ("none", rows.scores)):
        experience = compute_advantages(rows, online(**rejection(), kl={"placement": placement}), COEFS)
        assert experience.loss_mask.any(1).nonzero().flatten().tolist() == [int(expected.argmax())]
        middle = float(expected.sort().values[1])
        above = rejection(keep=3, min_score=middle - 1e-9)
        experience = compute_advantages(rows, online(**above, kl={"placement": placement}), COEFS)
        assert torch.equal(experience.loss_mask.any(1), expected >= middle - 1e-9)


def test_an_episode_that_failed_is_not_the_best_of_negative_ones() -> None:
    rows = rollout(groups=1, group_size=3)
    actions = rows.completion_mask.clone()
    actions[1] = False  # as of a failed environment; its token rewards are 0
    scores = torch.tensor([-3.0, -2.0, -1.0], dtype=rows.scores.dtype)
    batch = compute_advantages(replace(rows, scores=scores, episode_actions=actions), online(**rejection()), COEFS)
    assert batch.loss_mask.any(dim=1).tolist() == [False, False, True]


def test_pairs_hold_both_sides_and_what_was_said_of_them() -> None:
    batch = experience(online(**PAIR), groups=3, group_size=4)
    pairs = select_training_rows(batch, online(**PAIR))
    assert isinstance(pairs, SampledPairs)
    best, worst = best_and_worst(batch.scores, 4)
    for side, rows in (("chosen", best), ("rejected", worst)):
        assert torch.equal(getattr(pairs, f"{side}_ids"), batch.completion_ids[rows])
        assert torch.equal(getattr(pairs, f"{side}_mask"), batch.completion_mask[rows])
        close(getattr(pairs, f"{side}_ref_logprobs"), batch.ref_logprobs[rows].sum(1))
        close(getattr(pairs, f"{side}_old_logprobs"), batch.logprobs[rows])
    close(pairs.margins, batch.scores[best] - batch.scores[worst])
    assert (pairs.margins > 0).all()
    close(batch.advantages, pair_signs(batch.scores, 4)[:, None] * batch.completion_mask)


def test_ties_are_left_out_and_an_empty_lesson_is_empty() -> None:
    rows = rollout(groups=3, group_size=2)
    tied = type(rows)(**{**vars(rows), "scores": table([1.0, 1.0, 0.0, 2.0, 3.0, 3.0])[0]})
    pairs = best_worst_pairs(compute_advantages(tied, online(**PAIR), COEFS))
    assert torch.equal(pairs.chosen_ids, rows.completion_ids[3:4])
    assert torch.equal(pairs.rejected_ids, rows.completion_ids[2:3])
    alike = type(rows)(**{**vars(rows), "scores": torch.ones(6, dtype=torch.float64)})
    batch = compute_advantages(alike, online(**PAIR), COEFS)
    assert len(best_worst_pairs(batch)) == 0
    assert not batch.loss_mask.any()
    assert list(best_worst_pairs(batch).split(1)) == []


def test_other_algorithms_learn_from_every_row() -> None:
    algorithm = online(advantage={"type": "group"})
    batch = experience(algorithm)
    assert select_training_rows(batch, algorithm) is batch


DROPPED = {"advantage": {"type": "group"}, "drop_uniform_groups": True}


def test_rows_of_dropped_groups_take_no_pass_and_the_loss_is_the_same() -> None:
    algorithm = online(**DROPPED)
    plain = rollout(seed=5)
    uniform = torch.arange(len(plain)) < plain.group_size
    batch = compute_advantages(replace(plain, scores=torch.where(uniform, 1.0, plain.scores)), algorithm, COEFS)
    selected = select_training_rows(batch, algorithm)
    assert isinstance(selected, Experience)
    assert selected.row_ids.tolist() == batch.row_ids[plain.group_size :].tolist()
    objective, logprobs = Objective(algorithm, max_tokens=5), outputs(batch)
    assert objective.denominators(selected)["policy"] == objective.denominators(batch)["policy"]
    kept = output_rows(logprobs, torch.arange(plain.group_size, len(plain)))
    whole, part = objective.loss(batch, logprobs, COEFS), objective.loss(selected, kept, COEFS)
    close(part[0]["policy"], whole[0]["policy"])
    for name, mean in whole[1].items():
        assert (part[1][name].total, part[1][name].weight) == pytest.approx((mean.total, mean.weight)), name


def test_a_critic_learns_from_rows_that_the_policy_leaves_out() -> None:
    algorithm = online(**CLIP_PPO, mask_truncated=True)
    batch = compute_advantages(rollout(seed=5), algorithm, COEFS)
    assert select_training_rows(batch, algorithm) is batch


def test_where_every_group_is_dropped_all_rows_are_left_and_teach_nothing() -> None:
    algorithm = online(**DROPPED)
    batch = compute_advantages(replace(rollout(), scores=torch.ones(8, dtype=torch.float64)), algorithm, COEFS)
    assert select_training_rows(batch, algorithm) is batch
    assert not batch.loss_mask.any()
