"""The page claims no more than was measured: the best arm, the number of seeds, the opponents, the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cases import compare_tree, plan_of
from many import many

from rlhf.comparison.aggregate import comparable, read_cells, summarize
from rlhf.comparison.page import comparison_charts
from rlhf.comparison.plan import CellPlan, ensure_owner
from rlhf.comparison.results import ComparisonResults, Measures, SeedResult
from rlhf.comparison.summary import end_table, few_prompts_note, format_gain, notes, verdict
from rlhf.comparison.trial import Judgment
from rlhf.config.compare import START_FOLDER
from rlhf.evaluation.win_rate import Interval


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> ComparisonResults:
    """Results of ppo, grpo, dpo and best-of-n with three seeds; ppo is the best."""
    return many(tmp_path_factory.mktemp("many"), count=4, seeds=3)[1]


def with_score(results: ComparisonResults, arm: str, score: float) -> ComparisonResults:
    final = results.finals[arm]
    changed = replace(results.arms[arm], final=replace(final, measures=replace(final.measures, score=score)))
    return replace(results, arms={**results.arms, arm: changed})


def with_difference(results: ComparisonResults, difference: Interval, *, seeds: int = 3) -> ComparisonResults:
    """The same, with this difference between ppo and grpo, the next."""
    rates = (
        replace(rate, difference=difference, seeds=seeds) if (rate.a, rate.b) == ("ppo", "grpo") else rate
        for rate in results.win_rates
    )
    return replace(results, win_rates=tuple(rates))


def failed(seeds: Sequence[SeedResult], count: int) -> tuple[SeedResult, ...]:
    """The same seeds, the last `count` of which have failed."""
    return tuple(
        replace(seed, status="failed", measures=Measures()) if number >= len(seeds) - count else seed
        for number, seed in enumerate(seeds)
    )


def test_a_trained_arm_below_best_of_n_or_the_start_model_is_the_highest_of_the_trained_only(
    results: ComparisonResults,
) -> None:
    assert verdict(results).startswith("ppo has the highest score of the judge")
    below_search = with_score(results, "best_of_n", 9.0)
    assert verdict(below_search).startswith("Of the trained arms ppo has the highest score of the judge")
    start = replace(results.start_model, measures=replace(results.start_model.measures, score=9.0))
    assert verdict(replace(results, start_model=start)).startswith("Of the trained arms ppo has the highest")
    search = replace(results, arms={"best_of_n": results.arms["best_of_n"]}, win_rates=())
    assert "after 640 completions" in verdict(results)
    assert "after 640 completions" not in verdict(search)  # it spends none of the budget


def test_an_arm_that_lost_seeds_is_shown_with_those_it_has(results: ComparisonResults) -> None:
    ppo = results.arms["ppo"]
    partly = replace(results, arms={**results.arms, "ppo": replace(ppo, seeds=failed(ppo.seeds, 2))})
    assert verdict(partly).startswith("ppo (1 of 3 seeds) has the highest score")
    assert [row[0] for row in end_table(partly).rows][:3] == ["start model", "ppo (1 of 3 seeds)", "grpo"]
    assert [row[0] for row in end_table(results).rows][:3] == ["start model", "ppo", "grpo"]


@pytest.mark.parametrize(
    "low, high, seeds, prompts, words",
    [
        (0.1, 0.3, 3, 24, "scores +0.20 [+0.10, +0.30] higher, so the difference is clear of zero;"),
        (-0.1, 0.5, 3, 24, "higher, so these data do not tell the two apart"),
        (0.1, 0.3, 1, 24, "higher, so the difference is clear of zero for the one seed that both have"),
        (0.1, 0.3, 3, 5, "higher, so these data do not tell the two apart"),
        (-0.3, -0.1, 2, 24, "+0.20 [+0.10, +0.30] lower on the seeds that both have, so the difference is clear"),
    ],
)
def test_the_conclusion_is_what_the_interval_shows(
    results: ComparisonResults, low: float, high: float, seeds: int, prompts: int, words: str
) -> None:
    changed = with_difference(results, Interval((low + high) / 2, low, high), seeds=seeds)
    assert words in verdict(replace(changed, prompts=prompts))


def test_few_seeds_and_few_prompts_are_noted(results: ComparisonResults) -> None:
    assert any(note.startswith("3 seeds: the intervals cover") for note in notes(results))
    one = notes(replace(results, seeds=(0,), prompts=1))
    assert any(note.startswith("1 seed: ") and "nothing that another seed" in note for note in one)
    assert any(note.startswith("1 held-out prompt: too few") for note in one)
    assert not any("too few" in note or "seeds" in note for note in notes(replace(results, seeds=tuple(range(5)))))


def test_a_small_gain_is_shown_with_two_digits() -> None:
    assert format_gain(Interval(0.0021, 0.0004, 0.0038)) == "+0.0021 [+0.0004, +0.0038]"
    assert format_gain(Interval(1.5, -0.25, 3.25)) == "+1.50 [-0.25, +3.25]"
    assert format_gain(Interval(0.0, 0.0, 0.0)) == "+0.00 [+0.00, +0.00]"


def test_a_seed_that_failed_early_does_not_cut_the_curves_of_the_others(results: ComparisonResults) -> None:
    ppo = results.arms["ppo"]
    early = tuple(row for row in results.evaluations if (row.arm, row.seed) != ("ppo", 2) or row.step == 0)
    arms = {**results.arms, "ppo": replace(ppo, seeds=failed(ppo.seeds, 1))}
    charts = comparison_charts(replace(results, arms=arms, evaluations=early))
    curve = next(series for series in charts.curves[0].series if series.name == "ppo")
    whole = next(series for series in comparison_charts(results).curves[0].series if series.name == "ppo")
    assert len(curve.xs) == len(whole.xs) == 11
    assert [chart.title for chart in charts.proxies] == ["ppo", "grpo", "dpo"]


def judged_plan(folder: Path) -> CellPlan:
    """A plan of which every cell is judged, on three prompts."""
    plan = plan_of(compare_tree(folder))
    for number, cell in enumerate(plan.cells):
        ensure_owner(cell)
        scores = (0.1 * number, 0.5, 0.2 * number)
        rows = [
            {"prompt": prompt, "completion": " good", "score": score, "length": 2}
            for prompt, score in zip("abc", scores, strict=True)
        ]
        Judgment({"eval/score": sum(scores) / 3}, rows).write(cell.folder)
    return plan


def test_an_arm_that_was_judged_on_other_prompts_is_not_paired_with_the_start_model(tmp_path: Path) -> None:
    plan = judged_plan(tmp_path)
    cell = plan.of("grpo")[1]
    judged = Judgment.read(cell.folder)
    assert judged is not None
    rows = [judged.rows[0], judged.rows[2], {**judged.rows[1], "prompt": "d"}]  # b was too long for it, d is the next
    Judgment(judged.metrics, rows).write(cell.folder)
    results = summarize(plan, read_cells(plan))
    grpo = results.arms["grpo"]
    assert [seed.status for seed in grpo.seeds] == ["done", "failed"]
    assert "of which 1 are the same" in str(grpo.seeds[1].error)
    assert any(note.startswith("grpo, seed 1, failed: it read 3 held-out prompts") for note in notes(results))
    assert {rate.seeds for rate in results.win_rates if "grpo" in (rate.a, rate.b)} == {1}


def test_a_measure_that_a_seed_does_not_have_is_no_mean_of_the_others(tmp_path: Path) -> None:
    """A seed that collapsed to answers of one token has no bigram; a judge abstained for one seed alone."""
    plan = judged_plan(tmp_path)
    of_seeds = ({"eval/distinct_2": None, "eval/unjudged": 2.0}, {"eval/distinct_2": 0.8})
    for cell, metrics in zip(plan.of("grpo"), of_seeds, strict=True):
        judged = Judgment.read(cell.folder)
        assert judged is not None
        Judgment({**judged.metrics, **metrics}, judged.rows).write(cell.folder)
    arms = summarize(plan, read_cells(plan)).arms
    final = arms["grpo"].final
    assert final is not None
    assert [seed.measures.distinct_2 for seed in arms["grpo"].seeds] == [None, 0.8]
    assert (final.measures.distinct_2, final.measures.unjudged) == (None, 1.0)
    assert arms["dpo"].final is not None
    assert arms["dpo"].final.measures.unjudged is None


def test_a_seed_without_its_start_model_is_unfinished_and_the_others_are_reported(tmp_path: Path) -> None:
    plan = judged_plan(tmp_path)
    (plan.of(START_FOLDER)[1].folder / "judged.json").unlink()
    cells = read_cells(plan)
    assert comparable(cells) == cells
    results = summarize(plan, cells)
    assert len(results.arms) == 4
    for arm in results.arms.values():
        assert [seed.status for seed in arm.seeds] == ["done", "unfinished"]
    assert any(note.startswith("Not finished: ppo, seed 1;") for note in notes(results))


def test_curves_of_fewer_prompts_than_the_judge_reads_are_told() -> None:
    assert few_prompts_note({"ppo": None, "grpo": 200}, 200) == []
    (note,) = few_prompts_note({"ppo": 16, "grpo": None, "dpo": 32}, 200)
    assert note.startswith("During training 16 or 32 of the 200 held-out prompts were evaluated")
