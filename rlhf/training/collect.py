"""Sample and score a step's completions: once for every prompt, and again for groups that are rescued or refilled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.algo.advantages import fill_missing, uniform_groups
from rlhf.algo.masked import Mean
from rlhf.algo.selection import failed_groups, success_shares
from rlhf.algorithms.online import Online
from rlhf.algorithms.rescue import Rescue
from rlhf.batching import concat, extend
from rlhf.config.sections import OnlineConfig
from rlhf.errors import DataError, NonFiniteScores, RewardError, SamplingError
from rlhf.rewards.verifier import GRADING
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.generate import repeat_rows
from rlhf.tracking.metrics import Metrics
from rlhf.training.finish import counts
from rlhf.training.online_run import OnlineRun
from rlhf.training.overlap import sample_and_score_in_parts
from rlhf.training.rollout import (
    Collected,
    concat_scores,
    cost_metrics,
    generated_tokens,
    grading_metrics,
    live_tokens,
    reward_of,
)
from rlhf.training.running_scores import normalize_scores
from rlhf.types import Completions, Prompts, Scores


def sample_and_score(run: OnlineRun, step: int) -> Collected | None:
    """Sample and score the step's completions; None if a score is NaN or infinite, in which case the step is skipped.

    Raises:
        RewardError: the reward gave no scores; the run is saved as it was before the step.
        SamplingError: no server samples, or not with the trainer's weights; the run is saved likewise.
        DataError: a streamed file has a malformed row that is fatal, or cannot be read; the run is saved likewise.
    """
    size, drawn = run.config.sampling.completions_per_prompt, list[Completions]()
    if run.episodes is not None:
        run.episodes.take_metrics()  # of an evaluation
    try:
        collected = collect(
            run.prompts(step),
            _draw(run, step, drawn),
            partial(_refill, run, step),
            run.algorithm,
            group_size=size,
            hinted=no_hints if run.queue is None else run.queue.hinted,
            due=None if run.queue is None else run.queue.due(),
        )
        collected = leave_out_unscored(collected)
    except NonFiniteScores as error:
        run.session.skip_step(error)
        run.session.state.completions += sum(len(rows) for rows in drawn)
        if run.queue is not None:
            run.queue.skip()
        run.session.report(counts(run) | _generated(drawn), tokens=0)
        return None
    except (RewardError, SamplingError) as error:
        raise run.session.save_and_explain(error) from error
    except DataError as error:  # of a streamed file; another process may not have met it
        raise run.session.explain_update(error, changed=False) from error
    own = {} if run.episodes is None else run.episodes.take_metrics()
    for name, value in {**own, **_generated(drawn)}.items():
        collected.metrics.add(name, value)
    lagrange, state = run.algorithm.lagrange, run.session.state
    if lagrange is not None:
        multiplier = lagrange.in_use(state.multiplier, violation=state.violation)
        collected = replace(collected, scores=replace(collected.scores, scale=lagrange.score_weight(multiplier)))
    if run.config.reward.shaping.normalize is not None:
        collected = normalize_scores(run, collected)
    if run.ahead is not None:
        collected.metrics.add("overlap/age", float(run.ahead.age(step)))
    if run.servers is not None:
        ranks = run.session.ranks
        collected.metrics.merge(ranks.on_main(run.servers.take_metrics))
    if run.watch is not None:
        with run.session.recorder.phase("score"):
            collected.metrics.merge(run.watch(collected.completions, collected.scores, step))
    return collected


def _generated(drawn: Sequence[Completions]) -> dict[str, float]:
    """Return the tokens that the policy wrote in all draws of a step, also those that were thrown away."""
    return {"completion/generated_tokens": float(sum(map(generated_tokens, drawn)))}


def sampling_key(config: OnlineConfig, step: int, *names: int | str) -> int:
    """Derive the seed for sampling this step's completions."""
    return derive_seed(config.run.seed, "train", step, *names)


def _draw(run: OnlineRun, step: int, drawn: list[Completions]) -> Draw:
    """Return the function that samples and scores completions for this step; it adds what it samples to `drawn`."""
    phase = run.session.recorder.phase

    def draw(
        prompts: Prompts, *names: int | str, group_size: int, greedy: bool = False, asked: Prompts | None = None
    ) -> tuple[Completions, Scores]:
        key = sampling_key(run.config, step, *names)

        def sample(part: Prompts) -> Completions:
            if run.ahead is None:
                completions = run.sampler.sample(part, key=key, group_size=group_size, greedy=greedy)
            else:
                completions = run.ahead.take(step)
            drawn.append(completions)
            return completions

        if asked is not None:
            with phase("sample"):
                answers = under_prompts(sample(asked), prompts)
            with phase("score"):
                return answers, fill_failed(answers, run.reward(answers))
        if run.config.overlap.reward_parts > 1:
            with phase("sample"):
                completions, scores = sample_and_score_in_parts(
                    prompts, sample, run.reward, parts=run.config.overlap.reward_parts, device=run.models.device
                )
            return completions, fill_failed(completions, scores)
        with phase("sample"):
            completions = sample(prompts)
        with phase("score"):
            return completions, fill_failed(completions, run.reward(completions))

    return draw


def fill_failed(completions: Completions, scores: Scores) -> Scores:
    """Give an episode whose environment failed the mean of its group, or of all if the whole group failed.

    So the failure moves no mean, and the row is neither the best nor the worst of its group. It has no loss, and the
    parts of its score become NaN: they count in no metric.
    """
    counted = completions.counted
    if bool(counted.all()):
        return scores
    known = scores.values.where(counted, torch.nan)
    filled = fill_missing(known, completions.group_size)
    filled = filled.where(~filled.isnan(), fill_missing(known, len(known)).nan_to_num(0.0))
    parts = {name: part.where(counted, torch.nan) for name, part in scores.parts.items()}
    return Scores(values=scores.values.where(counted, filled), parts=parts, scale=scores.scale)


def _refill(run: OnlineRun, step: int, number: int) -> Prompts:
    """Return prompts that no other refill round of any step gets (until an epoch of them ends)."""
    return run.refill((step - 1) * run.algorithm.refill_rounds + number)


@runtime_checkable
class Draw(Protocol):
    """Samples and scores; `names` distinguish this draw's random numbers from the numbers of the step's other draws."""

    def __call__(
        self,
        prompts: Prompts,
        *names: int | str,
        group_size: int,
        greedy: bool = False,
        asked: Prompts | None = None,
    ) -> tuple[Completions, Scores]:
        """Sample completions of `prompts` like Sampler.sample, then score them by the RewardSource.

        If `asked` is given, the model is asked these prompts instead, and its answers count as answers to `prompts`.
        """


Hinted = Callable[[int], tuple[Prompts, Bool[Tensor, " N"]]]
"""Returns the step's prompts with the hint of the given number (from 1) in them, and which of them have it."""


def no_hints(number: int) -> tuple[Prompts, Bool[Tensor, " N"]]:
    """Raise: a run without algorithm.rescue asks for no hints."""
    raise AssertionError(f"hint {number} is asked for, but algorithm.rescue is off")


def collect(
    prompts: Prompts,
    draw: Draw,
    refill: Callable[[int], Prompts],
    algorithm: Online,
    *,
    group_size: int,
    hinted: Hinted = no_hints,
    due: Int[Tensor, " N"] | None = None,
) -> Collected:
    """Collect `group_size` scored completions of every prompt, or of other prompts that replace it.

    Args:
        draw: samples and scores.
        refill: returns other prompts, as many as `prompts`, for the refill round of the given number (from 1).
        algorithm: decides whether groups are rescued (rescue) or refilled (refill_rounds), in this order, and whether
            there are greedy baselines.
        hinted: returns the prompts with a hint in them, for the rescue.
        due: the number of the hint that each prompt is given in this step (rescue.after); 0 and None: none.
    """
    batch = draw(prompts, group_size=group_size)
    metrics = cost_metrics(batch[1])
    unused: list[Completions] = []
    if algorithm.refill_rounds > 0 or algorithm.rescue is not None:
        metrics.update({"score/first_draw": _mean_score(*batch)})
    shares = success_shares(_counted_scores(*batch), group_size, solved_above=algorithm.solved_above)
    rescue = _rescue(prompts, batch, draw, hinted, algorithm.rescue, due)
    batch, unused = rescue.batch, rescue.unused
    metrics.merge(rescue.metrics)
    if algorithm.refill_rounds > 0:  # a rescued group has a failure and a success, so it is not replaced
        batch, replaced_rows, is_new = _refill_uniform_groups(batch, draw, refill, algorithm.refill_rounds)
        unused = unused + replaced_rows
        rescue.hinted &= ~is_new  # of a group whose hint was due; the prompt that replaces it had none
        metrics.update({"group/refilled": Mean.of(is_new)})
    completions, scores = batch
    baselines = torch.zeros_like(scores.values)
    if algorithm.advantage.needs_greedy:
        best, best_scores = draw(prompts, "greedy", group_size=1, greedy=True)
        baselines = best_scores.values.repeat_interleave(group_size)
        metrics.update({"score/greedy": _mean_score(best, best_scores)})
        unused = [best]
    extra = sum(len(rows) for rows in unused)
    if algorithm.refill_rounds > 0 or algorithm.rescue is not None or unused:
        metrics.add("completion/extra", float(extra))
        tokens = sum(live_tokens(rows) for rows in unused) + rescue.hint_tokens
        metrics.add("completion/extra_tokens", float(tokens))
    return Collected(
        completions=completions,
        scores=scores,
        graded=completions.counted & ~scores.values.isnan(),
        baselines=baselines,
        hinted=rescue.hinted,
        failed=rescue.failed,
        rescued=rescue.rescued,
        shares=shares,
        extra=extra,
        metrics=metrics,
    )


def _mean_score(completions: Completions, scores: Scores) -> Mean:
    """Average the scores; a NaN, which no verifier scored, and a failed episode do not count."""
    values = reward_of(scores)
    return Mean.of(values, ~values.isnan() & completions.counted)


def _counted_scores(completions: Completions, scores: Scores) -> Float[Tensor, " B"]:
    """Return the scores, NaN for completions that do not count: a failed episode is no success and no failure."""
    return scores.values.masked_fill(~completions.counted, torch.nan)


def leave_out_unscored(collected: Collected) -> Collected:
    """Leave out completions to which no verifier applies: their score is NaN.

    A prompt without any score, or whose greedy completion has none, is left out of the step. A completion whose group
    has scores gets their mean: it moves no baseline, and has no advantage over it.

    Raises:
        NonFiniteScores: no completion of the step has a score.
    """
    scores, size = collected.scores, collected.completions.group_size
    if not (scores.values.isnan() | collected.baselines.isnan()).any():
        return collected
    values = fill_missing(scores.values, size)
    kept = (~(values.isnan() | collected.baselines.isnan())).nonzero().flatten()
    if len(kept) == 0:
        raise NonFiniteScores("no verifier applies to any completion of the step: see the columns that it reads")
    collected.metrics.merge(grading_metrics(scores.parts))  # of the prompts that are left out, too
    parts = {name: part for name, part in scores.parts.items() if not name.startswith(GRADING)}
    completions, filled = _select_rows((collected.completions, Scores(values=values, parts=parts)), kept)
    return replace(
        collected,
        completions=completions,
        scores=filled,
        graded=collected.graded[kept],
        baselines=collected.baselines[kept],
        hinted=collected.hinted[kept],
        extra=collected.extra + len(values) - len(kept),
    )


Samples = tuple[Completions, Scores]


def under_prompts(completions: Completions, prompts: Prompts) -> Completions:
    """Return the completions as completions of other prompts, one for each group, which take the place of their own."""
    return extend(
        Completions,
        repeat_rows(prompts, completions.group_size),
        completion_ids=completions.completion_ids,
        completion_mask=completions.completion_mask,
        sampler_logprobs=completions.sampler_logprobs,
        finished=completions.finished,
        group_size=completions.group_size,
    )


@dataclass(kw_only=True)
class _Rescued:
    """A step's batch while groups of it are sampled with hints; see Collected for `hinted` and `failed`."""

    batch: Samples
    hinted: Bool[Tensor, " B"]
    failed: Bool[Tensor, " N"]
    by_hint: Int[Tensor, " N"]  # the number of the hint that led to a success; 0: none
    unused: list[Completions] = field(default_factory=list)  # sampled and replaced, or sampled with a hint in vain
    hint_tokens: int = 0  # read while sampling with a hint beyond the tokens of the plain prompts
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def rescued(self) -> Bool[Tensor, " N"]:
        """Return which groups a hint led to a success."""
        return self.by_hint > 0


def _rescue(
    prompts: Prompts, batch: Samples, draw: Draw, hinted: Hinted, config: Rescue | None, due: Int[Tensor, " N"] | None
) -> _Rescued:
    """Sample some groups with hints; without a configuration, none."""
    no_group, no_row = torch.zeros(len(prompts), dtype=torch.bool), torch.zeros(len(batch[0]), dtype=torch.bool)
    rescue = _Rescued(batch=batch, hinted=no_row, failed=no_group, by_hint=torch.zeros_like(no_group, dtype=torch.long))
    if config is None:
        return rescue
    rescue.failed = failed_groups(batch[1].values, batch[0].group_size, solved_above=config.solved_above)
    if config.after == 0:
        counts_of_kind = _rescue_failed_groups(prompts, rescue, draw, hinted, config)
    else:
        counts_of_kind = _hint_due_groups(prompts, rescue, draw, hinted, config, due)
    rescue.metrics.update({"rescue/failed": Mean.of(rescue.failed)})
    by_hint = {f"rescue/by_hint_{n}": float((rescue.by_hint == n).sum()) for n in range(1, len(config.hints) + 1)}
    for name, value in {**by_hint, "rescue/rescued": float(rescue.rescued.sum()), **counts_of_kind}.items():
        rescue.metrics.add(name, value)
    return rescue


def _rescue_failed_groups(
    prompts: Prompts, rescue: _Rescued, draw: Draw, hinted: Hinted, config: Rescue
) -> Mapping[str, float]:
    """Sample prompts whose whole group failed with a hint, one hint after another (Guide, Nath et al. 2025).

    If a hint leads to a success, all completions sampled with it take the place of the group's last ones, the
    failures among them too: the choice of successes would add a bias beyond the importance weights. The first ones
    stay, so a rescued group has both. A group that no hint helps stays as it was sampled first.
    """
    without_hint = rescue.failed.clone()
    for number in range(1, len(config.hints) + 1):
        asked, has_hint = hinted(number)
        without_hint &= ~has_hint
        groups = (rescue.failed & (rescue.by_hint == 0) & has_hint).nonzero().flatten()
        _sample_with_hint(rescue, prompts, asked, groups, draw, config, number=number)
    return {"rescue/without_hint": float(without_hint.sum())}


def _hint_due_groups(
    prompts: Prompts, rescue: _Rescued, draw: Draw, hinted: Hinted, config: Rescue, due: Int[Tensor, " N"] | None
) -> Mapping[str, float]:
    """Sample a part of the groups that are due with their hint, whether or not it helps.

    The choice of groups and of rows to replace does not depend on this step's draws: a row of the plain prompt and a
    weighted row of the hinted one have the same expectation, so that the step has the plain one too.
    """
    due = torch.zeros_like(rescue.by_hint) if due is None else due
    without_hint = due > 0
    for number in range(1, len(config.hints) + 1):
        asked, has_hint = hinted(number)
        groups = ((due == number) & has_hint).nonzero().flatten()
        without_hint[groups] = False
        _sample_with_hint(rescue, prompts, asked, groups, draw, config, number=number)
    return {"rescue/due": float((due > 0).sum()), "rescue/without_hint": float(without_hint.sum())}


def _sample_with_hint(
    rescue: _Rescued,
    prompts: Prompts,
    asked: Prompts,
    groups: Int[Tensor, " D"],
    draw: Draw,
    config: Rescue,
    *,
    number: int,
) -> None:
    """Sample the groups with a hint, which replaces rows of the groups that it solves, or of all that were due."""
    if len(groups) == 0:
        return
    per_group = config.hinted_per_group(rescue.batch[0].group_size)
    plain, with_hint = prompts.rows(groups), asked.rows(groups)
    drawn = draw(plain, "rescue", number, group_size=per_group, asked=with_hint)
    rescue.hint_tokens += per_group * int(with_hint.prompt_mask.sum() - plain.prompt_mask.sum())
    solved = success_shares(_counted_scores(*drawn), per_group, solved_above=config.solved_above) > 0  # not if NaN
    rescue.by_hint[groups[solved]] = number
    is_used = solved if config.after == 0 else torch.ones_like(solved)
    rescue.batch, replaced, rows = _replace_last_of_groups(rescue.batch, drawn, groups, is_used)
    rescue.unused.append(replaced)
    rescue.hinted[rows] = True


def _replace_last_of_groups(
    batch: Samples, drawn: Samples, groups: Int[Tensor, " D"], solved: Bool[Tensor, " D"]
) -> tuple[Samples, Completions, Int[Tensor, " R"]]:
    """Replace the last rows of the `groups` that are `solved` by the drawn ones, which take their row ids.

    Returns:
        The batch, the completions left over (replaced or not used), and the rows that were replaced.
    """
    size, per_group, count = batch[0].group_size, drawn[0].group_size, len(batch[0])
    last = (groups[:, None] * size + torch.arange(size - per_group, size)).flatten()  # the rows that drawn may replace
    completions = replace(drawn[0], group_size=size, row_ids=batch[0].row_ids[last])
    combined = _concat_batches([batch, (completions, drawn[1])])
    is_used = solved.repeat_interleave(per_group)
    rows = torch.arange(count)
    rows[last[is_used]] = count + torch.arange(len(last))[is_used]
    left_over = torch.ones(len(combined[0]), dtype=torch.bool)
    left_over[rows] = False
    return _select_rows(combined, rows), combined[0].rows(left_over.nonzero().flatten()), last[is_used]


def _refill_uniform_groups(
    batch: Samples, draw: Draw, refill: Callable[[int], Prompts], rounds: int
) -> tuple[Samples, list[Completions], Bool[Tensor, " B"]]:
    """Replace uniform groups by groups of other prompts, in at most `rounds` rounds (DAPO, Yu et al. 2025, sec. 3.2).

    A replacing prompt takes the row id of the one it replaces, so its rows have that prompt's random numbers. Groups
    that are still uniform after the last round stay (the loss leaves them out). A group is uniform, too, if the scores
    that it has are equal, or if it has none.

    Returns:
        The batch, the completions that were sampled and discarded, and which rows are of groups that were replaced.
    """
    size, unused, is_new = batch[0].group_size, [], torch.zeros(len(batch[0]), dtype=torch.bool)
    for number in range(1, rounds + 1):
        uniform = _uniform(batch)
        if not uniform.any():
            break
        slots = uniform.nonzero().flatten()[::size]  # the first row of each uniform group
        others = replace(refill(number).rows(slice(0, len(slots))), row_ids=batch[0].row_ids[slots] // size)
        drawn = draw(others, "refill", number, group_size=size)
        varied = ~_uniform(drawn)
        rows = torch.arange(len(uniform))
        rows[uniform] = torch.where(varied, len(uniform) + torch.arange(len(varied)), rows[uniform])
        combined = _concat_batches([batch, drawn])
        discarded = torch.ones(len(combined[0]), dtype=torch.bool)
        discarded[rows] = False
        unused.append(combined[0].rows(discarded.nonzero().flatten()))
        batch = _select_rows(combined, rows)
        is_new[uniform] = varied
    return batch, unused, is_new


def _uniform(batch: Samples) -> Bool[Tensor, " B"]:
    """Flag the rows of groups that are uniform once missing scores are filled in; so is one without any score."""
    size = batch[0].group_size
    return uniform_groups(fill_missing(batch[1].values, size).nan_to_num(0.0), size)


def _concat_batches(batches: Sequence[Samples]) -> Samples:
    return concat([batch[0] for batch in batches]), concat_scores([batch[1] for batch in batches])


def _select_rows(batch: Samples, index: Tensor) -> Samples:
    completions, scores = batch
    parts = {name: part[index] for name, part in scores.parts.items()}
    return completions.rows(index), Scores(values=scores.values[index], parts=parts)
