"""Held-out evaluation: scores, KL to the reference and diversity of sampled completions, and the means of a loss.

Diversity is distinct n-grams over all completions, and repetition within each. N-grams are of the sampled token ids,
not of words; they include a closing EOS, and prompts are left out. The share of distinct n-grams falls with the number
of completions and with their length: compare it only between evaluations with equal numbers of prompts and similar
lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import exp, inf, nan

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf.algo.advantages import fill_missing
from rlhf.algo.kl import kl_estimate
from rlhf.algo.masked import Mean, read_means
from rlhf.batching import Batch, extend
from rlhf.errors import NonFiniteScores
from rlhf.models.policy_models import Models
from rlhf.rewards.source import RewardSource
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.sampling.sampler import Sampler, sample_batches
from rlhf.tracking.metrics import Metrics, describe
from rlhf.training.rollout import sample_records, turn_counts
from rlhf.training.step import Loss, RowWiseLoss
from rlhf.types import Completions, Prompts, Rollout, Scores

LARGEST_EXPONENT = 709.0  # exp of anything larger overflows a float


@dataclass(frozen=True)
class PolicyEvaluation:
    """The result of an evaluation: the metrics, and the completions they were computed from, scored by the judge."""

    metrics: dict[str, float]
    rollout: Rollout  # a completion without a score has the mean of the others
    scores: Scores  # of the judge; NaN if no verifier applies, or the environment of an episode failed
    exact_kl: Float[Tensor, " B"]  # nats, summed over the tokens of each completion; zero without a reference

    def records(
        self, decode: Callable[[Sequence[int]], str], *, step: int, split: str, limit: int
    ) -> list[dict[str, object]]:
        """Return the records of samples.jsonl for the first `limit` completions; the score None if it is NaN."""
        records = sample_records(
            self.rollout,
            decode,
            step=step,
            split=split,
            limit=limit,
            has_reference="eval/kl" in self.metrics,
            parts=self.scores.parts,
        )
        missing = self.scores.values.isnan().tolist()
        return [{**record, "score": None} if gone else record for record, gone in zip(records, missing, strict=False)]


@torch.no_grad()
def evaluate_policy(
    prompts: Sequence[Prompts],
    sampler: Sampler,
    models: Models,
    judge: RewardSource,
    *,
    proxy: RewardSource | None,
    cost: RewardSource | None = None,
    key: int,
    greedy: bool,
    rows_per_pass: int | AdaptiveMicroBatch,
) -> PolicyEvaluation:
    """Sample one completion for each held-out prompt and compute the evaluation metrics.

    Every evaluation with the same `key` draws with the same random numbers.

    Args:
        prompts: batches of held-out prompts.
        sampler: the sampler of the policy.
        models: compute log-probabilities under the policy and the reference.
        judge: scores the completions for `eval/score`.
        proxy: the reward that the policy is trained on, if it is not the judge.
        cost: the source of the costs for `eval/cost`, if the run has one.
        key: the key of the random numbers.
        greedy: also sample and score greedy completions.
        rows_per_pass: rows per forward pass; affects memory only. It is halved on out of memory, as in training.
    """
    passes = (
        rows_per_pass
        if isinstance(rows_per_pass, AdaptiveMicroBatch)
        else AdaptiveMicroBatch(rows_per_pass, what="an evaluation pass")
    )
    with models.engine.whole(models.policy, models.dtype):
        completions = sample_batches(sampler, prompts, key=key, group_size=1)
    scores = of_counted(completions, judge(completions))
    rollout, exact_kl = _score_rollout(completions, filled(scores), models, passes)
    metrics = _rollout_metrics(rollout, scores.values.isnan())
    if models.has_reference:
        metrics |= _reference_metrics(rollout, exact_kl)
    if proxy is not None:
        proxies = of_counted(completions, proxy(completions)).values.double()
        if not proxies.isnan().all():  # a verifier may apply to no held-out row
            metrics["eval/proxy"] = float(proxies[~proxies.isnan()].mean())
    if cost is not None:
        costs = of_counted(completions, cost(completions)).values.double()
        metrics |= _mean_and_error("eval/cost", costs[~costs.isnan()])  # NaN: no verifier applies
    if greedy:
        with models.engine.whole(models.policy, models.dtype):
            most_likely = sample_batches(sampler, prompts, key=key, group_size=1, greedy=True)
        greedy_scores = filled(of_counted(most_likely, judge(most_likely)))
        metrics["eval/score_greedy"] = float(greedy_scores.values.double().mean())
    return PolicyEvaluation(metrics, rollout, scores, exact_kl)


def of_counted(completions: Completions, scores: Scores) -> Scores:
    """Take the score of an episode whose environment failed away: it becomes NaN."""
    return replace(scores, values=scores.values.where(completions.counted, torch.nan))


def filled(scores: Scores) -> Scores:
    """Give a completion that no verifier applies to the mean of the others, so that it does not move the mean.

    Raises:
        NonFiniteScores: no completion has a score.
    """
    if not scores.values.isnan().any():
        return scores
    values = fill_missing(scores.values, len(scores.values))
    if values.isnan().any():
        raise NonFiniteScores("no verifier applies to any held-out completion: see the columns that it reads")
    return replace(scores, values=values)


def _score_rollout(
    completions: Completions, scores: Scores, models: Models, passes: AdaptiveMicroBatch
) -> tuple[Rollout, Float[Tensor, " B"]]:
    """Compute the log-probabilities of the completions and the exact KL of each, summed over its tokens.

    It works like `annotate` for training, but takes the KL from the same pass and has no critic: values are 0.
    """

    def forward_in_parts(share: Completions, size: int) -> tuple[Tensor, ...]:
        parts = [_forward(share.rows(rows).to(models.device), models) for rows in passes.cut(share, size)]
        return tuple(torch.cat(column).cpu() for column in zip(*parts, strict=True))

    logprobs, ref_logprobs, kl = passes.run(
        lambda size: models.engine.ranks.map_rows_to_tensors(completions, lambda share: forward_in_parts(share, size))
    )
    values = scores.values.to(logprobs.dtype)
    if completions.has_episodes:  # an environment's text has no probability under the policy
        logprobs, ref_logprobs, kl = (
            torch.where(completions.action_mask, tensor, 0.0) for tensor in (logprobs, ref_logprobs, kl)
        )
    rollout = extend(
        Rollout,
        completions,
        scores=values,
        baselines=torch.zeros_like(values),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=torch.zeros_like(logprobs),
        hinted=torch.zeros_like(completions.finished),
    )
    return rollout, kl.double().sum(dim=1)


def _forward(
    batch: Completions, models: Models
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute the log-probabilities under the policy and the reference, and the exact KL; 0 without a reference."""
    if models.has_reference:
        tokens = models.compare_to_reference(batch)
        return tokens.logprobs, tokens.ref_logprobs, tokens.kl
    logprobs = models.policy_tokens(batch).logprobs
    return logprobs, logprobs, torch.zeros_like(logprobs)


def _rollout_metrics(rollout: Rollout, unjudged: Bool[Tensor, " B"]) -> dict[str, float]:
    """Compute the metrics that need no reference model.

    Completions without a score do not count in the score's mean and standard deviation, and an episode whose
    environment failed in none.
    """
    scores, mask, counted = rollout.scores[~unjudged].double(), rollout.action_mask, rollout.counted
    episodes = {"eval/turns": Mean.of(turn_counts(rollout), counted).value} if rollout.has_episodes else {}
    return {
        "eval/score": float(scores.mean()),
        "eval/score_std": float(scores.std(correction=0)),
        **count_unjudged(unjudged),
        "eval/length": Mean.of(mask.sum(dim=1), counted).value,
        "eval/finished": Mean.of(rollout.finished, counted).value,
        **episodes,
        **diversity(rollout),
        "eval/entropy": Mean.of(-rollout.logprobs, mask).value,
    }


def count_unjudged(unjudged: Bool[Tensor, " B"]) -> dict[str, float]:
    """Count the completions that no verifier of the judge applies to, by metric name; empty if there are none."""
    return {"eval/unjudged": float(unjudged.sum())} if unjudged.any() else {}


def _reference_metrics(rollout: Rollout, exact_kl: Float[Tensor, " B"]) -> dict[str, float]:
    """Compute the KL to the reference, sampled and exact, and the perplexity under it."""
    sampled = kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1").double().sum(dim=1)
    return {
        **_mean_and_error("eval/kl", sampled[rollout.counted]),
        **_mean_and_error("eval/kl_exact", exact_kl[rollout.counted]),
        "eval/reference_perplexity": perplexity(rollout.ref_logprobs, rollout.action_mask),
    }


def _mean_and_error(name: str, values: Float[Tensor, " B"]) -> dict[str, float]:
    """Compute the mean over completions and its standard error, under `name` and `name`_se; NaN for a single one."""
    error = float(values.std() / len(values) ** 0.5) if len(values) > 1 else nan
    return {name: float(values.mean()), f"{name}_se": error}


def perplexity(logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> float:
    """Compute the perplexity of all completions together; infinite if a float would overflow.

        exp(-sum of log-probabilities / number of tokens)

    Both sums are over the unmasked tokens of all completions.
    """
    mean = Mean.of(-logprobs, mask).value
    return exp(mean) if mean < LARGEST_EXPONENT else inf


_Measured = tuple[list[dict[str, Mean]], dict[str, list[float]]]
"""The metrics of each part of a batch, and the values of its rows by name."""


@torch.no_grad()
def evaluate_loss(
    batches: Iterable[Batch],
    loss: Loss,
    ranks: Distributed = SINGLE_PROCESS,
    *,
    leave_out: Collection[str] = (),
    rows: dict[str, list[float]] | None = None,
) -> dict[str, float]:
    """Compute the metrics that a loss reports, averaged over held-out batches, by the names they have there.

    The batches are split over the ranks, and every rank does the same number of passes. The averages are added in the
    order of the batches, so they are equal to the bit for any number of ranks. A batch is halved on out of memory, as
    in training.

    Args:
        batches: held-out batches.
        loss: the loss; its metrics that have a held-out name in the table of metrics are averaged.
        ranks: the ranks of the run.
        leave_out: metrics of the loss, and values of its rows, that would mean something else on these batches.
        rows: receives the values of every row, by name and in the order of the batches, if the loss tells them.
    """
    passes = AdaptiveMicroBatch(sys.maxsize, what="an evaluation pass")
    dealt: list[_Measured] = []
    for batch, counts in _rank_batches(batches, ranks):
        passes.size = min(passes.size, len(batch))
        measured = passes.run(partial(_loss_metrics, batch, loss, passes))
        dealt += [measured] if counts else []
    rounds = zip_longest(*ranks.gather(dealt))  # batches were dealt to the ranks in turn
    in_order = [measured for of_ranks in rounds for measured in of_ranks if measured is not None]
    if rows is not None:
        rows.clear()
        joined = _join([values for _, values in in_order])
        rows.update({name: values for name, values in joined.items() if name not in leave_out})
    metrics = Metrics()
    for parts, _ in in_order:
        for means in parts:
            metrics.update(_held_out_names(means, leave_out))
    return metrics.values()


def _held_out_names(means: Mapping[str, Mean], leave_out: Collection[str]) -> dict[str, Mean]:
    """Give means the names that they have on held-out data; those without such a name are dropped."""
    names = {name: describe(name).held_out for name in means if name not in leave_out}
    return {held_out: means[name] for name, held_out in names.items() if held_out}


def _join(batches: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Join the row values of batches, in the order of the batches."""
    names = sorted({name for values in batches for name in values})
    return {name: [value for values in batches for value in values.get(name, [])] for name in names}


def _loss_metrics(batch: Batch, loss: Loss, passes: AdaptiveMicroBatch, size: int) -> _Measured:
    """Compute the metrics of the loss on each part of a batch, at most `size` rows a part, and the values of rows."""
    means: list[Mapping[str, Mean]] = []
    values: dict[str, Tensor] = {}
    for rows in passes.cut(batch, size):
        means.append(loss.terms(batch.rows(rows))[1])
        row_values = loss.row_values if isinstance(loss, RowWiseLoss) else {}
        for name, part in row_values.items():
            values.setdefault(name, torch.zeros(len(batch), dtype=torch.float64))[rows] = part.cpu().double()
    return read_means(means), {name: column.tolist() for name, column in values.items()}


def _rank_batches(batches: Iterable[Batch], ranks: Distributed) -> Iterator[tuple[Batch, bool]]:
    """Yield this rank's batches, each with whether it counts.

    All ranks yield equally many: in the last round a rank without a batch repeats another's, which does not count.
    """
    pending: list[Batch] = []
    for batch in batches:
        pending.append(batch)
        if len(pending) == ranks.world:
            yield pending[ranks.rank], True
            pending = []
    if pending:
        counts = ranks.rank < len(pending)
        yield pending[ranks.rank if counts else 0], counts


REPEATED = 4  # the n of the n-grams that count as repetition


def diversity(completions: Completions) -> dict[str, float]:
    """Compute the diversity metrics of a batch of completions, by metric name."""
    tokens = completion_tokens(completions)
    distinct = {f"eval/distinct_{n}": distinct_n(tokens, n) for n in (1, 2, 3)}
    return {**distinct, "eval/repetition": repetition(tokens).value}


def completion_tokens(completions: Completions) -> list[list[int]]:
    """Return the token ids of every completion that the policy drew, without padding."""
    return [row[mask].tolist() for row, mask in zip(completions.completion_ids, completions.action_mask, strict=True)]


def distinct_n(sequences: Iterable[Sequence[int]], n: int) -> float:
    """Compute distinct n-grams over all n-grams of all sequences (Li et al. 2016); NaN when there are none."""
    grams = [gram for sequence in sequences for gram in _grams(sequence, n)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def repetition(sequences: Iterable[Sequence[int]], n: int = REPEATED) -> Mean:
    """Compute the share of n-grams that occurred earlier in the same sequence, over the n-grams of all sequences.

        sum_i (n-grams of i - distinct n-grams of i) / sum_i n-grams of i

    This is seq-rep-n of Welleck et al. (2020, sec. 6.1), except that n-grams rather than sequences have equal weight:
    a sequence of fewer than n tokens has none.
    """
    grams = [_grams(sequence, n) for sequence in sequences]
    repeated = sum(len(row) - len(set(row)) for row in grams)
    return Mean(float(repeated), float(sum(map(len, grams))))


def _grams(sequence: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """Return the n-grams of a sequence, in order."""
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
