"""The expected gradient of every online loss, by enumeration, against the exact gradient of its objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_problem import ExactProblem, action_values, kl, make_rollout, model_outputs, objective_value, state_logprobs
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.exact.world import World, enumerate_world, expectation, random_scores, random_table
from rlhf.experience import compute_advantages
from rlhf.objective import Objective

WORLD = enumerate_world()
PROBLEM = ExactProblem(world=WORLD, reference=random_table(WORLD, 10), scores=random_scores(WORLD, 11))
REFERENCE = WORLD.sequence_logprobs(PROBLEM.reference)
BETA = 0.3
COEFS = Coefs(kl=BETA, penalty=0.7)
WIDE = {"clip_eps_low": 1.0, "clip_eps_high": 1e9}  # a clip that never binds


class Network(torch.nn.Module):
    """Logits from features of prompt and prefix: states share parameters, as in a language model."""

    def __init__(self, world: World) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        features = [
            [float(c == k) for k in range(world.prompts)]
            + [float(prefix.count(v)) for v in range(1, world.vocabulary)]
            + [float(prefix[-1]) if prefix else 0.0, float(len(prefix))]
            for c in range(world.prompts)
            for prefix in world.prefixes
        ]
        self.features = torch.tensor(features, dtype=torch.float64).view(world.prompts, len(world.prefixes), -1)
        width = self.features.shape[-1]
        self.first = torch.nn.Parameter(torch.randn(width, 6, generator=generator, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.randn(6, world.vocabulary, generator=generator, dtype=torch.float64))

    def forward(self) -> Tensor:
        """The policy's table."""
        return ((self.features @ self.first).tanh() @ self.second).log_softmax(-1)


class Table(torch.nn.Module):
    """One logit a state and token."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(random_table(world, 12))

    def forward(self) -> Tensor:
        """The policy's table."""
        return self.logits.log_softmax(-1)


@pytest.fixture(params=[Table, Network])
def policy(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A policy with and without parameters shared between states."""
    return request.param(WORLD)


def online(*, policy_loss: dict[str, Any] | None = None, **choices: Any) -> Online:
    """PPO's parts without whitening, which is not an expectation, and without a clip that binds unless told."""
    surrogate = policy_loss or {}
    wide = WIDE if surrogate.get("type", "clip") == "clip" else {}
    parts = {"kl": {"placement": "reward", "estimator": "k1"}, **choices}
    return Online.model_validate(
        {**parts, "policy_loss": {"type": "clip", "aggregate": "sequence_sum", **wide, **surrogate}}
    )


def with_critic(gae_lambda: float) -> dict[str, Any]:
    """GAE and a critic without a clip."""
    advantage = {"type": "gae", "gamma": 1.0, "gae_lambda": gae_lambda, "whiten": False}
    return {"advantage": advantage, "value_loss": {"clip_eps": None, "coef": 0.1}}


REINFORCE = {"advantage": {"type": "batch_whiten", "whiten": False}}
PLAIN = {"type": "policy_gradient"}


def same_gradient(policy: torch.nn.Module, ours: Tensor, exact: Tensor, *, scale: float = 1.0) -> None:
    """`ours` has `scale` times the gradient of `exact`, which is not zero, to 1e-8."""
    parameters = list(policy.parameters())
    mine = torch.autograd.grad(ours, parameters, retain_graph=True)
    theirs = torch.autograd.grad(exact, parameters, retain_graph=True)
    assert max(g.abs().max().item() for g in theirs) > 1e-3
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, scale * b, rtol=1e-8, atol=1e-10)


def differ(policy: torch.nn.Module, ours: Tensor, other: Tensor) -> None:
    """The gradients are far apart: the comparison above could have failed."""
    parameters = list(policy.parameters())
    pairs = zip(
        torch.autograd.grad(ours, parameters, retain_graph=True),
        torch.autograd.grad(other, parameters, retain_graph=True),
        strict=True,
    )
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-3


def exact_objective(table: Tensor, beta: float = BETA) -> Tensor:
    """E[score] - beta * KL(policy || reference) over sequences."""
    return objective_value(WORLD.sequence_logprobs(table), REFERENCE, PROBLEM.scores, beta)


def visited(old: Tensor, per_state: Tensor) -> Tensor:
    """The sum over tokens of a quantity of their states, expected under `old`, which is not differentiated."""
    return (state_logprobs(WORLD, old.detach()).exp() * per_state).sum(1).mean()


def test_weighing_rows_is_the_expectation_row_by_row(policy):
    algorithm = online(policy_loss={"entropy_coef": 0.1}, **with_critic(0.9))
    table, rows = policy(), WORLD.all_rows()
    values = random_scores(WORLD, 1)[:, : len(WORLD.prefixes)]
    batch = PROBLEM.experience(algorithm, COEFS, table, values=values)
    all_outputs, objective = model_outputs(WORLD, rows, table, values), Objective(algorithm, max_tokens=3)
    probabilities = WORLD.sequence_logprobs(table.detach()).exp().flatten() / WORLD.prompts
    assert probabilities.sum().item() == pytest.approx(1.0)
    one_by_one = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        part = slice(row, row + 1)
        outputs = type(all_outputs)(
            logprobs=all_outputs.logprobs[part], entropy=all_outputs.entropy[part], values=all_outputs.values[part]
        )
        one_by_one = one_by_one + probabilities[row] * objective.loss(batch.rows(part), outputs, COEFS)[0]["policy"]
    at_once = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table, values=values)["policy"]
    same_gradient(policy, at_once, one_by_one)


@pytest.mark.parametrize("parts", [REINFORCE, with_critic(0.95)], ids=["reinforce", "a2c"])
def test_the_plain_policy_gradient_at_the_old_policy_and_not_away_from_it(policy, parts):
    algorithm = online(policy_loss=PLAIN, **parts)
    table = policy()
    for old, compare in ((table, same_gradient), (random_table(WORLD, 13), differ)):
        values = PROBLEM.exact_values(algorithm, COEFS, old) if algorithm.value_loss is not None else None
        ours = PROBLEM.expected_terms(algorithm, COEFS, old=old, new=table, values=values)["policy"]
        compare(policy, -ours, exact_objective(table))


def baselined_terms(table: Tensor, baselines: Callable[[Tensor], Tensor]) -> Tensor:
    """ReMax's policy term expected over completions; `baselines` gives one number for each row from its scores."""
    rows = WORLD.all_rows()
    rollout = make_rollout(WORLD, rows, old=table, reference=PROBLEM.reference, scores=PROBLEM.scores)
    algorithm = online(advantage={"type": "greedy"}, policy_loss=PLAIN)
    batch = compute_advantages(replace(rollout, baselines=baselines(rollout.scores)), algorithm, COEFS)
    weights = WORLD.sequence_logprobs(table.detach()).exp().flatten() / WORLD.prompts
    outputs = model_outputs(WORLD, rows, table, None, weights)
    return Objective(algorithm, max_tokens=3).loss(batch, outputs, COEFS)[0]["policy"]


def greedy_scores(table: Tensor) -> Tensor:
    """The score `[C]` of the completion made of the most likely tokens."""
    scores = []
    for prompt in range(WORLD.prompts):
        prefix: tuple[int, ...] = ()
        while prefix in WORLD.prefixes:
            prefix = (*prefix, int(table[prompt, WORLD.prefixes.index(prefix)].argmax()))
        ends = [tuple(ids[mask].tolist()) for ids, mask in zip(WORLD.ids, WORLD.mask, strict=True)]
        scores.append(PROBLEM.scores[prompt, ends.index(prefix)])
    return torch.stack(scores)


def test_a_greedy_baseline_leaves_the_gradient_and_one_that_knows_the_completion_does_not(policy):
    table = policy()
    greedy = greedy_scores(table).repeat_interleave(len(WORLD.ids))
    assert greedy.abs().min() > 0.05
    same_gradient(policy, baselined_terms(table, lambda _: greedy), exact_objective(table), scale=-1.0)
    differ(policy, -baselined_terms(table, lambda scores: 0.5 * scores), exact_objective(table))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_ppo_with_the_exact_critic_at_any_lambda(policy, gae_lambda):
    algorithm = online(**with_critic(gae_lambda))
    table = policy()
    values = PROBLEM.exact_values(algorithm, COEFS, table)
    terms = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table, values=values)
    same_gradient(policy, terms["policy"], exact_objective(table), scale=-1.0)


def test_ppo_with_any_critic_at_lambda_one_but_not_below(policy):
    table = policy()
    wrong = random_scores(WORLD, 4)[:, : len(WORLD.prefixes)]
    for gae_lambda, compare in ((1.0, same_gradient), (0.9, differ)):
        algorithm = online(**with_critic(gae_lambda))
        terms = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table, values=wrong)
        compare(policy, -terms["policy"], exact_objective(table))


def test_the_default_clip_and_dual_clip_do_not_matter_at_the_old_policy(policy):
    how = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": 3.0}
    algorithm = online(policy_loss=how, **REINFORCE)
    table = policy()
    terms = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table)
    same_gradient(policy, terms["policy"], exact_objective(table), scale=-1.0)


def test_token_mean_divides_by_the_expected_length(policy):
    algorithm = online(policy_loss={"aggregate": "token_mean"}, **REINFORCE)
    table = policy()
    lengths = WORLD.mask.sum(1).double().expand(WORLD.prompts, -1)
    mean_length = expectation(WORLD.sequence_logprobs(table.detach()), lengths)
    terms = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table)
    same_gradient(policy, terms["policy"] / mean_length, exact_objective(table), scale=-1.0 / mean_length.item())


def test_the_constant_aggregate_divides_by_the_horizon(policy):
    algorithm = online(policy_loss={"aggregate": "constant"}, **REINFORCE)
    table = policy()
    terms = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table)
    same_gradient(policy, terms["policy"], exact_objective(table), scale=-1.0 / WORLD.horizon)


def pair_terms(algorithm: Online, *, old: Tensor, new: Tensor) -> Tensor:
    """The policy term expected over *pairs* of completions of a prompt, both from `old`: 2 rows a pair."""
    n = len(WORLD.ids)
    pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n))
    rows = torch.cat([c * n + pairs for c in range(WORLD.prompts)]).flatten()
    single = WORLD.sequence_logprobs(old.detach())
    joint = (single[:, :, None] + single[:, None, :]).exp().flatten() / WORLD.prompts
    rollout = make_rollout(WORLD, rows, old=old, reference=PROBLEM.reference, scores=PROBLEM.scores, group_size=2)
    batch = compute_advantages(rollout, algorithm, COEFS)
    weights = joint.repeat_interleave(2) / 2  # the mean over the two of a pair
    return Objective(algorithm, max_tokens=3).loss(batch, model_outputs(WORLD, rows, new, None, weights), COEFS)[0][
        "policy"
    ]


@pytest.mark.parametrize(
    "baseline, how, scale",
    [
        ("leave_one_out", {"ratio": "token", "aggregate": "sequence_sum"}, 1.0),
        ("leave_one_out", {"ratio": "sequence", "aggregate": "sequence_mean"}, 1.0),
        ("centered", {"ratio": "token", "aggregate": "sequence_sum"}, 0.5),  # (G - 1) / G
        ("centered", {"ratio": "token", "aggregate": "constant"}, 0.5 / 3),
    ],
)
def test_group_baselines_over_all_pairs(policy, baseline, how, scale):
    algorithm = online(advantage={"type": "group", "baseline": baseline}, policy_loss=how)
    table = policy()
    same_gradient(policy, pair_terms(algorithm, old=table, new=table), exact_objective(table), scale=-scale)


def test_the_ratio_of_sequences_is_exact_away_from_the_old_policy_and_that_of_tokens_is_not(policy):
    """Without a KL in the reward (it would be the old policy's), E_old[ratio * A] = E_new[A]."""
    old, table = random_table(WORLD, 13), policy()
    for ratio, aggregate, compare in (("sequence", "sequence_mean", same_gradient), ("token", "sequence_sum", differ)):
        algorithm = online(
            advantage={"type": "group", "baseline": "leave_one_out"},
            policy_loss={"ratio": ratio, "aggregate": aggregate},
            kl={"placement": "none", "coef": 0.0},
        )
        compare(policy, -pair_terms(algorithm, old=old, new=table), exact_objective(table, beta=0.0))


def per_token_kl(table: Tensor, *, reverse: bool = False) -> Tensor:
    """KL of the next token in every state `[C, S]`."""
    first, second = (PROBLEM.reference, table) if reverse else (table, PROBLEM.reference)
    return (first.exp() * (first - second)).sum(-1)


@pytest.mark.parametrize("estimator, reverse", [("k2", False), ("k3", True)])
def test_kl_in_the_loss_is_the_kl_of_each_token_in_states_taken_as_given(policy, estimator, reverse):
    algorithm = online(kl={"placement": "loss", "estimator": estimator}, **REINFORCE)
    table = policy()
    ours = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table)["policy"]
    exact = -exact_objective(table, beta=0.0) + BETA * visited(table, per_token_kl(table, reverse=reverse))
    same_gradient(policy, ours, exact)
    # Only a penalty in the reward sees a token's effect on the KL of later tokens.
    differ(policy, ours, -exact_objective(table))


def test_kl_in_the_loss_with_k2_is_exact_for_one_token():
    world = enumerate_world(horizon=1)
    problem = ExactProblem(world=world, reference=random_table(world, 1), scores=random_scores(world, 2))
    policy = Table(world)
    table = policy()
    algorithm = online(kl={"placement": "loss", "estimator": "k2"}, **REINFORCE)
    ours = problem.expected_terms(algorithm, COEFS, old=table, new=table)["policy"]
    reference = world.sequence_logprobs(problem.reference)
    exact = objective_value(world.sequence_logprobs(table), reference, problem.scores, BETA)
    same_gradient(policy, ours, exact, scale=-1.0)


def test_the_entropy_bonus_raises_the_entropy_of_visited_states(policy):
    algorithm = online(policy_loss={"entropy_coef": 0.4}, **REINFORCE)
    table = policy()
    ours = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table)["policy"]
    entropies = -(table.exp() * table).sum(-1)
    same_gradient(policy, ours, -exact_objective(table) - 0.4 * visited(table, entropies))


def old_action_values(old: Tensor) -> tuple[Tensor, Tensor]:
    """V and A = Q - V of the old policy, for rewards with the KL penalty in them."""
    algorithm = online(**REINFORCE)
    rewards = PROBLEM.experience(algorithm, COEFS, old).rewards
    values = PROBLEM.exact_values(algorithm, COEFS, old)
    return values, action_values(WORLD, old, rewards) - values[..., None]


def surrogate(old: Tensor, new: Tensor, gain: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """E over states and tokens of the old policy of gain(ratio, A), the advantages exact."""
    _, advantages = old_action_values(old)
    return visited(old, (old.exp() * gain((new - old).exp(), advantages)).sum(-1))


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_the_penalized_surrogate_away_from_the_old_policy(policy, gae_lambda):
    algorithm = online(policy_loss={"type": "penalty"}, **with_critic(gae_lambda))
    old, table = random_table(WORLD, 13), policy()
    values, _ = old_action_values(old)
    ours = PROBLEM.expected_terms(algorithm, COEFS, old=old, new=table, values=values)["policy"]
    divergence = kl(WORLD.sequence_logprobs(old), WORLD.sequence_logprobs(table))  # of whole sequences
    exact = -surrogate(old, table, lambda ratio, advantage: ratio * advantage) + COEFS.penalty * divergence
    same_gradient(policy, ours, exact)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_the_clipped_surrogate_away_from_the_old_policy(policy, dual_clip):
    """At lambda = 0 with the exact critic, the advantage of a token is its state's and action's."""
    how = {"clip_eps_low": 0.2, "clip_eps_high": 0.4, "dual_clip": dual_clip}
    algorithm = online(policy_loss=how, **with_critic(0.0))

    def gain(ratio: Tensor, advantage: Tensor) -> Tensor:
        bad = ratio.clamp(min=0.8) if dual_clip is None else ratio.clamp(0.8, dual_clip)
        return advantage * torch.where(advantage > 0, ratio.clamp(max=1.4), bad)

    old, table = random_table(WORLD, 13), policy()
    values, _ = old_action_values(old)
    ours = PROBLEM.expected_terms(algorithm, COEFS, old=old, new=table, values=values)["policy"]
    same_gradient(policy, ours, surrogate(old, table, gain), scale=-1.0)
    differ(policy, -ours, surrogate(old, table, lambda ratio, advantage: ratio * advantage))


@pytest.mark.parametrize("bounds", [(0.2, 0.4), (1.0, 0.3), (1.0, 1e9)])
def test_cispo_away_from_the_old_policy(policy, bounds):
    """Every token keeps its gradient, with the weight that its bounds leave it; unbounded, it is the surrogate's."""
    low, high = bounds
    algorithm = online(policy_loss={"type": "cispo", "clip_eps_low": low, "clip_eps_high": high}, **with_critic(0.0))
    old, table = random_table(WORLD, 13), policy()
    values, advantages = old_action_values(old)
    ours = PROBLEM.expected_terms(algorithm, COEFS, old=old, new=table, values=values)["policy"]
    plain = surrogate(old, table, lambda ratio, advantage: ratio * advantage)
    weights = (table.detach() - old).exp().clamp(1 - low, 1 + high)
    same_gradient(policy, ours, visited(old, (old.exp() * weights * advantages * table).sum(-1)), scale=-1.0)
    (same_gradient if high > 1e6 else differ)(policy, -ours, plain)


@pytest.mark.parametrize("gae_lambda", [0.95, 1.0])
def test_the_critic_is_drawn_to_the_exact_values(gae_lambda):
    algorithm = online(**with_critic(gae_lambda))
    table = random_table(WORLD, 12)
    exact = PROBLEM.exact_values(algorithm, COEFS, table)
    at_truth = exact.clone().requires_grad_()
    term = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table, values=at_truth)["value"]
    (slope,) = torch.autograd.grad(term, at_truth)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)
    if gae_lambda == 1.0:  # then the target does not depend on the critic: the gradient is the mean error's
        wrong = (exact + random_scores(WORLD, 4)[:, : len(WORLD.prefixes)]).requires_grad_()
        term = PROBLEM.expected_terms(algorithm, COEFS, old=table, new=table, values=wrong)["value"]
        (slope,) = torch.autograd.grad(term, wrong)
        visits = state_logprobs(WORLD, table).exp() / WORLD.prompts
        torch.testing.assert_close(slope, 0.1 * visits * (wrong - exact), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_weighing_the_kl_in_the_loss_makes_it_that_of_the_policy_on_stale_samples(policy, estimator):
    """Minibatches after the first are of an older policy: unweighted, the gradient is of no KL at all."""
    old, table = random_table(WORLD, 13), policy()
    exact = BETA * visited(old, per_token_kl(table))  # in the states that the samples have
    for weighed, compare in ((True, same_gradient), (False, differ)):
        penalty = {"placement": "loss", "estimator": estimator, "importance_weighted": weighed}
        both = [
            PROBLEM.expected_terms(online(kl=kind, **REINFORCE), COEFS, old=old, new=table)["policy"]
            for kind in (penalty, {"placement": "none", "coef": 0.0})
        ]
        compare(policy, both[0] - both[1], exact)
