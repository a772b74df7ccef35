"""The optima of the preference losses on the preferences of a whole population, every pair of completions weighed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact_problem import kl, optimum, table_of
from pair_values import PairValues, dpo, hinge, ipo, robust_dpo
from torch import Tensor

from rlhf.exact.world import enumerate_world, random_scores, random_table

WORLD = enumerate_world()
REFERENCE_TABLE = random_table(WORLD, 10)
REFERENCE = WORLD.sequence_logprobs(REFERENCE_TABLE)
REWARDS = random_scores(WORLD, 11)
# How often a completion is in a pair: not as the reference would have it, for DPO's optimum does not depend on it.
MASS = random_scores(WORLD, 12).softmax(1)
BETA = 0.5

Loss = Callable[[Tensor, Tensor], PairValues]


def preferences(rewards: Tensor, *, flipped: float = 0.0) -> Tensor:
    """P(first preferred to second) [C, N, N]: Bradley-Terry, each label then flipped with that probability."""
    clean = torch.sigmoid(rewards[:, :, None] - rewards[:, None, :])
    return (1 - flipped) * clean + flipped * (1 - clean)


def expected_loss(table: Tensor, loss: Loss, chosen: Tensor) -> Tensor:
    """The mean over prompts, pairs drawn from MASS x MASS, and labels drawn from `chosen`."""
    ratios = WORLD.sequence_logprobs(table) - REFERENCE
    count = ratios.shape[1]
    first = ratios[:, :, None].expand(-1, -1, count)
    second = ratios[:, None, :].expand(-1, count, -1)
    weights = MASS[:, :, None] * MASS[:, None, :] * chosen / WORLD.prompts
    return (weights.flatten() * loss(first.flatten(), second.flatten()).per_pair).sum()


def converged(loss: Loss, chosen: Tensor) -> Tensor:
    """The distribution [C, N] that descends no further."""
    logits = REFERENCE_TABLE.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=2000, tolerance_grad=1e-11, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        expected = expected_loss(logits.log_softmax(-1), loss, chosen)
        expected.backward()
        return expected

    optimizer.step(closure)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-7
    return WORLD.sequence_logprobs(logits.detach().log_softmax(-1))


def test_dpo_ends_at_the_optimum_of_the_reward_behind_the_preferences():
    """pi* = pi_ref * exp(r / beta) / Z: PPO's optimum, found without a reward and without a sample."""
    reached = converged(lambda w, r: dpo(w, r, beta=BETA), preferences(REWARDS))
    best = optimum(REFERENCE, REWARDS, BETA)
    assert kl(REFERENCE, best) > 0.1  # there was something to learn
    assert kl(reached, best) < 1e-10


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_robust_dpo_ends_there_from_flipped_labels_and_the_others_do_not(noise):
    labels, best = preferences(REWARDS, flipped=noise), optimum(REFERENCE, REWARDS, BETA)
    robust = converged(lambda w, r: robust_dpo(w, r, beta=BETA, label_smoothing=noise), labels)
    plain = converged(lambda w, r: dpo(w, r, beta=BETA), labels)
    smoothed = converged(lambda w, r: dpo(w, r, beta=BETA, label_smoothing=noise), labels)
    assert kl(robust, best) < 1e-9
    assert kl(plain, best) > 1e-2
    assert kl(smoothed, best) > kl(plain, best)  # cDPO smooths labels that are noisy already


def test_ipo_ends_at_the_optimum_of_the_preference_itself():
    """pi* = pi_ref * exp(P(y preferred to y') / beta) / Z, y' drawn as the data were (Azar et al. 2024, eq. 7)."""
    chosen = preferences(REWARDS)
    reached = converged(lambda w, r: ipo(w, r, beta=BETA), chosen)
    wins = (chosen * MASS[:, None, :]).sum(2)
    assert kl(reached, optimum(REFERENCE, wins, BETA)) < 1e-10
    assert kl(reached, optimum(REFERENCE, REWARDS, BETA)) > 1e-2


def test_where_the_labels_are_certain_ipo_stays_near_the_reference_and_dpo_does_not():
    certain = (REWARDS[:, :, None] > REWARDS[:, None, :]).double()
    table = (REFERENCE + 40 * REWARDS.argsort(1).argsort(1)).log_softmax(1)
    far = table_of(WORLD, table)
    for loss, falls in ((lambda w, r: dpo(w, r, beta=BETA), True), (lambda w, r: ipo(w, r, beta=BETA), False)):
        start = expected_loss(REFERENCE_TABLE, loss, certain)
        assert bool(expected_loss(far, loss, certain) < start) is falls
    reached = converged(lambda w, r: ipo(w, r, beta=BETA), certain)
    assert kl(reached, REFERENCE) < 1.0


def test_the_hinge_is_content_once_every_margin_is_held():
    loss: Loss = lambda w, r: hinge(w, r, beta=BETA, margin=1.0)  # noqa: E731
    certain = (REWARDS[:, :, None] > REWARDS[:, None, :]).double()
    spread = (REFERENCE + 3 * REWARDS.argsort(1).argsort(1)).log_softmax(1)  # 3 nats apart, times beta: above 1
    assert expected_loss(table_of(WORLD, spread), loss, certain).item() == pytest.approx(0.0, abs=1e-12)
    assert expected_loss(REFERENCE_TABLE, loss, certain) > 0.1
