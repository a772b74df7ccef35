"""The offline losses against their papers: values by hand, limits, identities, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from algo_cases import close
from hypothesis import given
from hypothesis import strategies as st
from pair_values import PairValues, dpo, hinge, ipo, orpo, robust_dpo, simpo, slic, values_of
from torch import Tensor

from rlhf.algorithms.kto import Kto, mismatched_partners
from rlhf.algorithms.offline_loss import LogRatioLoss
from rlhf.types import Side

seeds = st.integers(0, 2**31 - 1)
noises = st.floats(0.01, 0.45)
LOG3 = math.log(3.0)

PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor], PairValues]] = {
    "dpo": lambda a, b: dpo(a, b, beta=0.4),
    "cdpo": lambda a, b: dpo(a, b, beta=0.4, label_smoothing=0.2),
    "robust_dpo": lambda a, b: robust_dpo(a, b, beta=0.4, label_smoothing=0.2),
    "ipo": lambda a, b: ipo(a, b, beta=0.4),
    "hinge": lambda a, b: hinge(a, b, beta=0.4, margin=1.0),
    "slic": lambda a, b: slic(a, b, margin=1.0, nll_coef=0.5),
    "simpo": lambda a, b: simpo(a, b, beta=2.0, gamma=0.7),
    "orpo": lambda a, b: orpo(a, b, coef=0.3),
}
OF_RATIOS = ("dpo", "cdpo", "robust_dpo", "ipo", "hinge")


def numbers(*values: float) -> Tensor:
    """One number a completion, in float64."""
    return torch.tensor(values, dtype=torch.float64)


def sides(seed: int, count: int = 6, *, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Negative numbers, as log-probabilities are, for both sides."""
    generator = torch.Generator().manual_seed(seed)
    drawn = -scale * torch.rand(2, count, generator=generator, dtype=torch.float64) - 0.05
    return drawn[0], drawn[1]


# By hand


def test_dpo_by_hand():
    """Beta 1/2, log-ratios 2 log 3 apart: sigma(log 3) = 3/4."""
    losses = dpo(numbers(LOG3), numbers(-LOG3), beta=0.5)
    close(losses.per_pair, [-math.log(0.75)])
    close(losses.chosen_reward, [LOG3 / 2])
    close(losses.rejected_reward, [-LOG3 / 2])
    close(dpo(numbers(0.7), numbers(0.7), beta=0.5).per_pair, [math.log(2)])


def test_cdpo_by_hand():
    losses = dpo(numbers(LOG3), numbers(-LOG3), beta=0.5, label_smoothing=0.1)
    close(losses.per_pair, [-0.9 * math.log(0.75) - 0.1 * math.log(0.25)])


def test_robust_dpo_by_hand():
    losses = robust_dpo(numbers(LOG3), numbers(-LOG3), beta=0.5, label_smoothing=0.1)
    close(losses.per_pair, [(-0.9 * math.log(0.75) + 0.1 * math.log(0.25)) / 0.8])


def test_ipo_by_hand():
    """Beta 1/4 asks for 2 nats between the log-ratios."""
    close(ipo(numbers(1.0, 3.0, 0.0), numbers(0.0, 1.0, 1.0), beta=0.25).per_pair, [1.0, 0.0, 9.0])


def test_hinge_by_hand():
    losses = hinge(numbers(3.0, 12.0, -1.0), numbers(1.0, 1.0, 1.0), beta=0.1, margin=1.0)
    close(losses.per_pair, [0.8, 0.0, 1.2])


def test_slic_by_hand():
    losses = slic(numbers(-2.0, -2.0), numbers(-2.5, -4.0), margin=1.0, nll_coef=0.25)
    close(losses.per_pair, [0.5 + 0.5, 0.0 + 0.5])
    close(losses.chosen_reward, [-2.0, -2.0])


def test_the_chosen_likelihood_by_hand_has_a_gradient_and_changes_no_reward():
    """A comparison of log 2 for each pair, and half the mean surprise of the chosen tokens."""

    class Constant(LogRatioLoss):
        def compare(self, chosen: Side, rejected: Side) -> Tensor:
            return torch.full_like(chosen.logprobs, math.log(2))

    chosen, rejected = numbers(-2.0, -0.5).requires_grad_(), numbers(-3.0, -3.0)
    losses = values_of(Constant(type="constant", nll_coef=0.5), chosen, rejected)
    close(losses.per_pair, [math.log(2) + 1.0, math.log(2) + 0.25])
    losses.per_pair.sum().backward()
    assert chosen.grad is not None
    close(chosen.grad, [-0.5, -0.5])
    plain, with_likelihood = (dpo(chosen, rejected, beta=0.3, nll_coef=coef) for coef in (0.0, 0.5))
    close(with_likelihood.per_pair, plain.per_pair - 0.5 * chosen)
    close(with_likelihood.chosen_reward, plain.chosen_reward)
    close(with_likelihood.rejected_reward, plain.rejected_reward)


def test_simpo_by_hand():
    """Beta 2, means half a log 3 apart: sigma(log 3) = 3/4; with gamma log 3 as well, sigma(0) = 1/2."""
    chosen, rejected = numbers(-1.0), numbers(-1.0 - LOG3 / 2)
    close(simpo(chosen, rejected, beta=2.0, gamma=0.0).per_pair, [-math.log(0.75)])
    close(simpo(chosen, rejected, beta=2.0, gamma=LOG3).per_pair, [math.log(2)])


def test_orpo_by_hand():
    """Probabilities 3/4 and 1/2 a token: odds 3 and 1, an odds ratio of 3."""
    losses = orpo(numbers(math.log(0.75)), numbers(math.log(0.5)), coef=0.1)
    close(losses.per_pair, [-math.log(0.75) - 0.1 * math.log(0.75)])
    close(losses.chosen_reward, [LOG3])
    close(losses.rejected_reward, [0.0])


def test_orpo_at_probability_one_is_finite_and_so_is_its_gradient():
    chosen = numbers(0.0).requires_grad_()
    loss = orpo(chosen, numbers(-1.0), coef=0.1).per_pair.sum()
    loss.backward()
    assert math.isfinite(loss.item())
    assert chosen.grad is not None
    close(chosen.grad, [-1.0])  # the likelihood's


# KTO against its definition


def value(reward: float, z0: float, *, desirable: bool, beta: float, weight: float) -> float:
    """v(x, y) of Ethayarajh et al. 2024, eq. 7, as printed."""
    gain = beta * (reward - z0) if desirable else beta * (z0 - reward)
    return weight / (1 + math.exp(-gain))


@given(seeds, st.floats(0.05, 2.0), st.floats(0.0, 3.0))
def test_kto_is_lambda_minus_value(seed, beta, z0):
    generator = torch.Generator().manual_seed(seed)
    ratios = 2 * torch.randn(5, generator=generator, dtype=torch.float64)
    good = torch.rand(5, generator=generator) > 0.5
    loss = Kto(beta=beta, desirable_weight=1.3, undesirable_weight=0.6)
    losses = loss.per_completion(ratios, good, torch.full_like(ratios, z0))
    weights = [1.3 if g else 0.6 for g in good.tolist()]
    rows = zip(ratios.tolist(), good.tolist(), weights, strict=True)
    close(losses, [w - value(h, z0, desirable=g, beta=beta, weight=w) for h, g, w in rows])
    close(loss.reward(ratios), beta * ratios)


def test_kto_by_hand():
    """Reward log 3 above z0, in units of beta: 1/4 of the weight is lost if desirable, 3/4 if not."""
    loss, ratios = Kto(beta=0.5, undesirable_weight=2.0), numbers(2 * LOG3 + 1, 2 * LOG3 + 1)
    close(loss.per_completion(ratios, torch.tensor([True, False]), numbers(1.0, 1.0)), [0.25, 1.5])


def test_kto_pushes_each_label_its_way_and_lets_the_baseline_be():
    ratios, baselines = numbers(0.3, 0.3).requires_grad_(), numbers(0.1, 0.1).requires_grad_()
    Kto(beta=0.5).per_completion(ratios, torch.tensor([True, False]), baselines).sum().backward()
    slope = 0.5 * torch.sigmoid(torch.tensor(0.1)).item() * torch.sigmoid(torch.tensor(-0.1)).item()
    assert ratios.grad is not None
    close(ratios.grad, [-slope, slope], rtol=1e-6)
    assert baselines.grad is None


def test_the_baseline_is_a_mean_that_is_not_negative_and_has_no_gradient():
    ratios = numbers(1.0, -0.5, 1.0).requires_grad_()
    baseline = Kto().baseline(ratios)
    close(baseline, 0.5)
    assert not baseline.requires_grad
    close(Kto().baseline(numbers(-1.0, 0.5)), 0.0)


@pytest.mark.parametrize(
    "prompts, partners",
    [
        ("abc", [1, 2, 0]),
        ("aab", [2, 2, 0]),
        ("abab", [1, 2, 3, 0]),
        ("aabb", [2, 2, 0, 0]),
        ("aaba", [2, 2, 3, 2]),
        ("baaa", [1, 0, 0, 0]),
        ("aaa", [1, 2, 0]),  # nothing better
        ("a", [0]),
    ],
)
def test_a_row_is_matched_with_another_prompt(prompts, partners):
    assert mismatched_partners(prompts) == partners


# Limits and identities


@given(seeds)
def test_without_noise_the_three_dpos_are_one(seed):
    chosen, rejected = sides(seed)
    plain = dpo(chosen, rejected, beta=0.3).per_pair
    close(dpo(chosen, rejected, beta=0.3, label_smoothing=0.0).per_pair, plain)
    close(robust_dpo(chosen, rejected, beta=0.3, label_smoothing=0.0).per_pair, plain)


@given(seeds, noises)
def test_cdpo_is_the_expectation_of_dpo_over_flipped_labels(seed, noise):
    chosen, rejected = sides(seed)
    smoothed = dpo(chosen, rejected, beta=0.3, label_smoothing=noise).per_pair
    kept, flipped = (dpo(*pair, beta=0.3).per_pair for pair in ((chosen, rejected), (rejected, chosen)))
    close(smoothed, (1 - noise) * kept + noise * flipped)


@given(seeds, noises)
def test_robust_dpo_is_unbiased_under_flipped_labels_and_cdpo_is_not(seed, noise):
    chosen, rejected = sides(seed)
    clean = dpo(chosen, rejected, beta=0.3).per_pair

    def expected(loss: Callable[..., PairValues]) -> Tensor:
        kept = loss(chosen, rejected, beta=0.3, label_smoothing=noise).per_pair
        flipped = loss(rejected, chosen, beta=0.3, label_smoothing=noise).per_pair
        return (1 - noise) * kept + noise * flipped

    close(expected(robust_dpo), clean)
    assert (expected(dpo) - clean).abs().max() > 1e-6


@given(noises)
def test_cdpo_is_best_where_the_margin_says_the_noise(noise):
    """sigma(z) = 1 - epsilon."""
    margin = math.log((1 - noise) / noise) / 0.5
    chosen = numbers(margin).requires_grad_()
    (slope,) = torch.autograd.grad(dpo(chosen, numbers(0.0), beta=0.5, label_smoothing=noise).per_pair.sum(), chosen)
    close(slope, [0.0])


def test_robust_dpo_falls_without_bound_where_dpo_does_not():
    far = numbers(1e4)
    assert robust_dpo(far, -far, beta=1.0, label_smoothing=0.1).per_pair.item() < -1e3
    assert dpo(far, -far, beta=1.0, label_smoothing=0.1).per_pair.item() > 1e3
    assert 0 <= dpo(far, -far, beta=1.0).per_pair.item() < 1e-6


@given(seeds)
def test_at_a_small_beta_dpo_and_ipo_pull_alike(seed):
    """-log sigma(beta d) = log 2 - beta d / 2 + O(beta^2), and beta (d - 1/(2 beta))^2 = 1/(4 beta) - d + O(beta)."""
    chosen, rejected = sides(seed)
    chosen.requires_grad_()
    beta = 1e-6
    (of_dpo,) = torch.autograd.grad(dpo(chosen, rejected, beta=beta).per_pair.sum(), chosen)
    (of_ipo,) = torch.autograd.grad(ipo(chosen, rejected, beta=beta).per_pair.sum(), chosen)
    close(of_dpo / (-beta / 2), [1.0] * 6, rtol=1e-5)
    close(of_ipo / (-1 / beta), [1.0] * 6, rtol=1e-5)


@given(seeds, st.floats(0.05, 2.0))
def test_ipo_is_zero_at_its_margin_and_dpo_never_content(seed, beta):
    rejected = sides(seed)[0]
    chosen = (rejected + 1 / (2 * beta)).requires_grad_()
    at_margin = ipo(chosen, rejected, beta=beta).per_pair
    close(at_margin, [0.0] * 6)
    (still,) = torch.autograd.grad(at_margin.sum(), chosen)
    close(still, [0.0] * 6, atol=1e-8)
    (pulled,) = torch.autograd.grad(dpo(chosen, rejected, beta=beta).per_pair.sum(), chosen)
    assert (pulled < -0.1 * beta).all()


@given(seeds)
def test_simpo_without_margin_is_dpo_of_means_without_reference(seed):
    chosen, rejected = sides(seed)
    close(simpo(chosen, rejected, beta=2.0, gamma=0.0).per_pair, dpo(chosen, rejected, beta=2.0).per_pair)


@given(seeds)
def test_the_hinge_is_slic_of_rewards_without_likelihood(seed):
    chosen, rejected = sides(seed)
    of_slic = slic(0.7 * chosen, 0.7 * rejected, margin=1.0, nll_coef=0.0).per_pair
    close(hinge(chosen, rejected, beta=0.7, margin=1.0).per_pair, of_slic)


@given(seeds)
def test_orpo_without_odds_is_the_likelihood_and_odds_are_those_of_the_definition(seed):
    chosen, rejected = sides(seed)
    close(orpo(chosen, rejected, coef=0.0).per_pair, -chosen)
    losses = orpo(chosen, rejected, coef=1.0)
    p, q = chosen.exp(), rejected.exp()
    ratio = (p / (1 - p)) / (q / (1 - q))
    close(losses.per_pair + chosen, torch.log1p(1 / ratio), rtol=1e-7)


@given(seeds, st.sampled_from(OF_RATIOS))
def test_only_the_difference_of_log_ratios_counts(seed, name):
    chosen, rejected = sides(seed)
    close(PAIR_LOSSES[name](chosen + 5, rejected + 5).per_pair, PAIR_LOSSES[name](chosen, rejected).per_pair)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_preferring_the_chosen_side_more_is_better(name):
    chosen, rejected = sides(3)
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    losses = PAIR_LOSSES[name](chosen, rejected)
    up, down = torch.autograd.grad(losses.per_pair.sum(), (chosen, rejected), retain_graph=True)
    assert (up <= 0).all()
    assert (down >= 0).all()
    assert up.min() < -0.01
    assert down.max() > 0.01
    (reward_slope,) = torch.autograd.grad(losses.chosen_reward.sum(), chosen)
    assert (reward_slope > 0).all()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    chosen, rejected = sides(7)  # no pair stands at a kink of a hinge
    assert torch.autograd.gradcheck(
        lambda a, b: PAIR_LOSSES[name](a, b).per_pair, (chosen.requires_grad_(), rejected.requires_grad_())
    )


def test_the_gradient_of_kto_is_that_of_finite_differences():
    ratios, baselines = sides(7)
    good = torch.tensor([True, False] * 3)
    loss = Kto(beta=0.7, desirable_weight=1.5, undesirable_weight=0.5)
    assert torch.autograd.gradcheck(lambda h: loss.per_completion(h, good, baselines), (ratios.requires_grad_(),))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_long_completions_do_not_overflow(name):
    chosen, rejected = numbers(-3000.0, -1.0).requires_grad_(), numbers(-1.0, -3000.0).requires_grad_()
    loss = PAIR_LOSSES[name](chosen, rejected).per_pair
    gradients = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert loss.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
