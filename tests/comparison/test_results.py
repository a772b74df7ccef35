"""The output of a comparison: results.json and its schema, results.parquet, words, and the page in a browser."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from browser import BROWSER, browse, on_a_phone
from cases import compare_tree, compared, failing_arm, plan_of
from datasets import Dataset

from rlhf.api.comparing import failed_arms
from rlhf.cli import main
from rlhf.comparison.aggregate import KLS, read_cells, summarize, with_known_kl
from rlhf.comparison.costs import Costs
from rlhf.comparison.page import difference_table, reward_hacking_points, seed_means, styles, win_matrix
from rlhf.comparison.plan import read_plan
from rlhf.comparison.results import MEASURES, ArmBudget, ComparisonResults, Evaluation, FrontierPoint, Measures
from rlhf.comparison.scheduler import CellProcess
from rlhf.comparison.summary import budget_in_words, equal_kl_table, format_gain, notes, ranking, verdict
from rlhf.comparison.trial import Judgment, failure_of
from rlhf.config.load import compare_config, read_yaml
from rlhf.tracking.trackers import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("ppo", "grpo", "dpo", "best_of_n")
KEYS = {
    *("schema", "name", "start", "judge", "reward_source", "judge_is_trained_on", "budget", "seeds", "prompts"),
    *("start_model", "equal_kl", "arms", "win_rates", "suite_differences", "evaluations", "best_of_n", "notes"),
}
OF_AN_ARM = {
    *("type", "preset", "n", "kl_is_bound", "status", "seeds", "gain", "gain_in_std", "win_rate_over_start"),
    *("length_controlled_win_rate_over_start", "suites", "peak_memory_mb", "eval_prompts"),
    *("at_equal_kl", "costs", *MEASURES),
}
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison with a failed arm, and a completion that would like to act."""
    path = tmp_path_factory.mktemp("c")
    tree = compare_tree(path, arms={"broken": failing_arm(path)})
    assert compared(tree)
    judgment = Judgment.read(path / "compare" / "ppo" / "seed-0")
    assert judgment is not None
    rows = [{**judgment.rows[0], "completion": EVIL + "w" * 400}, *judgment.rows[1:]]
    Judgment(judgment.metrics, rows).write(path / "compare" / "ppo" / "seed-0")
    assert main(["report", str(path / "compare")]) == 0
    return path / "compare"


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """The content of results.json, as another program would read it."""
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def typed(folder: Path) -> ComparisonResults:
    return ComparisonResults.read(folder)


def test_what_was_written_is_read_back(folder: Path, typed: ComparisonResults, tmp_path: Path) -> None:
    """The failed arm, the costs before the first step, best-of-n's curve and the exact optimum included."""
    plan = read_plan(compare_config(read_yaml(folder / "compare.yaml")), folder)
    assert typed == summarize(plan, read_cells(plan))
    assert typed.arms["broken"].final is None
    typed.write(tmp_path)
    assert (tmp_path / "results.json").read_bytes() == (folder / "results.json").read_bytes()
    exact = replace(typed, exact_frontier=(FrontierPoint(kl=0.0, score=1.0),), equal_kl=None)
    exact.write(tmp_path)
    assert ComparisonResults.read(tmp_path) == exact


def test_the_order_of_keys_is_that_of_schema_1(typed: ComparisonResults, results: dict[str, Any]) -> None:
    """Costs are in the order of costs.jsonl, and before the first step, which has no line there, in Costs' order."""
    before, after = (list(row)[-6:] for row in results["evaluations"][:2])
    assert before == ["completions", "generated_tokens", "trained_tokens", "flops", "seconds", "tokens"]
    assert after == sorted(before)
    assert list(results["arms"]["ppo"])[:8] == [
        *("type", "preset", "n", "kl_is_bound", "status", "peak_memory_mb", "eval_prompts", "seeds")
    ]
    assert list(results["arms"]["ppo"])[-2:] == ["costs", "suites"]
    assert list(results["arms"]["broken"])[-2:] == ["seeds", "suites"]


def test_the_schema_is_what_the_page_says(results: dict[str, Any]) -> None:
    assert set(results) == KEYS
    for name in ARMS:
        assert set(results["arms"][name]) == OF_AN_ARM, name
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    for key in KEYS | OF_AN_ARM:
        assert f"`{key}`" in page, f"docs/compare.md does not say what {key} is"


def test_gains_are_paired_with_the_start_model(folder: Path, results: dict[str, Any]) -> None:
    gains = []
    for seed in (0, 1):
        a, b = (Judgment.read(folder / arm / f"seed-{seed}") for arm in ("grpo", "start"))
        assert a is not None
        assert b is not None
        assert [row["prompt"] for row in a.rows] == [row["prompt"] for row in b.rows]
        gains.append(a.column("score") - b.column("score"))
    gain = results["arms"]["grpo"]["gain"]
    assert gain["value"] == pytest.approx(float(torch.stack(gains).mean()))
    assert gain["low"] <= gain["value"] <= gain["high"]
    spread = results["start_model"]["spread"]
    assert results["arms"]["grpo"]["gain_in_std"]["value"] == pytest.approx(gain["value"] / spread)


def test_win_rates_of_a_pair_add_up_to_one(results: dict[str, Any]) -> None:
    rates = {(row["a"], row["b"]): row for row in results["win_rates"]}
    assert set(rates) == {(a, b) for a in ARMS for b in ARMS if a != b}
    for (a, b), row in rates.items():
        assert row["value"] + rates[b, a]["value"] == pytest.approx(1.0)
        assert row["difference"]["value"] == pytest.approx(-rates[b, a]["difference"]["value"])
        equal, swapped = row["length_controlled"], rates[b, a]["length_controlled"]
        assert equal["low"] <= equal["value"] <= equal["high"]
        assert (equal["value"], equal["low"]) == pytest.approx((1 - swapped["value"], 1 - swapped["high"]))
        assert row["seeds"] == 2


def test_the_exact_kl_and_the_texts_measures_are_there(folder: Path, results: dict[str, Any]) -> None:
    for name in ("ppo", "grpo", "dpo"):
        arm = results["arms"][name]
        assert abs(arm["kl_exact"] - arm["kl"]) < 5 * (arm["kl_se"] + arm["kl_exact_se"])
        assert arm["kl_exact"] > 0
        assert 1 < arm["reference_perplexity"] < 100
        assert 0 <= arm["distinct_1"] <= arm["distinct_2"] <= arm["distinct_3"] <= 1
        judged = Judgment.read(folder / name / "seed-0")
        assert judged is not None
        assert (judged.column("kl_exact") >= 0).all()
        assert float(judged.column("kl_exact").mean()) == pytest.approx(judged.metrics["eval/kl_exact"])
    best = results["arms"]["best_of_n"]
    assert (best["kl_exact"], best["reference_perplexity"]) == (None, None)
    assert best["repetition"] is not None
    assert results["start_model"]["kl_exact"] == pytest.approx(0.0, abs=1e-6)


def test_every_evaluation_has_what_it_measured_and_what_had_been_spent(results: dict[str, Any]) -> None:
    rows = results["evaluations"]
    assert [(r["arm"], r["seed"], r["step"]) for r in rows if r["arm"] == "ppo"] == [
        ("ppo", seed, step) for seed in (0, 1) for step in (0, 2, 4)
    ]
    for row in rows:
        assert row["completions"] == 16 * row["step"]
        assert row["score"] is not None
        assert row["kl"] is not None
        assert (row["tokens"] > 0) == (row["step"] > 0)
    level = results["equal_kl"]
    reached = [
        max(r["kl"] for r in rows if (r["arm"], r["seed"]) == (arm, seed)) for arm in ARMS[:3] for seed in (0, 1)
    ]
    assert level == pytest.approx(min(*reached, results["best_of_n"]["best_of_n"][-1]["kl"]))
    for name in ARMS:
        assert results["arms"][name]["at_equal_kl"]["seeds"] == 2


def test_best_of_n_has_a_curve_and_a_bound(results: dict[str, Any]) -> None:
    curve = results["best_of_n"]["best_of_n"]
    assert [point["n"] for point in curve] == [1, 2, 3, 4]
    assert curve[0]["kl"] == 0
    proxies = [point["proxy"] for point in curve]
    assert proxies == sorted(proxies)
    arm = results["arms"]["best_of_n"]
    assert arm["kl_is_bound"]
    assert arm["kl"] == pytest.approx(curve[1]["kl"])
    assert arm["proxy"] > results["start_model"]["proxy"]


def test_the_table_holds_the_same(folder: Path, results: dict[str, Any]) -> None:
    table = Dataset.from_parquet(str(folder / "results.parquet"))
    rows = [dict(row) for row in table]
    assert {row["kind"] for row in rows} == {"evaluation", "final", "best_of_n"}
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    assert [row["score"] for row in evaluations] == pytest.approx([row["score"] for row in results["evaluations"]])
    finals = {(row["arm"], row["seed"]): row for row in rows if row["kind"] == "final"}
    assert set(finals) == {(arm, seed) for arm in ("start", *ARMS) for seed in (0, 1)}
    mean = (finals["ppo", 0]["score"] + finals["ppo", 1]["score"]) / 2
    assert mean == pytest.approx(results["arms"]["ppo"]["score"])


def test_the_words(typed: ComparisonResults) -> None:
    text = verdict(typed)
    best = next(name for name in ranking(typed) if name != "best_of_n")
    assert text.startswith(f"{best} has the highest score of the judge")
    assert format_gain(typed.finals[best].gain) in text
    assert "best of 2 samples of the start model gains" in text
    assert len(re.findall(r"\.(?= [A-Z]|$)", text)) == 2  # two sentences
    lines = notes(typed)
    assert any(note.startswith("broken, seed 0, failed: ") and "no such thing" in note for note in lines)
    assert any(note.startswith("2 seeds") for note in lines)
    assert not any("trained on" in note for note in lines)
    assert equal_kl_table(typed) is not None


def test_a_budget_in_words() -> None:
    words = [budget_in_words(ArmBudget(unit="seconds", limit=limit)) for limit in (64.0, 2.5, 4e9)]
    assert words == [f"{limit} seconds of training" for limit in ("64", "2.50", "4,000,000,000")]


def test_nothing_finished_is_said_too(typed: ComparisonResults) -> None:
    broken = replace(typed, arms={"broken": typed.arms["broken"]}, win_rates=(), evaluations=())
    assert verdict(broken).startswith("No arm is finished")
    assert win_matrix(broken) == []
    one = replace(typed, arms={"ppo": typed.arms["ppo"]})
    assert "no other trained arm" in verdict(one)
    assert win_matrix(replace(one, win_rates=())) == []  # a table of one empty field is not shown
    assert "no seed in common" in verdict(replace(typed, win_rates=()))


def test_bands_and_marks_by_hand(typed: ComparisonResults) -> None:
    def row(seed: int, step: int, score: float, proxy: float) -> Evaluation:
        measures = Measures(score=score, proxy=proxy, score_std=1.0)
        return Evaluation(arm="a", seed=seed, step=step, measures=measures, costs=Costs(generated_tokens=step))

    seeds = {0: [row(0, 1, 1.0, 0.0), row(0, 2, 3.0, 1.0)], 1: [row(1, 3, 2.0, 0.0)]}
    assert seed_means(seeds, "score", "tokens") == [(2.0, 1.5, 1.0, 2.0)]  # the second: not every seed has come to it
    rows = [row(0, i, gold, proxy) for i, (gold, proxy) in enumerate([(0.0, 0.0), (2.0, 1.0), (1.9, 2.0), (1.0, 3.0)])]
    budget, arm = ArmBudget(unit="tokens", limit=3.0), typed.arms["ppo"]
    gaming = replace(typed, evaluations=tuple(rows), budget=budget, prompts=100, arms={"a": arm})
    assert reward_hacking_points(gaming, "a") == [(3.0, 1.0)]  # 1.9 is within two standard errors (0.2) of 2.0
    of_three = replace(gaming, arms={"a": replace(arm, eval_prompts=3)})
    assert reward_hacking_points(of_three, "a") == []  # and 1.0 within two of three prompts' (1.15)
    drawn = styles([f"a{i}" for i in range(9)])
    assert drawn["a0"].role == drawn["a8"].role == "s1"
    assert drawn["a0"].dash != drawn["a8"].dash
    assert drawn["a0"].symbol != drawn["a8"].symbol


def test_the_folder_holds_the_comparison_itself(folder: Path) -> None:
    settings = read_yaml(folder / "compare.yaml")
    assert list(settings["arms"]) == [*ARMS, "broken"]
    assert (folder / "ppo" / "seed-1" / "config.yaml").is_file()  # an ordinary run folder
    table = difference_table({arm: plan_of(settings).of(arm)[0].config.train for arm in ("ppo", "grpo")})
    assert table is not None
    assert ["algorithm.preset", "ppo", "grpo"] in [list(row) for row in table.rows]


@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")
class TestInABrowser:
    def test_nothing_on_the_console_and_every_arm_and_figure_there(self, folder: Path, tmp_path: Path) -> None:
        dom, console = browse(folder / "report.html", tmp_path)
        assert console == []
        assert 'data-drawn="true"' in dom
        assert "<title>tiny</title>" in dom  # no completion changed it
        for section in (
            "verdict",
            "notes",
            "frontier",
            "curves",
            "win-rates",
            "tables",
            "costs",
            "completions",
            "configs",
        ):
            assert f'id="{section}"' in dom, section
        places = set(re.findall(r'<div class="chart[^"]*" data-figure="([^"]+)"', dom))
        assert {"frontier", "curve:score", "curve:kl", "proxy:ppo", "proxy:grpo"} <= places
        assert dom.count('<svg class="main-svg"') >= len(places)
        for arm in ("start", *ARMS):
            assert f'<div class="when">{arm}</div>' in dom, arm
        legend = re.findall(r'class="legendtext"[^>]*>([^<]+)<', dom)
        assert set(ARMS) | {"start"} <= set(legend)
        assert "broken, seed 0, failed" in dom

    def test_on_a_phone_and_in_the_dark(self, folder: Path, tmp_path: Path) -> None:
        measured, console = on_a_phone(folder / "report.html", tmp_path)
        assert console == []
        assert measured["width"] <= 390
        assert 200 < measured["widest"] <= 390
        assert measured["first"]["background"] != measured["second"]["background"]
        assert measured["first"]["line"] != measured["second"]["line"]


@pytest.mark.usefixtures("warm_start")
def test_control_c_stops_the_command_and_its_cells_which_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a terminal sends it: to the command and to its cells at once."""
    tree = compare_tree(tmp_path, seeds=[0], budget={"completions": 32000}, evaluations=1, jobs=2)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**tree, "arms": {"ppo": {}, "again": {}}}))
    cells = [tmp_path / "compare" / arm / "seed-0" for arm in ("ppo", "again")]
    started: list[CellProcess] = []

    def start(*args: Any, **kwargs: Any) -> CellProcess:
        started.append(CellProcess(*args, **kwargs))
        return started[-1]

    def interrupt_when_all_are_under_way() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and any(len(list(read_jsonl(cell / "costs.jsonl"))) < 3 for cell in cells):
            time.sleep(0.05)
        for cell in started:
            cell.process.send_signal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("rlhf.api.comparing.CellProcess", start)
    waiting = threading.Thread(target=interrupt_when_all_are_under_way)
    waiting.start()
    assert main(["compare", str(tmp_path / "c.yaml")]) == 0
    waiting.join()
    printed = capsys.readouterr()
    assert "the same command continues" in printed.out
    assert "Traceback" not in printed.out + printed.err
    results = json.loads((tmp_path / "compare" / "results.json").read_text())
    for cell in cells:
        steps = [row["step"] for row in read_jsonl(cell / "costs.jsonl")]
        assert 3 <= len(steps) < 2000
        assert f"step-{steps[-1]:06d}" in {path.name for path in (cell / "checkpoints").iterdir()}
        assert failure_of(cell) is None
        assert results["arms"][cell.parent.name]["status"] == "unfinished"


@pytest.mark.usefixtures("warm_start")
def test_the_command_runs_cells_in_processes_of_their_own(tmp_path: Path) -> None:
    """One arm fails inside its process, the other finishes; the command ends, and names the failed one."""
    arms = {"grpo": None, "dpo": None, "best_of_n": None, "bad": failing_arm(tmp_path)}
    tree = compare_tree(tmp_path, seeds=[0], arms=arms)
    tree["arms"] = {name: arm for name, arm in tree["arms"].items() if arm is not None}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert main(["compare", str(tmp_path / "c.yaml"), "budget.completions=32"]) == 1
    results = json.loads((tmp_path / "compare" / "results.json").read_text())
    assert results["arms"]["ppo"]["status"] == "done"
    assert results["arms"]["bad"]["status"] == "failed"
    assert failed_arms(str(tmp_path / "compare")) == ["bad"]
    assert "no such thing" in results["arms"]["bad"]["seeds"][0]["error"]
    assert "no such thing" in (tmp_path / "compare" / "bad" / "seed-0" / "errors.log").read_text()
    assert results["arms"]["ppo"]["costs"]["completions"] == 32


def test_a_run_that_measured_no_kl_still_has_its_start_and_its_end() -> None:
    """reference.measure=false: evaluations along the way have none, the final model is judged beside the start."""

    def row(step: int, kl: float | None = None) -> Evaluation:
        measures = Measures(score=0.1 * step, **dict.fromkeys(KLS, kl))
        return Evaluation(arm="a", seed=0, step=step, measures=measures, costs=Costs())

    def kls(evaluation: Evaluation) -> list[float | None]:
        return [evaluation.measures.value(name) for name in KLS]

    rows = [row(step) for step in (0, 8, 16)]
    judged = {"eval/kl": 15.0, "eval/kl_se": 1.0, "eval/kl_exact": 14.0, "eval/kl_exact_se": 0.5}
    start, middle, end = with_known_kl(rows, judged)
    assert kls(start) == [0.0, 0.0, 0.0, 0.0]
    assert middle == rows[1]
    assert kls(end) == [15.0, 1.0, 14.0, 0.5]
    assert end.measures.score == rows[2].measures.score
    assert with_known_kl(rows, {})[-1].measures.kl is None  # not judged yet
    measured = [row(0, 0.1), row(8, 0.2)]
    assert with_known_kl(measured, judged) == measured
    assert with_known_kl([], judged) == []
