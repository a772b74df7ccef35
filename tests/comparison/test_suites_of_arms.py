"""Suites as judges of a comparison: every final model is measured, gains are paired, best-of-n keeps the best."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cases import compare_tree, compared, plan_of
from rich.console import Console
from runs import write_rows

from rlhf.api.checks import check_arm_files, suite_settings
from rlhf.cli import main
from rlhf.comparison.aggregate import read_cells, summarize
from rlhf.comparison.plan import plan_cells, read_plan
from rlhf.comparison.results import ComparisonResults, SuiteFigure
from rlhf.comparison.rows import browser_data
from rlhf.comparison.summary import difference_tables, format_gain, suite_tables
from rlhf.comparison.terminal import ComparisonTerminal
from rlhf.comparison.trial import FOLDER, SuiteScores, read_suites, summarize_suites
from rlhf.config.files import format_yaml
from rlhf.config.load import compare_config, dump, read_yaml
from rlhf.data.paths import Lookups
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.win_rate import Interval
from rlhf.factory.evaluation import evaluate_suite
from rlhf.lab.build import PREFIX
from rlhf.suites.harness import HarnessSuite
from rlhf.suites.questions import Estimate, SuiteResult, share_estimate
from rlhf.suites.subject import Subject

INSTRUCTIONS = [
    {"prompt": prompt, "instruction_id_list": ["keywords:existence", "punctuation:no_comma"], "kwargs": kwargs}
    for prompt in ("red one", "blue two", "red two")
    for kwargs in ([{"keywords": ["good"]}, {}], [{"keywords": ["one", "two"]}, {}])
]


CELLS_OF_BOTH = {"start/seed-0/cell.yaml", "grpo/seed-0/cell.yaml"}


def fails_on_a_trained_model(settings: Any, subject: Subject, task: Any) -> Any:
    if "grpo" in subject.path:
        raise DataError("the data are gone")
    return evaluate_suite(settings, subject, task)


def with_suites(folder: Path, **changes: Any) -> dict[str, Any]:
    rows = write_rows(folder / "instructions.jsonl", INSTRUCTIONS)
    safe = write_rows(folder / "safe.jsonl", [{"prompt": "red one", "label": label} for label in ("safe", "unsafe")])
    suites = {
        "ifeval": {"dataset": {"path": str(rows)}, "sampling": {"max_new_tokens": 6}},
        "xstest": {"dataset": {"path": str(safe)}, "sampling": {"max_new_tokens": 6}},
    }
    return compare_tree(folder, suites=suites, budget={"completions": 32}, evaluations=1, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("s")
    tree = with_suites(path, seeds=[0, 1])
    tree["arms"] = {name: tree["arms"][name] for name in ("grpo", "best_of_n")}
    assert compared(tree)
    return path / "compare"


@pytest.fixture(scope="module")
def results(folder: Path) -> ComparisonResults:
    return ComparisonResults.read(folder)


def stored(cell: Path, suite: str) -> dict[str, Any]:
    """The file that a suite left in the folder of a cell."""
    content: dict[str, Any] = json.loads((cell / FOLDER / f"{suite}.json").read_text(encoding="utf-8"))
    return content


def test_every_final_model_is_measured(folder: Path, results: ComparisonResults) -> None:
    assert set(read_suites(folder / "grpo" / "seed-1")) == {"ifeval", "xstest"}
    assert set(read_suites(folder / "best_of_n" / "seed-0")) == {"ifeval"}  # a refusal has no reward to pick by
    content = stored(folder / "start" / "seed-0", "ifeval")
    assert content["n"] == len(INSTRUCTIONS)
    assert len(content["examples"]) == len(INSTRUCTIONS)
    assert set(results.arms["grpo"].suites) == {"ifeval", "xstest"}
    ifeval = results.start_model.suites["ifeval"]
    assert {"prompt_strict", "instruction_strict"} <= set(ifeval)
    assert ifeval["prompt_strict"].gain == Interval(0.0, 0.0, 0.0)


def test_suites_write_prompts_as_the_arms_do(tmp_path: Path) -> None:
    tree = with_suites(tmp_path)
    data = {"system": "Be brief.", "chat_template_kwargs": {"thinking": False}}
    tree["shared"] = {**tree.get("shared", {}), "data": {**tree.get("shared", {}).get("data", {}), **data}}
    for cell in plan_of(tree).cells:
        assert cell.config.train.data.system == "Be brief."
        for settings in cell.config.suites.values():
            assert {key: settings[key] for key in data} == data


def test_results_are_read_back_as_they_were_written(folder: Path, results: ComparisonResults) -> None:
    assert results.arms["grpo"].suites["ifeval"]["prompt_strict"].gain is not None
    assert ComparisonResults.of(results.record()) == results
    plan = read_plan(compare_config(read_yaml(folder / "compare.yaml")), folder)
    assert results == summarize(plan, read_cells(plan))


def test_the_page_has_every_answer(folder: Path) -> None:
    plan = read_plan(compare_config(read_yaml(folder / "compare.yaml")), folder)
    sources = {source["name"]: source for source in browser_data(read_cells(plan))}
    assert list(sources) == ["held-out prompts", "ifeval", "xstest"]
    for suite in ("ifeval", "xstest"):
        (seed,) = (entry for entry in sources[suite]["seeds"] if entry["seed"] == 1)
        for arm in seed["arms"]:
            examples = stored(folder / arm["arm"] / "seed-1", suite)["examples"]
            assert [row[0] for row in arm["rows"]] == [example["completion"] for example in examples]
    assert [arm["arm"] for arm in sources["xstest"]["seeds"][1]["arms"]] == ["start", "grpo"]


def test_greedy_answers_of_the_start_model_are_taken_once(folder: Path) -> None:
    first, second = (stored(folder / "start" / f"seed-{seed}", "ifeval") for seed in (0, 1))
    assert second["config"]["seed"] == first["config"]["seed"] == 0
    assert stored(folder / "grpo" / "seed-1", "ifeval")["config"]["seed"] == 1


def test_gains_are_paired_over_seeds(folder: Path, results: ComparisonResults) -> None:
    gains = []
    for seed in (0, 1):
        after, before = (read_suites(folder / arm / f"seed-{seed}")["ifeval"] for arm in ("grpo", "start"))
        gains.append(after.figures["instruction_strict"].value - before.figures["instruction_strict"].value)
    gain = results.arms["grpo"].suites["ifeval"]["instruction_strict"].gain
    assert gain is not None
    assert gain.value == pytest.approx(sum(gains) / 2)
    assert gain.low <= gain.value <= gain.high
    of_seeds = [seed.suites["ifeval"]["instruction_strict"].gain for seed in results.arms["grpo"].seeds]
    assert [one.value for one in of_seeds if one is not None] == pytest.approx(gains)


def test_differences_between_arms_are_paired_over_their_seeds(folder: Path, results: ComparisonResults) -> None:
    (row,) = results.suite_differences
    assert (row.suite, row.a, row.b, row.seeds) == ("ifeval", "grpo", "best_of_n", 2)
    by_seed = []
    for seed in (0, 1):
        a, b = (read_suites(folder / arm / f"seed-{seed}")["ifeval"].rows[row.figure] for arm in (row.a, row.b))
        by_seed.append(sum(x - y for x, y in zip(a, b, strict=True)) / len(a))
    assert row.difference.value == pytest.approx(sum(by_seed) / 2)
    assert row.difference.low <= row.difference.value <= row.difference.high
    (table,) = difference_tables(results)
    (first, second), order = table.rows, list(table.columns[1:])
    assert [first[0], second[0]] == order
    assert first[1] == second[2] == "–"
    shown = format_gain(row.difference)
    assert table.rows[order.index("grpo")][1 + order.index("best_of_n")] == shown
    assert "Differences between arms" in (folder / "report.html").read_text(encoding="utf-8")


def test_tables_and_page(folder: Path, results: ComparisonResults) -> None:
    ifeval, xstest = suite_tables(results)
    assert ifeval.rows[0][0] == "start model"
    assert {row[0] for row in ifeval.rows[1:]} == {"grpo", "best_of_n, n = 2"}
    assert "prompt strict" in ifeval.columns
    figures = results.start_model.suites["ifeval"]
    assert [str(cell).split(" [")[0] for cell in ifeval.rows[0][1:-1]] == [
        f"{figure.value:{'.3f' if figure.value < 10 else '.1f'}}" for figure in list(figures.values())[:6]
    ]  # in their own units, as rlhf eval shows them: a length or a perplexity is no share
    assert [row[0] for row in xstest.rows] == ["start model", "grpo"]
    assert (results.arms["grpo"].peak_memory_mb or 0) > 0
    assert results.arms["best_of_n"].peak_memory_mb is None
    assert 'id="suites"' in (folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_comparison_measures_nothing_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/evals/*.json")}
    assert main(["report", str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*/evals/*.json")} == before
    assert "ifeval" in capsys.readouterr().out


def files_of(folder: Path) -> dict[str, int]:
    """Everything that a comparison wrote for its cells, with the time of writing."""
    files = [path for path in folder.glob("*/*/**/*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def test_suites_are_added_to_a_finished_comparison_which_trains_nothing(tmp_path: Path) -> None:
    tree = with_suites(tmp_path, seeds=[0])
    tree["arms"], later = {"grpo": tree["arms"]["grpo"]}, tree["suites"].pop("xstest")
    assert compared(tree)
    before = files_of(tmp_path / "compare")
    assert compared({**tree, "suites": {**tree["suites"], "xstest": later}})
    after = files_of(tmp_path / "compare")
    evals = {f"{cell}/seed-0/{name}" for cell in ("start", "grpo") for name in ("evals/xstest.json", "inputs.json")}
    assert {name for name in after if after[name] != before.get(name)} == {*evals, *CELLS_OF_BOTH}
    assert set(ComparisonResults.read(tmp_path / "compare").arms["grpo"].suites) == {"ifeval", "xstest"}


def test_a_suite_with_other_settings_is_measured_again(tmp_path: Path) -> None:
    tree = with_suites(tmp_path, seeds=[0])
    tree["arms"] = {"grpo": tree["arms"]["grpo"]}
    assert compared(tree)
    before = files_of(tmp_path / "compare")
    tree["suites"]["ifeval"]["dataset"]["limit"] = 2
    assert compared(tree)
    after = files_of(tmp_path / "compare")
    evals = {f"{cell}/seed-0/evals/ifeval.json" for cell in ("start", "grpo")}
    assert {name for name in after if after[name] != before.get(name)} == {*evals, *CELLS_OF_BOTH}
    assert stored(tmp_path / "compare" / "grpo" / "seed-0", "ifeval")["n"] == 2


def test_a_suite_that_fails_later_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = with_suites(tmp_path, seeds=[0])
    tree["arms"], suites = {"grpo": tree["arms"]["grpo"]}, tree.pop("suites")
    assert compared(tree)
    with monkeypatch.context() as patch:
        patch.setattr("rlhf.comparison.trial.evaluate_suite", fails_on_a_trained_model)
        assert compared({**tree, "suites": suites})
    results = ComparisonResults.read(tmp_path / "compare")
    (seed,) = results.arms["grpo"].seeds
    assert (seed.status, seed.error) == (
        "failed",
        "suites.ifeval: the data are gone (suites.ifeval=null leaves it out)",
    )
    assert results.arms["grpo"].final is not None  # its judgment is not lost
    assert compared({**tree, "suites": suites})
    (seed,) = ComparisonResults.read(tmp_path / "compare").arms["grpo"].seeds
    assert (seed.status, set(seed.suites)) == ("done", {"ifeval", "xstest"})


def test_the_arithmetic_that_a_cpu_chooses_is_no_other_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.runtime.device.cpu_gains_by_bfloat16", lambda: False)
    tree = with_suites(tmp_path, seeds=[0, 1])
    tree["arms"], tree["suites"] = {"grpo": tree["arms"]["grpo"]}, {"ifeval": tree["suites"]["ifeval"]}
    tree["shared"] = {**tree["shared"], "policy": {"dtype": "bfloat16"}}
    assert compared(tree)
    result = stored(tmp_path / "compare" / "start" / "seed-1", "ifeval")
    assert (result["config"]["dtype"], result["dtype"]) == ("bfloat16", "float32")
    assert result["config"]["seed"] == 0  # taken from the first seed
    before = files_of(tmp_path / "compare")
    assert compared(tree)
    assert files_of(tmp_path / "compare") == before


@pytest.mark.parametrize(
    "suite, length", [("ifeval", 6), ("lab", 6), ("harmful", 64), ("hh", 6)]
)  # the run's, or its own
def test_a_suite_is_sampled_as_by_rlhf_eval_on_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, length: int
) -> None:
    monkeypatch.setattr("rlhf.lab.build.lab_folder", lambda spec: tmp_path / "lab")
    rows = str(write_rows(tmp_path / "rows.jsonl", INSTRUCTIONS))
    tree = compare_tree(tmp_path, suites={suite: {"dataset": {"path": rows}}}, seeds=[0])
    cell = next(cell for cell in plan_of(tree).cells if cell.arm == "grpo")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(format_yaml(dump(cell.config.train)))
    settings, _ = suite_settings(suite, str(run), data=rows, limit=None, against="start", overrides=[])
    assert cell.config.suites[suite] == dump(settings)
    assert settings.sampling.max_new_tokens == length


def test_hh_compares_arms_with_their_start_by_the_judge(tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "suite.jsonl", [{"prompt": "red one", "chosen": "good", "rejected": "one"}] * 4)
    tree = compare_tree(tmp_path, suites={"hh": {"dataset": {"path": str(pairs)}}}, seeds=[0])
    tree["arms"] = {"dpo": {**tree["arms"]["dpo"], "algorithm": {"preset": "dpo", "loss": {"beta": 0.5}}}}
    plan = plan_of(tree)
    for cell in plan.cells:
        settings = cell.config.suites["hh"]
        assert settings["reference"] == cell.config.train.policy.model
        assert settings["source"] == dump(cell.config.train)["eval"]["source"]
        assert settings["beta"] == (0.5 if cell.arm == "dpo" else 0.1)
    assert compared(tree)
    figures = ComparisonResults.read(tmp_path / "compare").arms["dpo"].suites["hh"]
    assert {"implicit_accuracy", "win_rate_start", "score"} <= set(figures)


def test_the_lab_suite_needs_no_data_and_names_of_the_lab_become_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.lab.build.lab_folder", lambda spec: tmp_path / "lab")
    config = compare_config(compare_tree(tmp_path, suites={"lab": {"reference": "lab:base"}}))
    lab = tmp_path / "lab"
    for settings in [{}, {"dataset": {"limit": 5}}]:
        suites = plan_of(compare_tree(tmp_path, suites={"lab": settings})).cells[0].config.suites
        assert suites["lab"]["dataset"]["path"] == str(lab / "eval_prompts.jsonl")
        assert suites["lab"]["dataset"]["limit"] == settings.get("dataset", {}).get("limit")
    assert plan_cells(config, beside=tmp_path).cells[0].config.suites["lab"]["reference"] == str(lab / "base")
    before = plan_cells(config, beside=tmp_path, lab_files=False)  # the command checks it before it makes the lab
    assert before.cells[0].config.suites["lab"]["dataset"]["path"] == "lab:eval_prompts.jsonl"
    check_arm_files(before, Lookups(prefix=PREFIX))


def test_models_of_the_lab_that_are_made_later_are_no_missing_files_of_a_suite(tmp_path: Path) -> None:
    later = tmp_path / "lab"
    suites = {"lab": {"dataset": {"path": str(later / "rows.jsonl")}, "reference": str(later / "sft")}}
    plan = plan_of(compare_tree(tmp_path, suites=suites))
    check_arm_files(plan, Lookups(later=later))
    with pytest.raises(ConfigError, match=r"suites\.lab: reference: no such file or folder"):
        check_arm_files(plan, Lookups())


def test_a_wrong_suite_is_told_before_anything_runs(tmp_path: Path) -> None:
    tree = with_suites(tmp_path)
    left = plan_of({**tree, "suites": {**tree["suites"], "ifeval": None}}).cells[0]
    assert list(left.config.suites) == ["xstest"]
    with pytest.raises(ConfigError, match="did you mean ifeval"):
        plan_of({**tree, "suites": {"ifevl": {}}})
    with pytest.raises(ConfigError, match=r"suites\.ifeval: .*nonsense"):
        plan_of({**tree, "suites": {"ifeval": {**tree["suites"]["ifeval"], "nonsense": 1}}})


def test_by_hand() -> None:
    def of(rows: list[float]) -> dict[str, SuiteScores]:
        figure = SuiteFigure(value=sum(rows) / len(rows), low=None, high=None)
        return {"s": SuiteScores({"f": figure}, {"f": rows})}

    figure = summarize_suites([of([1.0, 0.0, 1.0, 1.0])], [of([0.0, 0.0, 1.0, 1.0])])["s"]["f"]
    assert figure.gain is not None
    assert (figure.value, figure.gain.value) == (0.75, 0.25)
    missing = summarize_suites([of([1.0])], [of([1.0, 0.0])])["s"]["f"]
    assert missing.gain is None


def test_seeds_with_different_numbers_of_rows_have_no_gain() -> None:
    def of(*rows: float) -> dict[str, SuiteScores]:
        return {"s": SuiteScores({"f": SuiteFigure(value=sum(rows) / len(rows), low=None, high=None)}, {"f": rows})}

    seeds, starts = [of(1.0, 0.0, 1.0), of(1.0, 0.0)], [of(0.0, 0.0, 1.0), of(0.0, 0.0)]
    assert summarize_suites(seeds, starts)["s"]["f"].gain is None
    assert summarize_suites([seeds[0]] * 2, [starts[0]] * 2)["s"]["f"].gain is not None


def test_a_share_of_0_in_all_seeds_is_not_certain() -> None:
    estimate = share_estimate("refused", [0.0] * 300, "refusals")
    figure = SuiteFigure(value=estimate.value, low=estimate.low, high=estimate.high)
    seed = {"harmful": SuiteScores({"refused": figure}, {"refused": [0.0] * 300})}
    both = summarize_suites([seed, seed], [seed, seed])["harmful"]["refused"]
    assert (both.value, both.low, both.high) == (0.0, estimate.low, estimate.high)
    assert both.high is not None
    assert 0.01 < both.high < 0.02


def test_a_suite_without_usable_rows_says_how_to_leave_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "blimp.jsonl", [{"sentence_good": "t1", "sentence_bad": "t2"}])
    tree = compare_tree(tmp_path, suites={"blimp": {"dataset": {"path": str(rows)}}}, seeds=[0], evaluations=1)
    tree["arms"] = {"grpo": tree["arms"]["grpo"]}
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["compare", str(path)]) == 2
    assert re.search(r"suites\.blimp: .*\(suites\.blimp=null leaves it out\)", capsys.readouterr().err, re.DOTALL)


def test_a_figure_that_does_not_exist_is_left_out(tmp_path: Path) -> None:
    """A model that answers nothing has no share of distinct bigrams."""
    (tmp_path / FOLDER).mkdir()
    figures = {
        "refused": {"value": 0.5, "low": 0.2, "high": 0.8},
        "distinct_2": {"value": None, "low": None, "high": None},
    }
    (tmp_path / FOLDER / "harmful.json").write_text(json.dumps({"figures": figures, "rows": {"refused": [1.0, 0.0]}}))
    scores = read_suites(tmp_path)
    summary = summarize_suites([scores], [scores])["harmful"]
    assert {name: figure.value for name, figure in summary.items()} == {"refused": 0.5}


def test_a_task_of_lm_eval_judges_the_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its name has a colon; the task itself is run by a stand-in for the extra."""
    asked: list[tuple[str, int | None]] = []

    def run_task(suite: HarnessSuite, subject: Subject, task: str) -> SuiteResult:
        asked.append((task, suite.limit))
        return SuiteResult((Estimate("acc", len(asked) / 4, 0.0, 1.0, 4, "normal", "as lm-eval defines it"),), 4, {})

    monkeypatch.setattr(HarnessSuite, "check_installed", classmethod(lambda cls: None))
    monkeypatch.setitem(sys.modules, "rlhf.suites.lm_eval", SimpleNamespace(run_task=run_task))  # type: ignore[arg-type]
    tree = compare_tree(tmp_path, suites={"lm-eval:truthfulqa_mc2": {"limit": 4}}, seeds=[0], evaluations=1)
    tree["arms"] = {"grpo": tree["arms"]["grpo"]}
    assert compared(tree)
    assert asked == [("truthfulqa_mc2", 4)] * 2
    results = ComparisonResults.read(tmp_path / "compare")
    assert results.start_model.suites["lm-eval:truthfulqa_mc2"]["acc"].value == 0.25
    assert results.arms["grpo"].suites["lm-eval:truthfulqa_mc2"]["acc"].value == 0.5
    assert suite_tables(results)[0].rows[1][0] == "grpo"
    console = Console(file=io.StringIO(), width=100)
    ComparisonTerminal(console).results(results, tmp_path / "report.html")
    assert console.file.getvalue().count("gain over start") == 2  # type: ignore[attr-defined]  # of the judge, and of acc
