"""Alarms on the scores and their judge."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Above, Alarm, Below, Grown, Reading
from rlhf.guard.alarms.history import History

JUDGE_FALL = 0.2  # standard deviations of the judge's score over prompts


class ProxyAgainstJudge(Alarm):
    """The judge's score is 0.2 standard deviations below its best, while the trained-on reward is higher."""

    name = "proxy-against-judge"
    metrics = ("eval/score", "eval/proxy")
    fall = JUDGE_FALL
    patience = 2
    causes = "the policy exploits the reward: it no longer agrees with the judge"
    cure = "use the best checkpoint (checkpoint.best); more KL penalty, an ensemble, another reward model"
    source = "Gao et al. 2023, sec. 3"

    def read(self, history: History) -> Reading | None:
        """Read the judge's score if the trained-on reward is above its value at the judge's best."""
        judge, proxy, spread = history.now("eval/score"), history.now("eval/proxy"), history.now("eval/score_std")
        before = history.evaluations("eval/score", "eval/proxy")
        if judge is None or proxy is None or not spread or not before:
            return None
        best, proxy_at_best = max(before, key=lambda evaluation: evaluation[0])
        limit = best - self.fall * spread
        return Reading(judge, limit, judge < limit and proxy > proxy_at_best)


class EnsembleDisagrees(Grown):
    """The members of the reward ensemble disagree twice as much as at the start."""

    name = "ensemble-disagrees"
    metrics = ("score/disagreement",)
    factor = 2.0
    plus = 0.1
    patience = 5
    causes = "the completions no longer resemble the reward models' training data"
    cure = "reward.source.how=mean_minus_std, more KL penalty; use an earlier checkpoint"
    source = "Coste et al. 2024; Eisenstein et al. 2023"


class ScoreFalls(Alarm):
    """The training score is one standard deviation below its initial value."""

    name = "score-falls"
    metrics = ("score/mean",)
    fall = 1.0  # standard deviations of the score at the start
    patience = 5
    causes = "a learning rate that is too high, a wrong sign in a custom loss or reward, a dominating penalty"
    cure = "lower policy.lr, check reward/kl_penalty and kl/coef, run rlhf.check on a custom loss"
    source = "docs/troubleshooting.md"

    def read(self, history: History) -> Reading | None:
        """Read the score in training against its start."""
        score, start, spread = history.now("score/mean"), history.start("score/mean"), history.start("score/std")
        if score is None or start is None or not spread:
            return None
        return Reading(score, start - self.fall * spread, score < start - self.fall * spread)


class ScoreConstant(Below):
    """All completions of a step have the same score."""

    name = "score-constant"
    metrics = ("score/std",)
    limit = 1e-6
    patience = 3
    causes = "a reward that is too coarse or broken, or a task that is too hard or already solved"
    cure = "read samples.jsonl and check the reward; give partial credit; use easier or harder prompts"
    source = "docs/troubleshooting.md"


class GroupsUniform(Above):
    """In more than 90 % of the groups all completions have the same score."""

    name = "groups-uniform"
    metrics = ("group/uniform",)
    limit = 0.9
    patience = 5
    causes = "prompts that are too hard or too easy, a coarse reward, or a collapsed policy"
    cure = (
        "a larger sampling.completions_per_prompt; with a group advantage (grpo, rloo) "
        "algorithm.drop_uniform_groups=true algorithm.refill_rounds=2"
    )
    source = "Yu et al. 2025 (DAPO), sec. 3.2"
