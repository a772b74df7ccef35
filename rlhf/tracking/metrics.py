"""The table of all metric names, and named means that add up; a name that is not in the table is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhf.algo.masked import Mean


@dataclass(frozen=True)
class MetricInfo:
    """Name, unit and meaning of a metric in metrics.jsonl."""

    name: str
    unit: str
    meaning: str


def _parse_table(rows: str) -> dict[str, MetricInfo]:
    entries = (line.split("|", 2) for line in rows.strip().splitlines())
    infos = (MetricInfo(name.strip(), unit.strip(), meaning.strip()) for name, unit, meaning in entries)
    return {info.name: info for info in infos}


METRICS: dict[str, MetricInfo] = _parse_table("""
score/mean            | score    | mean score of the step's completions, after shaping
score/std             | score    | their standard deviation
score/raw             | score    | mean score before shaping
score/clipped         | share    | completions whose score reward.shaping.clip changed
score/cut             | share    | completions that the reward model read without the beginning: beyond its context
score/greedy          | score    | mean score of the greedy completions that are the baseline (remax)
score/first_draw      | score    | with refill_rounds: mean score of the step's first samples, the policy's own
score/best_of_group   | score    | mean over prompts of the best score in the group
reward/kl_penalty     | score    | mean over completions of the summed KL penalty in the token rewards
kl/reference          | nats     | KL(policy || reference) per sequence, k1 summed over tokens, mean over completions
kl/coef               | score/nat| coefficient of the KL penalty during the step
kl/penalty_coef       | 1/nat    | coefficient of KL(old || new) during the step (ppo_penalty)
completion/masked     | share    | completions left out of the loss: cut off (mask_truncated), or of uniform groups
kl/old                | nats     | KL(old policy || policy) per token during the update
kl/old_last           | nats     | KL(old policy || policy) per token on the step's last minibatch; steers ppo_penalty
kl/sampler_mismatch   | nats     | mean |sampler's - old log-prob| of the sampled tokens; 0 where the sampler's serve
policy/first_ratio_deviation | -  | max |ratio - 1| on the first minibatch of the step; 0 but for rounding
policy/ratio          | -        | mean importance ratio
policy/clip_fraction  | share    | tokens whose gradient the clip stops; of cispo, whose weight it bounds
policy/entropy        | nats     | entropy of the next-token distribution at the sampled positions
policy/grad_norm      | -        | global gradient norm before clipping
policy/lr             | -        | learning rate
policy/optimizer_steps| count    | optimizer steps of the policy taken in the step; 0 in the critic's warm-up
policy/early_stop     | 0/1      | 1 when target_kl ended the step's epochs early
critic/explained_variance | share | 1 - Var(return - value) / Var(return), values before the update
critic/clip_fraction  | share    | tokens whose value gradient the clip stops
critic/value          | score    | mean predicted value
critic/return         | score    | mean return
critic/grad_norm      | -        | global gradient norm before clipping
critic/lr             | -        | learning rate
advantage/mean        | score    | mean advantage before whitening is undone: 0 when whitened
advantage/std         | score    | standard deviation of the advantages
completion/length     | tokens   | mean length, EOS included
completion/finished   | share    | completions that ended with EOS
completion/count      | count    | completions sampled since the start of the run, those not learned from included
completion/extra      | count    | sampled in the step and not learned from: greedy baselines, groups that were replaced
completion/extra_tokens | tokens | theirs, prompts included
completion/trained_tokens | tokens | read by the step's passes with gradient, prompts included; without data.sft's
group/uniform         | share    | completions in groups whose scores are all alike
group/refilled        | share    | groups of the step that stand in for uniform ones (refill_rounds)
pair/count            | count    | online_dpo: pairs learned from in the step, one a prompt at most
pair/ties             | count    | online_dpo: prompts of the step without a pair: their completions all scored alike
pair/score_gap        | score    | online_dpo: mean score of chosen minus rejected completions
kept/count            | count    | rejection_sampling: completions of the step that are learned from
kept/none             | count    | rejection_sampling: prompts of the step of which none was kept (min_score)
kept/score            | score    | rejection_sampling: mean score of the kept completions
loss/policy           | -        | surrogate loss per token
loss/kl               | score    | KL term of the loss per token
loss/value            | score^2  | value loss per token, before its coefficient
loss/ptx              | nats     | next-token loss per token on data.sft
loss/sft              | nats     | negative log-likelihood per completion token
loss/total            | -        | the loss that was descended
loss/accuracy         | share    | completion tokens that are the model's first choice
loss/rm               | nats     | Bradley-Terry loss per pair
loss/preference       | -        | preference loss per pair; of KTO, per completion
preference/accuracy   | share    | pairs whose chosen side has the higher reward; of KTO, rows on their side of z0
preference/margin     | reward   | mean implicit reward of chosen minus rejected sides
preference/chosen_reward | reward | mean implicit reward of chosen (of KTO, desirable) completions
preference/rejected_reward | reward | mean implicit reward of rejected (of KTO, undesirable) completions
preference/chosen_logprob | nats | log-probability of chosen (desirable) completions, summed over tokens
preference/rejected_logprob | nats | log-probability of rejected (undesirable) completions, summed over tokens
preference/baseline   | nats     | KTO's z0: mean log-ratio to the reference of mismatched completions, at least 0
rm/accuracy           | share    | pairs whose chosen side scores higher
rm/margin             | score    | mean score difference, chosen - rejected
rm/score_mean         | score    | mean score over both sides
skipped/nonfinite     | count    | optimizer steps not taken because of a NaN or Inf, since the start
skipped/zero_gradient | count    | optimizer steps in which a model stood still: its gradient was exactly zero (ties)
skipped/unscored      | count    | steps not taken because a score was NaN or infinite, since the start
eval/score            | score    | mean score of the judge on held-out prompts, one sampled completion each
eval/score_std        | score    | its standard deviation over prompts
eval/score_greedy     | score    | mean score of greedy completions of held-out prompts
eval/proxy            | score    | mean score of the trained-on reward on the same completions, before shaping
eval/kl               | nats     | KL(policy || reference) per sequence on held-out prompts, k1 of the sampled tokens
eval/kl_se            | nats     | its standard error
eval/kl_exact         | nats     | the same KL, over the whole vocabulary at every sampled position instead of k1
eval/kl_exact_se      | nats     | its standard error
eval/reference_perplexity | -     | perplexity of the held-out completions under the reference, per token
eval/length           | tokens   | mean length of held-out completions
eval/finished         | share    | held-out completions that ended with EOS
eval/distinct_1       | share    | distinct token ids over all tokens of all held-out completions, EOS included
eval/distinct_2       | share    | distinct token-id bigrams over all bigrams of all held-out completions, with EOS
eval/distinct_3       | share    | distinct token-id trigrams over all trigrams of all held-out completions, with EOS
eval/repetition       | share    | 4-grams that occurred earlier in the same held-out completion, over all its 4-grams
eval/entropy          | nats     | entropy per token: mean of -log pi over the sampled held-out tokens
eval/loss             | nats     | held-out negative log-likelihood per completion token
eval/preference_loss  | -        | held-out preference loss per pair; of KTO, per completion
eval/preference_accuracy | share | held-out pairs whose chosen side has the higher implicit reward
eval/preference_margin | reward  | held-out mean implicit reward of chosen minus rejected sides
eval/chosen_reward    | reward   | mean implicit reward of held-out chosen (of KTO, desirable) completions
eval/rejected_reward  | reward   | mean implicit reward of held-out rejected (of KTO, undesirable) completions
eval/chosen_logprob   | nats     | log-probability of held-out chosen (desirable) completions, summed over tokens
eval/rejected_logprob | nats     | log-probability of held-out rejected (undesirable) completions, summed over tokens
eval/rm_accuracy      | share    | held-out pairs whose chosen side scores higher
eval/rm_loss          | nats     | held-out Bradley-Terry loss per pair
""")


def describe(name: str) -> MetricInfo:
    """Return the table's entry for `name`.

    Raises:
        KeyError: the name is not in METRICS; add it there with its unit and meaning.
    """
    return METRICS[name]


class Metrics:
    """Named means, accumulated over micro-batches, optimizer steps and ranks."""

    def __init__(self, means: Mapping[str, Mean] | None = None) -> None:
        self._means: dict[str, Mean] = {}
        self.update(means or {})

    def update(self, means: Mapping[str, Mean]) -> None:
        """Add each mean to the one of the same name."""
        for name, mean in means.items():
            describe(name)
            self._means[name] = self._means[name] + mean if name in self._means else mean

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one value with a weight."""
        self.update({name: Mean(value * weight, weight)})

    def merge(self, other: Metrics) -> None:
        """Add all means of `other`."""
        self.update(other._means)

    def means(self) -> dict[str, Mean]:
        """Return a copy of the accumulated means."""
        return dict(self._means)

    def values(self) -> dict[str, float]:
        """Compute the value of each mean by name."""
        return {name: mean.value for name, mean in self._means.items()}

    def __getitem__(self, name: str) -> float:
        return self._means[name].value

    def __contains__(self, name: object) -> bool:
        return name in self._means

    def __iter__(self) -> Iterator[str]:
        return iter(self._means)
