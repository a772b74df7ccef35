"""A step's scored completions, the models' numbers for them before the update, and their metrics and samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.algo.advantages import fill_missing, uniform_groups
from rlhf.algo.correction import token_ratios
from rlhf.algo.kl import kl_estimate
from rlhf.algo.masked import Mean, explained_beyond_position, explained_variance, quantiles
from rlhf.algo.selection import effective_sample_share
from rlhf.algorithms.correction import Correction
from rlhf.algorithms.online import Online
from rlhf.batching import extend
from rlhf.config.sections import OldLogProbs
from rlhf.data.prompts import SOURCE
from rlhf.models.kernels.cast import weights_cast_once
from rlhf.models.policy_models import Models
from rlhf.rewards.cost import COST, REWARD
from rlhf.rewards.source import unpadded_ids
from rlhf.rewards.verifier import GRADING
from rlhf.tracking.metrics import Metrics
from rlhf.types import Completions, Experience, Rollout, Scores, StopReason

SCORE_PARTS = ("raw", "clipped", "cut", "disagreement")  # parts that are logged as score/NAME
COST_PARTS = (COST, REWARD)  # parts with metrics of their own
REFUSED = re.compile(r"[^\w .\-/]")  # in the name of a metric, by mlflow
PROBE_ROWS = 2  # rows per step whose log-probs the trainer computes too, to compare with the sampler's
LOGPROB_TOLERANCE = {torch.float64: 1e-9}  # nats; below it a token's two log-probs differ by rounding only
DEFAULT_LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A step's scored completions, and a count of those sampled besides."""

    completions: Completions
    scores: Scores
    graded: Bool[Tensor, " B"]  # False: the score is the mean of the group (no verifier applies, or a failed episode)
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion; zero if none was sampled
    hinted: Bool[Tensor, " B"]  # sampled with a hint in the prompt; sampler_logprobs are then with it
    failed: Bool[Tensor, " N"]  # prompts of which no completion without a hint succeeded; none if rescue is off
    rescued: Bool[Tensor, " N"]  # prompts of which one with a hint succeeded
    shares: Float[Tensor, " N"]  # of each prompt's completions without a hint, those that succeeded; NaN: no score
    extra: int  # completions that were sampled but are not trained on
    metrics: Metrics
    score_moments: dict[str, float] | None = None  # of all scores so far, if reward.shaping.normalize reads them


def live_tokens(completions: Completions) -> int:
    """Count the live tokens of prompts and completions."""
    return int(completions.prompt_mask.sum() + completions.completion_mask.sum())


def generated_tokens(completions: Completions) -> int:
    """Count the tokens that the policy wrote, also in episodes that do not count."""
    return int((completions.completion_mask & (completions.turns >= 0)).sum())


def concat_scores(all_scores: Sequence[Scores]) -> Scores:
    """Concatenate scores; a part that only some of them have is NaN for the rows of the others: it does not apply."""
    names = list(dict.fromkeys(name for scores in all_scores for name in scores.parts))
    return Scores(
        values=torch.cat([scores.values for scores in all_scores]),
        parts={
            name: torch.cat(
                [scores.parts.get(name, torch.full_like(scores.values, torch.nan)) for scores in all_scores]
            )
            for name in names
        },
    )


@torch.no_grad()
def compute_logprobs_and_values(
    completions: Completions,
    scores: Scores,
    models: Models,
    *,
    cut: Callable[[Completions], Sequence[Tensor]],
    baselines: Float[Tensor, " B"] | None = None,
    hinted: Bool[Tensor, " B"] | None = None,
    old_log_probs: OldLogProbs = "trainer",
) -> Rollout:
    """Compute log-probs under the policy and the reference, and values; all on the CPU, like the completions.

    Without a reference model its log-probs are the policy's (zero KL); without a critic the values are zero, and so are
    the baselines if none are given; no row is `hinted` if that is not given. `cut` splits the rows into micro-batches;
    `old_log_probs` says whether the policy's log-probs are computed or the sampler's are used.
    """
    use_sampler_logprobs = takes_sampler_logprobs(completions, models, old_log_probs)

    def work(share: Completions) -> tuple[Tensor, ...]:
        with weights_cast_once():
            passes = [
                _annotate_micro_batch(
                    share.rows(rows).to(models.device), models, use_sampler_logprobs=use_sampler_logprobs
                )
                for rows in cut(share)
            ]
        return tuple(torch.cat(tensors).cpu() for tensors in zip(*passes, strict=True))

    logprobs, ref_logprobs, values = models.engine.ranks.map_rows_to_tensors(completions, work)
    final_values = _final_values(completions, values)
    shaped = scores.parts.get(REWARD)
    if completions.has_episodes:  # the environment's tokens have no probability under the policy
        logprobs, ref_logprobs, values = (
            torch.where(completions.action_mask, tensor, 0.0) for tensor in (logprobs, ref_logprobs, values)
        )
    return extend(
        Rollout,
        completions,
        final_values=final_values,
        scores=scores.values.to(logprobs.dtype),
        turn_scale=scores.scale,
        shaped_scores=None if shaped is None else fill_missing(shaped.double(), completions.group_size),
        baselines=(torch.zeros_like(scores.values) if baselines is None else baselines).to(logprobs.dtype),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        hinted=torch.zeros_like(completions.finished) if hinted is None else hinted,
    )


def _final_values(completions: Completions, values: Float[Tensor, "B T"]) -> Float[Tensor, " B"] | None:
    """Return V of the state in which a row that was cut ends: the value at its last live token; None without any."""
    if not completions.has_episodes or not bool(completions.bootstrapped.any()):
        return None
    last = (completions.completion_mask.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    return torch.where(completions.bootstrapped, values.gather(1, last).squeeze(1), 0.0)


@torch.no_grad()
def takes_sampler_logprobs(completions: Completions, models: Models, old_log_probs: OldLogProbs) -> bool:
    """Decide whether the sampler's log-probs serve as the policy's in this step.

    auto: yes if they equal the trainer's up to rounding. Both use the same weights, temperature and (except in
    bfloat16) the same arithmetic; the first rows are recomputed to confirm it. The decision depends on the step alone,
    so it is the same on every rank and after a restart. Yes too if the update computes its own: nothing but the
    records of samples reads these then.
    """
    if old_log_probs != "auto" or models.update_gives_old_logprobs:
        return old_log_probs != "trainer"
    if models.dtype == "bfloat16" or models.shared_head is not None:
        return False
    probe = completions.rows(slice(0, PROBE_ROWS)).to(models.device)
    trainer = models.policy_tokens(probe).logprobs
    difference = torch.where(probe.action_mask, trainer - probe.sampler_logprobs, 0.0).abs().max()
    return bool(difference <= LOGPROB_TOLERANCE.get(trainer.dtype, DEFAULT_LOGPROB_TOLERANCE))


def _annotate_micro_batch(
    micro_batch: Completions, models: Models, *, use_sampler_logprobs: bool
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    if use_sampler_logprobs:
        logprobs, values = micro_batch.sampler_logprobs, models.values(micro_batch)
    else:
        outputs = models.outputs(micro_batch)
        logprobs, values = outputs.logprobs, outputs.values
    reference = models.reference_logprobs(micro_batch) if models.has_reference else logprobs
    logprobs = logprobs.to(reference.dtype)
    return logprobs, reference, values.to(logprobs.dtype)


def sample_records(
    rollout: Rollout,
    decode: Callable[[Sequence[int]], str],
    *,
    step: int,
    split: str,
    limit: int,
    has_reference: bool,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> list[dict[str, object]]:
    """Build the records of samples.jsonl for the first `limit` completions; prompts appear as the model reads them.

    The KL is None without a reference.
    """
    sequence_kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k1").sum(dim=1)
    records: list[dict[str, object]] = []
    for row in range(min(limit, len(rollout))):
        length = int(rollout.completion_mask[row].sum())
        prompt = rollout.references[row].get("prompt")
        records.append(
            {
                "step": step,
                "split": split,
                "row": int(rollout.row_ids[row]),
                "prompt": prompt if isinstance(prompt, str) else decode(_live_prompt(rollout, row)),
                "completion": decode(rollout.completion_ids[row, :length].tolist()),
                "score": float(rollout.reported_scores[row]) if bool(rollout.counted[row]) else None,
                "parts": part_record(parts or {}, row),
                "kl": float(sequence_kl[row]) if has_reference else None,
                "length": length,
                "finished": bool(rollout.finished[row]),
                **episode_record(rollout, row, decode),
            }
        )
    return records


def episode_record(completions: Completions, row: int, decode: Callable[[Sequence[int]], str]) -> dict[str, object]:
    """Return how an episode ended, its transcript and its number of action tokens; nothing for a plain completion."""
    stop = StopReason(int(completions.stops[row]))
    if stop is StopReason.NONE:
        return {}
    length = int((completions.turns[row][completions.completion_mask[row]] >= 0).sum())
    return {"stop": stop.name.lower(), "turns": transcript(completions, row, decode), "length": length}


def part_record(parts: Mapping[str, Tensor], row: int) -> dict[str, float | None]:
    """Return the parts of a completion's score by name, without the record of its grading."""
    return {name: _number(values[row]) for name, values in parts.items() if GRADING not in name}


def _number(value: Tensor) -> float | None:
    """Return a part's value; None if the part does not apply, for JSON has no NaN."""
    return None if value.isnan() else float(value)


def _live_prompt(rollout: Rollout, row: int) -> list[int]:
    ids: list[int] = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
    return ids


def rollout_metrics(experience: Experience, scores: Scores, models: Models, algorithm: Online) -> Metrics:
    """Compute the metrics of a step that do not depend on its update; KLs leave out hinted completions."""
    mask, counted = experience.action_mask, experience.counted
    values = experience.reported_scores.double()
    metrics = Metrics(
        {
            "score/mean": Mean.of(values, counted),
            "completion/length": Mean.of(mask.sum(dim=1), counted),
            "completion/finished": Mean.of(experience.finished, counted),
            "reward/kl_penalty": Mean.of(_penalties(experience), counted),
        }
    )
    if not models.update_gives_old_logprobs:  # else the update's pass measures them
        metrics.update(logprob_metrics(experience, models))
    if not experience.has_episodes:  # which often begin alike: the task is in the seed
        metrics.update(_duplicates(experience))
    metrics.add("score/std", float(values[counted].std(correction=0)))
    metrics.merge(_advantage_metrics(experience, algorithm))
    if "raw" in scores.parts:
        raw = fill_missing(scores.parts["raw"], experience.group_size)
        metrics.update({"score/raw": Mean.of(raw, ~raw.isnan() & counted)})
    for name in ("clipped", "cut", "disagreement"):
        if name in scores.parts:
            metrics.update({f"score/{name}": Mean.of(scores.parts[name], ~scores.parts[name].isnan())})
    metrics.merge(part_metrics(scores))
    if experience.has_episodes:
        metrics.merge(episode_metrics(experience))
    metrics.update(_scores_by_source(experience, values))
    if experience.group_size > 1:
        metrics.update(_group_metrics(experience, values))
    if models.has_critic:
        plain = mask & ~experience.hinted[:, None]
        metrics.update({"critic/value": Mean.of(experience.values, plain)})
        metrics.update({"critic/return": Mean.of(experience.returns, plain)})
        variance = explained_variance(experience.values, experience.returns, plain)
        metrics.add("critic/explained_variance", variance)
        beyond = explained_beyond_position(experience.values, experience.returns, mask.long().cumsum(dim=1) - 1, plain)
        metrics.add("critic/explained_beyond_position", beyond)
    return metrics


def _group_metrics(experience: Experience, values: Float[Tensor, " B"]) -> dict[str, Mean]:
    """Compute the best score of groups, and the share whose scores are all equal, of the rows that count."""
    counted = experience.counted.view(-1, experience.group_size)
    best = values.view(counted.shape).masked_fill(~counted, -torch.inf).amax(dim=1)
    uniform = uniform_groups(experience.scores, experience.group_size).view(counted.shape)[:, 0]
    has_any, has_several = counted.sum(dim=1) > 0, counted.sum(dim=1) > 1
    return {
        "score/best_of_group": Mean.of(best.masked_fill(~has_any, 0.0), has_any),
        "group/uniform": Mean.of(uniform, has_several),
    }


def _penalties(experience: Experience) -> Float[Tensor, " B"]:
    """Compute the KL penalty of each completion: its score and the rewards of its steps, less its token rewards."""
    given = experience.scores.double()
    if experience.process_rewards is not None:
        given = given + torch.where(experience.action_mask, experience.process_rewards, 0.0).sum(dim=1).double()
    return given - experience.rewards.sum(dim=1).double()


def logprob_metrics(experience: Experience, models: Models) -> dict[str, Mean]:
    """Compute how far the policy's log-probs are from the sampler's and from the reference's, without hinted rows.

    With the sampler mu (the policy itself, an older one, a server) and its states s_t:

        E_mu[sum_t r_t log pi / pi_ref] = E_mu[sum_t KL(pi(. | s_t) || pi_ref(. | s_t))] >= 0,     r_t = pi / mu

    and KL(pi || pi_ref) of sequences if mu is pi. Without r_t it is KL(mu || pi_ref) - KL(mu || pi), which may be
    negative (tests/exact/test_exact_stale.py).
    """
    mask = experience.action_mask & ~experience.hinted[:, None]
    mismatch = (experience.sampler_logprobs - experience.logprobs).abs()
    metrics = {"kl/sampler_mismatch": Mean.of(mismatch, mask)}
    per_token = kl_estimate(experience.logprobs, experience.ref_logprobs, "k1")
    per_token = per_token * token_ratios(experience.logprobs, experience.sampler_logprobs, mask)
    if models.has_reference:
        sequence_kl = torch.where(experience.action_mask, per_token, 0.0).sum(dim=1)
        metrics["kl/reference"] = Mean.of(sequence_kl, ~experience.hinted & experience.counted)
        if models.reference_is_teacher and models.teacher is None:
            metrics["kl/teacher"] = Mean.of(per_token, mask)
            metrics["kl/teacher_sequence"] = metrics["kl/reference"]
    return metrics


def reward_of(scores: Scores) -> Float[Tensor, " B"]:
    """Return the scores of a batch before a cost was combined with them; without a cost, the scores trained on."""
    return scores.parts.get(REWARD, scores.values)


def cost_metrics(scores: Scores) -> Metrics:
    """Compute mean and standard deviation of the costs of a batch, and the mean combined score; none without costs.

    Completions without a cost (NaN), such as those that no verifier applies to, do not count.
    """
    if COST not in scores.parts:
        return Metrics()
    values = scores.values.where(~reward_of(scores).isnan(), torch.nan)  # a failed episode has a filled-in score
    costs, values = (x[~x.isnan()].double() for x in (scores.parts[COST], values))
    metrics = Metrics({"cost/mean": Mean.of(costs), "lagrange/score": Mean.of(values)})
    metrics.add("cost/std", float(costs.std(correction=0)) if len(costs) else float("nan"))
    return metrics


def correction_metrics(experience: Experience, correction: Correction | None) -> Metrics:
    """Compute the metrics of the importance weights of sampling.correction; none without one."""
    if correction is None:
        return Metrics()
    return Metrics(correction.measure(experience.logprobs, experience.sampler_logprobs, experience.action_mask))


def part_metrics(scores: Scores) -> Metrics:
    """Compute mean and standard deviation of each named part over the completions that it applies to (not NaN).

    Characters of a name that some tracker refuses become underscores. The outcomes of gradings have their own metrics.
    """
    metrics = grading_metrics(scores.parts)
    for part, values in scores.parts.items():
        if part in (*SCORE_PARTS, *COST_PARTS) or part.startswith(GRADING):
            continue
        name = REFUSED.sub("_", part)
        live = values[~values.isnan()].double()
        metrics.add(f"part/{name}/applicable", len(live) / len(values))
        if len(live):
            metrics.update({f"part/{name}/mean": Mean.of(live)})
            metrics.add(f"part/{name}/std", float(live.std(correction=0)))
    return metrics


def turn_counts(completions: Completions) -> Int[Tensor, " B"]:
    """Count the actions of each row; 0 for an episode whose environment failed and that is left out."""
    turns = torch.where(completions.action_mask, completions.turns + 1, 0)
    return turns.amax(dim=1) if turns.shape[1] else turns.sum(dim=1)


def episode_metrics(completions: Completions) -> Metrics:
    """Compute the metrics of episodes: turns, rewards by turn, why they ended, and the environments' tokens."""
    mask, rewards = completions.action_mask, completions.turn_rewards.double()
    turns, kept = turn_counts(completions), mask.any(dim=1)
    metrics = Metrics(
        {
            "env/return": Mean.of(torch.where(mask, rewards, 0.0).sum(dim=1), kept),
            "env/turns": Mean.of(turns, kept),
            "env/tokens": Mean.of((completions.completion_mask & ~mask).sum(dim=1), kept),
            "env/error": Mean.of(completions.stops == StopReason.ERROR),
            "env/not_begun": Mean.of((completions.stops == StopReason.CONTEXT) & ~kept),
        }
    )
    for turn in range(int(turns.max())):
        of_turn = torch.where(mask & (completions.turns == turn), rewards, 0.0).sum(dim=1)
        metrics.update({f"env/reward_turn_{turn + 1}": Mean.of(of_turn, turns > turn)})
    for reason in StopReason:
        if reason is not StopReason.NONE:
            metrics.update({f"env/stop/{reason.name.lower()}": Mean.of(completions.stops == reason)})
    return metrics


def transcript(completions: Completions, row: int, decode: Callable[[Sequence[int]], str]) -> list[dict[str, object]]:
    """Return an episode as its parts in order: who wrote each, its text, and of an action its turn and reward."""
    length = int(completions.completion_mask[row].sum())
    ids, rewards = completions.completion_ids[row, :length].tolist(), completions.turn_rewards[row].tolist()
    parts: list[dict[str, object]] = []
    start = 0
    for turn, run in groupby(completions.turns[row, :length].tolist()):
        end = start + len(list(run))
        part: dict[str, object] = {"by": "policy" if turn >= 0 else "environment", "text": decode(ids[start:end])}
        parts.append(part | ({"turn": turn + 1, "reward": rewards[end - 1]} if turn >= 0 else {}))
        start = end
    return parts


def grading_metrics(parts: Mapping[str, Tensor]) -> Metrics:
    """Compute the outcomes of the gradings of a step; nothing if the source is no verifier."""
    metrics = Metrics()
    for name, values in parts.items():
        if name == f"{GRADING}seconds":
            metrics.add(f"{name}_p95", float(values.double().quantile(0.95)))
        elif name.startswith(GRADING):
            metrics.update({name: Mean.of(values)})
    return metrics


def _duplicates(experience: Experience) -> dict[str, Mean]:
    """Count the prompts that the step has twice, and the completions that different prompts share."""
    prompts, texts = ([tuple(ids) for ids in rows] for rows in unpadded_ids(experience))
    size, rows = experience.group_size, len(prompts)
    copies = Counter(prompts[::size])
    answered: dict[tuple[int, ...], set[int]] = {}
    for row, text in enumerate(texts):
        answered.setdefault(text, set()).add(row // size)
    return {
        "prompt/duplicates": Mean(float(sum(copies[prompt] > 1 for prompt in prompts[::size])), rows / size),
        "completion/duplicates": Mean(float(sum(len(answered[text]) > 1 for text in texts)), float(rows)),
    }


def _scores_by_source(experience: Experience, scores: Float[Tensor, " B"]) -> dict[str, Mean]:
    """Average the scores of the completions of each source's prompts; empty if the prompts are no mixture."""
    names = [reference.get(SOURCE) for reference in experience.references]
    return {
        f"source/score/{name}": Mean.of(scores, experience.counted & torch.tensor([other == name for other in names]))
        for name in dict.fromkeys(names)
        if name is not None
    }


def selection_metrics(experience: Experience, algorithm: Online) -> Metrics:
    """Compute how many of a step's completions are trained on and how they scored, and the advantage's own metrics."""
    metrics = Metrics()
    if algorithm.leaves_out_cut or algorithm.drop_uniform_groups:
        metrics.update({"completion/masked": Mean.of(~experience.loss_mask.any(dim=1))})
    if algorithm.rescue is not None:
        metrics.merge(_hint_metrics(experience))
    metrics.update(algorithm.advantage.measure(experience))
    return metrics


def _hint_metrics(experience: Experience) -> Metrics:
    """Compute the share of tokens that were sampled with a hint, and their importance weights."""
    live = experience.completion_mask & experience.hinted[:, None]
    metrics = Metrics({"rescue/hinted_tokens": Mean(float(live.sum()), float(experience.completion_mask.sum()))})
    if live.any() and experience.hint_weights is not None:
        metrics.update({"rescue/weight": Mean.of(experience.hint_weights, live)})
        metrics.add("rescue/weight_ess", effective_sample_share(experience.hint_weights, live))
    return metrics


def _advantage_metrics(experience: Experience, algorithm: Online) -> Metrics:
    """Compute mean, standard deviation and two quantiles of the advantages before whitening."""
    raw = algorithm.advantage.before_whitening(experience)
    live = raw[experience.loss_mask].double()
    metrics = Metrics({"advantage/mean": Mean.of(live)})
    if len(live):
        low, high = quantiles(live, (0.05, 0.95))
        metrics.add("advantage/std", float(live.std(correction=0)))
        metrics.add("advantage/p05", low)
        metrics.add("advantage/p95", high)
    return metrics
