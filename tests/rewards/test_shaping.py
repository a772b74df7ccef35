"""Clip first, penalties after: each by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import completions_of

from rlhf.errors import RewardError
from rlhf.rewards.cost import COST, REWARD
from rlhf.rewards.environment import episode_returns
from rlhf.rewards.shaping import ShapedReward, ShapingConfig, overlong_share
from rlhf.training.collect import fill_failed
from rlhf.training.rollout import cost_metrics
from rlhf.types import Completions, Scores


def batch(lengths: Sequence[int], finished: Sequence[bool]) -> Completions:
    made = completions_of([[5]] * len(lengths), [[3] * n for n in lengths])
    return replace(made, finished=torch.tensor(finished))


def shaped(config: ShapingConfig, scores: Sequence[float], lengths: Sequence[int], finished: Sequence[bool]) -> Scores:
    source = Scores(values=torch.tensor(scores), parts={"fit": torch.zeros(len(scores))})
    return ShapedReward(lambda _: source, config, max_new_tokens=10)(batch(lengths, finished))


def test_by_default_a_score_is_left_as_it_is() -> None:
    """A clip at 10 by default turned 12, 40, 75 and 99 into 10 without a word: every group tied."""
    scores = shaped(ShapingConfig(), [12.0, 40.0, 75.0, -99.0], [1, 10, 4, 4], [False, True, False, True])
    assert scores.values.tolist() == [12.0, 40.0, 75.0, -99.0]
    assert set(scores.parts) == {"fit", "raw"}


def test_what_a_clip_changes_is_told() -> None:
    scores = shaped(ShapingConfig(clip=10.0), [-20.0, 3.0, 12.0, 10.0], [1, 10, 4, 4], [False, True, False, True])
    assert scores.values.tolist() == [-10.0, 3.0, 10.0, 10.0]
    assert scores.parts["raw"].tolist() == [-20.0, 3.0, 12.0, 10.0]
    assert scores.parts["clipped"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert set(scores.parts) == {"fit", "raw", "clipped"}


def test_a_missing_eos_costs_its_penalty_even_at_the_clip() -> None:
    config = ShapingConfig(clip=2.0, missing_eos_penalty=1.5)
    scores = shaped(config, [1.0, 1.0, 5.0, -5.0], [3, 3, 3, 3], [True, False, False, False])
    assert scores.values.tolist() == [1.0, -0.5, 0.5, -3.5]
    assert scores.parts["missing_eos_penalty"].tolist() == [0.0, 1.5, 1.5, 1.5]


def test_an_episode_whose_environment_failed_stays_at_the_mean_of_its_group() -> None:
    rows = batch([3, 3, 3, 3], [True, False, False, True])
    actions = rows.completion_mask & torch.tensor([True, True, False, True])[:, None]  # the third one failed
    rows = replace(rows, episode_actions=actions, episode_rewards=actions * torch.tensor([[3.0], [0.0], [7.0], [0.0]]))
    reward = ShapedReward(episode_returns, ShapingConfig(missing_eos_penalty=4.0), max_new_tokens=10)
    rows = replace(rows, group_size=4)
    values = reward(rows).values
    assert values[2].isnan()
    assert fill_failed(rows, Scores(values=values, parts={})).values.tolist() == pytest.approx([9, -4, 5 / 3, 0])
    alone = fill_failed(replace(rows, group_size=1), Scores(values=values, parts={}))
    assert alone.values.tolist() == pytest.approx([9, -4, 5 / 3, 0])
    costed = Scores(values=values, parts={COST: torch.tensor([1.0, 2.0, 60.0, 3.0]), REWARD: values})
    metrics = cost_metrics(fill_failed(rows, costed)).values()
    assert metrics == pytest.approx({"cost/mean": 2, "cost/std": (2 / 3) ** 0.5, "lagrange/score": 5 / 3})


def test_the_overlong_penalty_by_hand() -> None:
    """max 10, buffer 4: free up to 6, then a quarter of 2.0 a token."""
    config = ShapingConfig(overlong_buffer=4, overlong_penalty=2.0)
    scores = shaped(config, [0.0] * 6, [1, 6, 7, 8, 9, 10], [True] * 6)
    assert scores.values.tolist() == [0.0, 0.0, -0.5, -1.0, -1.5, -2.0]
    assert scores.parts["overlong_penalty"].tolist() == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0]


def test_all_together() -> None:
    config = ShapingConfig(clip=1.0, missing_eos_penalty=0.25, overlong_buffer=2, overlong_penalty=0.5)
    scores = shaped(config, [4.0, 0.5, -0.5], [10, 9, 2], [False, True, True])
    assert scores.values.tolist() == [1.0 - 0.25 - 0.5, 0.5 - 0.25, -0.5]
    assert scores.parts["raw"].tolist() == [4.0, 0.5, -0.5]


@given(st.integers(0, 100), st.integers(1, 99))
def test_the_overlong_share_is_dapos_equation_13(length: int, buffer: int) -> None:
    longest = 100
    expected = 0.0 if length <= longest - buffer else -((longest - buffer) - length) / buffer
    share = overlong_share(torch.tensor([length]), max_new_tokens=longest, buffer=buffer)
    assert share.item() == pytest.approx(expected, abs=1e-12)
    assert 0.0 <= share.item() <= 1.0


def test_a_part_that_is_called_raw_is_refused() -> None:
    source = Scores(values=torch.zeros(1), parts={"raw": torch.zeros(1)})
    with pytest.raises(RewardError, match=r"'raw'.*rename it"):
        ShapedReward(lambda _: source, ShapingConfig(), max_new_tokens=10)(batch([1], [True]))
