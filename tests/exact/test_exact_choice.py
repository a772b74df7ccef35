"""The expected gradients of online DPO and of rejection sampling, over all pairs of completions that could be drawn."""

from __future__ import annotations

import pytest
import torch
from exact_problem import make_rollout, model_outputs
from test_exact_gradients import COEFS, PROBLEM, REFERENCE, WORLD, Table, differ, same_gradient
from torch import Tensor

from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.hinge import Hinge
from rlhf.algorithms.ipo import Ipo
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.online import Online
from rlhf.algorithms.online_dpo import BestAndWorst, OnlinePairLoss
from rlhf.algorithms.reinforce import PolicyGradientLoss
from rlhf.algorithms.rejection_sampling import Best
from rlhf.algorithms.robust_dpo import RobustDpo
from rlhf.exact.world import random_table
from rlhf.experience import compute_advantages, select_training_rows
from rlhf.objective import Objective
from rlhf.types import Experience, SampledPairs, Side

N = len(WORLD.ids)
# Scores with ties: some pairs cannot be ranked.
COARSE = PROBLEM.scores.round()
LOSSES: list[PairLoss] = [
    Dpo(beta=0.4),
    Dpo(beta=0.4, label_smoothing=0.2),
    RobustDpo(beta=0.4),
    Ipo(beta=0.4),
    Hinge(beta=0.4, margin=0.3),
]


def drawn(algorithm: Online, old: Tensor, scores: Tensor) -> tuple[Experience, Tensor, Tensor]:
    """Every ordered pair of completions of every prompt as a group of two; their rows, and each pair's probability."""
    pairs = torch.cartesian_prod(torch.arange(N), torch.arange(N))
    rows = torch.cat([c * N + pairs for c in range(WORLD.prompts)]).flatten()
    single = WORLD.sequence_logprobs(old.detach())
    joint = (single[:, :, None] + single[:, None, :]).exp().flatten() / WORLD.prompts
    rollout = make_rollout(WORLD, rows, old=old, reference=PROBLEM.reference, scores=scores, group_size=2)
    return compute_advantages(rollout, algorithm, COEFS), rows, joint


def row_of(ids: Tensor, mask: Tensor, prompt_ids: Tensor) -> Tensor:
    """The world's row of each completion."""
    index = {tuple(ids[mask].tolist()): n for n, (ids, mask) in enumerate(zip(WORLD.ids, WORLD.mask, strict=True))}
    which = [index[tuple(i[m].tolist())] for i, m in zip(ids, mask, strict=True)]
    return torch.tensor(which) + N * (prompt_ids[:, 1] - 1)


def pair_term(config: PairLoss, *, old: Tensor, new: Tensor, scores: Tensor = COARSE) -> Tensor:
    """Online DPO's loss, expected over the two completions that `old` draws of a prompt."""
    algorithm = Online(advantage=BestAndWorst(), policy_loss=OnlinePairLoss())
    batch, _, joint = drawn(algorithm, old, scores)
    pairs = select_training_rows(batch, algorithm)
    assert isinstance(pairs, SampledPairs)
    groups = batch.scores.view(-1, 2)
    weights = joint[groups[:, 0] != groups[:, 1]]
    assert len(weights) == len(pairs)
    assert 0.1 < float(weights.sum()) < 0.95  # there are ties, and pairs

    def side(ids: Tensor, mask: Tensor, references: Tensor) -> Side:
        logprobs = WORLD.token_logprobs(new, row_of(ids, mask, pairs.prompt_ids)).sum(1)
        return Side(logprobs=logprobs, ref_logprobs=references, lengths=mask.sum(1).double())

    chosen = side(pairs.chosen_ids, pairs.chosen_mask, pairs.chosen_ref_logprobs)
    rejected = side(pairs.rejected_ids, pairs.rejected_mask, pairs.rejected_ref_logprobs)
    return (weights * config.per_pair(chosen, rejected)).sum()


def as_defined(config: PairLoss, *, old: Tensor, new: Tensor) -> Tensor:
    """The same by its definition: over all (winner, loser), each met in either order."""
    probability = WORLD.sequence_logprobs(old.detach()).exp()
    h, lengths = WORLD.sequence_logprobs(new) - REFERENCE, WORLD.mask.sum(1).double()
    total = torch.zeros((), dtype=torch.float64)
    for c in range(WORLD.prompts):
        for winner in range(N):
            for loser in range(N):
                if COARSE[c, winner] > COARSE[c, loser]:
                    sides = [
                        Side(logprobs=h[c, n : n + 1], ref_logprobs=torch.zeros(1), lengths=lengths[n : n + 1])
                        for n in (winner, loser)
                    ]
                    weight = 2 * probability[c, winner] * probability[c, loser] / WORLD.prompts
                    total = total + weight * config.per_pair(*sides).sum()
    return total


def win_rate(old: Tensor, new: Tensor) -> Tensor:
    """P(a completion of `new` scores above one of `old`), a tie counting half."""
    wins = (COARSE[:, :, None] > COARSE[:, None, :]).double() + 0.5 * (COARSE[:, :, None] == COARSE[:, None, :])
    against = (wins * WORLD.sequence_logprobs(old.detach()).exp()[:, None, :]).sum(2)
    return (WORLD.sequence_logprobs(new).exp() * against).sum(1).mean()


@pytest.fixture
def policy() -> Table:
    return Table(WORLD)


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: f"{config.type}-{getattr(config, 'label_smoothing', 0)}")
def test_online_dpo_is_the_expected_offline_loss_on_ranked_pairs(policy: Table, config: PairLoss) -> None:
    for old in (policy(), random_table(WORLD, 13)):
        ours, exact = pair_term(config, old=old, new=policy()), as_defined(config, old=old, new=policy())
        torch.testing.assert_close(ours, exact)
        same_gradient(policy, ours, exact)


def test_online_dpo_starts_by_climbing_the_win_rate_against_itself() -> None:
    """At the reference every pair pulls alike, and the sum of the pulls is 2 beta grad P(win)."""
    policy = Table(WORLD)
    with torch.no_grad():
        policy.logits.copy_(PROBLEM.reference)
    table = policy()
    ours = pair_term(Dpo(beta=0.4), old=table, new=table)
    same_gradient(policy, ours, win_rate(table, table), scale=-2 * 0.4)
    expected_score = (WORLD.sequence_logprobs(table).exp() * COARSE).sum(1).mean()
    differ(policy, -ours, 2 * 0.4 * expected_score)  # it is not the score that is climbed


def rejection_term(*, old: Tensor, new: Tensor, min_score: float | None = None) -> Tensor:
    """Rejection sampling's loss, expected over the two completions that `old` draws of a prompt."""
    imitation = PolicyGradientLoss(aggregate="sequence_sum")
    algorithm = Online(advantage=Best(min_score=min_score), policy_loss=imitation)
    batch, rows, joint = drawn(algorithm, old, COARSE)
    learned = select_training_rows(batch, algorithm)
    assert isinstance(learned, Experience)
    chosen = batch.loss_mask.any(1)
    weights = joint.repeat_interleave(2)[chosen]
    outputs = model_outputs(WORLD, rows[chosen], new, None, weights)
    return Objective(algorithm, max_tokens=3).loss(learned, outputs, COEFS)[0]["policy"]


def test_rejection_sampling_imitates_the_distribution_of_the_best_of_two(policy: Table) -> None:
    """q(y) = p(y) (2 P(a rival scores below y) + P(it ties)), and the loss is the cross-entropy of q."""
    for old in (policy(), random_table(WORLD, 13)):
        p = WORLD.sequence_logprobs(old.detach()).exp()
        below = ((COARSE[:, :, None] > COARSE[:, None, :]).double() * p[:, None, :]).sum(2)
        ties = ((COARSE[:, :, None] == COARSE[:, None, :]).double() * p[:, None, :]).sum(2)
        best_of_two = p * (2 * below + ties)
        torch.testing.assert_close(best_of_two.sum(1), torch.ones(2, dtype=torch.float64))
        for threshold in (None, 1.0):
            kept = best_of_two if threshold is None else best_of_two * COARSE.ge(threshold)
            exact = -(kept * WORLD.sequence_logprobs(policy())).sum(1).mean()
            same_gradient(policy, rejection_term(old=old, new=policy(), min_score=threshold), exact)


def test_the_first_steps_of_both_point_the_same_way() -> None:
    """At the reference, online DPO's gradient is beta times the best of two's: both climb the win rate."""
    policy = Table(WORLD)
    with torch.no_grad():
        policy.logits.copy_(PROBLEM.reference)
    table = policy()
    same_gradient(policy, rejection_term(old=table, new=table), win_rate(table, table), scale=-2.0)
    pairs = pair_term(Dpo(beta=0.4), old=table, new=table)
    same_gradient(policy, pairs, rejection_term(old=table, new=table), scale=0.4)
