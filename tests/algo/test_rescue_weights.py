"""The weights of completions sampled with a hint: by hand, and as expectations over all completions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from algo_cases import COEFS, rollout

from rlhf.algo.selection import (
    effective_sample_share,
    failed_groups,
    shaped_importance,
    success_shares,
)
from rlhf.algorithms.online import Online
from rlhf.algorithms.rescue import HintWeights, SequenceWeights, ShapedWeights, TokenWeights
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, Outputs

LIVE = torch.tensor([[True, True], [True, False]])
PLAIN = torch.tensor([[0.1, 0.5], [0.2, 0.9]], dtype=torch.float64).log()
HINTED = torch.tensor([[0.5, 0.25], [0.8, 0.1]], dtype=torch.float64).log()


def test_a_group_fails_if_no_score_is_above_the_threshold() -> None:
    scores = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.5, 0.5])
    assert failed_groups(scores, 2, solved_above=0.0).tolist() == [True, False, False]
    assert failed_groups(scores, 2, solved_above=0.5).tolist() == [True, False, True]


def test_a_missing_score_is_neither_a_failure_nor_a_success() -> None:
    scores = torch.tensor([0.0, torch.nan, torch.nan, torch.nan, 1.0, torch.nan])
    assert failed_groups(scores, 2, solved_above=0.0).tolist() == [True, False, False]
    assert success_shares(scores, 2, solved_above=0.0).nan_to_num(-1).tolist() == [0, -1, 1]
    with_failure = torch.tensor([1.0, 0.0, 0.0, torch.nan])
    assert success_shares(with_failure, 4, solved_above=0.0).tolist() == [1 / 3]


def test_a_score_of_the_limit_is_no_success() -> None:
    scores = torch.tensor([0.1, 0.2])  # in float32, above 0.1 and 0.2 in float64
    assert success_shares(scores, 1, solved_above=0.1).tolist() == [0, 1]
    assert failed_groups(scores, 1, solved_above=0.2).tolist() == [True, True]


def test_weights_by_hand() -> None:
    token = TokenWeights(cap=1.5).weigh(PLAIN, HINTED, LIVE)
    assert token.tolist() == [pytest.approx([0.2, 1.5]), pytest.approx([0.25, 1.0])]
    sequence = SequenceWeights().weigh(PLAIN, HINTED, LIVE)
    assert sequence.tolist() == [pytest.approx([0.4, 0.4]), pytest.approx([0.25, 1.0])]
    assert SequenceWeights(cap=0.3).weigh(PLAIN, HINTED, LIVE)[0].tolist() == pytest.approx([0.3, 0.3])
    shaped = ShapedWeights(gamma=0.2).weigh(PLAIN, HINTED, LIVE)
    assert shaped.tolist() == [pytest.approx([0.25, 0.2 * 2 / 2.2**2]), pytest.approx([0.2 * 0.25 / 0.45**2, 1.0])]


@pytest.mark.parametrize(
    "config", [TokenWeights(), SequenceWeights(), ShapedWeights(), TokenWeights(cap=0.5), SequenceWeights(cap=0.5)]
)
def test_only_the_tokens_in_the_mask_are_weighted(config: HintWeights) -> None:
    weights = config.weigh(PLAIN, HINTED, LIVE & torch.tensor([[False], [True]]))
    assert weights[0].tolist() == [1.0, 1.0]
    assert weights[1, 0] < 1.0


def test_sequence_weights_turn_an_expectation_with_the_hint_into_the_one_without() -> None:
    """Over all completions of two tokens from a vocabulary of three, for a random function of the completion."""
    generator = torch.Generator().manual_seed(0)
    plain_first, hint_first = torch.randn(2, 3, generator=generator, dtype=torch.float64).log_softmax(1)
    plain_second, hint_second = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64).log_softmax(2)
    value = torch.randn(9, generator=generator, dtype=torch.float64)
    plain = torch.stack([plain_first.repeat_interleave(3), plain_second.flatten()], dim=1)  # [9, 2]
    hinted = torch.stack([hint_first.repeat_interleave(3), hint_second.flatten()], dim=1)
    mask = torch.ones(9, 2, dtype=torch.bool)
    weights = SequenceWeights(cap=1e9).weigh(plain, hinted, mask)[:, 0]
    with_hint, without = hinted.sum(1).exp(), plain.sum(1).exp()
    assert float((with_hint * weights * value).sum()) == pytest.approx(float((without * value).sum()), abs=1e-12)
    token = TokenWeights(cap=1e9).weigh(plain, hinted, mask)
    expected = (
        (hint_second.exp().flatten() * token[:, 1]).view(3, 3).sum(1)
    )  # of a token's weight, given the one before
    assert expected.tolist() == pytest.approx([1.0] * 3)


def test_the_shaped_weight_is_the_gradient_of_the_shaped_ratio() -> None:
    logprobs = PLAIN.clone().requires_grad_()
    ratio = (logprobs - HINTED).exp()
    (gradient,) = torch.autograd.grad((ratio / (ratio + 0.1)).sum(), logprobs)
    weights = shaped_importance(PLAIN, HINTED, torch.ones_like(LIVE), gamma=0.1)
    assert torch.allclose(weights, gradient)


def test_a_completion_of_many_unlikely_tokens_overflows_nothing() -> None:
    plain, hinted = torch.full((2, 400), -9.0), torch.full((2, 400), -0.1)
    mask = torch.ones(2, 400, dtype=torch.bool)
    for weights in (
        SequenceWeights(cap=2.0).weigh(plain, hinted, mask),
        SequenceWeights(cap=2.0).weigh(hinted, plain, mask),
        shaped_importance(hinted, plain.to(torch.float32) * 20, mask, gamma=0.1),
    ):
        assert weights.isfinite().all()
    assert float(SequenceWeights(cap=2.0).weigh(hinted, plain, mask).max()) == 2.0


def test_the_effective_sample_size_by_hand() -> None:
    weights, mask = torch.tensor([[1.0, 1.0, 7.0], [1.0, 3.0, 0.0]]), torch.ones(2, 3, dtype=torch.bool)
    mask[0, 2] = False
    assert effective_sample_share(weights, mask) == pytest.approx(36 / (5 * 12))
    assert effective_sample_share(torch.full((2, 3), 0.1), mask) == pytest.approx(1.0)
    assert effective_sample_share(weights, torch.zeros_like(mask)) == 0.0


GRPO = {"advantage": {"type": "group"}, "kl": {"placement": "loss", "estimator": "k3", "coef": 0.5}}
RESCUE = {"rescue": {"hints": [{"column": "hint"}]}}


def test_advantages_and_the_kl_of_hinted_rows_are_weighted_and_no_others() -> None:
    here = rollout(groups=2, group_size=2, tokens=3)
    hinted = torch.tensor([False, True, False, False])
    sampled = here.sampler_logprobs + torch.where(hinted, 0.7, 0.3)[:, None]
    batch = replace(here, hinted=hinted, sampler_logprobs=sampled)
    off = compute_advantages(batch, Online.model_validate(GRPO), COEFS)
    algorithm = Online.model_validate(GRPO | RESCUE)
    on = compute_advantages(batch, algorithm, COEFS)
    factor = torch.where(hinted[:, None] & batch.completion_mask, torch.tensor(-0.7, dtype=torch.float64).exp(), 1.0)
    assert torch.allclose(on.advantages, off.advantages * factor)
    assert on.hint_weights is not None
    assert torch.allclose(on.hint_weights, factor)
    assert off.hint_weights is None
    outputs = Outputs(logprobs=batch.logprobs, entropy=torch.zeros_like(factor), values=torch.zeros_like(factor))
    objective = Objective(algorithm, max_tokens=3)
    whole, metrics = objective.loss(on, outputs, COEFS)
    unweighted, plain_metrics = objective.loss(replace(on, hint_weights=torch.ones_like(factor)), outputs, COEFS)
    assert metrics["loss/kl"].total < plain_metrics["loss/kl"].total
    assert float(whole["policy"]) != float(unweighted["policy"])
