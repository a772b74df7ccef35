"""Completions of an older policy, by enumeration: the distributions of the KL metrics and the KL penalty."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exact_problem import ExactProblem, kl, make_rollout, model_outputs, objective_value, state_logprobs
from tiny_models import tiny
from torch import Tensor

from rlhf.algo.kl import Coefs, kl_of_distributions
from rlhf.algo.masked import Mean
from rlhf.algorithms.correction import Correction, NoCorrection, SequenceMask, TokenTruncate
from rlhf.algorithms.online import Online
from rlhf.exact.world import enumerate_world, expectation, random_scores, random_table
from rlhf.experience import compute_advantages
from rlhf.models.policy_models import Models
from rlhf.objective import Objective
from rlhf.training.rollout import logprob_metrics
from rlhf.types import Experience, Rollout

WORLD = enumerate_world()
PROBLEM = ExactProblem(world=WORLD, reference=random_table(WORLD, 10), scores=random_scores(WORLD, 11))
REFERENCE = WORLD.sequence_logprobs(PROBLEM.reference)
BETA = 0.3
COEFS = Coefs(kl=BETA, penalty=0.0)
UNCAPPED = 1e9
MODELS = Models(  # only which models exist matters here: the numbers come from tables
    policy=tiny(),
    temperature=1.0,
    dtype="float64",
    device=torch.device("cpu"),
    reference=tiny(),
    reference_is_teacher=True,
)
REINFORCE = {
    "advantage": {"type": "batch_whiten", "whiten": False},
    "policy_loss": {"type": "policy_gradient", "aggregate": "sequence_sum"},
}


def older() -> Tensor:
    """A policy whose tokens have probabilities 1/2, 1/4 and 1/4: completions' are multiples of 1/64."""
    generator = torch.Generator().manual_seed(3)
    likeliest = torch.randint(3, (WORLD.prompts, len(WORLD.prefixes)), generator=generator)
    return torch.full((*likeliest.shape, 3), 0.25).double().scatter(-1, likeliest[..., None], 0.5).log()


def of_older(rows: Tensor, policy: Tensor) -> Rollout:
    """Rows that the older policy drew, as the trainer annotates them with the policy of now."""
    rollout = make_rollout(WORLD, rows, old=policy, reference=PROBLEM.reference, scores=PROBLEM.scores)
    return replace(rollout, sampler_logprobs=WORLD.token_logprobs(older(), rows))


def drawn() -> Tensor:
    """64 rows a prompt, each completion as often as the older policy draws it: their mean is its expectation."""
    counts = (64 * WORLD.sequence_logprobs(older()).exp()).round().long().flatten()
    assert len(counts) == WORLD.rows
    assert counts.sum() == 64 * WORLD.prompts
    return WORLD.all_rows().repeat_interleave(counts)


def metrics_of(rollout: Rollout) -> dict[str, Mean]:
    algorithm = Online.model_validate({**REINFORCE, "kl": {"placement": "reward"}})
    return logprob_metrics(compute_advantages(rollout, algorithm, COEFS), MODELS)


def visited_kl(policy: Tensor) -> Tensor:
    """The KL of the next token in the older policy's states, summed over tokens."""
    visits = state_logprobs(WORLD, older()).exp()
    return (visits * kl_of_distributions(policy, PROBLEM.reference)).sum(1).mean()


def plain_mean(policy: Tensor) -> Tensor:
    """The mean of the log-ratios over the older policy's completions."""
    drawing = WORLD.sequence_logprobs(older())
    return kl(drawing, REFERENCE) - kl(drawing, WORLD.sequence_logprobs(policy))


def test_the_kl_metrics_are_of_the_policy_where_an_older_one_has_drawn() -> None:
    policy, mask = random_table(WORLD, 12), WORLD.mask.double()
    lengths = mask.sum(1).repeat(WORLD.prompts).view(WORLD.prompts, -1)
    exact, means = float(visited_kl(policy)), metrics_of(of_older(drawn(), policy))
    assert means["kl/reference"].value == pytest.approx(exact, abs=1e-12)
    assert means["kl/teacher_sequence"].value == pytest.approx(exact, abs=1e-12)
    length = float(expectation(WORLD.sequence_logprobs(older()), lengths))
    assert means["kl/teacher"].value == pytest.approx(exact / length, abs=1e-12)
    assert abs(float(plain_mean(policy)) - exact) > 0.1


def test_the_metric_is_not_negative_where_a_plain_mean_is() -> None:
    for seed in range(9):
        policy = (PROBLEM.reference + 0.3 * random_table(WORLD, seed)).log_softmax(-1)  # hardly moved from the start
        assert metrics_of(of_older(drawn(), policy))["kl/reference"].value > 0
    assert float(plain_mean((PROBLEM.reference + 0.3 * random_table(WORLD, 6)).log_softmax(-1))) < -0.2


def test_it_is_nearer_to_the_kl_of_sequences_than_a_plain_mean() -> None:
    errors = []
    for seed in range(20):
        policy = (older() + 0.3 * random_table(WORLD, seed)).log_softmax(-1)
        exact = kl(WORLD.sequence_logprobs(policy), REFERENCE)
        errors.append([float((estimate - exact).abs()) for estimate in (visited_kl(policy), plain_mean(policy))])
    near, far = torch.tensor(errors).mean(0).tolist()
    assert 0.02 < near < 0.5 * far  # the states are still the older policy's


def test_the_sums_of_ranks_add_up_and_hinted_rows_are_left_out() -> None:
    policy, rows = random_table(WORLD, 12), drawn()
    whole = metrics_of(of_older(rows, policy))
    parts = [metrics_of(of_older(part, policy)) for part in (rows[:37], rows[37:])]
    for name, mean in whole.items():
        assert (parts[0][name] + parts[1][name]).value == pytest.approx(mean.value, abs=1e-12), name
    rollout = of_older(torch.cat([rows, rows[:9]]), policy)
    hinted = torch.arange(len(rollout)) >= len(rows)
    for name, mean in metrics_of(replace(rollout, hinted=hinted)).items():
        assert mean.value == pytest.approx(whole[name].value, abs=1e-12), name


def test_completions_of_the_policy_itself_count_alike() -> None:
    policy = older()
    mean = metrics_of(of_older(drawn(), policy))["kl/reference"]
    assert mean.weight == float(64 * WORLD.prompts)
    assert mean.value == pytest.approx(float(kl(WORLD.sequence_logprobs(policy), REFERENCE)), abs=1e-12)


def expected_gradient(algorithm: Online, correction: Correction, logits: Tensor) -> Tensor:
    """The gradient of the expected loss over completions of the older policy, at the policy of now."""
    rows, table = WORLD.all_rows(), logits.log_softmax(-1)
    rollout = of_older(rows, table.detach())
    batch: Experience = compute_advantages(rollout, algorithm, COEFS, correction=correction)
    chance = WORLD.sequence_logprobs(older()).exp().flatten() / WORLD.prompts
    outputs = model_outputs(WORLD, rows, table, None, chance)
    (gradient,) = torch.autograd.grad(
        Objective(algorithm, max_tokens=WORLD.horizon).loss(batch, outputs, COEFS)[0]["policy"], logits
    )
    return gradient


def test_the_penalty_in_the_reward_is_of_the_policy_where_completions_are_weighted() -> None:
    algorithm = Online.model_validate({**REINFORCE, "kl": {"placement": "reward", "estimator": "k1"}})
    logits = random_table(WORLD, 12).requires_grad_()
    objective = objective_value(WORLD.sequence_logprobs(logits.log_softmax(-1)), REFERENCE, PROBLEM.scores, BETA)
    (exact,) = torch.autograd.grad(objective, logits)
    torch.testing.assert_close(expected_gradient(algorithm, SequenceMask(cap=UNCAPPED), logits), -exact)
    errors = [
        float((expected_gradient(algorithm, correction, logits) + exact).norm() / exact.norm())
        for correction in (TokenTruncate(cap=UNCAPPED), NoCorrection())
    ]
    assert 0.05 < errors[0] < errors[1]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_weighted_penalty_in_the_loss_is_of_the_policy_in_the_states_of_the_older_one(estimator: str) -> None:
    logits = random_table(WORLD, 12).requires_grad_()
    visits = state_logprobs(WORLD, older()).exp()
    exact_kl = BETA * (visits * kl_of_distributions(logits.log_softmax(-1), PROBLEM.reference)).sum(1).mean()
    (exact,) = torch.autograd.grad(exact_kl, logits)
    gradients = []
    for weighed in (True, False):
        penalty = {"placement": "loss", "estimator": estimator, "importance_weighted": weighed}
        with_it, without = (
            expected_gradient(Online.model_validate({**REINFORCE, "kl": kind}), NoCorrection(), logits)
            for kind in (penalty, {"placement": "none", "coef": 0.0})
        )
        gradients.append(with_it - without)
    torch.testing.assert_close(gradients[0], exact)
    assert float((gradients[1] - exact).norm() / exact.norm()) > 0.05
