"""Statistics and losses of episodes count the tokens of actions alone: by hand, on rows with observations."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from test_episodes import tree

from rlhf.algo.kl import Coefs
from rlhf.algo.selection import best_and_worst
from rlhf.algorithms.online import Online
from rlhf.evaluation.evaluate import evaluate_policy
from rlhf.experience import compute_advantages
from rlhf.training.annotate import annotate
from rlhf.training.collect import sample_and_score
from rlhf.training.offline import PairwiseLoss, stack_sides
from rlhf.types import Experience, Rollout, SampledPairs, StopReason

NO_KL = {"placement": "none", "coef": 0.0}
NOTHING = Coefs(kl=0.0, penalty=0.0)


def two_turns(actions: list[list[int]], rewards: list[list[float]], values: list[list[float]]) -> Rollout:
    """Rows of two turns, which are separated by observations; a column after the last action is padding."""
    acts = torch.tensor(actions, dtype=torch.bool)
    places = torch.arange(acts.shape[1])
    last = torch.where(acts, places, -1).amax(dim=1, keepdim=True)
    gap = (~acts & (places < last)).int().argmax(dim=1, keepdim=True)
    zeros, paid = torch.zeros(acts.shape), torch.tensor(rewards)
    return Rollout(
        prompt_ids=torch.ones(len(acts), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(acts), 1, dtype=torch.bool),
        row_ids=torch.arange(len(acts)),
        references=tuple({} for _ in acts),
        completion_ids=torch.ones(acts.shape, dtype=torch.long),
        completion_mask=places <= last,
        sampler_logprobs=zeros,
        finished=torch.ones(len(acts), dtype=torch.bool),
        group_size=1,
        episode_actions=acts,
        episode_turns=torch.where(acts, (places > gap).long(), -1),
        episode_rewards=paid,
        episode_stops=torch.full((len(acts),), int(StopReason.TERMINATED)),
        scores=paid.sum(dim=1),
        baselines=torch.zeros(len(acts)),
        logprobs=zeros,
        ref_logprobs=zeros,
        values=torch.tensor(values),
        hinted=torch.zeros(len(acts), dtype=torch.bool),
    )


def two_games() -> Rollout:
    """Without a critic the actions have the returns 5 and 3, and 1 and -1: mean 2, variance 5."""
    rewards = [[2.0, 0.0, 0.0, 3.0], [2.0, 0.0, -1.0, 0.0]]
    values = [[0.0, 9.0, 9.0, 0.0], [0.0, 9.0, 0.0, 0.0]]  # what a critic gives observations does not count
    return two_turns([[1, 0, 0, 1], [1, 0, 1, 0]], rewards, values)


WHITENED = torch.tensor([[3.0, 0.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 0.0]]) / sqrt(5)


def online(advantage: dict[str, Any]) -> Online:
    critic = {"value_loss": {"clip_eps": None}} if advantage["type"] == "gae" else {}
    return Online.model_validate({"advantage": advantage, "policy_loss": {"type": "clip"}, "kl": NO_KL, **critic})


@pytest.mark.parametrize("kind", ["gae", "batch_whiten"])
def test_advantages_are_whitened_over_actions(kind: str) -> None:
    experience = compute_advantages(two_games(), online({"type": kind}), NOTHING)
    torch.testing.assert_close(experience.advantages, WHITENED)


def test_advantages_of_stale_samples_are_whitened_over_actions() -> None:
    experience = compute_advantages(two_games(), online({"type": "gae"}), NOTHING, ratio_cap=1.0, trace_cap=1.0)
    torch.testing.assert_close(experience.advantages, WHITENED)


def test_a_minibatch_is_whitened_over_actions() -> None:
    algorithm = online({"type": "gae", "whiten_over": "minibatch"})
    experience = compute_advantages(two_games(), algorithm, NOTHING)
    assert experience.advantages.tolist() == [[5, 0, 0, 3], [1, 0, -1, 0]]
    torch.testing.assert_close(algorithm.advantage.of_minibatch(experience).advantages, WHITENED)


@pytest.mark.parametrize("caps", [{}, {"ratio_cap": 1.0, "trace_cap": 1.0}])
def test_rewards_are_whitened_over_actions(caps: dict[str, float]) -> None:
    """The rewards 2, 3, 2 and -1 have the mean 1.5 and the deviation 1.5: 11/6, 15/6, 11/6 and -1/6."""
    algorithm = online({"type": "gae", "whiten": False, "whiten_rewards": True})
    experience = compute_advantages(two_games(), algorithm, NOTHING, **caps)
    torch.testing.assert_close(experience.advantages, torch.tensor([[26.0, 0, 0, 15], [10, 0, -1, 0]]) / 6)


def test_ppo_discounts_between_tokens_and_turns_as_configured() -> None:
    """Two tokens, an observation and a token, rewards 2 and 4, a critic that is wrong; gamma 1/2, lambda 1/2 and 1.

    From the end: 4 - 1 = 3;  2 + 1/2 - 1/4 + 1/2 * 1 * 3 = 3.75;  1/8 - 1/2 + 1/2 * 1/2 * 3.75 = 0.5625.
    """
    game = two_turns([[1, 1, 0, 1]], [[0.0, 2.0, 0.0, 4.0]], [[0.5, 0.25, 9.0, 1.0]])
    settings = {"type": "gae", "gamma": 0.5, "gae_lambda": 0.5, "turn_lambda": 1.0, "whiten": False}
    experience = compute_advantages(game, online(settings), NOTHING)
    assert experience.advantages.tolist() == [[0.5625, 3.75, 0.0, 3.0]]
    assert experience.returns.tolist() == [[1.0625, 4.0, 0.0, 4.0]]


def test_reinforce_discounts_no_observation() -> None:
    """From the end: 4;  2 + 4/2 = 4;  4/2 = 2."""
    game = two_turns([[1, 1, 0, 1]], [[0.0, 2.0, 0.0, 4.0]], [[0.0] * 4])
    experience = compute_advantages(game, online({"type": "batch_whiten", "gamma": 0.5, "whiten": False}), NOTHING)
    assert experience.advantages.tolist() == [[2.0, 4.0, 0.0, 4.0]]


def played(folder: Path, *overrides: str, preset: str = "ppo") -> tuple[Any, Experience]:
    """Play a step of a tiny policy that has moved away from its reference."""
    settings = tree(folder)
    settings["algorithm"] = {"preset": preset}
    settings["sampling"] = {"max_new_tokens": 6, "completions_per_prompt": 2}
    run = runs.online(settings, "checkpoint.every=0", *overrides)
    generator = torch.Generator().manual_seed(0)
    for parameter in run.models.policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    collected = sample_and_score(run, 1)
    assert collected is not None
    return run, compute_advantages(annotate(run, collected), run.algorithm, run.coefs)


def test_no_pair_learns_what_the_environment_wrote(tmp_path: Path) -> None:
    run, experience = played(tmp_path, preset="online_dpo")
    pairs = run.algorithm.advantage.select(experience, drops_rows=False)
    assert isinstance(pairs, SampledPairs)
    best, worst = best_and_worst(experience.scores, 2)
    actions = experience.action_mask[torch.cat([best, worst])]
    live = experience.completion_mask[torch.cat([best, worst])]
    assert (live & ~actions).any()
    logprobs = torch.randn(actions.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    terms, _ = PairwiseLoss(run.models, run.algorithm.policy_loss.pair_loss).compare(
        pairs, stack_sides(pairs), logprobs
    )
    sum(terms.values()).backward()  # type: ignore[union-attr]
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad != 0, actions)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_in_the_loss_is_of_actions(tmp_path: Path, estimator: str) -> None:
    """With advantages of zero the penalty is the whole loss; also of a reference that has a value at each token."""
    kl = ("algorithm.kl.placement=loss", f"algorithm.kl.estimator={estimator}", "algorithm.kl.coef=0.5")
    run, experience = played(tmp_path, *kl)
    micro = replace(
        experience,
        advantages=torch.zeros_like(experience.advantages),
        ref_logprobs=torch.where(experience.completion_mask, experience.ref_logprobs - 0.3, 0.0),
    )
    outputs = run.models.outputs(micro)
    logprobs = outputs.logprobs.detach().requires_grad_()
    terms, metrics = run.objective.policy_term(micro, logprobs, outputs.entropy.detach(), run.coefs)
    terms["policy"].backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad != 0, experience.action_mask)
    assert metrics["loss/kl"].weight == experience.action_mask.sum()


def test_the_kl_of_an_evaluation_is_of_actions(tmp_path: Path) -> None:
    """Against the log-probabilities and the KL of all positions, of which those of actions are summed here."""
    run, _ = played(tmp_path)
    judge = run.reward
    evaluation = evaluate_policy(
        [run.prompts(1)], run.sampler, run.models, judge, proxy=None, key=5, greedy=False, rows_per_pass=16
    )
    rows = evaluation.rollout
    whole = run.models.compare_to_reference(rows)
    actions, observed = rows.action_mask, rows.completion_mask & ~rows.action_mask
    assert whole.kl[observed].min() > 0
    assert (whole.logprobs - whole.ref_logprobs)[observed].abs().min() > 0
    exact = torch.where(actions, whole.kl, 0.0).sum(dim=1)
    sampled = torch.where(actions, whole.logprobs - whole.ref_logprobs, 0.0).sum(dim=1)
    torch.testing.assert_close(evaluation.exact_kl.float(), exact.float())
    assert evaluation.metrics["eval/kl_exact"] == pytest.approx(float(exact.mean()), rel=1e-4)
    assert evaluation.metrics["eval/kl"] == pytest.approx(float(sampled.mean()), rel=1e-4)
    assert evaluation.metrics["eval/entropy"] == pytest.approx(-float(whole.logprobs[actions].mean()), rel=1e-4)
