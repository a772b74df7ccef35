"""The expected gradient of the estimators over two turns, by enumeration in float64, and mistakes that it shows.

A turn's reward stands before an observation, the last one before a last token of the environment; rows end after one
turn or two. The mistakes are those that other trainers have made; each has its thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import episode_world as ew
import pytest
import torch
from torch import Tensor

import rlhf.experience
from rlhf.algo import advantages as estimators
from rlhf.algo.kl import Coefs
from rlhf.algo.policy_loss import importance_ratio
from rlhf.algorithms.grpo import Group
from rlhf.algorithms.online import Online
from rlhf.types import Experience, Rollout

WORLD = ew.make_world()
OLD, REFERENCE = WORLD.table(1), WORLD.table(2)
BETA = 0.3
WIDE = {"type": "clip", "aggregate": "sequence_sum", "clip_eps_low": 1.0, "clip_eps_high": 1e9}


def online(advantage: dict[str, Any], *, beta: float = 0.0, **loss: Any) -> Online:
    critic = {"value_loss": {"clip_eps": None}} if advantage["type"] == "gae" else {}
    kl = {"placement": "reward" if beta else "none", "estimator": "k1", "coef": beta}
    return Online.model_validate({"advantage": advantage, "policy_loss": {**WIDE, **loss}, "kl": kl, **critic})


def gae(gae_lambda: float, **settings: Any) -> dict[str, Any]:
    return {"type": "gae", "gae_lambda": gae_lambda, "whiten": False, **settings}


def exact_gradient(weight_of: Tensor | None = None, *, beta: float = 0.0) -> Tensor:
    """The gradient of E[return] - beta KL(policy || reference), or of sum of weights x log-probability, by a table."""
    logits = OLD.clone().requires_grad_()
    logs = WORLD.log_probability(logits.log_softmax(-1))
    if weight_of is not None:
        value = (weight_of * logs).sum()
    else:
        kl = (logs.exp() * (logs - WORLD.log_probability(REFERENCE))).sum()
        value = (logs.exp() * WORLD.returns).sum() - beta * kl
    return torch.autograd.grad(value, logits)[0]


def expected_gradient(algorithm: Online, *, values: Tensor | None = None, group_size: int = 1) -> Tensor:
    """The expected gradient of the objective (minus the loss) under episodes of the old policy."""
    coefs = Coefs(kl=algorithm.kl.coef, penalty=0.0)
    experience, rows = ew.experience_of(WORLD, algorithm, coefs, OLD, REFERENCE, values=values, group_size=group_size)
    logits = OLD.clone().requires_grad_()
    weights = ew.weights_of(WORLD, rows, OLD, group_size)
    loss = ew.expected_loss(WORLD, experience, rows, algorithm, coefs, logits.log_softmax(-1), weights)
    return -torch.autograd.grad(loss, logits)[0]


def exact_values(*, beta: float = 0.0) -> Tensor:
    """V of the old policy for the token rewards that it gets, the KL penalty among them."""
    penalty = beta * torch.where(WORLD.actions, WORLD.logprobs(OLD) - WORLD.logprobs(REFERENCE), 0.0)
    return WORLD.values(OLD, WORLD.rewards - penalty)


def any_values() -> Tensor:
    """A critic that is wrong, but a function of the state."""
    by_state = torch.randn(len(WORLD.contexts), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.where(WORLD.mask, by_state[WORLD.states], 0.0)


Check = Callable[[], tuple[Tensor, Tensor]]
"""Returns the expected gradient of an estimator, and the right one."""

CHECKS: dict[str, Check] = {
    "ppo-any-critic": lambda: (expected_gradient(online(gae(1.0)), values=any_values()), exact_gradient()),
    "ppo-exact-critic": lambda: (expected_gradient(online(gae(0.0)), values=exact_values()), exact_gradient()),
    "ppo-lambda": lambda: (expected_gradient(online(gae(0.9)), values=exact_values()), exact_gradient()),
    "ppo-turn-lambda": lambda: (
        expected_gradient(online(gae(0.2, turn_lambda=0.95)), values=exact_values()),
        exact_gradient(),
    ),
    "ppo-kl": lambda: (
        expected_gradient(online(gae(1.0), beta=BETA), values=any_values()),
        exact_gradient(beta=BETA),
    ),
    "ppo-kl-exact-critic": lambda: (
        expected_gradient(online(gae(0.3), beta=BETA), values=exact_values(beta=BETA)),
        exact_gradient(beta=BETA),
    ),
    "reinforce": lambda: (
        expected_gradient(online({"type": "batch_whiten", "whiten": False})),
        exact_gradient(),
    ),
    "rloo": lambda: (
        expected_gradient(
            online({"type": "group", "baseline": "leave_one_out"}, ratio="sequence", aggregate="sequence_mean"),
            group_size=2,
        ),
        exact_gradient(),
    ),
    "dr_grpo": lambda: (
        2 * expected_gradient(online({"type": "group", "baseline": "centered"}), group_size=2),
        exact_gradient(),
    ),
    "grpo": lambda: (
        expected_gradient(online({"type": "group", "baseline": "normalized"}), group_size=2),
        exact_gradient(_normalized_pair_weights()),
    ),
}


def _normalized_pair_weights() -> Tensor:
    """Sum over partners of p(i) p(j) A(R_i, R_j), the advantage that GRPO gives the first of two episodes."""
    p = WORLD.log_probability(OLD).exp()
    difference = WORLD.returns[:, None] - WORLD.returns[None, :]
    advantage = difference / 2 / (difference.abs() / 2 + estimators.GROUP_STD_EPS)
    return p * (advantage * p[None, :]).sum(dim=1)


@pytest.mark.parametrize("check", CHECKS)
def test_the_expected_gradient_is_exact(check: str) -> None:
    ours, exact = CHECKS[check]()
    assert exact.abs().max() > 1e-2
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)


# Mistakes. Each changes the inputs of the estimators, or one function; at least one check has to see it.

RIGHT_ROLLOUT, RIGHT_GAE, RIGHT_REWARDS = ew.rollout, estimators.gae, estimators.token_rewards
Patch = Callable[[pytest.MonkeyPatch], None]


def in_rollout(change: Callable[[Rollout], Rollout]) -> Patch:
    return lambda patch: patch.setattr(ew, "rollout", lambda *args, **kwargs: change(RIGHT_ROLLOUT(*args, **kwargs)))


def last_actions(made: Rollout, turn: int) -> Tensor:
    """The last action token of this turn in each row, as a mask."""
    here = made.action_mask & (made.turns == turn)
    positions = torch.where(here, torch.arange(here.shape[1]), -1)
    return here & (positions == positions.amax(dim=1, keepdim=True))


def with_rewards(made: Rollout, rewards: Tensor) -> Rollout:
    return replace(made, episode_rewards=rewards, scores=rewards.sum(dim=1))


def inverted(made: Rollout) -> Rollout:
    return replace(made, episode_actions=made.completion_mask & ~made.action_mask)


def learns_observations(made: Rollout) -> Rollout:
    return replace(made, episode_actions=made.completion_mask)


def forgets_the_end_of_turn(made: Rollout) -> Rollout:
    kept = made.action_mask & ~((made.completion_ids == 0) & made.action_mask)
    return replace(made, episode_actions=kept)


def lost_behind_the_last_token(made: Rollout) -> Rollout:
    ends_masked = ~made.action_mask.gather(1, made.completion_mask.sum(dim=1, keepdim=True) - 1)
    return with_rewards(made, torch.where(ends_masked & last_actions(made, 1), 0.0, made.turn_rewards))


def last_turn_only(made: Rollout) -> Rollout:
    has_second = (made.turns == 1).any(dim=1, keepdim=True)
    return with_rewards(made, torch.where(has_second & last_actions(made, 0), 0.0, made.turn_rewards))


def paid_after_the_observation(made: Rollout) -> Rollout:
    rewards, second = made.turn_rewards.clone(), made.action_mask & (made.turns == 1)
    for row in second.any(dim=1).nonzero().flatten().tolist():
        first = int(last_actions(made, 0)[row].nonzero()[0])
        rewards[row, int(second[row].nonzero()[0])] += rewards[row, first]
        rewards[row, first] = 0.0
    return with_rewards(made, rewards)


def value_after_the_end(made: Rollout) -> Rollout:
    return replace(made, final_values=torch.where((made.turns == 1).any(dim=1), 1.5, 0.0).double())


def tokenized_again(made: Rollout) -> Rollout:
    shift = torch.where(made.action_mask & (made.turns == 1), 0.3, 0.0)
    return replace(made, logprobs=made.logprobs + shift)


def observations_in_gae(patch: pytest.MonkeyPatch) -> None:
    def wrong(rewards: Tensor, values: Tensor, mask: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        advantages, returns = RIGHT_GAE(rewards, values, mask | (values != 0), **settings)
        return torch.where(mask, advantages, 0.0), torch.where(mask, returns, 0.0)

    patch.setattr(estimators, "gae", wrong)


def kl_on_observations(patch: pytest.MonkeyPatch) -> None:
    everywhere = torch.where(WORLD.mask & ~WORLD.actions, WORLD.logprobs(OLD) - WORLD.logprobs(REFERENCE), 0.0)

    def wrong(scores: Tensor, penalty: Tensor, mask: Tensor, turn_rewards: Tensor) -> Tensor:
        rewards = RIGHT_REWARDS(scores, penalty, mask, turn_rewards)
        return rewards + torch.where(WORLD.actions, -everywhere.sum(dim=1, keepdim=True), 0.0) * BETA

    patch.setattr(rlhf.experience, "token_rewards", wrong)
    patch.setitem(CHECKS, "only", CHECKS["ppo-kl-exact-critic"])


def baseline_by_turn(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Group, made: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
        advantages = torch.zeros_like(rewards)
        for turn in (0, 1):
            here = made.action_mask & (made.turns == turn)
            to_go = torch.where(made.turns >= turn, rewards, 0.0).sum(dim=1).view(-1, made.group_size)
            has = here.any(dim=1).view_as(to_go)
            mean = (to_go * has).sum(dim=1, keepdim=True) / has.sum(dim=1, keepdim=True).clamp(min=1)
            advantages += torch.where(here, (to_go - mean).flatten()[:, None], 0.0)
        return advantages, advantages

    patch.setattr(Group, "compute", wrong)


def turns_as_samples(patch: pytest.MonkeyPatch) -> None:
    right = ew.experience_of

    def wrong(*args: Any, **kwargs: Any) -> tuple[Experience, Tensor]:
        experience, rows = right(*args, **kwargs)
        count = 1.0 + (experience.turns == 1).any(dim=1, keepdim=True)
        return replace(experience, advantages=experience.advantages / count), rows

    patch.setattr(ew, "experience_of", wrong)


def observations_in_the_ratio(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "rlhf.objective.importance_ratio",
        lambda logprobs, old, mask, level: importance_ratio(logprobs, old, logprobs != 0, level),
    )


MISTAKES: dict[str, Patch] = {
    "the mask is inverted (RAGEN 71)": in_rollout(inverted),
    "observations are learned (verl 2337)": in_rollout(learns_observations),
    "the end of a turn is not learned (tinker-cookbook)": in_rollout(forgets_the_end_of_turn),
    "a reward is lost behind a masked last token (miles 1827)": in_rollout(lost_behind_the_last_token),
    "only the last turn is paid (SkyRL 201)": in_rollout(last_turn_only),
    "a turn is paid after its observation (miles 1827)": in_rollout(paid_after_the_observation),
    "the critic is asked after the end (tinker-cookbook 506)": in_rollout(value_after_the_end),
    "history is tokenized again (verl 6719)": in_rollout(tokenized_again),
    "observations are steps of GAE (verl 7278)": observations_in_gae,
    "the KL counts observations (Search-R1 21)": kl_on_observations,
    "a baseline for each turn number (verl 7244)": baseline_by_turn,
    "each turn is a sample of its own (SkyRL 1492)": turns_as_samples,
    "the ratio counts observations (verl 3805)": observations_in_the_ratio,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_checks_see_a_planted_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    checks = [CHECKS["only"]] if "only" in CHECKS else CHECKS.values()
    assert any(not torch.allclose(ours, exact, rtol=1e-6, atol=1e-9) for ours, exact in (check() for check in checks))


def test_gae_by_hand_over_two_turns() -> None:
    """Rewards 1 and 2 at the ends of two turns of a token each, an observation between: V = 0.5, 0.25; lambda 0."""
    mask = torch.tensor([[True, False, True, False]])
    rewards = torch.tensor([[1.0, 0.0, 2.0, 0.0]])
    values = torch.tensor([[0.5, 9.0, 0.25, 9.0]])
    turns = torch.tensor([[0, 0, 1, 0]])
    settings = {"gamma": 1.0, "gae_lambda": 0.0}
    plain, _ = RIGHT_GAE(rewards, values, mask, **settings)
    torch.testing.assert_close(plain, torch.tensor([[0.75, 0.0, 1.75, 0.0]]))
    crossed, _ = RIGHT_GAE(rewards, values, mask, turns=turns, turn_lambda=0.5, **settings)
    torch.testing.assert_close(crossed, torch.tensor([[0.75 + 0.5 * 1.75, 0.0, 1.75, 0.0]]))
    cut, returns = RIGHT_GAE(rewards, values, mask, final_values=torch.tensor([4.0]), **settings)
    torch.testing.assert_close(cut, torch.tensor([[0.75, 0.0, 5.75, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.25, 0.0, 6.0, 0.0]]))


def test_groups_without_a_failed_member() -> None:
    scores = torch.tensor([1.0, 3.0, 100.0, 5.0, 2.0, 2.0, 7.0, 2.0])
    kept = torch.tensor([True, True, False, True, True, True, False, True])
    centered = estimators.group_centered(scores, 4, kept=kept)
    torch.testing.assert_close(centered, torch.tensor([-2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]))
    loo = estimators.leave_one_out(scores, 4, kept=kept)
    torch.testing.assert_close(loo, torch.tensor([-3.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]))
    alone = estimators.group_normalized(scores[kept][:3], 3)
    normalized = estimators.group_normalized(scores, 4, kept=kept)
    torch.testing.assert_close(normalized[kept][:3], alone)
    everything = torch.ones(8, dtype=torch.bool)
    for function in (estimators.group_centered, estimators.group_normalized, estimators.leave_one_out):
        torch.testing.assert_close(function(scores, 4, kept=everything), function(scores, 4))
