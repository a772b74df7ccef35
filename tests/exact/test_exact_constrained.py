"""The multiplier of a limited cost arrives at the constrained optimum, which is known here, and the cost at its limit.

At a fixed multiplier λ the loop maximizes E[(score - λ cost) / (1 + λ)] - β KL, whose optimum is known; its cost falls
with λ, so that one λ puts it at the limit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_problem import ExactProblem, kl, make_rollout, model_outputs, optimum
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.lagrange import Lagrange
from rlhf.algorithms.online import Online
from rlhf.exact.world import enumerate_world, expectation, random_scores, random_table
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, divide_by_denominators

WORLD = enumerate_world()
TABLE, SCORES = random_table(WORLD, 10), random_scores(WORLD, 11)
COSTS = 0.7 * SCORES + random_scores(WORLD, 13, scale=0.7)  # completions that earn also cost
REFERENCE = WORLD.sequence_logprobs(TABLE)
BETA = 0.5
FREE = expectation(optimum(REFERENCE, SCORES, BETA), COSTS).item()
LIMIT = FREE - 0.6
PARTS: dict[str, Any] = {"kl": {"placement": "reward", "estimator": "k1"}}
REINFORCE = {"advantage": {"type": "batch_whiten", "whiten": False}, "policy_loss": {"aggregate": "sequence_sum"}}
PPO = {"advantage": {"type": "gae", "whiten": False}, "policy_loss": {"aggregate": "sequence_sum"}, "value_loss": {}}
RLOO = {
    "advantage": {"type": "group", "baseline": "leave_one_out"},
    "policy_loss": {"ratio": "sequence", "aggregate": "sequence_mean"},
}
LEARNED_CRITIC = {"advantage": {"type": "gae"}, "value_loss": {"coef": 1.0, "clip_eps": None}}


def cost_at(multiplier: float) -> float:
    """The cost of the best policy at a fixed multiplier."""
    combined = Lagrange().combine(SCORES, COSTS, multiplier)
    return expectation(optimum(REFERENCE, combined, BETA), COSTS).item()


def constrained_multiplier() -> float:
    """The multiplier at which the best policy has its cost at the limit, by bisection."""
    low, high = 0.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cost_at(middle) > LIMIT else (low, middle)
    return high


def test_the_cost_of_the_optimum_falls_with_the_multiplier() -> None:
    costs = [cost_at(multiplier) for multiplier in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)]
    assert costs[0] == pytest.approx(FREE)
    assert costs == sorted(costs, reverse=True)
    assert cost_at(constrained_multiplier()) == pytest.approx(LIMIT)
    assert 0.1 < constrained_multiplier() < 5.0  # neither end of the range


def follow_exact_gradients(algorithm: Online, rates: list[float]) -> tuple[Tensor, float, list[float]]:
    """Train a table by exact gradients with Adam; return it, the learned multiplier and the cost before every step."""
    lagrange = algorithm.lagrange
    assert lagrange is not None
    coefs, multiplier, violation, costs = Coefs(kl=BETA, penalty=0.0), lagrange.start, 0.0, []
    logits = TABLE.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits])
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        table = logits.log_softmax(-1)
        combined = lagrange.combine(SCORES, COSTS, lagrange.in_use(multiplier, violation=violation))
        problem = ExactProblem(world=WORLD, reference=TABLE, scores=combined)
        values = problem.exact_values(algorithm, coefs, table) if algorithm.value_loss is not None else None
        terms = problem.expected_terms(algorithm, coefs, old=table, new=table, values=values)
        costs.append(expectation(WORLD.sequence_logprobs(table.detach()), COSTS).item())
        optimizer.zero_grad()
        terms["policy"].backward()
        optimizer.step()
        multiplier, violation = lagrange.next_multiplier(multiplier, cost=costs[-1]), costs[-1] - LIMIT
    return logits.detach().log_softmax(-1), multiplier, costs


@pytest.mark.parametrize(
    ("parts", "start"),
    [
        pytest.param(REINFORCE, 8.0, id="reinforce from above"),
        pytest.param(PPO, 0.3, id="ppo from below", marks=pytest.mark.slow),  # its critic: test_exact_convergence.py
        pytest.param(REINFORCE, 0.3, id="reinforce from below", marks=pytest.mark.slow),
        pytest.param(PPO, 8.0, id="ppo from above", marks=pytest.mark.slow),
    ],
)
def test_exact_gradients_lead_to_the_constrained_optimum(parts: dict[str, Any], start: float) -> None:
    algorithm = Online.model_validate({**PARTS, **parts, "lagrange": {"cost_limit": LIMIT, "lr": 0.1, "start": start}})
    table, multiplier, _ = follow_exact_gradients(algorithm, [0.2 * (1 - step / 500) for step in range(500)])
    reached = WORLD.sequence_logprobs(table)
    best = optimum(REFERENCE, Lagrange().combine(SCORES, COSTS, constrained_multiplier()), BETA)
    assert multiplier == pytest.approx(constrained_multiplier(), rel=1e-2)
    assert expectation(reached, COSTS).item() == pytest.approx(LIMIT, abs=1e-3)
    assert kl(reached, best).item() < 1e-4


def test_a_multiplier_that_looks_ahead_ends_the_swings_of_the_cost() -> None:
    """The cost gives up 0.6; at a high rate of the multiplier it swings about its limit by a third of that."""
    late = {}
    for lookahead in (0.0, 10.0):
        lagrange = {"cost_limit": LIMIT, "lr": 0.3, "lookahead": lookahead}
        algorithm = Online.model_validate({**PARTS, **REINFORCE, "lagrange": lagrange})
        costs = follow_exact_gradients(algorithm, [0.05] * 160)[2]
        late[lookahead] = max(abs(cost - LIMIT) for cost in costs[80:])
    assert late[0.0] > 0.2
    assert late[10.0] < 0.05


def rows_of(policy: Tensor, generator: torch.Generator) -> Tensor:
    """Rows drawn from the policy, in groups of 4 for each of 256 prompts."""
    distribution = WORLD.sequence_logprobs(policy).exp()
    prompts = torch.arange(256) % WORLD.prompts
    drawn = torch.multinomial(distribution[prompts], 4, replacement=True, generator=generator)
    return (prompts[:, None] * len(WORLD.ids) + drawn).flatten()


@pytest.mark.parametrize(
    "parts", [pytest.param(RLOO, id="rloo", marks=pytest.mark.slow), pytest.param(LEARNED_CRITIC, id="ppo")]
)
def test_samples_lead_to_the_constrained_optimum(parts: dict[str, Any]) -> None:
    """The step as a run has it: costs of the step's samples steer the multiplier, a critic learns the combination."""
    algorithm = Online.model_validate({**PARTS, **parts, "lagrange": {"cost_limit": LIMIT, "lr": 0.2}})
    lagrange, objective = algorithm.lagrange, Objective(algorithm, max_tokens=WORLD.horizon)
    assert lagrange is not None
    generator, steps = torch.Generator().manual_seed(0), 250
    logits = TABLE.clone().requires_grad_()
    critic = torch.zeros(WORLD.prompts, len(WORLD.prefixes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.05}, {"params": [critic], "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    coefs, multiplier, violation, late = Coefs(kl=BETA, penalty=0.0), lagrange.start, 0.0, []
    for step in range(steps):
        old = logits.detach().log_softmax(-1)
        rows = rows_of(old, generator)
        combined = lagrange.combine(SCORES, COSTS, lagrange.in_use(multiplier, violation=violation))
        values = critic.detach()
        rollout = make_rollout(WORLD, rows, old=old, reference=TABLE, scores=combined, values=values, group_size=4)
        batch = compute_advantages(rollout, algorithm, coefs)
        for part in torch.randperm(len(batch), generator=generator).split(512):
            minibatch = batch.rows(part)
            outputs = model_outputs(WORLD, rows[part], logits.log_softmax(-1), critic)
            terms, _ = objective.loss(minibatch, outputs, coefs)
            optimizer.zero_grad()
            sum(divide_by_denominators(terms, objective.denominators(minibatch)).values()).backward()
            optimizer.step()
        schedule.step()
        cost = COSTS.flatten()[rows].mean().item()
        multiplier, violation = lagrange.next_multiplier(multiplier, cost=cost), cost - LIMIT
        late += [multiplier] if step >= steps - 50 else []
    reached = expectation(WORLD.sequence_logprobs(logits.detach().log_softmax(-1)), COSTS).item()
    assert FREE - reached > 0.5  # there was something to give up
    assert reached == pytest.approx(LIMIT, abs=0.03)
    assert sum(late) / len(late) == pytest.approx(constrained_multiplier(), rel=0.1)
