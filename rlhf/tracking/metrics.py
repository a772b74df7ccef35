"""The one table of all metrics, their meanings and places; named means that add up; numbers as text.

The progress line, the pages of a run and of a comparison, the summary at the end of a run and docs/metrics.md read this
table. To log a metric that is not in it is an error. Numbers are formatted for people to read; files keep the numbers
themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from textwrap import dedent
from typing import Literal

from rlhf.algo.masked import Mean
from rlhf.batching import Number
from rlhf.errors import ConfigError
from rlhf.section import declared_metrics

RunKind = Literal["online", "preference", "sft", "reward_model"]
OPTIONAL_FIELDS = ("label", "better", "held_out", "curve")  # of a MetricInfo; its other details are places


@dataclass(frozen=True)
class Place:
    """A place where a metric is shown: the view, its position there, and the title it has there.

    The views are chart/<group of the report page>, progress/<kind of run>, headline, tile and summary; of a comparison,
    compare/curve (its learning curves) and compare/end (its table of final models). Metrics with the same chart and
    position share a chart, which the one with a title leads.
    """

    view: str
    position: int
    title: str = ""


@dataclass(frozen=True)
class MetricInfo:
    """A row of the table: name, unit and meaning of a metric in metrics.jsonl, and where it is shown."""

    name: str
    unit: str
    meaning: str
    label: str = ""  # on the progress line; its name if empty
    better: str = ""  # higher or lower; empty if neither is better for every algorithm
    held_out: str = ""  # the name of the same metric on held-out data
    curve: str = ""  # exact if it is set or counted, not measured: there is no noise to smooth
    places: tuple[Place, ...] = ()

    def place(self, view: str) -> Place | None:
        """Return the place of the metric in a view; None if it has none."""
        return next((place for place in self.places if place.view == view), None)


def _parse_table(rows: str) -> dict[str, MetricInfo]:
    """Parse lines of `name | unit | meaning`, each followed by indented lines of `key: value; key: value`."""
    table: dict[str, MetricInfo] = {}
    for metric in re.split(r"\n(?! )", rows.strip()):
        row, *lines = metric.splitlines()
        name, unit, meaning = (cell.strip() for cell in row.split("|", 2))
        details = [detail.split(": ", 1) for line in lines for detail in line.strip().rstrip(";").split("; ")]
        fields = {key: value for key, value in details if key in OPTIONAL_FIELDS}
        places = tuple(_parse_place(key, value) for key, value in details if key not in OPTIONAL_FIELDS)
        table[name] = MetricInfo(name, unit, meaning, places=places, **fields)
    return table


def _parse_place(view: str, text: str) -> Place:
    """Parse the position in a view and, after a space, the title."""
    position, _, title = text.partition(" ")
    return Place(view, int(position), title)


# Below a metric: the fields of MetricInfo that it has, and each Place where it is shown as `view: position title`.
METRICS: dict[str, MetricInfo] = _parse_table("""
score/mean            | score    | mean score of the step's completions, after shaping, before a cost
    label: score; better: higher; chart/score: 1 Score in training; progress/online: 1; headline: 4 Mean training score
score/std             | score    | their standard deviation
    chart/score: 4 Spread of scores
score/raw             | score    | mean score before shaping
    chart/score: 1
score/running_mean    | score    | mean of all scores of the run so far (reward.shaping.normalize)
    chart/score: 15 Running normalization
score/running_std     | score    | their standard deviation, by which the step's scores are divided
    chart/score: 15
score/clipped         | share    | completions whose score reward.shaping.clip changed
score/cut             | share    | completions whose beginning the reward model did not read: longer than its context
score/disagreement    | score    | mean over completions of the standard deviation over an ensemble's members
    chart/score: 5 Disagreement of the ensemble
score/greedy          | score    | mean score of the greedy baseline completions (remax)
score/first_draw      | score    | refill_rounds, rescue: mean score of the step's first samples, the policy's own
score/best_of_group   | score    | mean over prompts of the best score in the group
    chart/score: 1
part/*/mean           | score    | mean of a part of the score (ensemble source or rule) over completions it applies to
    chart/score: 6 Parts of the score
part/*/std            | score    | its standard deviation
part/*/applicable     | share    | completions that the part applies to: neither None nor NaN
process/reward        | score    | mean over completions of the rewards of their steps (reward.process), summed
    chart/score: 13 Rewards of steps
process/steps         | count    | mean number of steps with a reward that is not 0
    chart/score: 14 Steps of a completion
verifier/timeout      | share    | completions whose grading took longer than reward.source.timeout_s
    better: lower; chart/score: 11 Gradings that failed or do not apply
verifier/error        | share    | completions whose grading failed
    better: lower; chart/score: 11
verifier/none         | share    | completions that no verifier applies to
    chart/score: 11
verifier/seconds_p95  | s        | 5 % of the gradings took longer
    chart/score: 12 Seconds of a grading
watch/score           | score    | mean score of reward.watch, a judge that is not trained on
    chart/score: 7 The watching judge
watch/gap             | score    | mean training score before shaping, less the watching judge's on the same completions
    chart/score: 7
watch/correlation     | -        | Pearson correlation of training score and watching judge on these completions
    chart/score: 8 Agreement of the training reward and the watching judge
watch/failed          | 0/1      | 1 if the watching judge could not score the step
cost/mean             | cost     | mean cost of the step's completions (reward.cost), of the policy's first samples
    label: cost; better: lower; chart/cost: 1 Cost; progress/online: 7
cost/std              | cost     | its standard deviation
    chart/cost: 4 Spread of costs
lagrange/multiplier   | score/cost | Lagrange multiplier of the cost during the step
    label: λ; curve: exact; chart/cost: 2 Lagrange multiplier; progress/online: 8
lagrange/violation    | cost     | cost/mean less its limit; above 0 the limit is exceeded
    better: lower; chart/cost: 3 Cost less its limit
lagrange/at_limit     | 0/1      | 1 if the multiplier is at lagrange.highest
lagrange/score        | score    | mean of the score to train on: (score - multiplier x cost) / (1 + multiplier)
    chart/cost: 5 Score and cost combined
reward/kl_penalty     | score    | mean over completions of the summed KL penalty in the token rewards
    chart/kl: 3 KL penalty in the rewards
kl/reference          | nats     | KL(policy || reference) per sequence: k1 x policy / sampler, summed over tokens
    label: kl; chart/kl: 1 KL to the reference; progress/online: 2
kl/teacher            | nats     | KL(policy || teacher) per token; of a teacher that lists tokens a lower bound
    better: lower; held_out: eval/kl_teacher; chart/kl: 6 KL to the teacher, per token; progress/sft: 7;
    progress/online: 9
kl/teacher_sequence   | nats     | KL(policy || teacher) per sequence: the same, summed over tokens
    better: lower; chart/kl: 7 KL to the teacher, per sequence
eval/kl_teacher       | nats     | kl/teacher on held-out demonstrations (distill_sft)
    better: lower
teacher/agreement     | share    | tokens at which policy and teacher have the same likeliest token
    better: higher; held_out: eval/teacher_agreement; chart/kl: 8 Agreement with the teacher's likeliest token
eval/teacher_agreement| share    | teacher/agreement on held-out demonstrations (distill_sft)
    better: higher
teacher/tail          | share    | the teacher's probability of the tail, all tokens that are not compared one by one
    chart/kl: 9 Probability of the tail
teacher/policy_tail   | share    | the policy's probability of the tail
    chart/kl: 9
teacher/tail_error    | nats     | divergence lost by the tail, per token; a bound if tokens are listed
    better: lower; chart/kl: 10 Error of the tail
kl/coef               | score/nat| coefficient of the KL penalty during the step
    label: kl coef; curve: exact; chart/kl: 2 KL coefficient; progress/online: 3
kl/penalty_coef       | 1/nat    | coefficient of KL(old || new) during the step (ppo_penalty)
    curve: exact; chart/kl: 4 Coefficient of KL(old || new)
completion/duplicates | share    | completions identical to a completion of another prompt of the step
    chart/completions: 12 Duplicates in a step
prompt/duplicates     | share    | prompts identical to another prompt of the step
    chart/completions: 12
completion/masked     | share    | completions excluded from the loss: cut off (and left out) or in uniform groups
kl/old                | nats     | KL(old policy || policy) per sampled token during the update
    chart/updates: 2 KL(old || new)
kl/old_last           | nats     | KL(old policy || policy) per token on the step's last minibatch; steers ppo_penalty
    chart/updates: 2
kl/old_kept           | nats     | KL(old policy || policy) per token of the step after backtracking (ppo_penalty)
    chart/updates: 2
policy/backtracks     | count    | times that the step was halved (policy_loss.backtrack_above)
    chart/updates: 15 Steps moved back
kl/sampler_mismatch   | nats     | mean |sampler's - old log-prob| of the sampled tokens; 0 if the sampler's are used
    better: lower; chart/updates: 5 Sampler against trainer
overlap/age           | steps    | updates between the policy that sampled the step and the one trained (overlap.ahead)
correction/weight     | -        | mean importance weight policy / sampler of the step's tokens (sampling.correction)
    chart/updates: 16 Importance weights of the correction
correction/ess        | share    | effective sample size of these weights, as a share of the tokens
    better: higher; chart/updates: 16
correction/capped     | share    | tokens whose importance weight the cap truncated or masked
    chart/updates: 16
correction/masked     | share    | tokens whose importance weight is 0
    chart/updates: 16
server/canary         | nats     | largest |server's - trainer's log-prob| of tokens compared after the step's pushes
    better: lower; chart/updates: 17 Servers against the trainer
server/pushed_mb      | MB       | bytes of the weights that were written for servers, or sent to them, in the step
server/asked_again    | count    | requests that another server, or the same one started again, had to answer
server/alive          | count    | servers that answer at the end of the step's sampling
policy/first_ratio_deviation | -  | max |ratio - 1| on the first minibatch of the step; 0 up to rounding
    better: lower; chart/updates: 4 Ratio on the first minibatch: deviation from 1
policy/ratio          | -        | mean importance ratio
    chart/updates: 3 Importance ratio
policy/clip_fraction  | share    | tokens whose gradient the clip stops; in cispo, tokens whose weight it bounds
    chart/updates: 1 Clip fraction
policy/clip_scale     | -        | factor of the clip range in the step (policy_loss.adapt_to)
    curve: exact; chart/updates: 14 Factor of the clip range
policy/outside_clip   | share    | tokens whose ratio is outside the clip range, whatever the sign of the advantage
    chart/updates: 1
policy/entropy        | nats     | entropy of the next-token distribution, averaged over sampled positions
    label: entropy; chart/completions: 3 Entropy
policy/grad_norm      | -        | global gradient norm before clipping
    chart/optimization: 2 Gradient norm; progress/sft: 3; progress/reward_model: 3
policy/lr             | -        | learning rate; for npg and trpo the length of the step along F^-1 g
    curve: exact; chart/optimization: 1 Learning rate; progress/sft: 4
policy/optimizer_steps| count    | optimizer steps of the policy taken in the step; 0 in the critic's warm-up
    curve: exact; chart/updates: 6 Optimizer steps
policy/ptx_tokens     | tokens   | tokens of data.sft that passes with gradient read, including prompts
policy/early_stop     | 0/1      | 1 when target_kl ended the step's epochs early
    chart/updates: 7 Epochs ended early
trust_region/kl       | nats     | exact KL(old || new) per token of the step, over the vocabulary; 0 if rejected
    chart/updates: 9 Trust region: exact KL of the step
trust_region/kl_full_step | nats | exact KL(old || new) of the full step, before the line search; about max_kl
    chart/updates: 9
trust_region/accepted | 0/1      | 1 if a step was taken; 0 if the line search rejected every length
trust_region/backtracks | count  | shorter lengths that the line search tried
    chart/updates: 10 Trust region: backtracks
trust_region/improvement | -     | decrease of the policy's loss in the step
    chart/updates: 11 Trust region: improvement, actual and expected
trust_region/expected_improvement | - | decrease predicted to first order: length x gradient . direction
    chart/updates: 11
trust_region/forward_passes | count | forward passes that the search costs; a backward pass counts as two of them
trust_region/cg_residual | -     | |g - (F + damping) x| / |g| after the last conjugate-gradient iteration
    better: lower; chart/updates: 12 Conjugate gradients: residual
critic/explained_variance | share | 1 - Var(return - value) / Var(return), values before the update
    label: expl. var.; better: higher; chart/critic: 1 Explained variance; progress/online: 4;
    tile: 7 Explained variance; summary: 8
critic/explained_beyond_position | share | the same among tokens at one position: 0 for a critic that only counts tokens
    better: higher; chart/critic: 1
critic/clip_fraction  | share    | tokens whose value gradient the clip stops
    chart/critic: 4 Share of clipped values
critic/value          | score    | mean predicted value
    chart/critic: 2 Value and return
critic/return         | score    | mean return
    chart/critic: 2
critic/grad_norm      | -        | global gradient norm before clipping
    chart/optimization: 2
critic/extra_tokens   | tokens   | prompt and completion tokens of passes that train the critic alone
critic/lr             | -        | learning rate
    curve: exact; chart/optimization: 1
advantage/mean        | score    | mean advantage per token, before whitening
    chart/optimization: 3 Advantages
advantage/std         | score    | standard deviation of the advantages, before whitening
    chart/optimization: 3
advantage/p05         | score    | 5 % of the advantages are lower, before whitening
    chart/optimization: 3
advantage/p95         | score    | 5 % of the advantages are higher, before whitening
    chart/optimization: 3
completion/length     | tokens   | mean length, EOS included
    label: length; chart/completions: 1 Length; progress/online: 5
completion/finished   | share    | completions that ended with EOS; episodes of which every action did
    chart/completions: 2 Finished
completion/count      | count    | completions sampled since the start of the run, including those not trained on
    curve: exact; chart/completions: 7 Sampled so far; tile: 8 Completions sampled
completion/extra      | count    | completions sampled and not trained on: greedy baselines, replaced or unused ones
completion/extra_tokens | tokens | tokens of completion/extra, including prompts, plus the tokens of all hints
completion/generated_tokens | tokens | tokens that the policy wrote in the step, also those that are not trained on
completion/trained_tokens | tokens | tokens read by passes with gradient, including prompts, excluding data.sft
group/uniform         | share    | completions in groups whose scores are all equal
    chart/completions: 6 Groups with equal scores
group/refilled        | share    | groups of the step that replace uniform groups (refill_rounds)
rescue/failed         | share    | rescue: prompts of the step without a successful completion before hints
    better: lower; chart/completions: 8 Prompts whose whole group fails
rescue/rescued        | count    | rescue: failed prompts with a successful hinted completion
    chart/completions: 9 Prompts rescued
rescue/by_hint_1      | count    | rescue: prompts that the first hint rescued
rescue/by_hint_2      | count    | rescue: prompts that the second hint rescued
rescue/by_hint_3      | count    | rescue: prompts that the third hint rescued
rescue/by_hint_4      | count    | rescue: prompts that the fourth hint rescued
rescue/due            | count    | rescue.after: prompts of the step that are due a hint since they failed before
rescue/without_hint   | count    | rescue: prompts to be given a hint that have none: no text, or too long with it
rescue/hinted_tokens  | share    | rescue: completion tokens of the step that were sampled with a hint
    chart/completions: 10 Tokens sampled with a hint
rescue/weight         | -        | rescue: mean importance weight of hinted tokens, after truncation or shaping
    chart/updates: 13 Importance weight of hinted tokens
rescue/weight_ess     | share    | rescue: effective sample size of these weights divided by the number of tokens
    chart/updates: 13
rescue/replayed       | count    | rescue: prompts of the step that are replays of unsolved ones
    chart/completions: 9
rescue/replays_solved | count    | rescue: replays of the step that ended in success (replay.until)
rescue/waiting        | count    | rescue: prompts that wait for a replay after the step
    chart/completions: 11 Prompts waiting for a replay
rescue/given_up       | count    | rescue: prompts given up after replay.limit replays, since the start
    better: lower
curriculum/passed_over | count   | curriculum: prompts of the shuffled epochs that the step passed over
    chart/completions: 13 Prompts passed over
curriculum/known      | share    | curriculum: prompts of the data whose success rate is known
curriculum/rate       | share    | curriculum: mean success rate of these prompts
    chart/completions: 14 Success rate of the prompts
env/return            | score    | mean over episodes of the summed rewards of their turns, before shaping
    better: higher; chart/environment: 1 Return of an episode
env/turns             | count    | mean number of actions of an episode
    chart/environment: 2 Turns
env/reward_turn_*     | score    | mean reward of this turn (from 1), over the episodes that had it
    chart/environment: 3 Reward by turn
env/stop/*            | share    | episodes that ended for this reason (terminated, max_turns, context, error, ...)
    chart/environment: 4 Why episodes end
env/tokens            | tokens   | mean tokens of an episode that its environment and the chat template wrote
    chart/environment: 5 Tokens of the environment
env/error             | share    | episodes whose environment raised, hung, or returned no valid step
    better: lower; chart/environment: 6 Failures of environments
env/not_begun         | share    | episodes left out, because their first observation leaves no room for an action
    better: lower; chart/environment: 6
env/malformed         | count    | mean actions of an episode that the environment could not read (info["malformed"])
    better: lower; chart/environment: 7 Actions that could not be read
env/cut_actions       | count    | mean actions of an episode that sampling.max_new_tokens cut
    better: lower; chart/environment: 7
env/tool_calls        | count    | mean calls of tools in an episode
    chart/environment: 8 Calls of tools
env/tool_error        | share    | calls of tools that failed: malformed, unknown, or an error of the tool
    better: lower; chart/environment: 9 Calls of tools that failed
pair/count            | count    | online_dpo: pairs trained on in the step, at most one per prompt
pair/ties             | count    | online_dpo: prompts without a pair: ties, or gaps below `min_gap`
pair/score_gap        | score    | online_dpo: mean score of chosen minus rejected completions
kept/count            | count    | rejection_sampling: completions of the step that are trained on
kept/none             | count    | rejection_sampling: prompts without a kept completion (min_score)
kept/score            | score    | rejection_sampling: mean score of the kept completions
loss/policy           | -        | surrogate loss per token
    label: loss; chart/losses: 1 Policy loss
loss/kl               | score    | KL term of the loss per token
    chart/losses: 2 KL loss
loss/value            | score^2  | value loss per token, before its coefficient
    better: lower; chart/critic: 3 Value loss
loss/ptx              | nats     | next-token loss per token on data.sft
    better: lower; chart/language-modeling: 3 Pretraining loss
loss/sft              | nats     | negative log-likelihood per completion token
    label: loss; held_out: eval/loss; better: lower; chart/language-modeling: 1 Negative log-likelihood;
    progress/sft: 1; headline: 6 Training loss
loss/total            | -        | sum of the loss terms that the optimizer minimizes
    label: loss; chart/losses: 3 Total loss; headline: 7 Training loss
loss/accuracy         | share    | completion tokens that are the model's first choice
    better: higher; chart/language-modeling: 2 Token accuracy; progress/sft: 2
loss/rm               | nats     | Bradley-Terry loss per pair
    label: loss; held_out: eval/rm_loss; better: lower; chart/reward-model: 2 Loss; progress/reward_model: 1
loss/preference       | -        | preference loss per pair (KTO: per completion)
    held_out: eval/preference_loss; better: lower; chart/preferences: 5 Preference loss; progress/preference: 1
preference/accuracy   | share    | pairs whose chosen side has the higher reward (KTO: rows on the correct side of z0)
    held_out: eval/preference_accuracy; better: higher; chart/preferences: 1 Accuracy of the implicit reward;
    progress/preference: 2
preference/margin     | reward   | mean implicit reward of chosen minus rejected sides
    held_out: eval/preference_margin; chart/preferences: 4 Margin; progress/preference: 3
preference/chosen_reward | reward | mean implicit reward of chosen (KTO: desirable) completions
    held_out: eval/chosen_reward; chart/preferences: 3 Implicit reward of chosen and rejected
preference/rejected_reward | reward | mean implicit reward of rejected (KTO: undesirable) completions
    held_out: eval/rejected_reward; chart/preferences: 3
preference/chosen_logprob | nats | log-probability of chosen (desirable) completions, summed over tokens
    held_out: eval/chosen_logprob; chart/preferences: 2 Log-probability of chosen and rejected
preference/rejected_logprob | nats | log-probability of rejected (undesirable) completions, summed over tokens
    held_out: eval/rejected_logprob; chart/preferences: 2
preference/baseline   | nats     | KTO's z0: mean log-ratio to the reference of mismatched completions, at least 0
    chart/preferences: 8 KTO's z0; progress/preference: 6
loss/process          | nats     | process reward model: cross-entropy of the label of a step
    label: loss; held_out: eval/process_loss; better: lower; chart/reward-model: 2; progress/reward_model: 5
process/accuracy      | share    | process reward model: steps whose probability and label are on the same side of 1/2
    label: accuracy; held_out: eval/process_accuracy; better: higher; chart/reward-model: 1;
    progress/reward_model: 6; headline: 8 Accuracy on training steps
process/errors_found  | share    | process reward model: wrong steps whose probability to be right is at most 1/2
    held_out: eval/process_errors_found; better: higher; chart/reward-model: 6 Wrong steps found
rm/accuracy           | share    | pairs whose chosen side scores higher
    label: accuracy; held_out: eval/rm_accuracy; better: higher; chart/reward-model: 1 Accuracy;
    progress/reward_model: 2; headline: 5 Accuracy on training pairs
rm/margin             | score    | mean score difference, chosen - rejected
    chart/reward-model: 3 Score difference
rm/score_mean         | score    | mean score over both sides
    chart/reward-model: 4 Mean score
rm/disagreement       | score    | ensemble: mean over pairs of the members' standard deviation of chosen - rejected
    held_out: eval/rm_disagreement; chart/reward-model: 5 Disagreement of the members
source/score/*        | score    | mean score, after shaping, of the step's completions for one source's prompts
    chart/data: 1 Score by source
source/loss/*         | -        | main loss (loss/sft, loss/preference or loss/rm) on one source's rows
    chart/data: 2 Loss by source
source/rows/*         | count    | rows drawn from the source since the start of the run
    curve: exact; chart/data: 3 Rows drawn by source
source/skipped/*      | count    | rows of the source skipped so far as malformed or too long
    better: lower; curve: exact; chart/data: 4 Rows left out by source
skipped/nonfinite     | count    | optimizer steps skipped because of NaN or infinity, since the start
    better: lower; curve: exact; chart/updates: 8 Optimizer steps skipped: NaN or infinity;
    tile: 9 Optimizer steps skipped (NaN)
skipped/zero_gradient | count    | optimizer steps skipped because a model's gradient was exactly zero (all ties)
    better: lower
skipped/unscored      | count    | steps skipped because a score was NaN or infinite, since the start
    better: lower
best/step             | count    | the step of the best checkpoint so far (checkpoint.best)
    curve: exact; chart/score: 9 Best checkpoint, step
best/gain             | score    | mean paired difference between the latest and the best evaluation; above 0: better
    chart/score: 10 Gain over the best so far
best/gain_low         | score    | lower end of its confidence interval; above 0: the latest evaluation is the new best
    chart/score: 10
eval/score            | score    | mean score of the judge on held-out prompts, one sampled completion per prompt
    better: higher; chart/score: 2 Held-out score; progress/online: 6; progress/preference: 5; progress/sft: 6;
    headline: 1 Mean held-out score; summary: 1; compare/curve: 1 Judge's score; compare/end: 1 score
eval/score_std        | score    | its standard deviation over prompts
    chart/score: 4
eval/unjudged         | count    | completions that no verifier applies to, or whose environment failed; absent if none
    better: lower
eval/score_greedy     | score    | mean score of greedy completions of held-out prompts
    better: higher; chart/score: 2
eval/proxy            | score    | mean score of the trained-on reward on the same completions, before shaping
    chart/score: 3 Held-out score under the trained-on reward; summary: 2;
    compare/curve: 2 Score under the trained-on reward; compare/end: 2 proxy
eval/cost             | cost     | mean cost of the same completions (reward.cost)
    better: lower; chart/cost: 1; compare/curve: 6 Cost
eval/cost_se          | cost     | its standard error
eval/kl               | nats     | KL(policy || reference) per sequence on held-out prompts, k1 of the sampled tokens
    chart/kl: 1; summary: 3; compare/curve: 3 KL to the start model; compare/end: 3 KL, nats
eval/kl_se            | nats     | its standard error
eval/kl_exact         | nats     | eval/kl with the exact KL over the vocabulary at each sampled position, not k1
    chart/kl: 1; compare/end: 4 exact KL
eval/kl_exact_se      | nats     | its standard error
eval/reference_perplexity | -     | perplexity of the held-out completions under the reference, per token
    chart/kl: 5 Perplexity under the reference; tile: 6 Perplexity under the reference
eval/length           | tokens   | mean length of held-out completions
    chart/completions: 1; tile: 2 Held-out length, tokens; summary: 4; compare/curve: 4 Length; compare/end: 5 length
eval/finished         | share    | held-out completions that ended with EOS; episodes of which every action did
    chart/completions: 2; tile: 3 Held-out finished; compare/end: 6 finished
eval/turns            | count    | mean number of actions of a held-out episode
    chart/environment: 2
eval/distinct_1       | share    | distinct token ids over all tokens of all held-out completions, EOS included
    chart/completions: 4
eval/distinct_2       | share    | distinct token-id bigrams over all bigrams of all held-out completions, with EOS
    chart/completions: 4 Distinct bigrams, tokens and trigrams; tile: 4 Distinct bigrams; summary: 5;
    compare/curve: 5 Distinct bigrams; compare/end: 7 distinct-2
eval/distinct_3       | share    | distinct token-id trigrams over all trigrams of all held-out completions, with EOS
    chart/completions: 4
eval/repetition       | share    | share of 4-grams that occurred earlier in the same held-out completion
    chart/completions: 5 Repeated 4-grams; tile: 5 Repeated 4-grams; compare/end: 8 repetition
eval/entropy          | nats     | entropy per token: mean of -log pi over the sampled held-out tokens
    chart/completions: 3
eval/loss             | nats     | held-out negative log-likelihood per completion token
    better: lower; chart/language-modeling: 1; progress/sft: 5; headline: 3 Held-out loss; summary: 6
eval/preference_loss  | -        | held-out preference loss per pair (KTO: per completion)
    better: lower; chart/preferences: 5
eval/preference_accuracy | share | held-out pairs whose chosen side has the higher implicit reward
    better: higher; chart/preferences: 1; progress/preference: 4
eval/preference_margin | reward  | held-out mean implicit reward of chosen minus rejected sides
    chart/preferences: 4
eval/chosen_reward    | reward   | mean implicit reward of held-out chosen (KTO: desirable) completions
    chart/preferences: 7 Held-out implicit reward
eval/rejected_reward  | reward   | mean implicit reward of held-out rejected (KTO: undesirable) completions
    chart/preferences: 7
eval/chosen_logprob   | nats     | log-probability of held-out chosen (desirable) completions, summed over tokens
    chart/preferences: 6 Held-out log-probability
eval/rejected_logprob | nats     | log-probability of held-out rejected (undesirable) completions, summed over tokens
    chart/preferences: 6
eval/process_loss     | nats     | held-out cross-entropy of the label of a step
    better: lower; chart/reward-model: 2; tile: 10 Held-out step loss, nats
eval/process_accuracy | share    | held-out steps whose probability and label are on the same side of 1/2
    better: higher; chart/reward-model: 1; progress/reward_model: 7; headline: 9 Accuracy on held-out steps; summary: 9
eval/process_errors_found | share | held-out wrong steps whose probability to be right is at most 1/2
    better: higher; chart/reward-model: 6
eval/rm_accuracy      | share    | held-out pairs whose chosen side scores higher
    better: higher; chart/reward-model: 1; progress/reward_model: 4; headline: 2 Accuracy on held-out pairs; summary: 7
eval/rm_disagreement  | score    | ensemble: held-out mean over pairs of the members' std of chosen - rejected
    chart/reward-model: 5
eval/rm_loss          | nats     | held-out Bradley-Terry loss per pair
    better: lower; chart/reward-model: 2; tile: 1 Held-out pair loss, nats
""")


FAMILIES = {  # rows whose star stands for a name that the configuration gives
    name: re.compile(re.escape(name).replace(r"\*", ".+")) for name in METRICS if "*" in name
}


def describe(name: str) -> MetricInfo:
    """Return the entry for `name`, of the table or of a section that declares it (rlhf.section.Choice.metrics).

    If a part of the name comes from the configuration, it is the entry of its family, whose star stands for that
    part: `source/score/*` describes `source/score/chat`.

    Raises:
        ConfigError: there is none; add it with its unit and meaning.
    """
    row = _family(name)
    if row in METRICS:
        return METRICS[row]
    declared = _declared()
    if name not in declared:
        raise ConfigError(f"{name}: no row describes this metric; add one to `metrics` of the class that reports it")
    return declared[name]


def _family(name: str) -> str:
    """Return the name of the row with a star that describes `name`; the name itself if there is none."""
    if name in METRICS:
        return name
    return next((row for row, pattern in FAMILIES.items() if pattern.fullmatch(name)), name)


def _declared() -> dict[str, MetricInfo]:
    """Return the rows that sections declare for metrics of their own."""
    return {name: info for rows in sorted(declared_metrics()) for name, info in _parse_table(dedent(rows)).items()}


def table_of(names: Iterable[str]) -> dict[str, MetricInfo]:
    """Return the table with the rows that sections declare.

    Each of `names` that a row with a star describes has a row of its own.
    """
    rows = {name: _family(name) for name in sorted(names) if name not in METRICS}
    members = {name: replace(METRICS[row], name=name) for name, row in rows.items() if row in METRICS}
    return METRICS | _declared() | members


def shown_in(view: str, table: Mapping[str, MetricInfo] = METRICS) -> list[tuple[MetricInfo, Place]]:
    """Return the metrics that a view shows, by position; in a chart, the metric that gives it its title comes first."""
    shown = [(info, place) for info in table.values() if (place := info.place(view)) is not None]
    return sorted(shown, key=lambda entry: (entry[1].position, not entry[1].title))


def progress_metrics(kind: RunKind) -> tuple[str, ...]:
    """Return the names of the metrics on the progress line of a kind of run, in order; a run shows the ones it has."""
    return tuple(info.name for info, _ in shown_in(f"progress/{kind}", METRICS | _declared()))


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

    def add(self, name: str, value: Number, weight: float = 1.0) -> None:
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


def format_number(value: float) -> str:
    """Format a number compactly: 0.53, 5.90, 53.1, 12,400, 1.0e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.01 or size == 0:
        return f"{value:.2f}"
    return f"{value:.1e}"


def format_value(value: object) -> str:
    """Format any value for a table or a tile: numbers are rounded, those below 1 to three decimals; None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1 else format_number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_value(entry) for entry in value)
    return str(value)


def format_fixed(value: float | None) -> str:
    """Format a number with three decimals, for columns that are compared; empty if it is missing or NaN."""
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def format_significant(value: float) -> str:
    """Format a number with four significant digits, for figures of any size: 0.6125, 12.35, 1.2e-05."""
    return f"{value:.4g}"


def format_interval(value: float, low: float, high: float, digits: str = ".3g") -> str:
    """Format a value with its interval, all with the same digits: 0.612 [0.58, 0.645]."""
    return f"{value:{digits}} [{low:{digits}}, {high:{digits}}]"


def format_percent(value: float, low: float, high: float) -> str:
    """Format a share with its interval in percent: 61 % [58, 65]."""
    return f"{100 * value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds: 8.2s, 1m20s, 2h05m."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if round(seconds) < 60:
        return f"{seconds:.0f}s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{remainder:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def format_megabytes(megabytes: float) -> str:
    """Format a size in megabytes: 1,234 MB."""
    return f"{megabytes:,.0f} MB"


def format_gigabytes(megabytes: float) -> str:
    """Format a size in megabytes as gigabytes, for a column that has the unit in its head: 1.2."""
    return f"{megabytes / 1024:.1f}"
