"""rlhf.check: right losses and advantages pass, and the errors of wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf
from rlhf.algo.advantages import group_normalized
from rlhf.algo.policy_loss import importance_ratio
from rlhf.algorithms.cispo import CispoLoss
from rlhf.algorithms.functions import FunctionLoss
from rlhf.algorithms.grpo import Group
from rlhf.algorithms.kto import Kto
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.online_dpo import OnlinePairLoss
from rlhf.algorithms.penalty import PenaltyLoss
from rlhf.algorithms.policy_loss import PolicyLoss
from rlhf.algorithms.ppo import ClipLoss
from rlhf.algorithms.reinforce import BatchWhiten, PolicyGradientLoss
from rlhf.algorithms.slic import Slic
from rlhf.errors import ConfigError
from rlhf.types import Side


def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = importance_ratio(logprobs, old_logprobs, mask, "token")
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -importance_ratio(logprobs, old_logprobs, mask, "sequence") * advantages


def policy_gradient(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -logprobs * advantages


def test_right_losses() -> None:
    assert rlhf.check(clipped).passed
    assert "later updates on the same completions are corrected" in str(rlhf.check(clipped))
    assert "aggregate=sequence_mean" in str(rlhf.check(sequence_ratio))
    assert rlhf.check(sequence_ratio).passed
    assert "minibatches=1" in str(rlhf.check(policy_gradient))
    assert str(rlhf.check(policy_gradient)).endswith("this loss is right")


@pytest.mark.parametrize(
    "loss, message",
    [
        (ClipLoss, "later updates on the same completions are corrected"),
        (ClipLoss(ratio="sequence"), "with policy_loss.aggregate=sequence_mean"),
        (PenaltyLoss(coef=3.0), "the expected gradient is the policy gradient"),
        (CispoLoss, "later updates on the same completions are corrected"),
        (PolicyGradientLoss(), "minibatches=1"),
    ],
)
def test_losses_that_are_sections(loss: PolicyLoss | type[PolicyLoss], message: str) -> None:
    result = rlhf.check(loss)
    assert result.passed, result
    assert result.kind == "loss"
    assert message in str(result)


def test_advantages_that_are_sections() -> None:
    assert str(rlhf.check(Group(baseline="leave_one_out"))).endswith("this advantage is right")
    assert rlhf.check(Group).passed
    assert "with a bias" in str(rlhf.check(Group))
    assert rlhf.check(BatchWhiten(whiten=False)).passed


def test_a_section_that_cannot_be_checked_says_why() -> None:
    with pytest.raises(ConfigError, match="Kto is no policy loss, no advantage and no loss over pairs"):
        rlhf.check(Kto)
    with pytest.raises(ConfigError, match="FunctionLoss has no default for target: give an instance"):
        rlhf.check(FunctionLoss)
    with pytest.raises(ConfigError, match=r"policy_loss\.type=pair has no loss per token"):
        rlhf.check(OnlinePairLoss())


Loss = Callable[..., Tensor]
WRONG_LOSSES: dict[str, tuple[Loss, str]] = {
    "sign": (lambda **given: -clipped(**given), "the sign is wrong"),
    "no gradient": (lambda logprobs, **given: clipped(logprobs.detach(), **given), "has no gradient"),
    "mean over the batch": (
        lambda advantages, **given: clipped(advantages=advantages / advantages.std(), **given),
        "leave means over rows",
    ),
    "padding": (
        lambda advantages, **given: clipped(advantages=advantages.mean(1, keepdim=True).expand_as(advantages), **given),
        "more padding changes the loss",
    ),
    "one number": (lambda **given: clipped(**given).mean(), r"one value per token is needed, [30, 3]"),
    "squared advantage": (
        lambda advantages, **given: clipped(advantages=advantages**2, **given),
        "it points elsewhere: the cosine of the two is",
    ),
    "nothing to learn": (lambda advantages, **given: clipped(advantages=0 * advantages, **given), "it is zero"),
    "an error": (lambda **given: 1 / 0, "the loss failed: ZeroDivisionError: division by zero"),
    "not finite": (lambda **given: clipped(**given) / 0, "NaN or infinity"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses(name: str) -> None:
    loss, message = WRONG_LOSSES[name]
    result = rlhf.check(loss, "loss")
    assert not result.passed
    assert message in str(result)


def leave_one_out(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    scores = rewards.sum(1).view(-1, group_size)
    others = (scores.sum(1, keepdim=True) - scores) / (group_size - 1)
    return (scores - others).flatten()[:, None] * mask


def normalized(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    return group_normalized(rewards.sum(1), group_size)[:, None] * mask


def test_right_advantages() -> None:
    assert rlhf.check(leave_one_out).passed
    assert "bias" not in str(rlhf.check(leave_one_out))
    assert rlhf.check(normalized).passed
    assert "with a bias: the cosine of the two is 0.9" in str(rlhf.check(normalized))
    assert rlhf.check(lambda rewards, mask, group_size: rewards.sum(1, keepdim=True) * mask).passed  # REINFORCE


WRONG_ADVANTAGES: dict[str, tuple[Loss, str]] = {
    "sign": (lambda **given: -leave_one_out(**given), "the sign is wrong"),
    "groups mixed": (
        lambda rewards, mask, group_size: (
            (rewards.sum(1).view(group_size, -1) - rewards.sum(1).view(group_size, -1).mean(0)).flatten()[:, None]
            * mask
        ),
        "rows of different prompts are mixed",
    ),
    "division by zero": (
        lambda rewards, mask, group_size: (
            leave_one_out(rewards, mask, group_size)
            / rewards.sum(1).view(-1, group_size).std(1).repeat_interleave(group_size)[:, None]
        ),
        "a division by 0 if the scores of a group are equal",
    ),
    "per row": (lambda rewards, mask, group_size: rewards.sum(1), "one value per token is needed"),
    "absolute": (lambda **given: leave_one_out(**given).abs(), "it points elsewhere"),
    "later tokens only": (
        lambda rewards, mask, group_size: (
            leave_one_out(rewards, mask, group_size) * torch.arange(mask.shape[1], dtype=torch.float64)
        ),
        "different advantages|points elsewhere",
    ),
}


@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_wrong_advantages(name: str) -> None:
    advantage, message = WRONG_ADVANTAGES[name]
    result = rlhf.check(advantage, "advantage")
    assert not result.passed
    assert any(part in str(result) for part in message.split("|"))


def test_neither_a_loss_nor_an_advantage() -> None:
    with pytest.raises(ConfigError, match="a loss is called with logprobs"):
        rlhf.check(lambda x: x)
    others: list[Any] = [dict, torch.add]
    for other in others:
        with pytest.raises(ConfigError, match="neither a loss nor an advantage"):
            rlhf.check(other)


@pytest.mark.parametrize("name", sorted(PairLoss.choices()))
def test_every_loss_over_pairs_is_right(name: str) -> None:
    result = rlhf.check(PairLoss.choices()[name])
    assert result.passed, result
    assert result.kind == "pair loss"
    assert len(result.findings) == 6


def test_pairs_that_have_their_margin_already_rest() -> None:
    assert "the others rest" not in str(rlhf.check(Slic))
    assert "pairs; the others rest" in str(rlhf.check(Slic(nll_coef=0.0)))
    assert str(rlhf.check(Slic(nll_coef=0.0))).endswith("this pair loss is right")


class Compared(PairLoss):
    """The logistic loss; each wrong loss changes one part of it. Its type has no default: it joins no family."""

    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return -torch.nn.functional.logsigmoid(chosen.log_ratios - rejected.log_ratios)


class Swapped(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return super().per_pair(rejected, chosen)


class OtherReward(Compared):
    def reward(self, side: Side) -> Tensor:
        return -side.log_ratios


class OneNumber(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return super().per_pair(chosen, rejected).mean()


class OverTheBatch(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return super().per_pair(chosen, rejected) - (chosen.log_ratios - rejected.log_ratios).mean()


class Detached(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return super().per_pair(chosen, rejected).detach()


class SaysNoReference(Compared):
    needs_reference = False


class Fails(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        raise ZeroDivisionError


class Constant(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return 0.0 * super().per_pair(chosen, rejected)


class Infinite(Compared):
    def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
        return super().per_pair(chosen, rejected) / 0


class RewardOfNothing(Compared):
    def reward(self, side: Side) -> Tensor:
        return torch.zeros_like(side.lengths)


WRONG_PAIR_LOSSES: dict[type[PairLoss], str] = {
    Swapped: "it lowers it for 420 of 420 pairs",
    OtherReward: "it lowers it for 420 of 420 pairs",
    OneNumber: "per_pair returned a tensor of shape []: it has to return one value per row, a tensor of shape [420]",
    OverTheBatch: "the size of the micro-batches would change the result",
    Detached: "the loss has no gradient",
    SaysNoReference: "it is, and is 0 in training: take logprobs for log_ratios",
    Fails: "per_pair failed: ZeroDivisionError",
    Constant: "it does for no pair: nothing would be learned",
    Infinite: "NaN or infinity at a live pair",
    RewardOfNothing: "the implicit reward does not depend on the policy",
}


@pytest.mark.parametrize("loss", WRONG_PAIR_LOSSES)
def test_wrong_losses_over_pairs(loss: type[PairLoss]) -> None:
    result = rlhf.check(loss(type="mine"))
    assert not result.passed
    assert WRONG_PAIR_LOSSES[loss] in str(result)


def test_a_loss_that_reads_no_reference_may_leave_it_out() -> None:
    class WithoutReference(Compared):
        def per_pair(self, chosen: Side, rejected: Side) -> Tensor:
            return -torch.nn.functional.logsigmoid(chosen.logprobs - rejected.logprobs)

    result = rlhf.check(WithoutReference(type="mine"))
    assert result.passed
    assert "needs_reference = False saves its memory and time" in str(result)
