"""Truncated sampling: the tokens that are left, and log-probabilities among them, which give the exact gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf.algo.support import SamplingLimits, log_mass, pack, renormalized, restricted, unpack
from rlhf.exact.world import enumerate_world, random_scores, random_table

WORLD = enumerate_world(prompts=2, vocabulary=4, horizon=3)
ALL = (
    SamplingLimits(top_k=2),
    SamplingLimits(top_p=0.7),
    SamplingLimits(min_p=0.5),
    SamplingLimits(top_k=3, top_p=0.8, min_p=0.2),
)


def left(limits: SamplingLimits, *probabilities: float) -> list[int]:
    (support,) = limits.support(torch.tensor([probabilities], dtype=torch.float64)).tolist()
    return [token for token, is_left in enumerate(support) if is_left]


def test_what_is_left_worked_by_hand() -> None:
    row = (0.1, 0.4, 0.05, 0.3, 0.15)
    assert left(SamplingLimits(), *row) == [0, 1, 2, 3, 4]
    assert not SamplingLimits().are_on
    assert left(SamplingLimits(top_k=2), *row) == [1, 3]
    assert left(SamplingLimits(top_k=9), *row) == [0, 1, 2, 3, 4]
    assert left(SamplingLimits(top_p=0.6), *row) == [1, 3]  # 0.4 is too little, 0.7 enough
    assert left(SamplingLimits(top_p=0.01), *row) == [1]
    assert left(SamplingLimits(min_p=0.3), *row) == [1, 3, 4]  # at least 0.12
    assert left(SamplingLimits(top_k=3, top_p=0.8), *row) == [1, 3]  # of 0.85, which is 1 then: 0.68 of it
    assert left(SamplingLimits(top_k=1), 0.25, 0.25, 0.5, 0.0) == [2]
    assert left(SamplingLimits(top_k=1), 0.4, 0.4, 0.2) == [0, 1]  # a tie leaves both


@pytest.mark.parametrize("vocabulary", [1, 8, 9, 23])
def test_packed_flags_come_back(vocabulary: int) -> None:
    support = torch.rand(5, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) < 0.4
    packed = pack(support)
    assert packed.shape == (5, -(-vocabulary // 8))
    assert torch.equal(unpack(packed, vocabulary), support)
    assert pack(torch.tensor([[True, False, False, True, False, False, False, False, True]])).tolist() == [[9, 1]]


def test_log_probabilities_among_those_left() -> None:
    log_pi = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).log()
    packed = pack(torch.tensor([[False, True, False, True]]))
    torch.testing.assert_close(log_mass(log_pi, packed).exp(), torch.tensor([0.7], dtype=torch.float64))
    expected = torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]], dtype=torch.float64)
    torch.testing.assert_close(restricted(log_pi, packed).exp(), expected)
    torch.testing.assert_close(renormalized(log_pi.exp(), unpack(packed, 4)), expected)


def gradients(limits: SamplingLimits) -> tuple[Tensor, Tensor, Tensor, float]:
    """The gradient of E_{pi_S}[score], the trainer's expected one with and without the supports, and the mean ratio."""
    table, scores = random_table(WORLD, 1), random_scores(WORLD, 2)
    flat = table.flatten(0, 1)
    packed = pack(limits.support(flat.exp()))

    def truncated(log_pi: Tensor) -> Tensor:
        return restricted(log_pi.flatten(0, 1), packed).view_as(log_pi)

    logits = table.clone().requires_grad_()
    chance = WORLD.sequence_logprobs(truncated(logits.log_softmax(-1))).exp()
    (exact,) = torch.autograd.grad((chance * scores).sum(1).mean(), logits)
    rows = WORLD.all_rows()
    drawn = chance.detach().flatten() / WORLD.prompts
    advantages = (scores - (chance.detach() * scores).sum(1, keepdim=True)).flatten()
    states = WORLD.per_token(torch.arange(len(flat)).view(WORLD.prompts, -1), rows)  # row of the table, [B, T]
    log_pi = logits.log_softmax(-1)
    whole = WORLD.token_logprobs(log_pi, rows)
    mass = log_mass(log_pi.flatten(0, 1), packed)[states] * (whole != 0)
    expected = []
    for logprobs in (whole - mass, whole):
        surrogate = (drawn * advantages * logprobs.sum(1)).sum()
        expected.append(torch.autograd.grad(surrogate, logits, retain_graph=True)[0])
    mask = WORLD.mask.repeat(WORLD.prompts, 1)
    ratios = torch.where(mask, mass, 0.0).exp()
    return exact, *expected, float((drawn[:, None] * ratios.detach() * mask).sum() / (drawn[:, None] * mask).sum())


@pytest.mark.parametrize("limits", ALL)
def test_the_gradient_among_those_left_is_exact_and_that_among_all_is_not(limits: SamplingLimits) -> None:
    exact, corrected, plain, ratio = gradients(limits)
    torch.testing.assert_close(corrected, exact, rtol=0, atol=1e-14)
    assert (plain - exact).norm() > 0.05 * exact.norm()
    assert ratio < 0.95  # pi / pi_S at the first update


def test_without_limits_both_are_the_same() -> None:
    exact, corrected, plain, ratio = gradients(SamplingLimits())
    torch.testing.assert_close(corrected, exact, rtol=0, atol=1e-14)
    torch.testing.assert_close(plain, exact, rtol=0, atol=1e-14)
    assert ratio == pytest.approx(1.0)
