"""The divergences of policy and teacher: values worked by hand, the tail, and the bound of its error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf.algo.divergence import TeacherTokens, divergence, rest_of, same_width, shared_outcomes, tail_error_bound
from rlhf.algorithms.distill import COLUMNS, DistillLoss

P = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
KINDS = ("reverse", "forward", "jsd")


def random_pair(seed: int, *, tokens: int = 40, vocabulary: int = 12, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pi, teacher = scale * torch.randn(2, tokens, vocabulary, generator=generator, dtype=torch.float64)
    return pi.log_softmax(-1), teacher.log_softmax(-1)


def test_values_by_hand() -> None:
    # reverse: ½ log 2 + ¼ log 1 + ¼ log ½ = ¼ log 2; forward, by symmetry, the same
    assert divergence(P.log(), Q.log(), "reverse").item() == pytest.approx(0.25 * math.log(2), abs=1e-15)
    assert divergence(P.log(), Q.log(), "forward").item() == pytest.approx(0.25 * math.log(2), abs=1e-15)
    # m = (3/8, 1/4, 3/8): KL(P ‖ m) = ½ log 4/3 + ¼ log 2/3
    half = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    assert divergence(P.log(), Q.log(), "jsd").item() == pytest.approx(half, abs=1e-15)
    # β = ¼: m = ¼ Q + ¾ P = (7/16, 1/4, 5/16)
    to_q = 0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5)
    to_p = 0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)
    expected = 0.25 * to_q + 0.75 * to_p
    assert divergence(P.log(), Q.log(), "jsd", beta=0.25).item() == pytest.approx(expected, abs=1e-15)


def test_asymmetric_values_by_hand() -> None:
    p, q = torch.tensor([0.9, 0.1], dtype=torch.float64).log(), torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    reverse = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    forward = 0.5 * math.log(5 / 9) + 0.5 * math.log(5)
    assert divergence(p, q, "reverse").item() == pytest.approx(reverse, abs=1e-15)
    assert divergence(p, q, "forward").item() == pytest.approx(forward, abs=1e-15)


def test_jsd_tends_to_both_kl() -> None:
    pi, teacher = random_pair(1)
    small = divergence(pi, teacher, "jsd", beta=1e-7) / 1e-7
    torch.testing.assert_close(small, divergence(pi, teacher, "forward"), rtol=1e-4, atol=1e-5)
    large = divergence(pi, teacher, "jsd", beta=1 - 1e-7) / 1e-7
    torch.testing.assert_close(large, divergence(pi, teacher, "reverse"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_probability_zero_gives_no_nan(kind: str) -> None:
    log_pi = torch.tensor([[0.0, -math.inf, 0.0]], dtype=torch.float64).log_softmax(-1).requires_grad_()
    value = divergence(log_pi, log_pi.detach(), kind)  # type: ignore[arg-type]
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    (slope,) = torch.autograd.grad(value.sum(), log_pi)
    assert slope.isfinite().all()


def listed(log_teacher: Tensor, k: int) -> TeacherTokens:
    """As a server gives it: k log-probabilities and nothing else."""
    values, ids = log_teacher.topk(k, dim=-1)
    return TeacherTokens(logprobs=values, ids=ids, rest=rest_of(values))


def test_the_tail_by_hand() -> None:
    pi, teacher = shared_outcomes(P.log(), TeacherTokens(logprobs=Q.log()).top(1))
    torch.testing.assert_close(pi.exp(), torch.tensor([[0.25, 0.75]], dtype=torch.float64))  # token 2, and the others
    torch.testing.assert_close(teacher.exp(), torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    pi, teacher = shared_outcomes(P.log(), listed(Q.log(), 2), tail=False)
    torch.testing.assert_close(pi.exp().sum(-1), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(teacher.exp().max(), torch.tensor(2 / 3, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tail_gives_a_divergence_that_grows_to_the_whole_one(kind: str) -> None:
    pi, teacher = random_pair(2)
    whole = divergence(pi, teacher, kind)  # type: ignore[arg-type]
    before = torch.zeros_like(whole)
    for k in (1, 2, 4, 8, 11, 12):
        value = divergence(*shared_outcomes(pi, TeacherTokens(logprobs=teacher).top(k)), kind)  # type: ignore[arg-type]
        assert (value >= before - 1e-12).all()
        assert (value <= whole + 1e-12).all()
        before = value
    torch.testing.assert_close(before, whole, rtol=1e-12, atol=1e-12)


def test_without_the_tail_the_policy_can_leave_the_teachers_tokens_at_no_cost() -> None:
    teacher = listed(torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64).log(), 2)
    near = torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64).log()
    far = torch.tensor([[0.02, 0.01, 0.5, 0.47]], dtype=torch.float64).log()  # the same ratio of the two tokens
    for log_pi in (near, far):
        assert divergence(*shared_outcomes(log_pi, teacher, tail=False), "reverse").item() == pytest.approx(
            0.0, abs=1e-12
        )
    assert divergence(*shared_outcomes(far, teacher), "reverse").item() > 1.0


@pytest.mark.parametrize("kind", ("forward", "jsd"))
@pytest.mark.parametrize("scale", (0.3, 2.0, 4.0))
def test_the_error_of_the_tail_is_within_its_bound(kind: str, scale: float) -> None:
    pi, teacher = random_pair(3, scale=scale)
    for k in (1, 3, 6, 11):
        known = listed(teacher, k)
        error = divergence(pi, teacher, kind) - divergence(*shared_outcomes(pi, known), kind)  # type: ignore[arg-type]
        bound = tail_error_bound(pi, known, kind)  # type: ignore[arg-type]
        assert (error >= -1e-10).all()
        assert (bound >= error - 1e-10).all()


def test_the_reverse_divergence_has_no_bound() -> None:
    pi, teacher = random_pair(4)
    assert tail_error_bound(pi, listed(teacher, 3), "reverse").isnan().all()


def test_ids_that_only_one_model_has_are_left_out() -> None:
    pi, teacher = random_pair(5, vocabulary=7)
    wide = torch.cat([pi, torch.full((len(pi), 2), -30.0, dtype=torch.float64)], dim=1).log_softmax(-1)
    cut, given = same_width(wide, TeacherTokens(logprobs=teacher))
    torch.testing.assert_close(cut, pi, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(given.logprobs, teacher)
    cut, given = same_width(pi, TeacherTokens(logprobs=wide))
    torch.testing.assert_close(given.logprobs, pi, rtol=1e-9, atol=1e-9)


def test_the_columns_of_a_comparison() -> None:
    pi, teacher = random_pair(6)
    columns = DistillLoss(top_k=4, divergence="forward").against_teacher(pi, TeacherTokens(logprobs=teacher))
    named = dict(zip(COLUMNS, columns, strict=True))
    torch.testing.assert_close(named["kl"], divergence(pi, teacher, "reverse"))  # over the whole vocabulary
    torch.testing.assert_close(named["divergence"] + named["error"], divergence(pi, teacher, "forward"))
    assert torch.equal(named["agreement"].bool(), pi.argmax(-1) == teacher.argmax(-1))
    torch.testing.assert_close(named["teacher_tail"], 1 - teacher.topk(4).values.exp().sum(-1))
    inside = pi.gather(1, teacher.topk(4).indices).exp().sum(-1)
    torch.testing.assert_close(named["student_tail"], 1 - inside)


def test_only_the_divergence_has_a_gradient() -> None:
    pi, teacher = random_pair(7)
    pi.requires_grad_()
    columns = DistillLoss(divergence="jsd", beta=0.3).against_teacher(pi, TeacherTokens(logprobs=teacher))
    assert columns[0].requires_grad
    (whole,) = torch.autograd.grad(columns.sum(), pi, retain_graph=True)
    (own,) = torch.autograd.grad(columns[0].sum(), pi)
    assert torch.equal(whole, own)


def test_without_the_tail_listed_tokens_have_no_bound() -> None:
    """All of the policy may be outside of the K tokens, which is far from the bound of an error of the tail."""
    teacher = torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64).log()
    far = torch.tensor([[0.02, 0.01, 0.5, 0.47]], dtype=torch.float64).log()
    for kind in KINDS:
        whole = divergence(far, teacher, kind)  # type: ignore[arg-type]
        columns = {}
        for tail in (True, False):
            loss = DistillLoss(divergence=kind, top_k=2, tail=tail)  # type: ignore[arg-type]
            columns[tail] = dict(zip(COLUMNS, loss.against_teacher(far, listed(teacher, 2)), strict=True))
        assert columns[False]["error"].isnan().all()
        assert "teacher/tail_error" not in loss.measure(
            torch.stack(list(columns[False].values()))[:, None], torch.ones(1, 1, dtype=torch.bool)
        )
        missing = whole - columns[False]["divergence"]
        assert kind == "reverse" or (columns[True]["error"] < missing).all(), "it is no bound of what is missing here"
