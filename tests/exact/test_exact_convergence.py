"""Training arrives at the best policy by the objective: pi* = pi_ref * exp(score / beta) / Z."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_problem import (
    ExactProblem,
    best_score,
    best_value,
    kl,
    make_rollout,
    model_outputs,
    objective_value,
    optimum,
)
from quick import quick
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.exact.world import enumerate_world, expectation, random_scores, random_table
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, divide_by_denominators

WORLD = enumerate_world()
PROBLEM = ExactProblem(world=WORLD, reference=random_table(WORLD, 10), scores=random_scores(WORLD, 11))
REFERENCE = WORLD.sequence_logprobs(PROBLEM.reference)


def online(**choices: Any) -> Online:
    """KL in the reward, nothing whitened, unless told otherwise."""
    parts: dict[str, Any] = {
        "advantage": {"type": "batch_whiten", "whiten": False},
        "policy_loss": {"type": "clip", "aggregate": "sequence_sum"},
        "kl": {"placement": "reward", "estimator": "k1"},
    }
    return Online.model_validate({**parts, **choices})


GAE = {"advantage": {"type": "gae", "gae_lambda": 0.95, "whiten": False}, "value_loss": {}}


def descend(algorithm: Online, *, beta: float, steps: int = 300) -> Tensor:
    """The table after `steps` of Adam on exact expected gradients, the critic (if there is one) exact too."""
    coefs = Coefs(kl=beta, penalty=0.0)
    logits = PROBLEM.reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / steps)
        table = logits.log_softmax(-1)
        values = PROBLEM.exact_values(algorithm, coefs, table) if algorithm.value_loss is not None else None
        terms = PROBLEM.expected_terms(algorithm, coefs, old=table, new=table, values=values)
        optimizer.zero_grad()
        terms["policy"].backward()
        optimizer.step()
    return logits.detach().log_softmax(-1)


@pytest.mark.parametrize("beta", quick([0.5, 1.0], [0.5]))
@pytest.mark.parametrize("parts", [{}, GAE], ids=["reinforce", "ppo"])
def test_exact_gradients_lead_to_the_optimum(parts, beta):
    distribution = WORLD.sequence_logprobs(descend(online(**parts), beta=beta))
    assert kl(distribution, optimum(REFERENCE, PROBLEM.scores, beta)).item() < 1e-5
    reached = objective_value(distribution, REFERENCE, PROBLEM.scores, beta).item()
    assert reached == pytest.approx(best_value(REFERENCE, PROBLEM.scores, beta).item(), abs=1e-5)


def without_foresight(beta: float) -> Tensor:
    """By backward induction, a state's value being the expected score alone."""
    table, values = PROBLEM.reference.clone(), {}
    ends = {tuple(ids[mask].tolist()): n for n, (ids, mask) in enumerate(zip(WORLD.ids, WORLD.mask, strict=True))}
    for state, prefix in reversed(list(enumerate(WORLD.prefixes))):
        following = [
            PROBLEM.scores[:, ends[longer]] if (longer := (*prefix, token)) in ends else values[longer]
            for token in range(WORLD.vocabulary)
        ]
        scores = torch.stack(following, dim=1)
        table[:, state] = (PROBLEM.reference[:, state] + scores / beta).log_softmax(-1)
        values[prefix] = (table[:, state].exp() * scores).sum(-1)
    return table


def test_kl_in_the_loss_leads_elsewhere():
    """Each token weighs its own KL only: pi(a | s) = pi_ref * exp(Q(s, a) / beta), Q without the KL still to come."""
    beta = 0.5
    table = descend(online(kl={"placement": "loss", "estimator": "k2"}), beta=beta)
    myopic = without_foresight(beta)
    ours = WORLD.sequence_logprobs(table)
    assert kl(ours, WORLD.sequence_logprobs(myopic)).item() < 1e-5
    assert kl(ours, optimum(REFERENCE, PROBLEM.scores, beta)).item() > 1e-2


def draw(policy: Tensor, generator: torch.Generator) -> Tensor:
    """Rows drawn from the policy, in groups of 4 for each of 256 prompts."""
    distribution = WORLD.sequence_logprobs(policy).exp()
    prompts = torch.arange(256) % WORLD.prompts
    drawn = torch.multinomial(distribution[prompts], 4, replacement=True, generator=generator)
    return (prompts[:, None] * len(WORLD.ids) + drawn).flatten()


def learn(
    algorithm: Online, *, beta: float, steps: int, epochs: int, coefs: Coefs | None = None
) -> tuple[Tensor, Coefs]:
    """The whole step as a run has it: sample, credit, epochs of minibatches, a critic that learns, controllers."""
    generator = torch.Generator().manual_seed(0)
    logits = PROBLEM.reference.clone().requires_grad_()
    critic = torch.zeros(WORLD.prompts, len(WORLD.prefixes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.05}, {"params": [critic], "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    objective = Objective(algorithm, max_tokens=WORLD.horizon)
    coefs = Coefs(kl=beta, penalty=1.0) if coefs is None else coefs
    for _ in range(steps):
        old = logits.detach().log_softmax(-1)
        rows = draw(old, generator)
        annotated = make_rollout(
            WORLD,
            rows,
            old=old,
            reference=PROBLEM.reference,
            scores=PROBLEM.scores,
            values=critic.detach(),
            group_size=4,
        )
        batch = compute_advantages(annotated, algorithm, coefs)
        old_kl = []
        for _ in range(epochs):
            for part in torch.randperm(len(batch), generator=generator).split(512):
                minibatch = batch.rows(part)
                outputs = model_outputs(WORLD, rows[part], logits.log_softmax(-1), critic)
                terms, observed = objective.loss(minibatch, outputs, coefs)
                optimizer.zero_grad()
                sum(divide_by_denominators(terms, objective.denominators(minibatch)).values()).backward()
                optimizer.step()
                old_kl.append(observed["kl/old"].value)
        schedule.step()
        coefs = next_coefs(algorithm, coefs, batch, old_kl[-1])
    return logits.detach().log_softmax(-1), coefs


def next_coefs(algorithm: Online, coefs: Coefs, batch: Any, old_kl: float) -> Coefs:
    """Controllers as the configuration has them."""
    reference_kl = (batch.logprobs - batch.ref_logprobs).sum(1).mean().item()
    return Coefs(
        kl=algorithm.kl.controller.next_coef(coefs.kl, kl=reference_kl, completions=len(batch)),
        penalty=algorithm.policy_loss.next_coef(coefs.penalty, kl=old_kl),
    )


RLOO = {
    "advantage": {"type": "group", "baseline": "leave_one_out"},
    "policy_loss": {"type": "clip", "ratio": "sequence", "aggregate": "sequence_mean"},
}
PPO = {"advantage": {"type": "gae"}, "policy_loss": {"type": "clip"}, "value_loss": {"coef": 1.0, "clip_eps": None}}
PENALTY = {**PPO, "policy_loss": {"type": "penalty"}}
A2C = {**PPO, "policy_loss": {"type": "policy_gradient"}}
CISPO = {"advantage": {"type": "group", "baseline": "leave_one_out"}, "policy_loss": {"type": "cispo"}}


@pytest.mark.parametrize(
    "parts, epochs",
    [
        pytest.param(RLOO, 2, id="rloo", marks=pytest.mark.slow),  # the adaptive coefficient's, below, is RLOO too
        pytest.param(PPO, 2, id="ppo"),
        pytest.param(PENALTY, 2, id="ppo_penalty", marks=pytest.mark.slow),
        pytest.param(CISPO, 2, id="cispo", marks=pytest.mark.slow),
        pytest.param(A2C, 1, id="a2c", marks=pytest.mark.slow),
    ],
)
def test_samples_lead_to_the_optimum(parts, epochs):
    beta = 0.5
    table, _ = learn(online(**parts), beta=beta, steps=150 if epochs > 1 else 300, epochs=epochs)
    distribution = WORLD.sequence_logprobs(table)
    best = optimum(REFERENCE, PROBLEM.scores, beta)
    assert kl(REFERENCE, best) > 0.1  # there was something to learn
    assert kl(distribution, best).item() < 1e-4


def test_the_adaptive_coefficient_settles_on_its_target_and_on_the_frontier():
    target = 0.3
    algorithm = online(
        **RLOO,
        kl={"placement": "reward", "controller": {"type": "adaptive", "target": target, "horizon": 10_000.0}},
    )
    table, coefs = learn(algorithm, beta=1.0, steps=150, epochs=1, coefs=Coefs(kl=2.0, penalty=0.0))
    distribution = WORLD.sequence_logprobs(table)
    nats = kl(distribution, REFERENCE).item()
    assert nats == pytest.approx(target, rel=0.1)
    assert expectation(distribution, PROBLEM.scores).item() == pytest.approx(
        best_score(REFERENCE, PROBLEM.scores, nats), rel=1e-3
    )
    assert coefs.kl < 1.0
