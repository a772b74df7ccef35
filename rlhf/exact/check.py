"""Check a loss or an advantage against the gradient it stands for, by enumeration: no sampling, no tolerance for noise.

The policy gradient theorem (Sutton et al. 2000) gives the yardstick: at the policy that sampled, the expected gradient
of a right loss is the gradient of the expected score, and a right advantage makes it so, up to a bias that is reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as functional
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.advantages import token_rewards
from rlhf.algo.divergence import TeacherTokens
from rlhf.algo.functions import AdvantageFunction, LossFunction
from rlhf.algo.kl import Coefs
from rlhf.algo.policy_loss import importance_ratio, kl_old_new
from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.policy_loss import PolicyLoss, TokenLoss, Tokens
from rlhf.errors import ConfigError
from rlhf.exact.check_pairs import check_pair_loss
from rlhf.exact.findings import ROUNDING, CheckResult, Finding, close, compare_gradients, try_shape
from rlhf.exact.world import World, enumerate_world, expectation, random_scores, random_table
from rlhf.experience import checked_advantages
from rlhf.objective import checked_surrogate
from rlhf.section import Section
from rlhf.types import Rollout
from rlhf.user_code import checked_per_token

GROUP = 2  # completions of a prompt; all pairs are enumerated
Checked = Callable[..., Tensor] | Section | type[Section]
LEAST_COSINE = 0.9  # GRPO's division by the standard deviation, a known bias, has 0.96


def check(function: Checked, kind: Literal["loss", "advantage"] | None = None) -> CheckResult:
    """Check a loss or an advantage of your own.

        print(rlhf.check(my_loss))

    Args:
        function: a loss (rlhf.algo.functions.LossFunction) or an advantage (AdvantageFunction); or a section of a
            TokenLoss, a PairLoss or an Advantage, or such a class, which is checked with its defaults.
        kind: which of the two a function is; None tells by the names of its arguments.

    Raises:
        ConfigError: it is neither, by its class or its arguments; or a class cannot be made without settings.
    """
    section = _with_defaults(function) if isinstance(function, type) else function
    if not isinstance(section, Section):
        return _check_function(section, kind or _kind_of(section))
    if isinstance(section, PairLoss):
        return CheckResult("pair loss", tuple(check_pair_loss(section, enumerate_world())))
    if isinstance(section, Advantage):
        return _check_function(_advantage_function(section), "advantage")
    if not isinstance(section, PolicyLoss):
        raise ConfigError(f"{type(section).__name__} is no policy loss, no advantage and no loss over pairs")
    if isinstance(section, TokenLoss) and section.reads_teacher:
        return CheckResult("loss", tuple(_check_distillation(section, enumerate_world())))
    return _check_function(_loss_function(section), "loss")


def _check_function(function: Callable[..., Tensor], kind: Literal["loss", "advantage"]) -> CheckResult:
    world, checked = enumerate_world(), checked_per_token(function, f"the {kind}")
    findings = _check_loss(checked, world) if kind == "loss" else _check_advantage(checked, world)
    return CheckResult(kind, tuple(findings))


def _with_defaults(kind: type[object]) -> Section:
    if not issubclass(kind, Section):
        raise ConfigError(f"{kind.__name__} is neither a loss nor an advantage: its class is not derived from one")
    missing = [name for name, field in kind.model_fields.items() if field.is_required()]
    if missing:
        raise ConfigError(f"{kind.__name__} has no default for {', '.join(missing)}: give an instance")
    return kind()


def _loss_function(loss: PolicyLoss) -> LossFunction:
    """Return the loss as a function of log-probabilities, as training calls it at the first step's coefficients."""
    if not isinstance(loss, TokenLoss):
        raise ConfigError(f"policy_loss.type={loss.type} has no loss per token that could be checked")

    def function(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        tokens = Tokens(
            ratio=importance_ratio(logprobs, old_logprobs, mask, loss.ratio_level),
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            mask=mask,
            old_kl=kl_old_new(logprobs, old_logprobs, mask),
            coefs=Coefs(kl=0.0, penalty=loss.start_coef),
        )
        return checked_surrogate(loss, tokens).per_token

    return function


def _advantage_function(advantage: Advantage) -> AdvantageFunction:
    """Return the advantage as a function of rewards: of completions without a KL, with values and baselines of 0."""

    def function(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
        rows, zeros = len(rewards), torch.zeros_like(rewards)
        rollout = Rollout(
            prompt_ids=torch.zeros(rows, 1, dtype=torch.long),
            prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
            row_ids=torch.arange(rows),
            references=({},) * rows,
            completion_ids=torch.zeros_like(mask, dtype=torch.long),
            completion_mask=mask,
            sampler_logprobs=zeros,
            finished=torch.ones(rows, dtype=torch.bool),
            group_size=group_size,
            scores=rewards.sum(dim=1),
            baselines=zeros[:, 0],
            logprobs=zeros,
            ref_logprobs=zeros,
            values=zeros,
            hinted=torch.zeros(rows, dtype=torch.bool),
        )
        return checked_advantages(advantage, rollout, rewards)[0]

    return function


def _check_distillation(loss: TokenLoss, world: World) -> list[Finding]:
    """Check a loss that reads a teacher: its gradient, its minimum, and that no row depends on another."""
    teacher, rows = random_table(world, 13), world.all_rows()

    def per_token(logits: Tensor, rows: Tensor) -> Tensor:
        log_pi, mask = logits.log_softmax(-1), world.mask[rows % len(world.ids)]
        states, known = (world.per_token(table, rows)[mask] for table in (log_pi, teacher))
        columns = loss.against_teacher(states, TeacherTokens(logprobs=known))
        placed = columns.new_zeros(len(columns), *mask.shape).masked_scatter(
            mask.expand(len(columns), *mask.shape), columns
        )
        logprobs = world.token_logprobs(log_pi, rows)
        tokens = Tokens(
            ratio=torch.ones_like(logprobs),
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            advantages=torch.zeros_like(logprobs),
            mask=mask,
            old_kl=torch.zeros_like(logprobs),
            coefs=Coefs(kl=0.0, penalty=loss.start_coef),
            teacher=placed,
        )
        return torch.where(mask, checked_surrogate(loss, tokens).per_token, 0.0)

    table = random_table(world, 12).requires_grad_()
    shape, values = try_shape(lambda: per_token(table, rows))
    if values is None:
        return [shape]
    if not values.requires_grad:
        return [shape, Finding("the gradient reaches the policy", False, "the loss has no gradient")]
    what = "a row's loss does not depend on other rows"
    alone = torch.cat([per_token(table, rows[row : row + 1]) for row in range(len(rows))])
    at_teacher = teacher.clone().requires_grad_()
    least = per_token(at_teacher, rows)
    (slope,) = torch.autograd.grad(least.sum(), at_teacher)
    is_least = bool((values >= -ROUNDING).all()) and close(least, torch.zeros_like(least))
    return [
        shape,
        Finding("the gradient reaches the policy", True),
        Finding(what, close(alone, values), "" if close(alone, values) else "it does"),
        Finding(
            "it is a divergence: never negative, and 0 if the policy is the teacher",
            is_least,
            "" if is_least else "it is not: compare the teacher's probabilities of all tokens, the tail too",
        ),
        Finding("the teacher's policy is a stationary point", close(slope, torch.zeros_like(slope))),
    ]


def _kind_of(function: Callable[..., Tensor]) -> Literal["loss", "advantage"]:
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:  # no function, or a built-in one without a signature
        raise ConfigError(f"{function!r} is neither a loss nor an advantage: {error}") from error
    if "logprobs" in names:
        return "loss"
    if "rewards" in names:
        return "advantage"
    raise ConfigError(
        f"the function has the arguments {', '.join(sorted(names)) or 'none'}: a loss is called with logprobs, "
        "old_logprobs, advantages and mask, an advantage with rewards, mask and group_size"
    )


@dataclass(frozen=True)
class _Batch:
    """The inputs of a loss: every completion of every prompt once."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def rows(self, rows: Tensor | slice) -> _Batch:
        return _Batch(self.logprobs[rows], self.old_logprobs[rows], self.advantages[rows], self.mask[rows])

    def padded(self, columns: int) -> _Batch:
        """Return the batch with more padding: columns outside the mask, which are 0 as in training."""
        logprobs, old_logprobs, advantages, mask = (
            functional.pad(tensor, (0, columns))
            for tensor in (self.logprobs, self.old_logprobs, self.advantages, self.mask)
        )
        return _Batch(logprobs, old_logprobs, advantages, mask)


def _per_token(loss: LossFunction, batch: _Batch) -> Float[Tensor, "B T"]:
    """Compute a loss, and zero it outside the mask, like training."""
    result = loss(
        logprobs=batch.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
    )
    return torch.where(batch.mask, result, 0.0)


def _check_loss(loss: LossFunction, world: World) -> list[Finding]:
    scores, table = random_scores(world, 11), random_table(world, 12).requires_grad_()
    rows = world.all_rows()
    logprobs = world.token_logprobs(table.log_softmax(-1), rows)
    mask = world.mask[rows % len(world.ids)]
    advantages = torch.where(mask, scores.flatten()[rows][:, None], 0.0)
    batch = _Batch(logprobs, logprobs.detach(), advantages, mask)
    shape, per_token = try_shape(lambda: _per_token(loss, batch))
    if per_token is None:
        return [shape]
    if not per_token.requires_grad:
        return [
            shape,
            Finding("the gradient reaches the policy", False, "the loss has no gradient: is logprobs detached?"),
        ]
    return [
        shape,
        Finding("the gradient reaches the policy", True),
        _check_rows(loss, batch, per_token),
        _check_padding(loss, batch, per_token),
        _check_gradient(world, table, scores, per_token),
        _check_old(loss, batch, per_token),
    ]


def _check_rows(loss: LossFunction, batch: _Batch, per_token: Tensor) -> Finding:
    what = "a row's loss does not depend on other rows"
    alone = torch.cat([_per_token(loss, batch.rows(slice(row, row + 1))) for row in range(len(batch.mask))])
    if close(alone, per_token):
        return Finding(what, True)
    return Finding(
        what,
        False,
        "it does, so the size of the micro-batches would change the result: leave means over rows to "
        "policy_loss.aggregate, and put normalization into the advantage",
    )


def _check_padding(loss: LossFunction, batch: _Batch, per_token: Tensor) -> Finding:
    what = "padding has no influence"
    padded = _per_token(loss, batch.padded(2))[:, : per_token.shape[1]]
    if close(padded, per_token):
        return Finding(what, True)
    return Finding(
        what, False, "more padding changes the loss of live tokens: take means over the mask, not over columns"
    )


def _check_gradient(world: World, table: Tensor, scores: Tensor, per_token: Tensor) -> Finding:
    """Compare the expected gradient with the gradient of the expected score, at the policy that sampled."""
    what = "the expected gradient is the policy gradient"
    probabilities = world.sequence_logprobs(table.detach().log_softmax(-1)).exp().flatten() / world.prompts
    lengths = world.mask[world.all_rows() % len(world.ids)].sum(1)
    (exact,) = torch.autograd.grad(-expectation(world.sequence_logprobs(table.log_softmax(-1)), scores), table)

    def compare(per_row: Tensor) -> Finding:
        (ours,) = torch.autograd.grad((per_row * probabilities).sum(), table, retain_graph=True)
        return compare_gradients(what, ours, exact, least=1 - ROUNDING)

    summed, averaged = compare(per_token.sum(1)), compare(per_token.sum(1) / lengths)
    if averaged.passed and not summed.passed:  # the loss of every token is the loss of its sequence
        return Finding(what, True, "with policy_loss.aggregate=sequence_mean")
    return summed


def _check_old(loss: LossFunction, batch: _Batch, per_token: Tensor) -> Finding:
    """Check that old_logprobs is used: a loss without it is right for the first update on a batch only."""
    what = "later updates on the same completions are corrected"
    moved = _Batch(batch.logprobs, batch.old_logprobs - 0.1 * batch.mask, batch.advantages, batch.mask)
    other = _per_token(loss, moved)
    (before,) = torch.autograd.grad(per_token.sum(), batch.logprobs, retain_graph=True)
    (after,) = torch.autograd.grad(other.sum(), batch.logprobs, retain_graph=True)
    if close(before, after):
        return Finding(what, True, "they are not: old_logprobs is not used, so set batch.epochs=1 and minibatches=1")
    return Finding(what, True)


def _check_advantage(advantage: AdvantageFunction, world: World) -> list[Finding]:
    scores, table = random_scores(world, 11), random_table(world, 12)
    pairs = _all_pairs(world)
    mask = world.mask[pairs % len(world.ids)]
    rewards = token_rewards(scores.flatten()[pairs], torch.zeros_like(mask, dtype=torch.float64), mask)

    def call(token_rewards: Tensor, live: Tensor) -> Tensor:
        return torch.where(live, advantage(rewards=token_rewards, mask=live, group_size=GROUP), 0.0)

    shape, advantages = try_shape(lambda: call(rewards, mask))
    if advantages is None:
        return [_explain_ties(shape)]
    return [
        shape,
        _check_tied(call, rewards, mask),
        _check_order(call, rewards, mask, advantages),
        _check_direction(world, table, scores, pairs, advantages),
    ]


def _explain_ties(shape: Finding) -> Finding:
    """Add a likely cause to NaN: the enumerated pairs hold some of the same completion twice."""
    if "NaN" not in shape.message:
        return shape
    return Finding(shape.what, False, f"{shape.message}: is there a division by 0 if the scores of a group are equal?")


def _check_tied(call: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, mask: Tensor) -> Finding:
    what = "equal scores of a group give no advantage over each other"
    tied = token_rewards(torch.full_like(rewards[:, 0], 0.7), torch.zeros_like(rewards), mask)
    result = call(tied, mask)
    if not result.isfinite().all():
        return Finding(what, False, "NaN or infinity: add a small constant to the standard deviation")
    live = result[mask]
    if close(live, live[:1].expand_as(live)):
        return Finding(what, True)
    return Finding(what, False, "tokens of completions that score alike get different advantages")


def _check_order(
    call: Callable[[Tensor, Tensor], Tensor], rewards: Tensor, mask: Tensor, advantages: Tensor
) -> Finding:
    what = "the order of the prompts does not matter"
    generator = torch.Generator().manual_seed(3)
    groups = torch.randperm(len(rewards) // GROUP, generator=generator)
    rows = (groups[:, None] * GROUP + torch.arange(GROUP)).flatten()
    if close(call(rewards[rows], mask[rows]), advantages[rows]):
        return Finding(what, True)
    return Finding(
        what,
        False,
        "it does: rows of different prompts are mixed. The rows of a group are consecutive: view(-1, group_size)",
    )


def _check_direction(world: World, table: Tensor, scores: Tensor, pairs: Tensor, advantages: Tensor) -> Finding:
    """Compare the expected gradient over all groups, weighted by their probability, with the expected score's."""
    leaf = table.clone().requires_grad_()
    distribution = world.sequence_logprobs(leaf.log_softmax(-1))
    probabilities = (distribution.detach().exp().flatten()[pairs]).view(-1, GROUP).prod(1) / world.prompts
    surrogate = (advantages.detach() * world.token_logprobs(leaf.log_softmax(-1), pairs)).sum(1).view(-1, GROUP).mean(1)
    (ours,) = torch.autograd.grad(-(surrogate * probabilities).sum(), leaf, retain_graph=True)
    (exact,) = torch.autograd.grad(-expectation(distribution, scores), leaf)
    return compare_gradients("the expected gradient is the policy gradient", ours, exact, least=LEAST_COSINE)


def _all_pairs(world: World) -> Tensor:
    """Return the rows of all pairs of completions of a prompt, group after group."""
    count = len(world.ids)
    within = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    return torch.cat([prompt * count + within for prompt in range(world.prompts)]).flatten()
