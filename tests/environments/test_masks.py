"""Statistics and losses of episodes count the tokens of actions alone: by hand, on rows with observations."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.experience import compute_advantages
from rlhf.types import Rollout, StopReason

NO_KL = {"placement": "none", "coef": 0.0}
NOTHING = Coefs(kl=0.0, penalty=0.0)


def two_turns(actions: list[list[int]], rewards: list[list[float]], values: list[list[float]]) -> Rollout:
    """Rows of two turns, which are separated by observations; a column after the last action is padding."""
    acts = torch.tensor(actions, dtype=torch.bool)
    places = torch.arange(acts.shape[1])
    last = torch.where(acts, places, -1).amax(dim=1, keepdim=True)
    gap = (~acts & (places < last)).int().argmax(dim=1, keepdim=True)
    zeros, paid = torch.zeros(acts.shape), torch.tensor(rewards)
    return Rollout(
        prompt_ids=torch.ones(len(acts), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(acts), 1, dtype=torch.bool),
        row_ids=torch.arange(len(acts)),
        references=tuple({} for _ in acts),
        completion_ids=torch.ones(acts.shape, dtype=torch.long),
        completion_mask=places <= last,
        sampler_logprobs=zeros,
        finished=torch.ones(len(acts), dtype=torch.bool),
        group_size=1,
        episode_actions=acts,
        episode_turns=torch.where(acts, (places > gap).long(), -1),
        episode_rewards=paid,
        episode_stops=torch.full((len(acts),), int(StopReason.TERMINATED)),
        scores=paid.sum(dim=1),
        baselines=torch.zeros(len(acts)),
        logprobs=zeros,
        ref_logprobs=zeros,
        values=torch.tensor(values),
        hinted=torch.zeros(len(acts), dtype=torch.bool),
    )


def two_games() -> Rollout:
    """Without a critic the actions have the returns 5 and 3, and 1 and -1: mean 2, variance 5."""
    rewards = [[2.0, 0.0, 0.0, 3.0], [2.0, 0.0, -1.0, 0.0]]
    values = [[0.0, 9.0, 9.0, 0.0], [0.0, 9.0, 0.0, 0.0]]  # what a critic gives observations does not count
    return two_turns([[1, 0, 0, 1], [1, 0, 1, 0]], rewards, values)


WHITENED = torch.tensor([[3.0, 0.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 0.0]]) / sqrt(5)


def online(advantage: dict[str, Any]) -> Online:
    critic = {"value_loss": {"clip_eps": None}} if advantage["type"] == "gae" else {}
    return Online.model_validate({"advantage": advantage, "policy_loss": {"type": "clip"}, "kl": NO_KL, **critic})


@pytest.mark.parametrize("kind", ["gae", "batch_whiten"])
def test_advantages_are_whitened_over_actions(kind: str) -> None:
    experience = compute_advantages(two_games(), online({"type": kind}), NOTHING)
    torch.testing.assert_close(experience.advantages, WHITENED)


def test_advantages_of_stale_samples_are_whitened_over_actions() -> None:
    experience = compute_advantages(two_games(), online({"type": "gae"}), NOTHING, ratio_cap=1.0, trace_cap=1.0)
    torch.testing.assert_close(experience.advantages, WHITENED)


def test_a_minibatch_is_whitened_over_actions() -> None:
    algorithm = online({"type": "gae", "whiten_over": "minibatch"})
    experience = compute_advantages(two_games(), algorithm, NOTHING)
    assert experience.advantages.tolist() == [[5, 0, 0, 3], [1, 0, -1, 0]]
    torch.testing.assert_close(algorithm.advantage.of_minibatch(experience).advantages, WHITENED)


@pytest.mark.parametrize("caps", [{}, {"ratio_cap": 1.0, "trace_cap": 1.0}])
def test_rewards_are_whitened_over_actions(caps: dict[str, float]) -> None:
    """The rewards 2, 3, 2 and -1 have the mean 1.5 and the deviation 1.5: 11/6, 15/6, 11/6 and -1/6."""
    algorithm = online({"type": "gae", "whiten": False, "whiten_rewards": True})
    experience = compute_advantages(two_games(), algorithm, NOTHING, **caps)
    torch.testing.assert_close(experience.advantages, torch.tensor([[26.0, 0, 0, 15], [10, 0, -1, 0]]) / 6)


def test_ppo_discounts_between_tokens_and_turns_as_configured() -> None:
    """Two tokens, an observation and a token, rewards 2 and 4, a critic that is wrong; gamma 1/2, lambda 1/2 and 1.

    From the end: 4 - 1 = 3;  2 + 1/2 - 1/4 + 1/2 * 1 * 3 = 3.75;  1/8 - 1/2 + 1/2 * 1/2 * 3.75 = 0.5625.
    """
    game = two_turns([[1, 1, 0, 1]], [[0.0, 2.0, 0.0, 4.0]], [[0.5, 0.25, 9.0, 1.0]])
    settings = {"type": "gae", "gamma": 0.5, "gae_lambda": 0.5, "turn_lambda": 1.0, "whiten": False}
    experience = compute_advantages(game, online(settings), NOTHING)
    assert experience.advantages.tolist() == [[0.5625, 3.75, 0.0, 3.0]]
    assert experience.returns.tolist() == [[1.0625, 4.0, 0.0, 4.0]]


def test_reinforce_discounts_no_observation() -> None:
    """From the end: 4;  2 + 4/2 = 4;  4/2 = 2."""
    game = two_turns([[1, 1, 0, 1]], [[0.0, 2.0, 0.0, 4.0]], [[0.0] * 4])
    experience = compute_advantages(game, online({"type": "batch_whiten", "gamma": 0.5, "whiten": False}), NOTHING)
    assert experience.advantages.tolist() == [[2.0, 4.0, 0.0, 4.0]]
