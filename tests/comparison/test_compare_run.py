"""Running a comparison: budgets are kept, an arm's failure is its own, an interrupted one continues to the same end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import Ended, compare_tree, compared, here, plan_of
from lock_holder import held_elsewhere
from quick import quick
from runs import make_model

from rlhf.api.comparing import rebuild_comparison, run_compare
from rlhf.comparison.aggregate import read_cells, summarize
from rlhf.comparison.costs import (
    COSTS,
    Costs,
    CostTracker,
    Sizes,
    count_source_parameters,
    offline_flops,
    online_flops,
    sampling_flops,
    search_flops,
)
from rlhf.comparison.plan import ensure_owner, plan_cells
from rlhf.comparison.scheduler import run_cells
from rlhf.comparison.trial import FAILED, JUDGED, Judgment, failure_of, record_failure
from rlhf.comparison.view import ComparisonView
from rlhf.config.load import compare_config, load_compare
from rlhf.errors import CheckpointError, ConfigError, UserError
from rlhf.evaluation.win_rate import Interval
from rlhf.models.backbone import load_causal_lm
from rlhf.rewards.ensemble import EnsembleSource
from rlhf.rewards.function import FunctionSource
from rlhf.rewards.model import ModelSource
from rlhf.tracking.run_folder import RunFolder, is_in_use
from rlhf.tracking.trackers import read_jsonl

ONLY_PPO = {"grpo": None, "dpo": None, "best_of_n": None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of one seed that nothing interrupted."""
    path = tmp_path_factory.mktemp("finished")
    assert compared(compare_tree(path, seeds=[0]))
    return path / "compare"


def without_seconds(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_jsonl(path)]


def test_flops_by_hand() -> None:
    sizes = Sizes(policy=100, reference=100, critic=50, reward=30)
    forward = 2 * (100 + 30 + 100 + 100 + 50)  # sample, score, annotate by all three
    assert online_flops(sizes, tokens=7, passes=2.0) == 7 * (forward + 2 * 6 * 150)
    assert offline_flops(Sizes(policy=100, reference=100), tokens=7) == 7 * 800
    assert offline_flops(Sizes(policy=100, reference=100), tokens=7, has_baseline=True) == 7 * 1200
    assert sampling_flops(sizes, tokens=7) == 7 * 2 * 130
    assert search_flops(sizes, tokens=7, forward_passes=54.5) == 7 * 54.5 * 200


def test_the_size_of_a_reward_source(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    model = load_causal_lm(str(folder))
    count = sum(p.numel() for p in model.parameters())
    source = ModelSource(path=str(folder))
    assert count_source_parameters(source) == count
    assert count_source_parameters(EnsembleSource(sources=[source, source, FunctionSource(target="a:b")])) == 2 * count
    assert count_source_parameters(None) == 0


def test_costs_are_what_was_done(finished: Path) -> None:
    folder = finished
    for arm in ("ppo", "grpo"):
        rows = list(read_jsonl(folder / arm / "seed-0" / COSTS))
        metrics = [row for row in RunFolder(folder / arm / "seed-0").read_metrics() if row["step"] > 0]
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert [row["completions"] for row in rows] == [16, 32, 48, 64]
        generated = [round(16 * row["completion/length"]) for row in metrics]
        assert rows[-1]["generated_tokens"] == sum(generated)
        assert rows[-1]["trained_tokens"] > 2 * sum(generated)  # two epochs over prompts and completions
        assert rows[-1]["tokens"] == rows[-1]["generated_tokens"] + rows[-1]["trained_tokens"]
        assert rows[-1]["seconds"] > rows[0]["seconds"] > 0
    rows = list(read_jsonl(folder / "dpo" / "seed-0" / COSTS))
    assert [row["completions"] for row in rows] == [16, 32, 48, 64]
    assert rows[-1]["trained_tokens"] == 4 * 8 * 2 * (2 + 3)  # steps, pairs, sides, prompt + completion with EOS
    assert rows[-1]["generated_tokens"] == 0
    rows_of = {arm: json.loads((folder / arm / "seed-0" / JUDGED).read_text())["rows"] for arm in ("ppo", "best_of_n")}
    assert [set(row["parts"]) for row in rows_of["best_of_n"]] == [set(row["parts"]) for row in rows_of["ppo"]]
    (spent,) = read_jsonl(folder / "best_of_n" / "seed-0" / COSTS)
    assert spent["completions"] == 20 * 2  # n of each prompt: the other samples are for the curve alone
    assert 20 * 2 <= spent["generated_tokens"] <= 20 * 2 * 6
    assert spent["trained_tokens"] == 0


def test_a_step_whose_score_is_nan_costs_its_completions_and_not_the_arm(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "calls = []\ndef score(prompts, completions, references):\n    calls.append(1)\n"
        "    return [float('nan') if len(calls) == 3 else float(len(c)) for c in completions]\n"
    )
    source = {"type": "function", "target": f"{tmp_path / 'rewards.py'}:score"}
    assert compared(compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO, reward_source=source))
    folder = tmp_path / "compare" / "ppo" / "seed-0"
    rows = list(read_jsonl(folder / COSTS))
    assert [row["completions"] for row in rows] == [16, 32, 48, 64]
    unscored = [row.get("skipped/unscored", 0) for row in RunFolder(folder).read_metrics()]
    skipped = unscored.index(1) - 1  # the first line is the evaluation before any step
    assert rows[skipped]["trained_tokens"] == rows[skipped - 1]["trained_tokens"]
    assert 16 <= rows[skipped]["generated_tokens"] - rows[skipped - 1]["generated_tokens"] <= 16 * 6
    sampled, trained = (rows[n]["flops"] - rows[n - 1]["flops"] for n in (skipped, skipped + 1))
    assert 0 < sampled < trained / 3, "sampling alone, without the passes of an update"
    assert Judgment.read(folder) is not None


@pytest.mark.parametrize(
    "unit, share", quick([("tokens", 0.6), ("flops", 0.3), ("completions", 0.5)], [("flops", 0.3)])
)
def test_a_run_ends_when_its_budget_is_spent(tmp_path: Path, finished: Path, unit: str, share: float) -> None:
    one_step = next(iter(read_jsonl(finished / "ppo" / "seed-0" / COSTS)))
    limit = (5 + share) * one_step[unit]
    budget = {"completions": None, unit: limit if unit == "flops" else round(limit)}
    assert compared(compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO, budget=budget))
    folder = tmp_path / "compare" / "ppo" / "seed-0"
    spent = [row[unit] for row in read_jsonl(folder / COSTS)]
    if unit == "completions":
        assert len(spent) == 5  # the most that does not go over
    else:
        assert spent[-2] < limit <= spent[-1]  # the first step that reaches it
    metrics = RunFolder(folder).read_metrics()
    assert metrics[-1]["step"] == len(spent)
    assert "eval/score" in metrics[-1]  # it ended as a run ends: evaluated, saved, exported
    assert f"step-{len(spent):06d}" in {path.name for path in (folder / "checkpoints").iterdir()}
    assert (folder / "model").is_dir()


def test_a_comparison_continues_from_its_folder(tmp_path: Path) -> None:
    config = compare_config({**compare_tree(tmp_path), "base": "base.yaml"})
    interrupted = run_compare(config, beside=tmp_path, start=lambda *_: Ended("interrupted"))
    assert not interrupted
    for cell in plan_cells(config, beside=tmp_path).cells:
        ensure_owner(cell)
    folder = tmp_path / "compare"
    continued = plan_cells(load_compare(folder, ["seeds=[0, 1, 2]"]), beside=folder)
    for cell in continued.cells:
        ensure_owner(cell)
    settings = (folder / "compare.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"ppo.* other settings \(budget.completions, "):
        run_compare(load_compare(folder, ["budget.completions=32"]), beside=folder)
    assert (folder / "compare.yaml").read_bytes() == settings


def test_a_second_comparison_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO)
    told = r"compare is in use .*\(pid \d+\).* choose another out_dir$"
    with held_elsewhere(tmp_path / "compare"), pytest.raises(CheckpointError, match=told):
        compared(tree)
    assert [path.name for path in (tmp_path / "compare").iterdir()] == [".lock"]  # no cell was marked


def test_a_comparison_holds_its_folder_until_it_ends(tmp_path: Path) -> None:
    config = compare_config(compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO))
    locked: list[bool] = []

    def look(cell: Any, place: int) -> Ended:
        locked.append(is_in_use(tmp_path / "compare"))
        return Ended("interrupted")

    assert not run_compare(config, beside=tmp_path, start=look)
    assert locked == [True]
    assert not is_in_use(tmp_path / "compare")


def test_a_comparison_that_runs_can_be_reported(finished: Path) -> None:
    with held_elsewhere(finished):
        results, _ = rebuild_comparison(str(finished))
    assert results.arms["ppo"].status == "done"


def test_a_cell_that_is_done_has_not_failed(tmp_path: Path) -> None:
    """A process of an older version may have marked it while it ran."""
    plan = plan_of(compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO))

    def marked(cell: Any, place: int) -> Ended:
        record_failure(cell.folder, "in use by another process")
        return Ended("done")

    assert run_cells(plan, marked, ComparisonView())
    assert [failure_of(cell.folder) for cell in plan.cells] == [None, None]


def test_a_failed_cell_is_tried_again_and_a_finished_one_is_not(tmp_path: Path) -> None:
    source = {"type": "function", "target": f"{tmp_path / 'rewards.py'}:score"}
    tree = compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO, reward_source=source)
    tree["arms"]["dpo"] = {"algorithm": {"preset": "dpo"}, "batch": {"prompts_per_step": 8}}
    good = "def score(prompts, completions, references):\n    return [float(len(c)) for c in completions]\n"
    (tmp_path / "rewards.py").write_text(good)
    plan = plan_of(tree)
    for cell in plan.cells[:1]:
        ensure_owner(cell)
        assert here(cell) == "done"
    (tmp_path / "rewards.py").write_text(good.replace("float", "no_such_name"))
    assert compared(tree)
    failed = plan.of("ppo")[0].folder
    assert (failed / FAILED).is_file()
    judged = {cell.folder: (cell.folder / JUDGED).stat().st_mtime_ns for cell in plan.cells[:1]}
    (tmp_path / "rewards.py").write_text(good)
    assert compared(tree)
    assert not (failed / FAILED).exists()
    assert (failed / JUDGED).is_file()
    assert judged == {folder: (folder / JUDGED).stat().st_mtime_ns for folder in judged}


def test_without_the_start_model_there_is_nothing_to_compare(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, seeds=[0], start=str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"^start: no such file or folder: .*gone"):
        compared(tree)


@pytest.mark.parametrize("killed", [False, True], ids=["saved", "killed"])
def test_an_interrupted_comparison_continues_to_the_same_end(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    arms = ("ppo",) if killed else ("ppo", "dpo")  # a kill is felt by the arm that runs
    tree = compare_tree(tmp_path, seeds=[0])
    parts = {**tree, "arms": {arm: tree["arms"][arm] for arm in arms}}
    spend = CostTracker.spend

    def interrupted(self: CostTracker, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        spend(self, step, metrics, tokens=tokens, seconds=seconds)
        if step == 3 and killed:
            raise KeyboardInterrupt  # the newest checkpoint is then of step 2
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(CostTracker, "spend", interrupted)
        if killed:
            with pytest.raises(KeyboardInterrupt):
                compared(parts)
        else:
            assert not compared(parts)  # ppo stops after its third step, saved
            results = json.loads((tmp_path / "compare" / "results.json").read_text())
            assert results["arms"]["ppo"]["status"] == results["arms"]["dpo"]["status"] == "unfinished"
    assert len(list(read_jsonl(tmp_path / "compare" / "ppo" / "seed-0" / COSTS))) == 3
    assert compared(parts)
    for arm in arms:
        one, other = (folder / arm / "seed-0" for folder in (finished, tmp_path / "compare"))
        assert without_seconds(one / COSTS) == without_seconds(other / COSTS)
        assert (one / JUDGED).read_bytes() == (other / JUDGED).read_bytes()
        assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()


def test_a_run_that_spent_its_budget_before_it_was_judged_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = compare_tree(tmp_path, seeds=[0], arms=ONLY_PPO, budget={"completions": None, "tokens": 700})
    assert compared(tree)
    folder = tmp_path / "compare" / "ppo" / "seed-0"
    before = without_seconds(folder / COSTS)
    (folder / JUDGED).unlink()
    assert compared(tree)
    assert without_seconds(folder / COSTS) == before
    assert (folder / JUDGED).is_file()


def test_costs_add_and_are_read_back() -> None:
    costs = Costs(completions=3, generated_tokens=4, trained_tokens=5, flops=6.0, seconds=7.0)
    assert Costs.of(costs.record()) == costs
    assert costs.plus(costs).record() == {key: 2 * value for key, value in costs.record().items()}
    assert costs.tokens == 9


def test_judging_uses_the_same_random_numbers_for_every_arm(tmp_path: Path) -> None:
    """An arm that has learned nothing writes the start model's answers, prompt by prompt, and gains nothing."""
    still = {"policy": {"lr": 1e-30}}
    tree = compare_tree(tmp_path, arms={**ONLY_PPO, "ppo": still}, budget={"completions": 16}, evaluations=1)
    assert compared(tree)
    plan = plan_of(tree)
    cells = read_cells(plan)
    start, ppo = ([one.judged for one in cells if one.cell.arm == arm] for arm in ("start", "ppo"))
    for a, b in zip(start, ppo, strict=True):
        assert isinstance(a, Judgment)
        assert isinstance(b, Judgment)
        assert [row["completion"] for row in a.rows] == [row["completion"] for row in b.rows]
    texts = [[row["completion"] for row in one.rows] for one in start if one is not None]
    assert texts[0] != texts[1]  # another seed, other numbers
    results = summarize(plan, cells)
    final = results.finals["ppo"]
    assert final.gain == Interval(0.0, 0.0, 0.0)
    assert final.win_rate_over_start.value == 0.5


def test_a_cell_that_is_done_is_not_run_again(finished: Path) -> None:
    plan = plan_cells(load_compare(finished), beside=finished)
    seen: list[str] = []

    def refuse(cell: Any, place: int) -> Any:
        seen.append(cell.arm)
        raise AssertionError("a finished cell was run again")

    assert run_cells(plan, refuse, ComparisonView())
    assert seen == []
