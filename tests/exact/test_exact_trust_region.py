"""The natural gradient and TRPO with exact expectations: the direction is F^-1 g, and every step improves."""

from __future__ import annotations

import pytest
import torch
from exact_problem import ExactProblem, action_values, best_value, objective_value, state_logprobs
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from rlhf.algo.kl import Coefs, kl_of_distributions
from rlhf.algo.trust_region import (
    Trial,
    backtrack,
    conjugate_gradient,
    softmax_fisher_product,
    step_length,
    undamped_curvature,
)
from rlhf.algorithms.online import Online
from rlhf.exact.world import enumerate_world, expectation, random_scores, random_table

# torch scripts its rules for forward-mode differentiation, at their first use, with functions that it deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

WORLD = enumerate_world()
PROBLEM = ExactProblem(world=WORLD, reference=random_table(WORLD, 10), scores=random_scores(WORLD, 11))
REFERENCE = WORLD.sequence_logprobs(PROBLEM.reference)
BETA = 0.3
COEFS = Coefs(kl=BETA, penalty=0.0)
TRUST_REGION = Online.model_validate(
    {
        "advantage": {"type": "batch_whiten", "whiten": False},
        "policy_loss": {"type": "trust_region", "aggregate": "sequence_sum"},
        "kl": {"placement": "reward", "estimator": "k1"},
    }
)


class Table(torch.nn.Module):
    """One logit a state and token."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(random_table(WORLD, 12))

    def forward(self) -> Tensor:
        return self.logits


class Network(torch.nn.Module):
    """Two layers over a code of the state: fewer weights than logits, and states share them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shape = WORLD.prompts, len(WORLD.prefixes)
        self.code = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
        self.first = torch.nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.randn(3, WORLD.vocabulary, generator=generator, dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.code @ self.first).tanh() @ self.second


@pytest.fixture(params=[Table, Network])
def policy(request: pytest.FixtureRequest) -> torch.nn.Module:
    return request.param()


def flat(tensors: dict[str, Tensor] | list[Tensor]) -> Tensor:
    values = tensors.values() if isinstance(tensors, dict) else tensors
    return torch.cat([tensor.reshape(-1) for tensor in values])


class ExactStep:
    """Loss, gradient and Fisher matrix of a policy, each an expectation under it."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy
        self.named = {name: p.detach().clone() for name, p in policy.named_parameters()}
        self.old = policy().detach().log_softmax(-1)
        self.visits = state_logprobs(WORLD, self.old).exp() / WORLD.prompts  # expected tokens chosen in a state
        rewards = PROBLEM.experience(TRUST_REGION, COEFS, self.old).rewards
        self.action_values = action_values(WORLD, self.old, rewards)

    def logits(self, weights: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(self.policy, weights, ())
        return output

    def unflat(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([p.numel() for p in self.named.values()])
        return {n: part.view_as(p) for (n, p), part in zip(self.named.items(), parts, strict=True)}

    def gradient(self) -> Tensor:
        """Of the library's own loss, over all completions."""
        terms = PROBLEM.expected_terms(TRUST_REGION, COEFS, old=self.old, new=self.policy().log_softmax(-1))
        return flat(list(torch.autograd.grad(terms["policy"], list(self.policy.parameters()))))

    def product(self, vector: Tensor) -> Tensor:
        _, tangent = jvp(self.logits, (self.named,), (self.unflat(vector),))
        _, pull = vjp(self.logits, self.named)
        weighted = self.visits[..., None] * softmax_fisher_product(self.old, tangent)
        return flat(pull(weighted)[0])

    def fisher(self) -> Tensor:
        """E[sum_t grad log pi grad log pi'], from its definition."""
        jacobian = torch.func.jacrev(lambda w: self.logits(w).log_softmax(-1))(self.named)
        scores = torch.cat([j.reshape(self.old.numel(), -1) for j in jacobian.values()], dim=1)
        weights = (self.visits[..., None] * self.old.exp()).reshape(-1, 1)
        return scores.T @ (weights * scores)

    def kl(self, weights: dict[str, Tensor]) -> float:
        return float((self.visits * kl_of_distributions(self.old, self.logits(weights).log_softmax(-1))).sum())

    def surrogate(self, weights: dict[str, Tensor]) -> float:
        """-E[ratio x advantage]; a baseline changes only its constant."""
        pi = self.logits(weights).softmax(-1)
        return -float((self.visits * (pi * self.action_values).sum(-1)).sum())


def test_products_are_those_of_the_fisher_matrix(policy: torch.nn.Module) -> None:
    step = ExactStep(policy)
    explicit = step.fisher()
    for seed in range(2):
        vector = torch.randn(len(explicit), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(step.product(vector), explicit @ vector, rtol=1e-9, atol=1e-12)


def test_the_direction_is_the_natural_gradient(policy: torch.nn.Module) -> None:
    step = ExactStep(policy)
    gradient = step.gradient()
    solution = conjugate_gradient(step.product, gradient, iterations=300)
    exact = torch.linalg.pinv(step.fisher(), hermitian=True) @ gradient  # a shift of a state's logits changes nothing
    torch.testing.assert_close(solution.x, exact, rtol=1e-6, atol=1e-8)
    cosine = torch.cosine_similarity(solution.x, gradient, dim=0)
    assert 0 < cosine < 0.99  # which is not the gradient's direction


def test_a_table_s_natural_gradient_is_the_advantage_whatever_the_state_s_probability() -> None:
    """Kakade 2001, theorem 1: with a logit for each state and token, F^-1 grad E[score] = A(s, a), up to a shift."""
    step = ExactStep(Table())
    solution = conjugate_gradient(step.product, step.gradient(), iterations=300)
    descent = -solution.x.view_as(step.old)
    advantages = step.action_values - (step.old.exp() * step.action_values).sum(-1, keepdim=True)
    torch.testing.assert_close(descent - descent.mean(-1, keepdim=True), advantages - advantages.mean(-1, keepdim=True))


@pytest.mark.parametrize("max_kl", [0.001, 0.1])
def test_every_step_of_trpo_stays_in_its_region_and_raises_the_objective(max_kl: float) -> None:
    policy = Table()
    value = objective_value(WORLD.sequence_logprobs(policy().log_softmax(-1)), REFERENCE, PROBLEM.scores, BETA).item()
    best = best_value(REFERENCE, PROBLEM.scores, BETA).item()
    for number in range(12):
        step = ExactStep(policy)
        gradient = step.gradient()
        solution = conjugate_gradient(lambda v, s=step: s.product(v) + 1e-4 * v, gradient, iterations=50)
        length = step_length(undamped_curvature(solution, gradient, damping=1e-4), max_kl=max_kl)

        def weights(length: float, step: ExactStep = step, x: Tensor = solution.x) -> dict[str, Tensor]:
            return step.unflat(flat(step.named) - length * x)

        def attempt(length: float, step: ExactStep = step) -> Trial:
            new = weights(length, step)
            improvement = step.surrogate(step.named) - step.surrogate(new)
            return Trial(length=length, kl=step.kl(new), improvement=improvement)

        outcome = backtrack(attempt, length, max_kl=max_kl, shrink=0.7, backtracks=10)
        assert outcome.accepted
        assert outcome.last.kl <= max_kl
        if number == 0:
            assert outcome.first.kl == pytest.approx(max_kl, rel=0.35 if max_kl > 0.01 else 0.05)  # to second order
        with torch.no_grad():
            policy.logits.copy_(weights(outcome.last.length)["logits"])
        distribution = WORLD.sequence_logprobs(policy().log_softmax(-1))
        before, value = value, objective_value(distribution, REFERENCE, PROBLEM.scores, BETA).item()
        assert value > before or before > 0.97 * best  # steps of a fixed KL go back and forth there
    if max_kl == 0.1:
        assert value == pytest.approx(best, rel=0.03)
        assert expectation(distribution, PROBLEM.scores) > expectation(REFERENCE, PROBLEM.scores)
