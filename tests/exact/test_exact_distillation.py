"""The gradients of the three objectives of distillation, by enumeration: full, sampled token, and whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_problem import ExactProblem, kl, model_outputs
from test_exact_gradients import Network, Table, differ, same_gradient, visited
from torch import Tensor

import rlhf
from rlhf.algo.divergence import TeacherTokens, divergence
from rlhf.algo.kl import Coefs
from rlhf.algorithms.distill import DistillLoss
from rlhf.algorithms.online import Online
from rlhf.algorithms.presets import PRESETS
from rlhf.config.files import merge
from rlhf.exact.world import enumerate_world, random_scores, random_table
from rlhf.objective import Objective

WORLD = enumerate_world()
TEACHER = random_table(WORLD, 21)
PROBLEM = ExactProblem(world=WORLD, reference=TEACHER, scores=torch.zeros(WORLD.prompts, len(WORLD.ids)).double())
COEFS = Coefs(kl=1.0, penalty=0.0)
SUMMED = {"policy_loss": {"aggregate": "sequence_sum"}}  # Σ_t, without the division by lengths


@pytest.fixture(params=[Table, Network])
def policy(request: pytest.FixtureRequest) -> torch.nn.Module:
    """A policy with and without parameters shared between states."""
    return request.param(WORLD)


def preset(name: str, **changes: Any) -> Online:
    return Online.model_validate(merge(merge(PRESETS[name]["algorithm"], SUMMED), changes))


def compared(loss: DistillLoss, table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """The models' outputs for a loss that reads the teacher; the gradient is weighted by row."""
    mask = WORLD.mask[rows % len(WORLD.ids)]
    columns = loss.against_teacher(
        WORLD.per_token(table, rows)[mask], TeacherTokens(logprobs=WORLD.per_token(TEACHER, rows)[mask])
    )
    placed = columns.new_zeros(len(columns), *mask.shape).masked_scatter(
        mask.expand(len(columns), *mask.shape), columns
    )
    fixed = placed.detach()
    return fixed + weights[:, None] * (placed - fixed)


def full_term(algorithm: Online, *, old: Tensor, new: Tensor) -> Tensor:
    """The policy term of `distill`, with the gradient of its expectation over completions from `old`."""
    rows, loss = WORLD.all_rows(), algorithm.policy_loss
    assert isinstance(loss, DistillLoss)
    weights = WORLD.sequence_logprobs(old.detach()).exp().flatten() / WORLD.prompts
    batch = PROBLEM.experience(algorithm, COEFS, old)
    outputs = model_outputs(WORLD, rows, new, None, weights)
    outputs = type(outputs)(**{**vars(outputs), "teacher": compared(loss, new, rows, weights)})
    return Objective(algorithm, max_tokens=WORLD.horizon).loss(batch, outputs, COEFS)[0]["policy"]


SETTINGS = (
    {"divergence": "reverse"},
    {"divergence": "forward"},
    {"divergence": "jsd", "beta": 0.3},
    {"divergence": "reverse", "top_k": 1},
    {"divergence": "forward", "top_k": 2},
    {"divergence": "jsd", "top_k": 1},
)


def state_divergence(table: Tensor, *, kind: str = "reverse", beta: float = 0.5, top_k: int | None = None) -> Tensor:
    """D(π(·|s), π_T(·|s)) of every state `[C, S]`; the tokens that are not in the top k add up to one outcome."""
    if top_k is None or top_k == WORLD.vocabulary:
        return divergence(table, TEACHER, kind, beta=beta)  # type: ignore[arg-type]
    best = TEACHER.topk(top_k, dim=-1).indices
    listed = torch.zeros_like(TEACHER, dtype=torch.bool).scatter(-1, best, True)

    def merged(log_p: Tensor) -> Tensor:
        tail = torch.where(listed, 0.0, log_p.exp()).sum(-1, keepdim=True)
        return torch.cat([log_p.exp().gather(-1, best), tail], dim=-1).log()

    return divergence(merged(table), merged(TEACHER), kind, beta=beta)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_the_full_form_is_the_divergence_at_visited_states(policy: torch.nn.Module, settings: dict[str, Any]) -> None:
    algorithm, table = preset("distill", policy_loss=settings), policy()
    how = {"kind": settings["divergence"], **{key: settings[key] for key in ("beta", "top_k") if key in settings}}
    for old in (table, random_table(WORLD, 13)):  # visited by the policy itself, or by another
        ours = full_term(algorithm, old=old, new=table)
        same_gradient(policy, ours, visited(old, state_divergence(table, **how)))


def test_the_sampled_token_with_gamma_0_has_the_same_expectation(policy: torch.nn.Module) -> None:
    table = policy()
    ours = PROBLEM.expected_terms(preset("opd"), COEFS, old=table, new=table)["policy"]
    same_gradient(policy, ours, visited(table, state_divergence(table)))
    differ(policy, ours, kl(WORLD.sequence_logprobs(table), WORLD.sequence_logprobs(TEACHER)))


def test_gamma_1_is_the_kl_of_whole_sequences(policy: torch.nn.Module) -> None:
    table = policy()
    ours = PROBLEM.expected_terms(preset("minillm"), COEFS, old=table, new=table)["policy"]
    exact = kl(WORLD.sequence_logprobs(table), WORLD.sequence_logprobs(TEACHER))
    same_gradient(policy, ours, exact)
    differ(policy, ours, visited(table, state_divergence(table)))


def test_a_mixed_reward_is_the_score_less_alpha_times_the_kl_to_the_teacher(policy: torch.nn.Module) -> None:
    problem = ExactProblem(world=WORLD, reference=TEACHER, scores=random_scores(WORLD, 11))
    table, alpha = policy(), 0.3
    ours = problem.expected_terms(preset("minillm"), Coefs(kl=alpha, penalty=0.0), old=table, new=table)["policy"]
    distribution = WORLD.sequence_logprobs(table)
    score = (distribution.exp() * problem.scores).sum(1).mean()
    same_gradient(policy, ours, alpha * kl(distribution, WORLD.sequence_logprobs(TEACHER)) - score)


@pytest.mark.parametrize("kind", ("reverse", "forward", "jsd"))
def test_rlhf_check_confirms_the_loss(kind: str) -> None:
    assert rlhf.check(DistillLoss(divergence=kind)).passed  # type: ignore[arg-type]
    assert rlhf.check(DistillLoss(divergence=kind, top_k=1)).passed  # type: ignore[arg-type]


def test_rlhf_check_finds_a_truncated_sum() -> None:
    class Truncated(DistillLoss):
        """Σ over the teacher's two likeliest tokens, as if nothing else were there."""

        type: str = "truncated"  # type: ignore[assignment]

        def against_teacher(self, log_pi: Tensor, teacher: TeacherTokens) -> Tensor:
            known = teacher.top(2)
            chosen = log_pi.gather(1, known.ids)
            return torch.stack([(known.logprobs.exp() * (known.logprobs - chosen)).sum(-1)] * 6)

    try:
        result = rlhf.check(Truncated())
    finally:
        Truncated.members.pop("truncated")
    assert not result.passed
    assert "tail" in str(result)
