"""Describe the results of a comparison in sentences and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.comparison.costs import COSTS_TABLE, UNITS
from rlhf.comparison.results import (
    ArmBudget,
    ArmResult,
    ArmWinRate,
    ComparisonResults,
    EqualKl,
    FinalModels,
    Measures,
    SeedResult,
    Status,
    SuiteFigure,
)
from rlhf.evaluation.win_rate import Interval
from rlhf.report.charts import Table, humanize
from rlhf.tracking.metrics import format_gigabytes, format_interval, format_number, format_percent, shown_in

SUITE_FIGURES = 6  # the most figures of a suite that get a column
LEAST_KL = 0.5  # nats per sequence: a policy nearer to its start has hardly been trained
FEW_SEEDS = 3  # up to so many, the intervals are too narrow if seeds differ (docs/compare.md)
FEW_PROMPTS = 6  # fewer favor one side by chance more than one time in twenty: 2 · 2^-5 = 0.06


def verdict(results: ComparisonResults) -> str:
    """Write two sentences: which trained arm is best and by how much, and how it compares with the next.

    They claim no more than was measured: if best-of-n or the start model scores higher, the best is the best of the
    trained arms only.
    """
    ranked = ranking(results)
    untuned = results.tuning.untuned_arms if results.tuning is not None else set()
    trained = [arm for arm in ranked if results.arms[arm].type == "train" and arm not in untuned]
    if not ranked:
        return "No arm is finished, so there is nothing to compare. Errors, if there are any, are in the notes."
    best = (trained or ranked)[0]
    final = results.finals[best]
    score = final.measures.score
    assert score is not None, "ranked by its score"
    gain, in_std = format_gain(final.gain), format_gain(final.gain_in_std)
    kl = _kl(final.measures.kl, is_bound=results.arms[best].kl_is_bound)
    start = results.start_model.measures.score
    is_highest = best == ranked[0] and (start is None or score >= start)
    among = "Of the tuned arms " if untuned else "" if is_highest or not trained else "Of the trained arms "
    scored = format_number(score) + _as_written(results, best)
    spent = f" after {budget_in_words(results.budget)}" if trained else ""
    first = (
        f"{among}{best}{_seeds_if_partial(results, best)} has the highest score of the judge, {scored}: {gain} over "
        f"the start model, or {in_std} of its standard deviations, {kl}{spent}."
    )
    return f"{first} {_second(results, best, [arm for arm in trained if arm != best])}"


def _seeds_if_partial(results: ComparisonResults, arm: str) -> str:
    """Return in brackets how many seeds an arm has finished; empty if it has finished all."""
    seeds = results.arms[arm].seeds
    done = sum(cell.is_judged for cell in seeds)
    return "" if done == len(seeds) else f" ({done} of {len(seeds)} seeds)"


def _as_written(results: ComparisonResults, arm: str) -> str:
    """Return the score of a tuned arm as it was written, in brackets, if that was run too."""
    tuning = results.tuning.arms.get(arm) if results.tuning is not None else None
    final = results.finals.get(tuning.untuned_arm) if tuning is not None and tuning.untuned_arm is not None else None
    if final is None or final.measures.score is None:
        return ""
    return f" ({format_number(final.measures.score)} as written)"


def _second(results: ComparisonResults, best: str, others: Sequence[str]) -> str:
    search = "; ".join(
        f"the best of {results.arms[arm].n} samples of the start model gains {format_gain(final.gain)}"
        for arm, final in results.finals.items()
        if results.arms[arm].type == "best_of_n" and arm != best
    )
    ending = f"; {search}" if search else ""
    if not others:
        return f"There is no other trained arm to compare it with{ending}."
    pair = next((rate for rate in results.win_rates if (rate.a, rate.b) == (best, others[0])), None)
    if pair is None:
        return f"{others[0]}, the next, has no seed in common with it{ending}."
    return f"{_against(results, pair)}{ending}."


def _against(results: ComparisonResults, pair: ArmWinRate) -> str:
    """Describe how the best trained arm does against the next, on the seeds that both have finished."""
    next_best = pair.b + _seeds_if_partial(results, pair.b)
    gain = pair.difference
    compared = f"{format_gain(gain)} higher"
    if gain.value < 0:  # it is the best by seeds that the other has not finished
        compared = f"{format_gain(_negative(gain))} lower on the seeds that both have"
    return (
        f"Against {next_best}, the next, it wins {_percent(pair.rate)} of the prompts and scores {compared}, so "
        f"{_conclusion(pair, results.prompts)}"
    )


def _conclusion(pair: ArmWinRate, prompts: int) -> str:
    """Describe what the interval of a difference shows.

    One seed shows nothing of another. Of fewer than FEW_PROMPTS prompts all can favor one side by chance, and no
    resample of them then favors the other.
    """
    if prompts < FEW_PROMPTS or not (pair.difference.low > 0 or pair.difference.high < 0):
        return "these data do not tell the two apart"
    return "the difference is clear of zero" + (" for the one seed that both have" if pair.seeds == 1 else "")


def ranking(results: ComparisonResults) -> list[str]:
    """Return the arms that have a final score, the best first."""
    scores = {name: score for name, final in results.finals.items() if (score := final.measures.score) is not None}
    return sorted(scores, key=lambda name: -scores[name])


def format_gain(gain: Interval | None) -> str:
    """Format a difference with its 95 % interval; a dash without one."""
    if gain is None:
        return "–"
    return format_interval(gain.value, gain.low, gain.high, f"+.{_decimals(gain)}f")


def _decimals(gain: Interval) -> int:
    """Return how many decimals show two digits of the larger end of an interval: at least two, at most six."""
    largest = max(abs(gain.low), abs(gain.high))
    return 2 if largest == 0 or not math.isfinite(largest) else min(6, max(2, 1 - math.floor(math.log10(largest))))


def notes(results: ComparisonResults) -> list[str]:
    """List the caveats for the reader: failed and unfinished cells, and limits of the comparison."""
    lines = [f"{name}, seed {cell.seed}, failed: {cell.error}" for name, cell in _cells_with(results, "failed")]
    unfinished = [f"{name}, seed {cell.seed}" for name, cell in _cells_with(results, "unfinished")]
    if unfinished:
        lines.append(f"Not finished: {'; '.join(unfinished)}. The same command continues.")
    lines += [*results.notes, *_unjudged_note(results)]
    if results.judge_is_trained_on:
        lines.append("The judge is the reward that the arms are trained on: gaming it cannot be seen. Set judge.")
    if len(results.seeds) == 1:
        lines.append("1 seed: the intervals cover the choice of prompts, and nothing that another seed would change.")
    elif len(results.seeds) <= FEW_SEEDS:
        lines.append(f"{len(results.seeds)} seeds: the intervals cover the variation between seeds only roughly.")
    if results.prompts < FEW_PROMPTS:
        count = f"{results.prompts} held-out prompt{'s' if results.prompts > 1 else ''}"
        lines.append(f"{count}: too few for the intervals to mean much.")
    lines += [
        f"{name} hardly moved (KL {format_number(kl)} nats), so its rank says little about the algorithm: give it more "
        "steps or a higher learning rate."
        for name, arm in results.arms.items()
        if arm.type == "train" and name in results.finals
        if (kl := results.finals[name].measures.kl) is not None and kl < LEAST_KL
    ]
    if any(arm.kl_is_bound for arm in results.arms.values()):
        lines.append("Best-of-n trains nothing and is no part of the budget: its cost is paid at every use.")
    return lines


def _unjudged_note(results: ComparisonResults) -> list[str]:
    """Return a note of how many completions have no score of the judge, if any has none."""
    seeds = [seed.measures for arm in results.arms.values() for seed in arm.seeds]
    most = max(measures.unjudged or 0.0 for measures in (results.start_model.measures, *seeds))
    text = (
        f"The judge has no score for up to {most:.0f} of the {results.prompts} completions of a model: no verifier "
        "applies to them: means are over the others, gains and win rates over the prompts on which both have a score."
    )
    return [text] if most else []


def _cells_with(results: ComparisonResults, status: Status) -> list[tuple[str, SeedResult]]:
    """List the cells of that status, each with the name of its arm."""
    return [(name, cell) for name, arm in results.arms.items() for cell in arm.seeds if cell.status == status]


def parallel_note(jobs: int) -> list[str]:
    """Return a note that seconds are not comparable, if several cells ran at once."""
    text = f"{jobs} cells ran at once on shares of one machine: their seconds are no measure of a cell alone."
    return [text] if jobs > 1 else []


def few_prompts_note(limits: Mapping[str, int | None], prompts: int) -> list[str]:
    """Return a note that curves are of fewer prompts than the final figures; `limits` are eval.prompts of the arms."""
    fewer = {limit for limit in limits.values() if limit is not None and limit < prompts}
    if not fewer:
        return []
    count = " or ".join(str(limit) for limit in sorted(fewer))
    return [
        f"During training {count} of the {prompts} held-out prompts were evaluated (eval.prompts): learning curves and "
        "the table at equal KL are of these, the table at the end is of all."
    ]


def end_table(results: ComparisonResults) -> Table:
    """Build the table of the final models: the start model, then every arm, the best first."""
    rows: list[list[Any]] = [["start model", *_row(results.start_model.measures), "–", "–", "–", "–"]]
    rows += [
        [name + _seeds_if_partial(results, name), *_end_row(results.arms[name], results.finals[name])]
        for name in ranking(results)
    ]
    measured = [place.title for _, place in shown_in("compare/end")]
    gains = ["gain over start", "in its standard deviations", "win rate over start", "at equal length"]
    return Table("At the end", ["", *measured, *gains], rows)


def _end_row(arm: ArmResult, final: FinalModels) -> list[Any]:
    return [
        *_row(final.measures, kl_is_bound=arm.kl_is_bound),
        format_gain(final.gain),
        format_gain(final.gain_in_std),
        _percent(final.win_rate_over_start),
        _percent(final.length_controlled_win_rate_over_start),
    ]


def _row(measures: Measures, *, kl_is_bound: bool = False) -> list[Any]:
    names = [info.name for info, _ in shown_in("compare/end")]
    values: dict[str, Any] = {name: measures.value(name.removeprefix("eval/")) for name in names}
    if kl_is_bound:
        values["eval/kl"] = f"≤ {measures.kl:.2f}"
    return list(values.values())


def _percent(share: Interval) -> str:
    return format_percent(share.value, share.low, share.high)


def suite_tables(results: ComparisonResults) -> list[Table]:
    """Build a table for each suite: the start model and every arm; the last column is the gain in the first figure."""
    return [_suite_table(results, suite) for suite, figures in results.start_model.suites.items() if figures]


def _suite_table(results: ComparisonResults, suite: str) -> Table:
    start = results.start_model.suites[suite]
    names = list(start)[:SUITE_FIGURES]
    rows: list[list[Any]] = [["start model", *(_suite_value(start[name]) for name in names), "–"]]
    for arm in ranking(results):
        figures = results.arms[arm].suites.get(suite)
        if figures is not None:
            # A judge of pairs that has not answered yet leaves opponents without a figure.
            values = [_suite_value(figures[name]) if name in figures else None for name in names]
            gain = figures[names[0]].gain if names[0] in figures else None
            rows.append([_with_n(results, arm), *values, format_gain(gain)])
    columns = ["", *map(humanize, names), f"{humanize(names[0])}, gain over start"]
    return Table(suite, columns, rows)


def difference_tables(results: ComparisonResults) -> list[Table]:
    """Build a table for each suite of the differences between arms in its first figure: the row less the column."""
    tables = []
    for suite in results.start_model.suites:
        rows = [row for row in results.suite_differences if row.suite == suite]
        if rows:
            known = {(row.a, row.b): row.difference for row in rows}
            known |= {(row.b, row.a): _negative(row.difference) for row in rows}
            arms = [arm for arm in ranking(results) if any(arm in pair for pair in known)]
            cells = [[a, *(format_gain(known.get((a, b))) for b in arms)] for a in arms]
            title = f"{suite}: {humanize(rows[0].figure)} of the row less the column's"
            tables.append(Table(title, ["", *arms], cells))
    return tables


def _negative(interval: Interval) -> Interval:
    return Interval(0.0 - interval.value, 0.0 - interval.high, 0.0 - interval.low)  # of 0 no -0


def _with_n(results: ComparisonResults, arm: str) -> str:
    n = results.arms[arm].n
    return arm if n is None else f"{arm}, n = {n}"


def _suite_value(figure: SuiteFigure) -> str:
    digits = ".3f" if abs(figure.value) < 10 else ".1f"
    if figure.low is None or figure.high is None:
        return format(figure.value, digits)
    return format_interval(figure.value, figure.low, figure.high, digits)


def equal_kl_table(results: ComparisonResults) -> Table | None:
    """Build the table of every arm at the point where it first reached the common KL; None if there is none."""
    level = results.equal_kl
    if level is None:
        return None
    rows = [[name, *_equal_kl_row(results.finals[name].at_equal_kl)] for name in ranking(results)]
    rows.sort(key=lambda row: -row[1] if isinstance(row[1], float) else float("inf"))
    return Table(
        f"At a KL of {format_number(level)} nats",
        ["", "score", "gain over start", "lowest to highest seed", "seeds"],
        rows,
    )


def _equal_kl_row(reached: EqualKl | None) -> list[Any]:
    if reached is None or reached.score is None:
        return ["not reached", None, None, 0]
    return [reached.score, reached.gain, f"{reached.low:.2f} to {reached.high:.2f}", reached.seeds]


def cost_table(results: ComparisonResults) -> Table:
    """Build the table of the costs of every arm, the mean over its seeds."""
    shown = [cost for cost in COSTS_TABLE if cost.column]
    rows: list[list[Any]] = []
    for name, final in results.finals.items():
        arm, costs = results.arms[name], final.costs
        if costs is not None:
            when = "at every use" if arm.type == "best_of_n" else "once"
            spent = [cost.format(getattr(costs, cost.name)) for cost in shown]
            peak = None if arm.peak_memory_mb is None else format_gigabytes(arm.peak_memory_mb)
            rows.append([name, *spent, peak, when])
    columns = ["", *(cost.column for cost in shown), "peak memory, GB", "paid"]
    return Table("Mean over seeds", columns, rows)


def _kl(kl: float | None, *, is_bound: bool) -> str:
    bound = "at most " if is_bound else ""
    return f"at {bound}{format_number(kl)} nats of KL" if kl is not None else "at a KL not measured"


def budget_in_words(budget: ArmBudget) -> str:
    """Write a budget's limit with its unit."""
    limit = f"{budget.limit:,.0f}" if budget.limit == int(budget.limit) else format_number(budget.limit)
    return f"{limit} {UNITS[budget.unit]}"
