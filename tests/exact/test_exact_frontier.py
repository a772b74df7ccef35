"""Every preset in the enumerated world: no arm is above the exact reward-KL frontier, and the best come up to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from exact_problem import ExactProblem, best_score, kl, make_rollout, model_outputs
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algo.selection import best_and_worst
from rlhf.algorithms.kto import Kto
from rlhf.algorithms.offline import Offline
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.online import Online
from rlhf.algorithms.presets import PRESETS
from rlhf.algorithms.sft import Sft
from rlhf.evaluation.frontier import exact_frontier, optimal_logprobs, score_at_kl
from rlhf.exact.world import EOS, enumerate_world, expectation, random_scores, random_table
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, divide_by_denominators
from rlhf.types import Rollout, Side

WORLD = enumerate_world()
PROBLEM = ExactProblem(world=WORLD, reference=random_table(WORLD, 10), scores=random_scores(WORLD, 11))
REFERENCE = WORLD.sequence_logprobs(PROBLEM.reference)
LENGTHS = WORLD.mask.sum(1).double().expand(WORLD.prompts, -1)
START = expectation(REFERENCE, PROBLEM.scores).item()

TAUGHT = ("distill", "distill_sft")  # they compare with a teacher's distribution, and this world has none
ONLINE = [name for name, parts in PRESETS.items() if "loss" not in parts["algorithm"] and name not in TAUGHT]
OFFLINE = [name for name, parts in PRESETS.items() if "loss" in parts["algorithm"] and name not in TAUGHT]
PROMPTS, GROUP = 32, 16
# Presets that are to arrive, and the KL coefficient at which: with the KL in the loss they have another optimum, which
# comes near the frontier if the coefficient is small (GRPO at 0.02; at 0.2 it ends 4 % below).
ARRIVE = {"ppo": 0.5, "rloo": 0.5, "grpo": 0.02}


def share_of_the_best(distribution: Tensor) -> float:
    """The gain in score as a share of the largest gain at the same KL: 1 on the frontier, never above."""
    nats = kl(distribution, REFERENCE).item()
    assert nats > 0.02  # it went somewhere
    best = best_score(REFERENCE, PROBLEM.scores, nats)
    return (expectation(distribution, PROBLEM.scores).item() - START) / (best - START)


def greedy_scores(table: Tensor) -> Tensor:
    """`[C]`: the score of each prompt's likeliest-token completion."""
    ends = {tuple(ids[mask].tolist()): n for n, (ids, mask) in enumerate(zip(WORLD.ids, WORLD.mask, strict=True))}
    scores = []
    for prompt in range(WORLD.prompts):
        tokens: tuple[int, ...] = ()
        while len(tokens) < WORLD.horizon and (not tokens or tokens[-1] != EOS):
            tokens = (*tokens, int(table[prompt, WORLD.prefixes.index(tokens)].argmax()))
        scores.append(PROBLEM.scores[prompt, ends[tokens]])
    return torch.stack(scores)


def drawn(old: Tensor, critic: Tensor, generator: torch.Generator) -> tuple[Tensor, Rollout]:
    """Rows in groups of GROUP, as the frozen models annotate them, with the greedy completion's score beside."""
    prompts = torch.arange(PROMPTS) % WORLD.prompts
    picks = torch.multinomial(WORLD.sequence_logprobs(old).exp()[prompts], GROUP, replacement=True, generator=generator)
    rows = (prompts[:, None] * len(WORLD.ids) + picks).flatten()
    frozen = {"old": old, "reference": PROBLEM.reference, "scores": PROBLEM.scores}
    rollout = make_rollout(WORLD, rows, **frozen, values=critic.detach(), group_size=GROUP)
    return rows, replace(rollout, baselines=greedy_scores(old)[WORLD.row_prompts(rows)])


def online_loss(
    algorithm: Online, coefs: Coefs, rows: Tensor, rollout: Rollout, table: Tensor, critic: Tensor
) -> Tensor:
    """The loss of one step on all of its rows: pairs by the pair loss, tokens by the objective."""
    if algorithm.policy_loss.pair_loss is not None:
        sides = [
            Side(
                logprobs=WORLD.token_logprobs(table, rows[part]).sum(1),
                ref_logprobs=rollout.ref_logprobs[part].sum(1),
                lengths=rollout.completion_mask[part].sum(1).double(),
            )
            for part in best_and_worst(rollout.scores, GROUP)
        ]
        return algorithm.policy_loss.loss.per_pair(*sides).mean()
    batch = compute_advantages(rollout, algorithm, coefs)
    objective = Objective(algorithm, max_tokens=WORLD.horizon)
    terms, _ = objective.loss(batch, model_outputs(WORLD, rows, table, critic), coefs)
    return sum(divide_by_denominators(terms, objective.denominators(batch)).values(), start=torch.zeros(()))


def learned_online(algorithm: Online, *, kl_coef: float, steps: int) -> Tensor:
    """The distribution after `steps` steps of sampling, credit and one update each."""
    generator = torch.Generator().manual_seed(0)
    logits = PROBLEM.reference.clone().requires_grad_()
    critic = torch.zeros(WORLD.prompts, len(WORLD.prefixes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.08}, {"params": [critic], "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    for _ in range(steps):
        old = logits.detach().log_softmax(-1)
        rows, rollout = drawn(old, critic, generator)
        optimizer.zero_grad()
        coefs = Coefs(kl=kl_coef, penalty=0.1)
        online_loss(algorithm, coefs, rows, rollout, logits.log_softmax(-1), critic).backward()
        optimizer.step()
        schedule.step()
    return WORLD.sequence_logprobs(logits.detach().log_softmax(-1))


def population_loss(algorithm: Offline, table: Tensor) -> Tensor:
    """The expected loss over all pairs of completions of a prompt, alike often, labelled by Bradley and Terry."""
    logprobs = WORLD.sequence_logprobs(table)
    wins = torch.sigmoid(PROBLEM.scores[:, :, None] - PROBLEM.scores[:, None, :])
    match algorithm.loss:
        case Sft():
            return -(wins.mean(2) * logprobs).sum(1).mean()  # on the chosen sides
        case Kto() as how:
            ratios = (logprobs - REFERENCE).flatten()
            baselines = how.baseline(ratios).expand(ratios.numel())
            losses = [how.per_completion(ratios, torch.full_like(ratios, label).bool(), baselines) for label in (1, 0)]
            good = wins.mean(2).flatten()
            return (good * losses[0] + (1 - good) * losses[1]).mean()
        case PairLoss() as how:
            count = logprobs.shape[1]
            sides = [
                Side(**{name: value.unsqueeze(3 - dim).expand(-1, count, count).flatten() for name, value in numbers})
                for dim, numbers in ((1, numbers_of(logprobs)), (2, numbers_of(logprobs)))
            ]
            return (wins.flatten() * how.per_pair(*sides)).mean()


def numbers_of(logprobs: Tensor) -> list[tuple[str, Tensor]]:
    return [("logprobs", logprobs), ("ref_logprobs", REFERENCE), ("lengths", LENGTHS)]


def learned_offline(algorithm: Offline) -> Tensor:
    """The distribution after 150 steps on the whole population."""
    logits = PROBLEM.reference.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        population_loss(algorithm, logits.log_softmax(-1)).backward()
        optimizer.step()
    return WORLD.sequence_logprobs(logits.detach().log_softmax(-1))


@pytest.mark.parametrize("preset", ONLINE)
def test_online_arms_are_on_or_below_the_frontier_and_the_best_come_within_two_percent(preset: str) -> None:
    algorithm = Online.model_validate(PRESETS[preset]["algorithm"])
    arrives = preset in ARRIVE
    table = learned_online(algorithm, kl_coef=ARRIVE.get(preset, algorithm.kl.coef), steps=120 if arrives else 30)
    share = share_of_the_best(table)
    assert share <= 1 + 1e-9
    assert share >= (0.98 if arrives else 0.5)


@pytest.mark.parametrize("preset", OFFLINE)
def test_offline_arms_are_on_or_below_the_frontier_and_dpo_is_on_it(preset: str) -> None:
    """Losses that imitate (SFT, SLiC, ORPO) or weigh by length (SimPO, IPO per token) end elsewhere, but not above."""
    share = share_of_the_best(learned_offline(Offline.model_validate(PRESETS[preset]["algorithm"])))
    assert share <= 1 + 1e-9
    assert share >= (0.99 if preset in ("dpo", "ipo") else 0.3)


def test_the_curve_is_the_frontier() -> None:
    """Against the world's own bisection; from the reference it rises, concave, to the highest score."""
    points = exact_frontier(REFERENCE, PROBLEM.scores)
    assert points[0] == (0.0, pytest.approx(START))
    for nats, score in points[1:]:
        assert best_score(REFERENCE, PROBLEM.scores, nats) == pytest.approx(score, abs=1e-9)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points) if b[0] - a[0] > 1e-6]
    assert min(slopes) > 0
    assert slopes == sorted(slopes, reverse=True)
    assert points[-1][1] == pytest.approx(PROBLEM.scores.amax(1).mean().item(), abs=1e-3)
    half = points[-1][0] / 2
    between = score_at_kl(points, half)
    assert between is not None
    assert 0 <= best_score(REFERENCE, PROBLEM.scores, half) - between < 0.01  # dense enough to be drawn


def test_by_hand_and_where_a_completion_is_impossible() -> None:
    reference = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    scores = torch.tensor([[0.0, 1.0, 9.0]], dtype=torch.float64)
    optimal = optimal_logprobs(reference, scores, beta=0.5).exp()
    odds = torch.tensor([1.0, 7.38905609893065, 0.0], dtype=torch.float64)
    torch.testing.assert_close(optimal, (odds / odds.sum())[None])
    points = exact_frontier(reference, scores)
    assert points[0] == (0.0, 0.5)
    assert points[-1] == (pytest.approx(0.6931472), pytest.approx(1.0))  # log 2 nats, and never the 9
