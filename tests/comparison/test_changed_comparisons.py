"""Folders of comparisons whose file was changed: what was measured for other settings is not reported."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import Ended, compare_tree, plan_of
from many import many
from rich.console import Console
from runs import make_model, write_rows

from rlhf.comparison.aggregate import read_cells, summarize
from rlhf.comparison.costs import Costs
from rlhf.comparison.page import finished_seeds, reward_hacking_points
from rlhf.comparison.plan import Cell, CellPlan
from rlhf.comparison.results import ComparisonResults, Evaluation, Measures
from rlhf.comparison.scheduler import run_cells
from rlhf.comparison.summary import end_table, equal_kl_table, notes, suite_tables
from rlhf.comparison.terminal import ComparisonTerminal
from rlhf.comparison.trial import FOLDER, Judgment, failure_of, read_suites, record_failure, run_suites, suite_file
from rlhf.comparison.view import ComparisonView
from rlhf.config.files import format_yaml
from rlhf.config.load import dump
from rlhf.errors import ModelError
from rlhf.evaluation.frontier import score_at_kl
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import encode_line

ROWS = [{"row": row, "prompt": f"red {row}", "completion": "good", "score": 1.0 + row, "length": 1} for row in range(3)]


def tree_of(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = write_rows(folder / "rows.jsonl", [{"prompt": "red one", "instruction_id_list": ["x"], "kwargs": [{}]}])
    suites = {"ifeval": {"dataset": {"path": str(rows)}}}
    tree = compare_tree(folder, **{"seeds": [0], "suites": suites, **changes})
    tree["arms"] = {"dpo": tree["arms"]["dpo"]}
    return tree


STRICT = {"strict": {"value": 0.5, "low": 0.1, "high": 0.9}}
TRUNCATED = {"truncated": {"value": 0.0, "low": 0.0, "high": 0.5}}  # of suites for which the model writes


def judge(cell: Cell, figures: Mapping[str, Any] = STRICT) -> None:
    """Write the judgment and the suites of a cell that nobody ran."""
    (cell.folder / FOLDER).mkdir(parents=True)
    metrics = {"eval/score": 2.0, "eval/kl": 9.0}
    Judgment(metrics, ROWS).write(cell.folder)
    for name, settings in cell.config.suites.items():
        content = {
            "model": {"path": cell.config.train.policy.model},
            "figures": figures,
            "rows": {"strict": [0.5]},
            "config": settings,
        }
        (cell.folder / FOLDER / f"{name}.json").write_text(json.dumps(content))


def judged_plan(tree: Mapping[str, Any], figures: Mapping[str, Any] = STRICT) -> CellPlan:
    """A comparison of which every cell is judged."""
    plan = plan_of(tree)
    for cell in plan.cells:
        judge(cell, figures)
    return plan


def plan_without_a_suite(folder: Path) -> tuple[CellPlan, Path]:
    """A judged comparison of two seeds, and the folder of its last cell, which has no result of its suite."""
    plan = judged_plan(tree_of(folder, seeds=[0, 1]))
    last = plan.of("dpo")[1].folder
    suite_file(last, "ifeval").unlink()
    return plan, last


def stopped(cell: Cell, place: int) -> Ended:
    return Ended("interrupted")


def test_an_arm_that_needs_nothing_more_has_not_failed(tmp_path: Path) -> None:
    """A suite that was added failed; `suites.NAME=null leaves it out`, as its message says."""
    plan = judged_plan(tree_of(tmp_path, suites={}))
    for cell in plan.cells:
        record_failure(cell.folder, "suites.ifeval: the data are gone (suites.ifeval=null leaves it out)")
    assert run_cells(plan, stopped, ComparisonView())
    assert [failure_of(cell.folder) for cell in plan.cells] == [None, None]


def test_a_suite_that_is_left_out_is_not_reported(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    for cell in plan_of(tree).cells:
        judge(cell)
    assert [set(result.suites) for result in read_cells(plan_of(tree))] == [{"ifeval"}] * 2
    left_out = plan_of({**tree, "suites": {"ifeval": None}})
    assert [set(result.suites) for result in read_cells(left_out)] == [set()] * 2


def test_a_suite_with_other_settings_is_not_reported_before_it_is_measured_again(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    for cell in plan_of(tree).cells:
        judge(cell)
    tree["suites"]["ifeval"]["sampling"] = {"max_new_tokens": 5}
    plan = plan_of(tree)
    assert not run_cells(plan, stopped, ComparisonView())
    assert [read_suites(cell.folder) for cell in plan.cells] == [{}, {}]


def test_a_suite_that_was_measured_otherwise_by_hand_is_left_out_with_a_note(tmp_path: Path) -> None:
    """`rlhf eval FOLDER --suite ifeval limit=...` writes into the cell's own file."""
    plan = judged_plan(tree_of(tmp_path))
    path = suite_file(plan.cells[1].folder, "ifeval")
    content = json.loads(path.read_text())
    content["config"]["sampling"]["max_new_tokens"] = 5
    path.write_text(json.dumps(content))
    cells = read_cells(plan)
    assert [set(result.suites) for result in cells] == [{"ifeval"}, set()]
    results = summarize(plan, cells)
    assert (results.arms["dpo"].status, results.arms["dpo"].suites) == ("done", {})
    (note,) = results.notes
    assert note.startswith("dpo, seed 0: evals/ifeval.json was made with other settings than the comparison's")
    assert note in notes(results)
    assert ComparisonResults.of(json.loads(json.dumps(results.record()))).notes == (note,)
    console = Console(file=io.StringIO(), width=400)
    ComparisonTerminal(console).results(results, tmp_path / "report.html")
    assert note in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_arm_without_a_result_of_a_suite_is_named(tmp_path: Path) -> None:
    """The suite was added, and measuring it was interrupted, or it failed for one seed."""
    plan, last = plan_without_a_suite(tmp_path)
    results = summarize(plan, read_cells(plan))
    assert results.arms["dpo"].suites == {}
    (note,) = results.notes
    assert note == (
        "ifeval has no result for dpo, seed 1. Its table shows only models with a result for every seed, beside the "
        "start model's. The same command measures it."
    )
    (last / "judged.json").unlink()  # the seed is not finished: the other one's result is shown
    assert summarize(plan, read_cells(plan)).notes == ()


def test_a_seed_that_was_judged_counts_if_a_suite_fails_later(tmp_path: Path) -> None:
    plan, last = plan_without_a_suite(tmp_path)
    record_failure(last, "suites.ifeval: the data are gone (suites.ifeval=null leaves it out)")
    results = summarize(plan, read_cells(plan))
    assert [seed.status for seed in results.arms["dpo"].seeds] == ["done", "failed"]
    assert (results.win_rates, results.finals["dpo"].measures.score) == ((), 2.0)
    assert [row[0] for row in end_table(results).rows] == ["start model", "dpo"]  # the mean over both seeds
    rows = [Evaluation(arm="dpo", seed=seed, step=0, measures=Measures(), costs=Costs()) for seed in (0, 1)]
    assert finished_seeds(replace(results, evaluations=tuple(rows)), "dpo").keys() == {0, 1}


def test_a_suite_without_figures_does_not_end_the_report(tmp_path: Path) -> None:
    """A tag of lm-eval has figures of its tasks alone; a judge of pairs may abstain on all of them."""
    plan = judged_plan(tree_of(tmp_path), {})
    results = summarize(plan, read_cells(plan))
    assert (results.suite_differences, suite_tables(results)) == ((), [])


def test_a_suite_of_a_model_that_is_gone_is_an_error_that_says_how_to_leave_it_out(tmp_path: Path) -> None:
    cell = plan_of(tree_of(tmp_path)).cells[1]
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(format_yaml(dump(cell.config.train)))
    RunFolder(cell.folder).write_complete(4)
    message = r"^suites\.ifeval: the run in .* its model/ is gone, .*again \(suites\.ifeval=null leaves it out\)$"
    with pytest.raises(ModelError, match=message):
        run_suites(cell.config, cell.folder, str(cell.folder))


@pytest.mark.parametrize(
    "length, figures, note",
    [
        (8, STRICT | TRUNCATED, "ifeval: answers have at most 6 tokens (start), 8 tokens (dpo). For one length set "),
        (6, STRICT | TRUNCATED, None),  # the base's
        (8, STRICT, None),  # a suite that reads probabilities alone
    ],
)
def test_models_that_answer_at_other_lengths_are_named(
    tmp_path: Path, length: int, figures: dict[str, Any], note: str | None
) -> None:
    tree = tree_of(tmp_path)
    tree["arms"]["dpo"]["sampling"] = {"max_new_tokens": length}
    plan = judged_plan(tree, figures)
    cells = read_cells(plan)
    assert [set(result.suites) for result in cells] == [{"ifeval"}] * 2
    judged = "sampling.max_new_tokens of the judged completions: 6 (start); 8 (dpo). For one value set shared.sampling."
    expected = [f"{judged}max_new_tokens."] if length == 8 else []
    expected += [] if note is None else [f"{note}suites.ifeval.sampling.max_new_tokens."]
    assert summarize(plan, cells).notes == tuple(expected)


def test_models_that_are_judged_at_another_temperature_are_named(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    tree["arms"]["dpo"]["sampling"] = {"temperature": 0.5}
    plan = judged_plan(tree)
    told = "sampling.temperature of the judged completions: 1.0 (start); 0.5 (dpo). For one value set shared.sampling."
    assert summarize(plan, read_cells(plan)).notes == (f"{told}temperature.",)


def test_no_figure_of_another_start_model_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of(tmp_path)
    judge(plan_of(tree).cells[0])
    other = str(make_model(tmp_path / "other", seed=1))
    start = plan_of({**tree, "start": other, "seeds": [1]}).cells[0]
    measured: list[str] = []
    monkeypatch.setattr("rlhf.comparison.trial.load_model_for_suite", lambda settings, path: SimpleNamespace(path=path))
    monkeypatch.setattr("rlhf.comparison.trial.evaluate_suite", lambda settings, subject, task: None)
    monkeypatch.setattr("rlhf.comparison.trial.write_result", lambda *given: measured.append(given[2]))
    run_suites(start.config, start.folder, None)
    assert measured == [other]


def test_the_kl_of_a_best_checkpoint_is_not_that_of_the_last_evaluation(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, suites={})
    tree["arms"]["dpo"]["checkpoint"] = {"best": {"patience": 1}}
    plan = judged_plan(tree)
    folder = plan.cells[1].folder
    lines = [{"step": step, "eval/score": 1.0, "best/step": float(min(step, 2))} for step in (0, 2, 4)]
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode_line, lines)))
    evaluations = read_cells(plan)[1].evaluations
    assert [evaluation.measures.kl for evaluation in evaluations] == [0.0, 9.0, None]


def test_a_gain_at_equal_kl_is_over_the_start_model_on_the_prompts_of_the_evaluations(tmp_path: Path) -> None:
    plan, _, cells = many(tmp_path, count=3, seeds=2)
    few = 6  # eval.prompts of the arms
    limited = []
    for result in cells:
        train = result.cell.config.train
        train = train.model_copy(update={"eval": train.eval.model_copy(update={"prompts": few})})
        config = result.cell.config.model_copy(update={"train": train})
        limited.append(replace(result, cell=replace(result.cell, config=config)))
    table = equal_kl_table(summarize(plan, limited))
    assert table is not None
    level = summarize(plan, limited).equal_kl
    assert level is not None
    for name, score, gain, *_ in table.rows:
        scores, starts = [], []
        for result in limited:
            if result.cell.arm == name:
                points = [(row.measures.kl or 0.0, row.measures.score or 0.0) for row in result.evaluations]
                scores.append(score_at_kl(points, level) or 0.0)
            elif result.cell.arm == "start" and result.judged is not None:
                starts.append(float(result.judged.column("score")[:few].mean()))
        assert score == pytest.approx(sum(scores) / 2)
        assert gain == pytest.approx(sum(scores) / 2 - sum(starts) / 2)


def test_a_judge_that_abstains_makes_the_margin_of_gaming_wider(tmp_path: Path) -> None:
    _, results, _ = many(tmp_path, count=3, seeds=1)  # of 24 prompts

    def marked(unjudged: float | None) -> int:
        rows = []
        for number, row in enumerate([row for row in results.evaluations if row.arm == "ppo"][:2]):
            # The judge's score falls by 0.7; two standard errors are 0.41 on 24 prompts, and 1 on 4.
            measures = Measures(score=1.0 - 0.7 * number, proxy=float(number), score_std=1.0, unjudged=unjudged)
            rows.append(Evaluation(arm="ppo", seed=row.seed, step=number, measures=measures, costs=row.costs))
        return len(reward_hacking_points(replace(results, evaluations=tuple(rows)), "ppo"))

    assert (marked(None), marked(20.0)) == (1, 0)
