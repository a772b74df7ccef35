"""The alarms: what is looked for in the metrics of a run, what usually causes it and what to try.

An alarm is a pure function of the history of the metrics. Of the history of each metric, the start and the recent past
are kept; of the evaluations, which are few, all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

KEPT = 40  # recent values of each metric
START = 5  # first values of a metric in training, of which the mean is where it started
HELD_OUT = "eval/"


@dataclass
class Track:
    """One metric: its first values and its recent ones."""

    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0

    def add(self, value: float) -> None:
        """Append a value."""
        if len(self.first) < START:
            self.first.append(value)
        self.recent.append(value)
        self.count += 1


@dataclass(frozen=True)
class RunFacts:
    """What a limit depends on besides the metrics."""

    kl_target: float | None = None  # of an adaptive controller, in nats per sequence
    is_rounded: bool = False  # arithmetic in bfloat16
    is_ahead: bool = False  # completions come from the policy of the step before
    reads_ratio: bool = True  # false: a pair loss with the sampler's log-probabilities, which no loss reads
    updates: int = 1  # optimizer steps on the same completions
    repeats_prompts: bool = False  # the data has fewer prompts than a step takes
    leaves_out_template: bool = False  # the model has a chat template that data.chat_template=none does not use
    on_data: bool = False  # nothing is sampled to train on: SFT, losses over pairs, reward models


class History:
    """The metrics of a run, line by line of metrics.jsonl. A value that is not finite is as one that is not there."""

    def __init__(self, facts: RunFacts | None = None) -> None:
        self.facts = facts or RunFacts()
        self._tracks: dict[str, Track] = {}
        self._latest: dict[str, float] = {}
        self._evaluations: list[dict[str, float]] = []  # what is held out, of the lines before the latest

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Append the metrics of a logged step."""
        if held_out := {name: value for name, value in self._latest.items() if name.startswith(HELD_OUT)}:
            self._evaluations.append(held_out)
        self._latest = {
            name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)
        }
        for name, value in self._latest.items():
            self._tracks.setdefault(name, Track()).add(value)

    def now(self, name: str) -> float | None:
        """Return the value in the latest line; None where that has none."""
        return self._latest.get(name)

    def start(self, name: str) -> float | None:
        """Return where the metric started: the mean of its first values, or the first evaluation; None before that."""
        track = self._tracks.get(name)
        if track is None:
            return None
        if name.startswith(HELD_OUT):
            return track.first[0]
        return fmean(track.first) if track.count > START else None

    def count(self, name: str) -> int:
        """Return how often the metric was logged."""
        return self._tracks[name].count if name in self._tracks else 0

    def before(self, name: str) -> list[float]:
        """Return the recent values before the latest line, oldest first."""
        track = self._tracks.get(name)
        if track is None:
            return []
        values = list(track.recent)
        return values[:-1] if name in self._latest else values

    def evaluations(self, *names: str) -> list[tuple[float, ...]]:
        """Return the values of held-out metrics in the evaluations before the latest line that have all of them."""
        return [tuple(line[name] for name in names) for line in self._evaluations if line.keys() >= set(names)]


@dataclass(frozen=True)
class Reading:
    """What an alarm saw in the latest line of metrics: a value, its limit, and whether it is beyond it."""

    value: float
    limit: float
    is_bad: bool


Read = Callable[[History], Reading | None]
"""Reads the latest line; None where it cannot tell: the metric is not there, or has not been for long enough."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A row of the table. It goes off after `patience` bad readings in a row, and is silent until as many good ones."""

    name: str
    metrics: tuple[str, ...]  # the first is the one whose curve is marked
    reads: str = ""  # what the value of a reading is; empty: the first metric
    read: Read
    patience: int
    sees: str  # the condition, in words
    causes: str
    cure: str
    source: str

    @property
    def quantity(self) -> str:
        """Return what the value of a reading is, in words."""
        return self.reads or self.metrics[0]


def above(name: str, limit: float, *, after: int = 0) -> Read:
    """Return a reading of a metric that is bad above the limit, from its `after`-th value on."""

    def read(history: History) -> Reading | None:
        value = history.now(name)
        if value is None or history.count(name) <= after:
            return None
        return Reading(value, limit, value > limit)

    return read


def below(name: str, limit: float, *, after: int = 0) -> Read:
    """Return a reading of a metric that is bad below the limit, from its `after`-th value on."""

    def read(history: History) -> Reading | None:
        value = history.now(name)
        if value is None or history.count(name) <= after:
            return None
        return Reading(value, limit, value < limit)

    return read


def grown(name: str, factor: float, *, plus: float = 0.0) -> Read:
    """Return a reading that is bad above `factor` times where the metric started, plus `plus`."""

    def read(history: History) -> Reading | None:
        value, start = history.now(name), history.start(name)
        if value is None or start is None:
            return None
        limit = factor * abs(start) + plus
        return Reading(value, limit, value > limit)

    return read


def shrunk(name: str, share: float) -> Read:
    """Return a reading that is bad below `share` of where the metric started, if that was above 0."""

    def read(history: History) -> Reading | None:
        value, start = history.now(name), history.start(name)
        if value is None or start is None or start <= 0:
            return None
        return Reading(value, share * start, value < share * start)

    return read


def rose(name: str) -> Read:
    """Return a reading of a count that is bad wherever it is larger than in the line before, or than 0 in the first."""

    def read(history: History) -> Reading | None:
        value, before = history.now(name), history.before(name)
        if value is None:
            return None
        last = before[-1] if before else 0.0
        return Reading(value, last, value > last)

    return read


def worse_than_best(name: str, factor: float) -> Read:
    """Return a reading of a held-out loss that is bad above `factor` times its smallest value so far."""

    def read(history: History) -> Reading | None:
        value, before = history.now(name), history.evaluations(name)
        if value is None or not before:
            return None
        limit = factor * min(before)[0]
        return Reading(value, limit, value > limit)

    return read


KL_PER_TOKEN = 0.5  # nats per token from the reference
TARGETS_AWAY = 3.0
RATIO_DEVIATION = {False: 0.02, True: 0.5}  # of float32 and of bfloat16, whose log-probabilities are rounded
MISMATCH = {False: 0.01, True: 0.1}  # nats, likewise
SPIKE, BEFORE_A_SPIKE = 10.0, 10
VALUE_OFFSET = 1.5  # standard deviations of the score
SETTLED = 15  # steps in which a critic may be wrong
SCORE_FALL = 1.0  # standard deviations of the score at the start
NEVER_CLIPPED = 1e-4  # share of tokens
JUDGE_FALL = 0.2  # standard deviations of the judge's score over prompts


def kl_per_token(history: History) -> Reading | None:
    """Read the KL to the reference per token of a completion."""
    kl, length = history.now("kl/reference"), history.now("completion/length")
    if kl is None or not length:
        return None
    return Reading(kl / length, KL_PER_TOKEN, kl / length > KL_PER_TOKEN)


def kl_above_target(history: History) -> Reading | None:
    """Read the KL to the reference against the target of the adaptive controller."""
    kl, target = history.now("kl/reference"), history.facts.kl_target
    if kl is None or target is None:
        return None
    return Reading(kl, TARGETS_AWAY * target, kl > TARGETS_AWAY * target)


def first_ratio(history: History) -> Reading | None:
    """Read how far the importance ratio is from 1 before any update, where a loss may read it."""
    deviation, limit = history.now("policy/first_ratio_deviation"), RATIO_DEVIATION[history.facts.is_rounded]
    if deviation is None or not history.facts.reads_ratio:
        return None
    return Reading(deviation, limit, deviation > limit)


def sampler_mismatch(history: History) -> Reading | None:
    """Read how far the sampler's log-probabilities are from the trainer's; a sampler one step behind may be."""
    mismatch, limit = history.now("kl/sampler_mismatch"), MISMATCH[history.facts.is_rounded]
    return None if mismatch is None or history.facts.is_ahead else Reading(mismatch, limit, mismatch > limit)


def never_clipped(history: History) -> Reading | None:
    """Read the share of ratios outside the clip range, if several updates share the same completions."""
    return None if history.facts.updates == 1 else below("policy/outside_clip", NEVER_CLIPPED)(history)


def duplicate_prompts(history: History) -> Reading | None:
    """Read the share of repeated prompts, unless the data has fewer prompts than a step takes."""
    return None if history.facts.repeats_prompts else above("prompt/duplicates", 0.5)(history)


def diversity_fell(history: History) -> Reading | None:
    """Read the distinct bigrams against the start; a run on data imitates texts that are less diverse than noise."""
    return None if history.facts.on_data else shrunk("eval/distinct_2", 0.5)(history)


def gradient_spike(history: History) -> Reading | None:
    """Read the gradient norm against the median of those before it."""
    norm, before = history.now("policy/grad_norm"), history.before("policy/grad_norm")
    if norm is None or len(before) < BEFORE_A_SPIKE:
        return None
    limit = SPIKE * max(median(before), 0.1)
    return Reading(norm, limit, norm > limit)


def value_offset(history: History) -> Reading | None:
    """Read the distance of the mean value from the mean return, which explained variance does not see."""
    value, returned, spread = history.now("critic/value"), history.now("critic/return"), history.start("score/std")
    if value is None or returned is None or not spread or history.count("critic/value") <= SETTLED:
        return None
    return Reading(abs(value - returned), VALUE_OFFSET * spread, abs(value - returned) > VALUE_OFFSET * spread)


def score_fell(history: History) -> Reading | None:
    """Read the score in training against where it started."""
    score, start, spread = history.now("score/mean"), history.start("score/mean"), history.start("score/std")
    if score is None or start is None or not spread:
        return None
    return Reading(score, start - SCORE_FALL * spread, score < start - SCORE_FALL * spread)


def proxy_against_judge(history: History) -> Reading | None:
    """Read the judge's score where the trained-on reward is above what it was at the judge's best."""
    judge, proxy, spread = history.now("eval/score"), history.now("eval/proxy"), history.now("eval/score_std")
    before = history.evaluations("eval/score", "eval/proxy")
    if judge is None or proxy is None or not spread or not before:
        return None
    best, proxy_at_best = max(before, key=lambda evaluation: evaluation[0])
    limit = best - JUDGE_FALL * spread
    return Reading(judge, limit, judge < limit and proxy > proxy_at_best)


def loss_on_data(history: History) -> Reading | None:
    """Read the loss of a run on data against where it started; a policy-gradient loss has no scale."""
    names = ("loss/sft", "loss/rm", "loss/preference")
    name = next((name for name in names if history.now(name) is not None), None)
    return None if name is None else grown(name, 3.0, plus=0.5)(history)


ALARMS = (
    Alarm(
        name="kl-per-update",
        metrics=("kl/old",),
        read=above("kl/old", 0.1),
        patience=2,
        sees="within one step the policy moves more than 0.1 nats per token away from the sampling policy",
        causes="a learning rate that is too high, or too many updates on the same completions",
        cure="lower policy.lr, fewer batch.epochs or batch.minibatches, algorithm.target_kl=0.02",
        source="Spinning Up's PPO ends a step at 0.015; Huang et al. 2022 (37 details): at 0.01 to 0.05",
    ),
    Alarm(
        name="kl-jump",
        metrics=("kl/old",),
        read=above("kl/old", 1.0),
        patience=1,
        sees="within one step the policy moves more than 1 nat per token away from the sampling policy",
        causes="a learning rate that is far too high",
        cure="divide policy.lr by 10; resume from an earlier checkpoint, or restart",
        source="Spinning Up's PPO ends a step at 0.015; Huang et al. 2022 (37 details): at 0.01 to 0.05",
    ),
    Alarm(
        name="kl-to-reference",
        metrics=("kl/reference",),
        reads="kl/reference per token",
        read=kl_per_token,
        patience=3,
        sees="the KL to the reference is above 0.5 nats per token of a completion",
        causes="a missing or weak KL penalty, a wrong sign, or a learning rate that is too high",
        cure="algorithm.kl.placement=reward algorithm.kl.coef=0.05, lower policy.lr; use the best checkpoint",
        source="Gao et al. 2023, sec. 3: the true score falls with the root of the KL; 0.5 from runs in the lab",
    ),
    Alarm(
        name="kl-above-target",
        metrics=("kl/reference",),
        read=kl_above_target,
        patience=5,
        sees="the KL to the reference exceeds three times the controller's target",
        causes="the controller is too slow for the learning rate",
        cure="lower policy.lr, lower algorithm.kl.controller.horizon, start with a larger algorithm.kl.coef",
        source="Ziegler et al. 2019, sec. 2.2: the KL settles at its target",
    ),
    Alarm(
        name="kl-negative",
        metrics=("kl/reference",),
        read=below("kl/reference", -0.5),
        patience=3,
        sees="the estimated KL to the reference is below -0.5 nats, although a KL cannot be negative",
        causes="samples from another distribution: another temperature, stale log-probabilities, top-k or top-p",
        cure="sampling.old_log_probs=trainer; use sampling.backend=hf policy.packing=off to find the cause",
        source="Schulman 2020: k1 is unbiased on the policy's own samples",
    ),
    Alarm(
        name="clip-fraction",
        metrics=("policy/clip_fraction",),
        read=above("policy/clip_fraction", 0.4),
        patience=3,
        sees="the clip stops the gradient of more than two tokens in five",
        causes="update steps that are too large, or too many updates on the same completions",
        cure="lower policy.lr, fewer batch.epochs or batch.minibatches",
        source="Huang et al. 2022 (37 details), detail 12, count ratios outside 1 ± eps: 0.1 to 0.3, here "
        "policy/outside_clip; on the same ratios about half of these lose their gradient",
    ),
    Alarm(
        name="never-clipped",
        metrics=("policy/outside_clip",),
        read=never_clipped,
        patience=20,
        sees="for twenty steps fewer than one ratio in ten thousand was outside the clip range",
        causes="a learning rate that is too low for the policy to move, or a clip range that is too wide",
        cure="raise policy.lr until kl/old is near 0.01, or lower batch.epochs: the later ones change nothing",
        source="Huang et al. 2022 (37 details), detail 12: the clip is active in 0.1 to 0.3 of the ratios",
    ),
    Alarm(
        name="critic-explains-nothing",
        metrics=("critic/explained_variance",),
        read=below("critic/explained_variance", 0.05, after=SETTLED),
        patience=10,
        sees="after step 15 the critic predicts no better than a constant for ten steps",
        causes="a critic that learns too slowly, too fast, or not at all; too few steps; an unpredictable reward",
        cure="raise or lower critic.lr, critic.init=reward, algorithm.advantage.gae_lambda=1, or algorithm.preset=rloo",
        source="Schulman et al. 2016, sec. 3: the variance of GAE comes from the critic's errors",
    ),
    Alarm(
        name="critic-worse-than-constant",
        metrics=("critic/explained_variance",),
        read=below("critic/explained_variance", -0.5, after=SETTLED),
        patience=3,
        sees="the critic's error variance is 1.5 times the variance of the returns",
        causes="value targets on a different scale than the values, critic.lr too high, clipped values",
        cure="lower critic.lr, critic.warmup_steps=10, algorithm.value_loss.clip_eps=null",
        source="Huang et al. 2022 (37 details), detail 9; Andrychowicz et al. 2021",
    ),
    Alarm(
        name="value-offset",
        metrics=("critic/value", "critic/return"),
        reads="|critic/value - critic/return|",
        read=value_offset,
        patience=5,
        sees="the mean value differs from the mean return by more than 1.5 standard deviations of the score",
        causes="shifted value targets, a change in the reward's scale, a new value head",
        cure="critic.warmup_steps=10, raise critic.lr, algorithm.value_loss.clip_eps=null, calibrate the reward model",
        source="explained variance ignores a constant offset: 1 - Var(return - value) / Var(return)",
    ),
    Alarm(
        name="entropy-collapse",
        metrics=("policy/entropy",),
        read=shrunk("policy/entropy", 0.3),
        patience=3,
        sees="the entropy has fallen below 30 % of its initial value",
        causes="the policy has collapsed onto a few phrases: weak KL penalty, high learning rate, or too many steps",
        cure="algorithm.policy_loss.entropy_coef=0.01, algorithm.policy_loss.clip_eps_high=0.28, more KL penalty",
        source="Yu et al. 2025 (DAPO), sec. 3.1; Cui et al. 2025 (The Entropy Mechanism)",
    ),
    Alarm(
        name="entropy-explosion",
        metrics=("policy/entropy",),
        read=grown("policy/entropy", 1.5, plus=0.3),
        patience=3,
        sees="the entropy exceeds 1.5 times its initial value",
        causes="the policy is degrading: a learning rate or an entropy bonus that is too high",
        cure="lower policy.lr, algorithm.policy_loss.entropy_coef=0, continue from an earlier checkpoint",
        source="Huang et al. 2022 (37 details), detail 10",
    ),
    Alarm(
        name="first-ratio",
        metrics=("policy/first_ratio_deviation",),
        read=first_ratio,
        patience=2,
        sees="before the first update the importance ratio is not 1",
        causes="old log-probabilities that are stale, or computed at another temperature or precision",
        cure="sampling.old_log_probs=trainer; use policy.packing=off sampling.backend=hf to find the cause",
        source="Huang et al. 2022 (37 details): the ratio of the first minibatch must be 1",
    ),
    Alarm(
        name="sampler-mismatch",
        metrics=("kl/sampler_mismatch",),
        read=sampler_mismatch,
        patience=2,
        sees="sampler and trainer compute different log-probabilities for the sampled tokens",
        causes="the sampler uses another temperature, precision or weights than the trainer",
        cure="sampling.old_log_probs=trainer, policy.head_dtype=float32, sampling.backend=hf",
        source="Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL)",
    ),
    Alarm(
        name="length-grows",
        metrics=("completion/length",),
        read=grown("completion/length", 2.0),
        patience=5,
        sees="completions are more than twice as long as at the start",
        causes="the reward favors length, or unfinished completions are not penalized",
        cure="reward.shaping.missing_eos_penalty=1, reward.shaping.overlong_buffer, a length-controlled reward",
        source="Singhal et al. 2023 (A Long Way to Go); Yu et al. 2025 (DAPO), sec. 3.4",
    ),
    Alarm(
        name="length-shrinks",
        metrics=("completion/length",),
        read=shrunk("completion/length", 0.4),
        patience=5,
        sees="completions are shorter than 40 % of their initial length",
        causes="stopping early is the safest way to score, or the KL penalty charges every token",
        cure="read samples.jsonl; score short answers lower; lower algorithm.kl.coef",
        source="docs/troubleshooting.md",
    ),
    Alarm(
        name="cut-off",
        metrics=("completion/finished",),
        read=below("completion/finished", 0.1),
        patience=3,
        sees="more than 90 % of the completions are cut off by sampling.max_new_tokens",
        causes="the limit is too low, or the start model has not learned to emit EOS",
        cure="raise sampling.max_new_tokens; SFT on whole rows; reward.shaping.missing_eos_penalty=1",
        source="Huang et al. 2024 (N+), the EOS trick",
    ),
    Alarm(
        name="fewer-finish",
        metrics=("completion/finished",),
        read=shrunk("completion/finished", 0.5),
        patience=5,
        sees="less than half as many completions end with EOS as at the start",
        causes="length is rewarded, or unfinished completions are not penalized",
        cure="reward.shaping.missing_eos_penalty=1, reward.shaping.overlong_buffer",
        source="Huang et al. 2024 (N+), the EOS trick",
    ),
    Alarm(
        name="duplicate-prompts",
        metrics=("prompt/duplicates",),
        read=duplicate_prompts,
        patience=2,
        sees="more than half of the step's prompts are duplicates",
        causes="repeated rows in data.prompts, or fewer rows than batch.prompts_per_step",
        cure="remove the duplicates; lower batch.prompts_per_step and raise sampling.completions_per_prompt",
        source="Lee et al. 2022 (Deduplicating Training Data)",
    ),
    Alarm(
        name="duplicate-completions",
        metrics=("completion/duplicates",),
        read=grown("completion/duplicates", 1.0, plus=0.4),
        patience=3,
        sees="the share of completions shared by several prompts rose by 40 percentage points",
        causes="the policy gives the same answer to every prompt",
        cure="more KL penalty, algorithm.policy_loss.entropy_coef=0.01, an earlier checkpoint, another reward",
        source="Kirk et al. 2024 (diversity after RLHF)",
    ),
    Alarm(
        name="repetition",
        metrics=("eval/repetition",),
        read=grown("eval/repetition", 1.0, plus=0.2),
        patience=2,
        sees="the share of repeated 4-grams in held-out completions rose by 20 percentage points",
        causes="the policy raises the reward by repeating itself",
        cure="more KL penalty, lower policy.lr, a repetition rule in the reward; use the best checkpoint",
        source="Holtzman et al. 2020, sec. 4; Gao et al. 2023",
    ),
    Alarm(
        name="diversity-falls",
        metrics=("eval/distinct_2",),
        read=diversity_fell,
        patience=2,
        sees="held-out completions have less than half as many distinct bigrams as before training",
        causes="the policy has collapsed onto a few phrases",
        cure="more KL penalty, lower policy.lr, algorithm.policy_loss.entropy_coef=0.01; use the best checkpoint",
        source="Kirk et al. 2024 (diversity after RLHF)",
    ),
    Alarm(
        name="proxy-against-judge",
        metrics=("eval/score", "eval/proxy"),
        read=proxy_against_judge,
        patience=2,
        sees="the judge's score is 0.2 standard deviations below its best, while the trained-on reward is higher",
        causes="the policy exploits the reward: it no longer agrees with the judge",
        cure="use the best checkpoint (checkpoint.best); more KL penalty, an ensemble, another reward model",
        source="Gao et al. 2023, sec. 3",
    ),
    Alarm(
        name="ensemble-disagrees",
        metrics=("score/disagreement",),
        read=grown("score/disagreement", 2.0, plus=0.1),
        patience=5,
        sees="the members of the reward ensemble disagree twice as much as at the start",
        causes="the completions no longer resemble the reward models' training data",
        cure="reward.source.how=mean_minus_std, more KL penalty; use an earlier checkpoint",
        source="Coste et al. 2024; Eisenstein et al. 2023",
    ),
    Alarm(
        name="score-falls",
        metrics=("score/mean",),
        read=score_fell,
        patience=5,
        sees="the training score is one standard deviation below its initial value",
        causes="a learning rate that is too high, a wrong sign in a custom loss or reward, a dominating penalty",
        cure="lower policy.lr, check reward/kl_penalty and kl/coef, run rlhf.check on a custom loss",
        source="docs/troubleshooting.md",
    ),
    Alarm(
        name="score-constant",
        metrics=("score/std",),
        read=below("score/std", 1e-6),
        patience=3,
        sees="all completions of a step have the same score",
        causes="a reward that is too coarse or broken, or a task that is too hard or already solved",
        cure="read samples.jsonl and check the reward; give partial credit; use easier or harder prompts",
        source="docs/troubleshooting.md",
    ),
    Alarm(
        name="groups-uniform",
        metrics=("group/uniform",),
        read=above("group/uniform", 0.9),
        patience=5,
        sees="in more than 90 % of the groups all completions have the same score",
        causes="prompts that are too hard or too easy, a coarse reward, or a collapsed policy",
        cure="algorithm.drop_uniform_groups=true algorithm.refill_rounds=2, a larger sampling.completions_per_prompt",
        source="Yu et al. 2025 (DAPO), sec. 3.2",
    ),
    Alarm(
        name="gradient-spike",
        metrics=("policy/grad_norm",),
        read=gradient_spike,
        patience=2,
        sees="the gradient norm is ten times the median of the previous steps",
        causes="an unusual batch, a diverging loss, or a reward on another scale",
        cure="lower policy.max_grad_norm and policy.lr, schedule.warmup_steps, larger batch.prompts_per_step",
        source="Huang et al. 2022 (37 details), detail 11",
    ),
    Alarm(
        name="steps-not-finite",
        metrics=("skipped/nonfinite",),
        read=rose("skipped/nonfinite"),
        patience=1,
        sees="an optimizer step was skipped because the loss or a gradient was NaN or infinite",
        causes="a learning rate that is too high, an overflow in low precision, or a custom loss",
        cure="lower policy.lr, policy.dtype=float32; inspect the preceding step",
        source="docs/reliability.md",
    ),
    Alarm(
        name="scores-not-finite",
        metrics=("skipped/unscored",),
        read=rose("skipped/unscored"),
        patience=1,
        sees="a step was skipped because a score was NaN or infinite",
        causes="a reward that divides by zero or fails on unusual completions",
        cure="fix the reward; notes.jsonl names the completion",
        source="docs/reliability.md",
    ),
    Alarm(
        name="kl-coefficient-runaway",
        metrics=("kl/coef",),
        read=grown("kl/coef", 20.0, plus=1e-6),
        patience=3,
        sees="the controller has raised the coefficient to 20 times its initial value",
        causes="the penalty cannot hold the policy: the learning rate is too high, or the reward's scale is wrong",
        cure="lower policy.lr, calibrate the reward, start with a larger algorithm.kl.coef",
        source="Ziegler et al. 2019, sec. 2.2",
    ),
    Alarm(
        name="held-out-loss-rises",
        metrics=("eval/loss",),
        read=worse_than_best("eval/loss", 1.05),
        patience=2,
        sees="the held-out loss is 5 % above its minimum",
        causes="the model memorizes the rows, or the learning rate is too high",
        cure="fewer schedule.epochs, lower policy.lr, schedule.decay=cosine; checkpoint.best keeps the lowest",
        source="Ouyang et al. 2022, sec. 3.5: after one epoch",
    ),
    Alarm(
        name="held-out-preference-loss-rises",
        metrics=("eval/preference_loss",),
        read=worse_than_best("eval/preference_loss", 1.1),
        patience=2,
        sees="the loss on held-out pairs is 10 % above its minimum",
        causes="the model memorizes the pairs, or the learning rate is too high",
        cure="fewer schedule.epochs, lower policy.lr, larger algorithm.loss.beta; checkpoint.best keeps the lowest",
        source="Rafailov et al. 2024 (over-optimization in direct alignment)",
    ),
    Alarm(
        name="held-out-pairs-rise",
        metrics=("eval/rm_loss",),
        read=worse_than_best("eval/rm_loss", 1.1),
        patience=2,
        sees="the reward model's loss on held-out pairs is 10 % above its minimum",
        causes="the model memorizes the pairs, or the learning rate is too high",
        cure="schedule.epochs=1, lower model.lr; checkpoint.best keeps the lowest",
        source="Ouyang et al. 2022, app. C: reward models overfit after one epoch",
    ),
    Alarm(
        name="loss-explodes",
        metrics=("loss/total",),
        reads="the loss on the data",
        read=loss_on_data,
        patience=3,
        sees="the loss exceeds three times its initial value",
        causes="a learning rate that is too high",
        cure="lower the learning rate, set schedule.warmup_steps, lower max_grad_norm",
        source="docs/troubleshooting.md",
    ),
)
