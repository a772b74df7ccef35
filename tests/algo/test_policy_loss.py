"""The surrogates: values by hand, points at which the gradient stops, and weights of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from algo_cases import NAN, close, grids, live, prefix_mask, table, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algo.policy_loss import RatioLevel, importance_ratio, kl_old_new, token_weights
from rlhf.algorithms.cispo import CispoLoss
from rlhf.algorithms.penalty import PenaltyLoss
from rlhf.algorithms.policy_loss import Surrogate
from rlhf.algorithms.ppo import ClipLoss
from rlhf.algorithms.reinforce import PolicyGradientLoss

AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def clipped_surrogate(ratio: Tensor, advantages: Tensor, **how: float | None) -> Surrogate:
    return ClipLoss.model_validate(how).per_token(tokens(ratio, advantages))


def cispo_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, **how: float) -> Surrogate:
    return CispoLoss.model_validate(how).per_token(tokens(ratio, advantages, logprobs=logprobs))


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor) -> Surrogate:
    return PolicyGradientLoss().per_token(tokens(torch.ones_like(logprobs), advantages, logprobs=logprobs))


def penalized_surrogate(ratio: Tensor, advantages: Tensor, old_kl: Tensor, *, coef: float) -> Surrogate:
    coefs = Coefs(kl=0.0, penalty=coef)  # of the step, not the one that the configuration begins with
    return PenaltyLoss(coef=9.0).per_token(tokens(ratio, advantages, old_kl=old_kl, coefs=coefs))


def loss_and_gradient(ratio: float, advantage: float, **how: float | None) -> tuple[float, float, bool]:
    """Of one token, with respect to the ratio."""
    variable = table([ratio]).requires_grad_()
    loss = clipped_surrogate(variable, table([advantage]), **how)
    loss.per_token.sum().backward()
    return loss.per_token.item(), variable.grad.item(), loss.clipped.item()


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.1, 2.0, -2.2, -2.0),  # inside
        (1.5, 2.0, -2.6, 0.0),  # already more likely than it may become: stop
        (0.5, 2.0, -1.0, -2.0),  # good but less likely than before: go on
        (1.1, -2.0, 2.2, 2.0),  # inside
        (1.5, -2.0, 3.0, 2.0),  # bad and more likely than before: go on
        (0.5, -2.0, 1.6, 0.0),  # already less likely than it may become: stop
        (1.25, 2.0, -2.5, -2.0),  # between the two bounds' sizes: low .2, high .3
        (0.75, -2.0, 1.6, 0.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_cases_of_the_clip(ratio, advantage, loss, gradient):
    value, slope, clipped = loss_and_gradient(ratio, advantage, clip_eps_low=0.2, clip_eps_high=0.3)
    assert value == pytest.approx(loss, rel=1e-12)
    assert slope == pytest.approx(gradient, rel=1e-12)
    assert clipped == (gradient == 0.0 and advantage != 0.0)


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (2.5, -2.0, 5.0, 2.0),  # below the dual clip
        (4.0, -2.0, 6.0, 0.0),  # bad and far more likely: bounded by c * |A|
        (0.5, -2.0, 1.6, 0.0),  # the same without it
        (4.0, 2.0, -2.6, 0.0),  # a positive advantage is not touched
        (0.5, 2.0, -1.0, -2.0),
        (1.1, 2.0, -2.2, -2.0),
    ],
)
def test_the_cases_of_the_dual_clip(ratio, advantage, loss, gradient):
    value, slope, clipped = loss_and_gradient(ratio, advantage, clip_eps_low=0.2, clip_eps_high=0.3, dual_clip=3.0)
    assert value == pytest.approx(loss, rel=1e-12)
    assert slope == pytest.approx(gradient, rel=1e-12)
    assert clipped == (gradient == 0.0)


@given(grids(), st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([None, 2.0, 3.0]))
def test_clipped_is_where_the_gradient_is_zero(grid, low, high, dual_clip):
    ratio = grid.second.exp().requires_grad_()
    loss = clipped_surrogate(ratio, grid.first, clip_eps_low=low, clip_eps_high=high, dual_clip=dual_clip)
    (slope,) = torch.autograd.grad(loss.per_token.sum(), ratio)
    assert torch.equal(loss.clipped, slope == 0)
    close(torch.where(loss.clipped, 0.0, -grid.first), slope)


@given(grids(), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_the_clip_only_ever_makes_the_objective_worse(grid, low, high):
    ratio = grid.second.exp()
    plain = -ratio * grid.first
    clipped = clipped_surrogate(ratio, grid.first, clip_eps_low=low, clip_eps_high=high)
    assert (clipped.per_token >= plain - 1e-12).all()
    assert (clipped.per_token[~clipped.clipped] == plain[~clipped.clipped]).all()


@given(grids())
def test_at_ratio_one_the_gradient_is_reinforce(grid):
    logprobs = grid.second.clone().requires_grad_()
    for level in ("token", "sequence", "sequence_mean"):
        # A sequence's ratio carries the sum (mean) of its tokens, so its advantage is one number a row.
        advantages = grid.first if level == "token" else grid.scores[:, None].expand_as(grid.first)
        ratio = importance_ratio(logprobs, grid.second, grid.mask, level)
        assert (ratio == 1).all()
        lengths = grid.mask.sum(1, keepdim=True).clamp(min=1)
        scale = {"token": 1.0, "sequence": lengths, "sequence_mean": 1.0}[level]
        reinforce = torch.where(grid.mask, -advantages * scale, 0.0)
        for loss in (
            clipped_surrogate(ratio, advantages, clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=3.0),
            penalized_surrogate(ratio, advantages, kl_old_new(logprobs, grid.second, grid.mask), coef=2.0),
        ):
            total = torch.where(grid.mask, loss.per_token, 0.0).sum()
            close(torch.autograd.grad(total, logprobs, retain_graph=True)[0], reinforce)
        if level != "token":
            continue
        for loss in (
            cispo_loss(ratio, logprobs, advantages, clip_eps_low=0.2, clip_eps_high=0.2),
            policy_gradient_loss(logprobs, advantages),
        ):
            assert loss.clipped is None or not loss.clipped.any()
            total = torch.where(grid.mask, loss.per_token, 0.0).sum()
            close(torch.autograd.grad(total, logprobs, retain_graph=True)[0], reinforce)


@pytest.mark.parametrize(
    "ratio, advantage, logprob, loss, gradient, clipped",
    [
        (1.1, 2.0, -3.0, 6.6, -2.2, False),  # 1.1 * 2 * 3
        (1.5, 2.0, -3.0, 7.8, -2.6, True),  # the weight is 1.3, and the token still learns
        (0.5, 2.0, -3.0, 4.8, -1.6, True),  # the weight is 0.8
        (1.5, -2.0, -0.5, -1.3, 2.6, True),
        (0.5, -2.0, -0.5, -0.8, 1.6, True),  # PPO's clip would stop it
        (0.9, -2.0, -0.5, -0.9, 1.8, False),
        (1.5, 0.0, -0.5, 0.0, 0.0, True),
    ],
)
def test_the_cases_of_cispo(ratio, advantage, logprob, loss, gradient, clipped):
    """Low .2, high .3; the gradient is with respect to the log-probability, which the ratio moves with."""
    old = logprob - math.log(ratio)
    variable = table([logprob]).requires_grad_()
    terms = cispo_loss((variable - old).exp(), variable, table([advantage]), clip_eps_low=0.2, clip_eps_high=0.3)
    (slope,) = torch.autograd.grad(terms.per_token.sum(), variable)
    assert terms.per_token.item() == pytest.approx(loss, rel=1e-12)
    assert slope.item() == pytest.approx(gradient, rel=1e-12)
    assert terms.clipped.item() == clipped


@given(grids(), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_cispo_is_the_plain_surrogate_where_it_does_not_clip_and_a_bounded_one_where_it_does(grid, low, high):
    logprobs = grid.second.clone().requires_grad_()
    ratio = (logprobs - grid.second.flip(1)).exp()
    ours = cispo_loss(ratio, logprobs, grid.first, clip_eps_low=low, clip_eps_high=high)
    (slope,) = torch.autograd.grad(ours.per_token.sum(), logprobs, retain_graph=True)
    (plain,) = torch.autograd.grad((-ratio * grid.first).sum(), logprobs)
    close(slope[~ours.clipped], plain[~ours.clipped])
    assert torch.equal(slope != 0, grid.first != 0)
    bound = torch.where(ratio.detach() > 1, torch.full_like(grid.first, 1 + high), 1 - low)
    close(slope[ours.clipped], (-bound * grid.first)[ours.clipped])


def test_log_likelihood_by_hand():
    logprobs = table([-1.5, -0.5]).requires_grad_()
    loss = policy_gradient_loss(logprobs, table([2.0, -4.0]))
    close(loss.per_token.detach(), [[3.0, -2.0]])
    close(torch.autograd.grad(loss.per_token.sum(), logprobs)[0], [[-2.0, 4.0]])
    assert loss.clipped is None


def test_penalized_surrogate_by_hand():
    loss = penalized_surrogate(table([1.5, 0.5]), table([2.0, -4.0]), table([0.1, 0.2]), coef=3.0)
    close(loss.per_token, [[-2.7, 2.6]])
    assert loss.clipped is None


def test_importance_ratio_by_hand():
    old = table([-1.0, -2.0, -3.0], [-1.0, NAN, NAN], [NAN, NAN, NAN])
    new = table([-0.9, -2.3, -2.6], [-0.8, NAN, NAN], [NAN, NAN, NAN])  # differences .1, -.3, .4 | .2
    mask = live([1, 1, 1], [1, 0, 0], [0, 0, 0])
    e = math.exp
    ones = [1.0, 1.0, 1.0]
    close(importance_ratio(new, old, mask, "token"), table([e(0.1), e(-0.3), e(0.4)], [e(0.2), 1, 1], ones))
    close(importance_ratio(new, old, mask, "sequence"), table([e(0.2)] * 3, [e(0.2), 1, 1], ones))
    close(importance_ratio(new, old, mask, "sequence_mean"), table([e(0.2 / 3)] * 3, [e(0.2), 1, 1], ones))


@given(grids(shortest=1))
def test_the_levels_of_the_ratio_agree(grid):
    token, sequence, mean = (
        importance_ratio(grid.second, grid.second.flip(0), grid.mask, level)
        for level in ("token", "sequence", "sequence_mean")
    )
    lengths = grid.mask.sum(1)
    close(token.prod(1), sequence[:, 0])  # dead tokens count 1
    close(mean[:, 0] ** lengths, sequence[:, 0])
    single = prefix_mask([1] * len(lengths), grid.mask.shape[1])
    close(
        importance_ratio(grid.second, grid.first, single, "sequence"),
        importance_ratio(grid.second, grid.first, single, "token"),
    )


def test_the_ratio_has_no_gradient_outside_the_mask():
    new = table([-0.9, -2.3, NAN]).requires_grad_()
    for level in ("token", "sequence", "sequence_mean"):
        ratio = importance_ratio(new, table([-1.0, -2.0, NAN]), live([1, 1, 0]), level)
        (slope,) = torch.autograd.grad(ratio.sum(), new)
        assert slope[0, 2] == 0
        assert (slope[0, :2] > 0).all()


@pytest.mark.parametrize(
    "how, weights, norm",
    [
        ("token_mean", table([1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]), 4.0),
        ("sequence_mean", table([1 / 3, 1 / 3, 1 / 3, 0], [1, 0, 0, 0], [0, 0, 0, 0]), 2.0),
        ("sequence_sum", table([1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]), 2.0),
        ("constant", table([0.125, 0.125, 0.125, 0], [0.125, 0, 0, 0], [0, 0, 0, 0]), 2.0),
    ],
)
def test_token_weights_by_hand(how, weights, norm):
    ours, our_norm = token_weights(prefix_mask([3, 1, 0], 4), how, max_tokens=8)
    close(ours, weights)
    assert our_norm == norm


@given(grids(holes=True), st.sampled_from(AGGREGATES), st.integers(0, 5))
def test_aggregation_adds_over_rows(grid, how, cut):
    weights, norm = token_weights(grid.mask, how, max_tokens=7)
    parts = [token_weights(mask, how, max_tokens=7) for mask in (grid.mask[:cut], grid.mask[cut:])]
    close(torch.cat([part[0] for part in parts]), weights)
    assert sum(part[1] for part in parts) == norm
    assert (weights[~grid.mask] == 0).all()


@given(grids(shortest=1))
def test_a_loss_of_one_everywhere_aggregates_to_one(grid):
    """Or, for a sum, to the mean length; for a constant, to the mean length over the longest."""
    mean_length = grid.mask.sum().item() / len(grid.mask)
    expected = {"token_mean": 1.0, "sequence_mean": 1.0, "sequence_sum": mean_length, "constant": mean_length / 7}
    for how in AGGREGATES:
        weights, norm = token_weights(grid.mask, how, max_tokens=7)
        assert weights.sum().item() / norm == pytest.approx(expected[how], rel=1e-12)


@given(grids())
def test_the_four_aggregations_agree_at_full_length(grid):
    rows, tokens = grid.mask.shape
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    values = {}
    for how in AGGREGATES:
        weights, norm = token_weights(mask, how, max_tokens=tokens)
        values[how] = (weights * grid.first).sum() / norm
    close(values["sequence_mean"], values["token_mean"])
    close(values["constant"], values["token_mean"])
    close(values["sequence_sum"], tokens * values["token_mean"])


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_a_ratio_that_float32_cannot_hold_is_a_number_with_a_gradient(level: RatioLevel) -> None:
    """exp(100) is infinite in float32; times an advantage of 0, or through the clip's other branch, it was NaN."""
    logprobs = torch.tensor([[0.0, 0.0], [-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-100.0, -100.0], [-1.0, -1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    ratio = importance_ratio(logprobs, old, mask, level)
    assert ratio[1].tolist() == [1.0, 1.0]
    assert ratio[0].tolist() == pytest.approx([math.exp(20.0)] * 2)
    for advantage in (0.0, 1.0, -1.0):
        surrogate = clipped_surrogate(ratio, torch.full((2, 2), advantage), clip_eps_low=0.2, clip_eps_high=0.2)
        (gradient,) = torch.autograd.grad(surrogate.per_token.sum(), logprobs, retain_graph=True)
        assert bool(gradient.isfinite().all())
        assert (gradient[1] != 0).any() == (advantage != 0)


def adapted(scale: float, ratio: Tensor, advantages: Tensor) -> Surrogate:
    coefs = Coefs(kl=0.0, penalty=scale)
    return ClipLoss(adapt_to=0.01).per_token(tokens(ratio, advantages, coefs=coefs))


def test_an_adapted_clip_by_hand():
    """Scale 1/2 clips at 0.9 and 1.1, scale 2 at 0.6 and 1.4, scale 4 at 0.2 and 1.8."""
    ratio, advantages = table([1.3, 0.7]), table([1.0, -1.0])
    close(adapted(0.5, ratio, advantages).per_token, [[-1.1, 0.9]])
    close(adapted(1.0, ratio, advantages).per_token, [[-1.2, 0.8]])
    close(adapted(2.0, ratio, advantages).per_token, [[-1.3, 0.7]])
    assert adapted(0.5, ratio, advantages).clipped.all()
    assert not adapted(2.0, ratio, advantages).clipped.any()


def test_a_clip_range_never_reaches_below_0():
    wide = ClipLoss(clip_eps_low=0.9, adapt_to=0.01)
    coefs = Coefs(kl=0.0, penalty=4.0)
    close(wide.per_token(tokens(table([1e-3]), table([-1.0]), coefs=coefs)).per_token, [[1e-3]])


def test_the_adapted_clip_moves_as_its_rule_says():
    loss = ClipLoss(adapt_to=0.01)
    assert loss.start_coef == 1.0
    assert loss.next_coef(1.0, kl=0.016) == pytest.approx(1 / 1.5)
    assert loss.next_coef(1.0, kl=0.006) == pytest.approx(1.5)
    assert loss.next_coef(1.0, kl=0.012) == loss.next_coef(1.0, kl=0.008) == 1.0
    assert loss.next_coef(3.9, kl=0.0) == 4.0
    assert loss.next_coef(0.26, kl=1.0) == 0.25
    assert ClipLoss().next_coef(0.3, kl=1.0) == 0.3  # not adapted
    assert (ClipLoss().coef_metric, loss.coef_metric) == ("", "policy/clip_scale")


def test_other_bands_of_the_penalty_by_hand():
    """Heess et al. 2017: within half and twice the target it stays, outside it moves by 1.5."""
    loss = PenaltyLoss(target=0.01, band=2.0, factor=1.5)
    assert loss.next_coef(1.0, kl=0.019) == loss.next_coef(1.0, kl=0.0051) == 1.0
    assert loss.next_coef(1.0, kl=0.021) == 1.5
    assert loss.next_coef(3.0, kl=0.004) == 2.0
    assert PenaltyLoss(target=0.01, backtrack_above=3.0).kl_limit == pytest.approx(0.03)
    assert PenaltyLoss().kl_limit is None
