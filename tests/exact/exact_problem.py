"""Exact results in a world that can be enumerated: optima, frontiers, values, expected losses.

How an expectation passes through `rlhf.objective`: the loss is a sum over rows, so E[loss] is the sum over
all completions of probability x (that row's loss). All completions are the rows of one `Experience`, and
`weigh_gradient` multiplies the gradient of each row by that row's probability: one call of `Objective.loss`
gives the exact gradient of the expectation over completions drawn from the *old* policy. `sequence_*` and `constant`
aggregates have the number of completions as their norm, so that this is the expected loss of a minibatch of any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.batching import extend
from rlhf.exact.world import World, expectation
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, Outputs
from rlhf.types import Completions, Experience, Rollout


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Compute KL(first || second) in nats per sequence, the mean over prompts."""
    return expectation(first, first - second)


def objective_value(distribution: Tensor, reference: Tensor, scores: Tensor, beta: float) -> Tensor:
    """Compute E[score] - beta * KL(distribution || reference)."""
    return expectation(distribution, scores) - beta * kl(distribution, reference)


def optimum(reference: Tensor, scores: Tensor, beta: float) -> Tensor:
    """Return the distribution that maximizes objective_value: reference * exp(score / beta), normalized per prompt."""
    return (reference + scores / beta).log_softmax(1)


def best_value(reference: Tensor, scores: Tensor, beta: float) -> Tensor:
    """Compute objective_value of the optimum: the mean over prompts of beta * log E_reference[exp(score / beta)]."""
    return beta * (reference + scores / beta).logsumexp(1).mean()


def state_logprobs(world: World, table: Tensor) -> Tensor:
    """Return the log-probability `[C, S]` that a state is visited."""
    states = [torch.zeros(world.prompts, dtype=table.dtype)]
    index = {prefix: state for state, prefix in enumerate(world.prefixes)}
    for prefix in world.prefixes[1:]:  # the shorter come first
        before = index[prefix[:-1]]
        states.append(states[before] + table[:, before, prefix[-1]])
    return torch.stack(states, dim=1)


def table_of(world: World, distribution: Tensor) -> Tensor:
    """Return the table whose distribution is this one: conditionals of sums over the continuations of a prefix."""
    mass = torch.zeros(world.prompts, len(world.prefixes), world.vocabulary, dtype=distribution.dtype)
    for completion, (ids, mask, states) in enumerate(zip(world.ids, world.mask, world.states, strict=True)):
        mass[:, states[mask], ids[mask]] += distribution[:, completion, None].exp()
    return (mass / mass.sum(-1, keepdim=True)).log()


def frontier(reference: Tensor, scores: Tensor, betas: list[float]) -> list[tuple[float, float]]:
    """Compute (KL, score) of the optimum at each beta: no distribution has a higher score at that KL."""
    points = []
    for beta in betas:
        best = optimum(reference, scores, beta)
        points.append((kl(best, reference).item(), expectation(best, scores).item()))
    return points


def best_score(reference: Tensor, scores: Tensor, kl_budget: float) -> float:
    """Find the highest E[score] within `kl_budget` nats of the reference, by bisection on log beta."""
    low, high = -12.0, 12.0
    for _ in range(80):
        middle = (low + high) / 2
        spent = frontier(reference, scores, [2.0**middle])[0][0]
        low, high = (middle, high) if spent > kl_budget else (low, middle)
    return frontier(reference, scores, [2.0**high])[0][1]


# State values


def state_values(world: World, table: Tensor, rewards: Tensor) -> Tensor:
    """Compute V `[C, S]`: the expected undiscounted rest of the token rewards `[C * N, T]` from each state on."""
    return _averages(world, table, rewards)[0]


def action_values(world: World, table: Tensor, rewards: Tensor) -> Tensor:
    """Compute Q `[C, S, V]`: the same after a given next token."""
    return _averages(world, table, rewards)[1]


def _averages(world: World, table: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Average over completions through a state (and token), weighted by their probability."""
    to_go = rewards.flip(1).cumsum(1).flip(1).view(world.prompts, len(world.ids), -1)
    weights = world.sequence_logprobs(table).exp()
    total = torch.zeros(2, world.prompts, len(world.prefixes), world.vocabulary, dtype=table.dtype)
    for n, (ids, mask, states) in enumerate(zip(world.ids, world.mask, world.states, strict=True)):
        total[0][:, states[mask], ids[mask]] += weights[:, n, None] * to_go[:, n, mask]
        total[1][:, states[mask], ids[mask]] += weights[:, n, None]
    by_state = total.sum(-1)
    return by_state[0] / by_state[1], total[0] / total[1]


# Through the library


def make_rollout(
    world: World,
    rows: Tensor,
    *,
    old: Tensor,
    reference: Tensor,
    scores: Tensor,
    values: Tensor | None = None,
    group_size: int = 1,
) -> Rollout:
    """Annotate rows as the frozen models would; `values` is V `[C, S]`, zero without."""
    which, prompts = rows % len(world.ids), world.row_prompts(rows)
    logprobs = world.token_logprobs(old, rows).detach()
    mask = world.mask[which]
    values = torch.zeros(world.prompts, len(world.prefixes), dtype=old.dtype) if values is None else values
    completions = Completions(
        prompt_ids=torch.stack([torch.zeros_like(prompts), 1 + prompts % (world.vocabulary - 1)], dim=1),
        prompt_mask=torch.tensor([[False, True]]).expand(len(rows), 2),
        row_ids=torch.arange(len(rows)),
        references=tuple({"prompt": prompt} for prompt in prompts.tolist()),
        completion_ids=world.ids[which],
        completion_mask=mask,
        sampler_logprobs=logprobs,
        finished=world.finished[which],
        group_size=group_size,
    )
    return extend(
        Rollout,
        completions,
        scores=scores.flatten()[rows],
        baselines=torch.zeros_like(logprobs[:, 0]),
        logprobs=logprobs,
        ref_logprobs=world.token_logprobs(reference, rows),
        values=torch.where(mask, world.per_token(values, rows), 0.0).detach(),
        hinted=torch.zeros_like(completions.finished),
    )


def weigh_gradient(tensor: Tensor, weights: Tensor) -> Tensor:
    """Return the tensor itself; the gradient of row i is multiplied by weights[i]."""
    fixed = tensor.detach()
    return fixed + weights[:, None] * (tensor - fixed)


def model_outputs(
    world: World, rows: Tensor, table: Tensor, values: Tensor | None, weights: Tensor | None = None
) -> Outputs:
    """Compute the outputs of trained models with this table and these values `[C, S]`, gradients weighted by row."""
    mask = world.mask[rows % len(world.ids)]
    entropies = -(table.exp() * table).sum(-1)
    outputs = [world.token_logprobs(table, rows), torch.where(mask, world.per_token(entropies, rows), 0.0)]
    outputs.append(
        torch.zeros_like(outputs[0]) if values is None else torch.where(mask, world.per_token(values, rows), 0.0)
    )
    if weights is not None:
        outputs = [weigh_gradient(tensor, weights) for tensor in outputs]
    return Outputs(logprobs=outputs[0], entropy=outputs[1], values=outputs[2])


@dataclass(frozen=True, kw_only=True)
class ExactProblem:
    """A learning problem: the world, the policy's start, and its rewards."""

    world: World
    reference: Tensor  # [C, S, V]
    scores: Tensor  # [C, N]

    def experience(
        self, algorithm: Online, coefs: Coefs, old: Tensor, *, values: Tensor | None = None, rows: Tensor | None = None
    ) -> Experience:
        """Compute the advantages of `rows`, all completions by default; whitening would not be weighted."""
        rows = self.world.all_rows() if rows is None else rows
        rollout = make_rollout(
            self.world, rows, old=old.detach(), reference=self.reference, scores=self.scores, values=values
        )
        return compute_advantages(rollout, algorithm, coefs)

    def exact_values(self, algorithm: Online, coefs: Coefs, table: Tensor) -> Tensor:
        """Compute V `[C, S]` of the policy for the token rewards that this algorithm gives it."""
        table = table.detach()
        return state_values(self.world, table, self.experience(algorithm, coefs, table).rewards)

    def expected_terms(
        self, algorithm: Online, coefs: Coefs, *, old: Tensor, new: Tensor, values: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute terms with the gradient (not the value) of their expectation over completions from `old`."""
        rows = self.world.all_rows()
        batch = self.experience(algorithm, coefs, old, values=values)
        weights = self.world.sequence_logprobs(old.detach()).exp().flatten() / self.world.prompts
        objective = Objective(algorithm, max_tokens=self.world.horizon)
        return objective.loss(batch, model_outputs(self.world, rows, new, values, weights), coefs)[0]
