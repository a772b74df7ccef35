"""Scores on the scale of all scores of the run so far (reward.shaping.normalize)."""

from __future__ import annotations

from dataclasses import asdict, replace

from rlhf.algo.moments import Moments
from rlhf.rewards.cost import REWARD
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import Collected, reward_of
from rlhf.types import Scores


def normalize_scores(run: OnlineRun, collected: Collected) -> Collected:
    """Add the step's scores to the moments of the run, and bring scores and greedy baselines onto that scale.

    A score that was filled in (not `graded`) is not added. Every rank has the scores of the whole step, so the moments
    are the same on all of them. The scores before are kept as a part; the moments become part of the run's state when
    the step ends.
    """
    shaping = run.config.reward.shaping
    scores = collected.scores
    moments = Moments(**run.session.state.score_moments).with_batch(scores.values[collected.graded])
    collected.metrics.add("score/running_mean", moments.mean)
    collected.metrics.add("score/running_std", moments.std)
    baselines = collected.baselines
    return replace(
        collected,
        score_moments=asdict(moments),
        scores=Scores(
            values=shaping.normalized(scores.values, moments),
            parts={**scores.parts, REWARD: reward_of(scores)},
            scale=1.0 / shaping.divisor(moments),
        ),
        baselines=shaping.normalized(baselines, moments) if run.algorithm.advantage.needs_greedy else baselines,
    )
