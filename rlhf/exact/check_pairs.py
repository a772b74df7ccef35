"""Check a loss over pairs, on every ordered pair of completions of every prompt of a world that can be enumerated.

The two yardsticks: a step of descent has to widen the margin of each pair's implicit rewards; and over pairs that the
reference samples and Bradley-Terry labels (Bradley and Terry 1952), the expected gradient has to raise the score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms.offline_loss import PairLoss
from rlhf.errors import ConfigError
from rlhf.exact.findings import ROUNDING, Finding, close, compare_gradients, try_shape
from rlhf.exact.world import World, expectation, random_scores, random_table
from rlhf.types import Side
from rlhf.user_code import UserCode, check_values

LEAST_COSINE = 0.0  # a loss per token, or with the likelihood of the chosen side, has a bias by design
ROWS = 50  # pairs that are computed one by one


@dataclass(frozen=True)
class _Pairs:
    """All ordered pairs of different completions of a prompt; rows of the world, and the inputs of a loss at them."""

    chosen: Tensor
    rejected: Tensor
    logprobs: Tensor  # of every row of the world
    ref_logprobs: Tensor
    lengths: Tensor

    def part(self, pairs: slice) -> _Pairs:
        return _Pairs(self.chosen[pairs], self.rejected[pairs], self.logprobs, self.ref_logprobs, self.lengths)

    def sides(self) -> tuple[Side, Side]:
        chosen, rejected = (
            Side(logprobs=self.logprobs[rows], ref_logprobs=self.ref_logprobs[rows], lengths=self.lengths[rows])
            for rows in (self.chosen, self.rejected)
        )
        return chosen, rejected


def check_pair_loss(loss: PairLoss, world: World) -> list[Finding]:
    """Check a loss over pairs at the policy that training begins with, the reference."""
    table = random_table(world, 12).requires_grad_()
    logprobs = world.sequence_logprobs(table.log_softmax(-1)).flatten()
    reference = logprobs.detach() if loss.needs_reference else torch.zeros_like(logprobs)
    pairs = _all_pairs(world, logprobs, reference)
    shape, values = try_shape(lambda: _values(loss, pairs), of="pair")
    if values is None:
        return [shape]
    if not values.requires_grad:
        return [shape, Finding("the gradient reaches the policy", False, "the loss has no gradient")]
    return [
        shape,
        Finding("the gradient reaches the policy", True),
        _check_rows(loss, pairs),
        _check_margin(loss, pairs),
        _check_reference(loss, pairs),
        _check_direction(world, table, values, pairs),
    ]


def _values(loss: PairLoss, pairs: _Pairs) -> Tensor:
    with UserCode(f"{loss.type}: per_pair", error=ConfigError):
        values = loss.per_pair(*pairs.sides())
    return check_values(values, len(pairs.chosen), f"{loss.type}: per_pair")


def _reward(loss: PairLoss, side: Side) -> Tensor:
    with UserCode(f"{loss.type}: reward", error=ConfigError):
        rewards = loss.reward(side)
    return check_values(rewards, len(side.logprobs), f"{loss.type}: reward")


def _all_pairs(world: World, logprobs: Tensor, ref_logprobs: Tensor) -> _Pairs:
    rows = world.all_rows()
    chosen, rejected = torch.cartesian_prod(rows, rows).unbind(1)
    are_pairs = (world.row_prompts(chosen) == world.row_prompts(rejected)) & (chosen != rejected)
    lengths = world.mask.sum(1)[rows % len(world.ids)].to(logprobs.dtype)
    return _Pairs(chosen[are_pairs], rejected[are_pairs], logprobs, ref_logprobs, lengths)


def _check_rows(loss: PairLoss, pairs: _Pairs) -> Finding:
    """Compare the values of some pairs, away from the reference, with the values of each alone."""
    what = "a pair's loss does not depend on other pairs"
    some = _moved(pairs).part(slice(0, ROWS))  # not all: their differences cancel, since each stands there both ways
    alone = torch.cat([_values(loss, some.part(slice(pair, pair + 1))) for pair in range(ROWS)])
    if close(alone, _values(loss, some)):
        return Finding(what, True)
    return Finding(what, False, "it does, so the size of the micro-batches would change the result")


def _moved(pairs: _Pairs) -> _Pairs:
    """Return the pairs with another reference."""
    shift = torch.linspace(-0.5, 0.5, len(pairs.ref_logprobs), dtype=pairs.ref_logprobs.dtype)
    return _Pairs(pairs.chosen, pairs.rejected, pairs.logprobs, pairs.ref_logprobs + shift, pairs.lengths)


def _check_margin(loss: PairLoss, pairs: _Pairs) -> Finding:
    """Check the slope of each pair's margin M = r(y_w) - r(y_l) along descent on its two log-probabilities.

        slope = -(dL/dl_w dM/dl_w + dL/dl_l dM/dl_l),     l = log π(y)

    A pair without a slope has its margin already; one below 0 is trained the wrong way.
    """
    what = "a step raises the chosen side's implicit reward over the rejected side's"
    chosen, rejected = pairs.logprobs[pairs.chosen].detach(), pairs.logprobs[pairs.rejected].detach()
    leaf = torch.cat([chosen, rejected]).requires_grad_()
    own = torch.arange(len(chosen))
    free = _Pairs(
        own,
        own + len(own),
        leaf,
        torch.cat([pairs.ref_logprobs[pairs.chosen], pairs.ref_logprobs[pairs.rejected]]),
        torch.cat([pairs.lengths[pairs.chosen], pairs.lengths[pairs.rejected]]),
    )
    sides = free.sides()
    try:
        margins = _reward(loss, sides[0]) - _reward(loss, sides[1])
    except ConfigError as error:
        return Finding(what, False, str(error))
    if not margins.requires_grad:
        return Finding(what, False, "the implicit reward does not depend on the policy")
    (falls,) = torch.autograd.grad(_values(loss, free).sum(), leaf)
    (rises,) = torch.autograd.grad(margins.sum(), leaf)
    slopes = -(falls * rises).view(2, -1).sum(0)
    wrong, right = int((slopes < -ROUNDING).sum()), int((slopes > ROUNDING).sum())
    if wrong:
        return Finding(what, False, f"it lowers it for {wrong} of {len(own)} pairs: are the sides or the sign swapped?")
    if not right:
        return Finding(what, False, "it does for no pair: nothing would be learned")
    return Finding(what, True, "" if right == len(own) else f"for {right} of {len(own)} pairs; the others rest")


def _check_reference(loss: PairLoss, pairs: _Pairs) -> Finding:
    """Check `needs_reference` against what the loss reads."""
    reads = not close(_values(loss, _moved(pairs)), _values(loss, pairs))
    if loss.needs_reference:
        message = "" if reads else "it is not: needs_reference = False saves its memory and time"
        return Finding("the reference is read", True, message)
    what = "needs_reference is false, and no reference is read"
    return Finding(what, not reads, "it is, and is 0 in training: take logprobs for log_ratios" if reads else "")


def _check_direction(world: World, table: Tensor, values: Tensor, pairs: _Pairs) -> Finding:
    """Compare the expected gradient with the expected score's, over pairs that the policy itself has sampled."""
    scores = random_scores(world, 11)
    distribution = world.sequence_logprobs(table.log_softmax(-1))
    sampled = distribution.detach().exp().flatten()
    is_preferred = (scores.flatten()[pairs.chosen] - scores.flatten()[pairs.rejected]).sigmoid()
    weights = sampled[pairs.chosen] * sampled[pairs.rejected] * is_preferred
    (ours,) = torch.autograd.grad((values * weights).sum(), table, retain_graph=True)
    (exact,) = torch.autograd.grad(-expectation(distribution, scores), table)
    return compare_gradients("the expected gradient raises the score", ours, exact, least=LEAST_COSINE)
