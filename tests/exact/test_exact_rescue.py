"""Completions sampled with a hint under a critic: their expectation, by enumeration, equals plain sampling's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_problem import ExactProblem, make_rollout, model_outputs, objective_value, state_values
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algo.masked import whiten
from rlhf.algo.selection import rest_importance
from rlhf.algorithms.online import Online
from rlhf.exact.world import enumerate_world, random_scores, random_table
from rlhf.experience import compute_advantages
from rlhf.objective import Objective

WORLD = enumerate_world()
PLAIN, HINTED = random_table(WORLD, 3), random_table(WORLD, 4)
PROBLEM = ExactProblem(world=WORLD, reference=random_table(WORLD, 10), scores=random_scores(WORLD, 11))
VALUES = torch.randn(2, len(WORLD.prefixes), generator=torch.Generator().manual_seed(6), dtype=torch.float64)
NO_CAP = 1e12
COEFS = Coefs(kl=0.3, penalty=0.0)


def ppo(weights: dict[str, Any], gae_lambda: float = 1.0) -> Online:
    """PPO with a critic and a rescue, without whitening, which is no expectation."""
    return Online.model_validate(
        {
            "advantage": {"type": "gae", "gae_lambda": gae_lambda, "whiten": False},
            "value_loss": {"clip_eps": None},
            "policy_loss": {"type": "clip", "aggregate": "sequence_sum", "clip_eps_low": 1.0, "clip_eps_high": 1e9},
            "kl": {"placement": "reward", "estimator": "k1"},
            "rescue": {"hints": [{"column": "hint"}], "after": 1, "weights": weights},
        }
    )


def gradients(algorithm: Online, drawn: Tensor, *, is_hinted: bool, per_row: Tensor | None = None) -> list[Tensor]:
    """The expected gradients of policy and critic over completions drawn by the table `drawn`.

    `per_row` [C, N] multiplies the probability of each completion.
    """
    rows = WORLD.all_rows()
    rollout = make_rollout(WORLD, rows, old=PLAIN, reference=PROBLEM.reference, scores=PROBLEM.scores, values=VALUES)
    rollout = replace(
        rollout,
        sampler_logprobs=WORLD.token_logprobs(drawn, rows),
        hinted=torch.full((len(rows),), is_hinted),
    )
    batch = compute_advantages(rollout, algorithm, COEFS)
    logits, values = PLAIN.clone().requires_grad_(), VALUES.clone().requires_grad_()
    weights = WORLD.sequence_logprobs(drawn).exp() * (1.0 if per_row is None else per_row)
    outputs = model_outputs(WORLD, rows, logits.log_softmax(-1), values, weights.flatten() / WORLD.prompts)
    terms, _ = Objective(algorithm, max_tokens=WORLD.horizon).loss(batch, outputs, COEFS)
    return [
        *torch.autograd.grad(terms["policy"], logits, retain_graph=True),
        *torch.autograd.grad(terms["value"], values),
    ]


@pytest.mark.parametrize("gae_lambda", [1.0, 0.6])
def test_exact_weights_give_policy_and_critic_the_gradients_of_plain_sampling(gae_lambda: float) -> None:
    algorithm = ppo({"type": "sequence", "cap": NO_CAP}, gae_lambda)
    plain = gradients(algorithm, PLAIN, is_hinted=False)
    hinted = gradients(algorithm, HINTED, is_hinted=True)
    for ours, exact in zip(hinted, plain, strict=True):
        assert exact.abs().max() > 1e-3
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-12)
    unweighted = gradients(algorithm, HINTED, is_hinted=False)  # as if the plain prompt had given them
    assert all((ours - exact).abs().max() > 1e-3 for ours, exact in zip(unweighted, plain, strict=True))


def test_with_lambda_1_that_is_the_gradient_of_score_minus_kl_whatever_the_critic_says() -> None:
    ours, _ = gradients(ppo({"type": "sequence", "cap": NO_CAP}), HINTED, is_hinted=True)
    logits = PLAIN.clone().requires_grad_()
    distribution = WORLD.sequence_logprobs(logits.log_softmax(-1))
    objective = objective_value(distribution, WORLD.sequence_logprobs(PROBLEM.reference), PROBLEM.scores, COEFS.kl)
    (exact,) = torch.autograd.grad(objective, logits)
    torch.testing.assert_close(-ours, exact, rtol=1e-8, atol=1e-10)


def test_hints_that_follow_from_this_step_s_draws_bias_what_earlier_steps_would_not() -> None:
    """A group of two, the second replaced by a hinted success if both failed: rescue.after=0, enumerated."""
    algorithm = ppo({"type": "sequence", "cap": NO_CAP})
    succeeds = (PROBLEM.scores > 0).double()
    probability, hinted_probability = (WORLD.sequence_logprobs(table).exp() for table in (PLAIN, HINTED))
    fails = (probability * (1 - succeeds)).sum(1, keepdim=True)
    rescues = (hinted_probability * succeeds).sum(1, keepdim=True)
    first = gradients(algorithm, PLAIN, is_hinted=False)
    second = gradients(algorithm, PLAIN, is_hinted=False, per_row=1 - (1 - succeeds) * fails * rescues)
    taken = gradients(algorithm, HINTED, is_hinted=True, per_row=succeeds * fails**2)
    in_advance = gradients(algorithm, HINTED, is_hinted=True)
    for at_once, replacement, hint, plain in zip(second, taken, in_advance, first, strict=True):
        torch.testing.assert_close((plain + hint) / 2, plain, rtol=1e-9, atol=1e-12)
        assert ((plain + at_once + replacement) / 2 - plain).abs().max() > 1e-3


def test_the_rest_s_ratio_turns_hinted_returns_into_the_plain_values() -> None:
    rows = WORLD.all_rows()
    mask = WORLD.mask[rows % len(WORLD.ids)]
    rewards = torch.zeros(len(rows), WORLD.horizon, dtype=torch.float64)
    rewards.scatter_(1, mask.sum(1, keepdim=True) - 1, PROBLEM.scores.flatten()[:, None])
    ratio = rest_importance(WORLD.token_logprobs(PLAIN, rows), WORLD.token_logprobs(HINTED, rows), mask, cap=NO_CAP)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    weights = WORLD.sequence_logprobs(HINTED).exp().flatten()
    totals = torch.zeros(2, WORLD.prompts, len(WORLD.prefixes), dtype=torch.float64)
    for row in rows.tolist():
        prompt, which = divmod(row, len(WORLD.ids))
        states, live = WORLD.states[which][mask[row]], mask[row]
        totals[0, prompt, states] += weights[row] * (ratio * to_go)[row, live]
        totals[1, prompt, states] += weights[row] * ratio[row, live]
    torch.testing.assert_close(totals[0] / totals[1], state_values(WORLD, PLAIN, rewards), rtol=1e-9, atol=1e-12)


def test_weighted_whitening_has_the_moments_of_the_plain_policy() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [4.0, 9.0]], dtype=torch.float64), torch.tensor([[1, 1], [1, 0]]).bool()
    weights = torch.tensor([[1.0, 1.0], [0.5, 7.0]], dtype=torch.float64)
    mean = (1 + 2 + 0.5 * 4) / 2.5
    variance = ((1 - mean) ** 2 + (2 - mean) ** 2 + 0.5 * (4 - mean) ** 2) / 2.5
    expected = torch.tensor([[1 - mean, 2 - mean], [4 - mean, 0.0]], dtype=torch.float64) / variance**0.5
    torch.testing.assert_close(whiten(values, mask, weights=weights), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whiten(values, mask, weights=torch.ones_like(values)), whiten(values, mask))
