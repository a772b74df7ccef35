"""Tuning: equal for every arm, on seeds and prompts of its own, continued to the same end, and told on the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import Ended, at_once, compare_tree, compared, failing_arm, here, plan_of

from rlhf.api.comparing import check_owners, rebuild_comparison, run_compare
from rlhf.comparison.costs import COSTS, CostTracker
from rlhf.comparison.plan import Cell, ensure_owner
from rlhf.comparison.results import ComparisonResults
from rlhf.comparison.scheduler import advice_on_memory
from rlhf.comparison.summary import verdict
from rlhf.comparison.trial import JUDGED, Judgment, record_failure
from rlhf.comparison.tuning.run import NOT_RERUN, tuning_table
from rlhf.config.files import merge, merge_overrides, parse_overrides
from rlhf.config.load import compare_config
from rlhf.errors import ConfigError, DivergenceError, RankLost, UserError
from rlhf.tracking.metrics import format_number
from rlhf.tracking.trackers import read_jsonl

LR = {"policy.lr": [0.03, 0.1]}
TUNE = {"trials": 3, "space": LR, "report_default": True}
ARMS: dict[str, Any] = {
    "ppo": {"policy": {"lr": 1e-6}},
    "grpo": None,
    "dpo": {"algorithm": {"preset": "dpo"}, "batch": {"prompts_per_step": 8}, "policy": {"lr": 1e-6}},
}
ONLY_DPO = {"ppo": None, "grpo": None, "best_of_n": None}


def tuned_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    return compare_tree(folder, seeds=[0], tune=TUNE, arms=ARMS, evaluations=1) | changes


def of_dpo(folder: Path) -> dict[str, Any]:
    """A comparison that tunes one arm."""
    arms = {**ARMS, **ONLY_DPO}
    return compare_tree(folder, seeds=[0], tune={"trials": 3, "space": LR}, arms=arms, evaluations=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tuned comparison that nothing interrupted."""
    path = tmp_path_factory.mktemp("tuned")
    assert compared(tuned_tree(path))
    return path / "compare"


def tuning_of(folder: Path) -> dict[str, Any]:
    tuning: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["tuning"]
    return tuning


def timeless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: timeless(value) for key, value in tree.items() if key != "seconds"}
    return [timeless(value) for value in tree] if isinstance(tree, list) else tree


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def prompts_of(folder: Path) -> set[str]:
    judged = Judgment.read(folder)
    assert judged is not None
    return {row["prompt"] for row in judged.rows}


def test_every_arm_has_the_same_trials_and_the_same_budget(finished: Path) -> None:
    tuning = tuning_of(finished)
    assert (tuning["rounds"], tuning["budget"]) == ([3, 2], pytest.approx(153.6))  # 2 rounds x 64 / (1/3 + 1/2)
    assert tuning["limits"] == pytest.approx([25.6, 64])
    for name in ("ppo", "dpo"):
        trials = tuning["arms"][name]["trials"]
        assert [trial["trial"] for trial in trials] == [0, 1, 2]
        assert sorted(trial["costs"]["completions"] for trial in trials) == [16, 64, 64]  # whole steps of 16
        assert sum(trial["costs"]["completions"] for trial in trials) <= tuning["budget"]
        assert sorted(len(trial["scores"]) for trial in trials) == [1, 2, 2]
        assert len(trials[0]["scores"]) == 2  # the default is in every round
    assert tuning["arms"]["best_of_n"] is None
    reported = json.loads((finished / "results.json").read_text(encoding="utf-8"))["arms"]
    assert all(reported[name]["costs"]["completions"] == 64 for name in ("ppo", "dpo"))  # tuning is not in it


def test_the_best_of_the_last_round_is_the_arm(finished: Path) -> None:
    tuning = tuning_of(finished)
    for name in ("ppo", "dpo"):
        arm = tuning["arms"][name]
        last = {trial["trial"]: trial["scores"][-1] for trial in arm["trials"] if len(trial["scores"]) == 2}
        assert last[arm["chosen"]] == max(last.values()) >= last[0]
        values = arm["trials"][arm["chosen"]]["values"]
        assert plan_cell(finished, name)["train"]["policy"]["lr"] == values.get("policy.lr", 1e-6)
    assert tuning["arms"]["ppo"]["chosen"] != 0  # with a learning rate of next to nothing it learns nothing
    assert tuning["arms"]["ppo"]["untuned_arm"] == "ppo_untuned"
    assert plan_cell(finished, "ppo_untuned")["train"]["policy"]["lr"] == 1e-6


def plan_cell(folder: Path, arm: str) -> Any:
    return yaml.safe_load((folder / arm / "seed-0" / "cell.yaml").read_text(encoding="utf-8"))


def test_trials_have_seeds_and_prompts_of_their_own(finished: Path) -> None:
    tuning, trial = tuning_of(finished), finished / "ppo" / "tuning" / "trial-0" / "seed-1000" / "round-1"
    for arm in ("start", "ppo", "dpo", "best_of_n"):
        assert prompts_of(finished / arm / "seed-0") == prompts_of(finished / "start" / "seed-0")
    assert not prompts_of(trial) & prompts_of(finished / "start" / "seed-0")
    assert len(prompts_of(trial) | prompts_of(finished / "start" / "seed-0")) == 20  # no held-out prompt is lost
    assert (tuning["prompts"], tuning["shared_prompts"], tuning["are_split"]) == (len(prompts_of(trial)), 0, True)


def test_a_trial_that_goes_on_is_a_run_that_was_never_stopped(tmp_path: Path, finished: Path) -> None:
    plan = plan_of(tuned_tree(tmp_path))
    (cell,) = [c for c in plan.trials if "ppo/tuning/trial-0/seed-1000/round-2" in str(c.folder)]
    ensure_owner(cell)
    assert here(cell) == "done"
    other = finished / "ppo" / "tuning" / "trial-0" / "seed-1000"
    assert (cell.folder / JUDGED).read_bytes() == (other / "round-2" / JUDGED).read_bytes()
    assert not (other / "checkpoints").exists()
    assert not (other / "model").exists()


def test_the_results_and_the_page_say_what_tuning_changed(finished: Path) -> None:
    results = ComparisonResults.read(finished)
    assert results.record() == ComparisonResults.of(results.record()).record()
    tuning = results.tuning
    assert tuning is not None
    ppo = tuning.arms["ppo"]
    assert ppo is not None
    assert ppo.chosen is not None
    chosen, default = ppo.trial(ppo.chosen), ppo.trial(0)
    assert chosen is not None
    assert default is not None
    pair = next(rate for rate in results.win_rates if (rate.a, rate.b) == ("ppo", "ppo_untuned"))
    table = tuning_table(results)
    assert table is not None
    rows = {row[0]: row for row in table.rows}
    assert rows["ppo"][1:4] == [3, 0, f"policy.lr 1e-06 → {chosen.values['policy.lr']:g}"]
    assert rows["ppo"][5:7] == [f"{default.score:.2f}", f"{chosen.score:.2f}"]
    assert rows["ppo"][7] == 144
    assert rows["ppo"][4].startswith(f"{pair.difference.value:+.2f}")
    assert rows["best_of_n"][3] == "nothing to tune"
    page = (finished / "report.html").read_text(encoding="utf-8")
    for text in ("What tuning changed", str(rows["ppo"][3]), "nothing to tune", "3 trials for each trained arm"):
        assert text in page
    assert "on seed 1000 and" in page
    untuned = results.finals["ppo_untuned"].measures.score
    assert untuned is not None
    assert re.match(rf"Of the tuned arms ppo has .*? \({format_number(untuned)} as written\): ", verdict(results))
    assert "chosen (as written)" in page or "dropped after round 1" in page
    assert "may spend 154 completions" in page


def test_the_report_is_rebuilt_from_the_folder(finished: Path) -> None:
    before = (finished / "results.json").read_bytes()
    rebuild_comparison(str(finished))
    assert (finished / "results.json").read_bytes() == before


def test_trials_with_seeds_that_tuning_does_not_have_are_not_reported(tmp_path: Path, finished: Path) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    (trial,) = copy.glob("dpo/*/trial-1/seed-*")
    other = Path(shutil.copytree(trial, trial.with_name("seed-77")))
    for file in other.glob("round-*/cell.yaml"):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        tree["seed"] = tree["train"]["run"]["seed"] = 77
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        judged = file.parent / "judged.json"
        judged.write_text(re.sub(r'"eval/score": [-0-9.e]+', '"eval/score": 99.0', judged.read_text(encoding="utf-8")))
    rebuild_comparison(str(copy))
    assert tuning_of(copy) == tuning_of(finished)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tune": {"seeds": [1001]}}, r"ppo/seed-0 has values that these trials .*compare/ppo to tune the"),
        ({"tune": {"trials": 2}}, r"tuning/trial-\d/.* was made with other settings"),
        ({"arms": {"best_of_n": {"n": 3}}}, r"best_of_n/seed-0 was made with other settings \(best_of_n.n\)"),
    ],
)
def test_a_change_that_is_refused_trains_no_trial_and_writes_nothing(
    finished: Path, changes: dict[str, Any], message: str
) -> None:
    tree, before = tuned_tree(finished.parent), contents_of(finished)
    config = compare_config(merge(tree, changes))
    with pytest.raises(ConfigError, match=message):
        run_compare(config, beside=Path(), start=lambda cell, place: pytest.fail(f"{cell.label} began"))
    assert contents_of(finished) == before


def test_a_seed_and_an_arm_may_be_added_to_a_tuned_comparison(finished: Path) -> None:
    added = {"ppo_more": {"policy": {"lr": 1e-6}}}
    check_owners(plan_of(merge(tuned_tree(finished.parent), {"seeds": [0, 1], "arms": added})), Path())


def test_an_interrupted_tuning_continues_to_the_same_end(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend = CostTracker.spend

    def interrupted(self: CostTracker, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        spend(self, step, metrics, tokens=tokens, seconds=seconds)
        if step == 3 and "ppo/tuning/trial-0" in str(self.path):  # in the middle of its second round
            os.kill(os.getpid(), signal.SIGTERM)

    tree = tuned_tree(tmp_path, arms={"ppo": ARMS["ppo"]})
    with monkeypatch.context() as patch:
        patch.setattr(CostTracker, "spend", interrupted)
        assert not compared(tree)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "compare").rglob(JUDGED)}
    assert tuning_of(tmp_path / "compare")["arms"]["ppo"]["chosen"] is None
    assert "Tuning is not finished" in (tmp_path / "compare" / "report.html").read_text(encoding="utf-8")
    assert compared(tree)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "compare").rglob(JUDGED)}.items()
    one, other = (timeless(tuning_of(path)["arms"]["ppo"]) for path in (finished, tmp_path / "compare"))
    assert one == other
    for name in ("ppo", "ppo_untuned"):
        ends = [(path / name / "seed-0" / JUDGED).read_bytes() for path in (finished, tmp_path / "compare")]
        assert ends[0] == ends[1]


def test_a_trial_that_diverges_is_a_counted_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = of_dpo(tmp_path)
    spend, tried = CostTracker.spend, list[str]()

    def diverges(self: CostTracker, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        spend(self, step, metrics, tokens=tokens, seconds=seconds)
        tried.append(str(self.path))
        if "trial-1" in str(self.path):
            raise DivergenceError("a NaN or Inf in the loss")

    monkeypatch.setattr(CostTracker, "spend", diverges)
    assert compared(tree)
    folder = tmp_path / "compare"
    trials = tuning_of(folder)["arms"]["dpo"]["trials"]
    assert (trials[1]["scores"], trials[1]["error"]) == ([None], "a NaN or Inf in the loss")
    assert trials[1]["costs"]["completions"] == 16  # its spending is counted
    assert [len(trials[number]["scores"]) for number in (0, 2)] == [2, 2]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "failed and counts as a loss: a NaN or Inf in the loss" in page
    results = ComparisonResults.read(folder)
    assert results.tuning is not None
    table = tuning_table(results)
    assert table is not None
    assert table.rows[0][2] == 1
    assert table.rows[0][4] == (NOT_RERUN if tuning_of(folder)["arms"]["dpo"]["chosen"] else "the arm as written")
    tried.clear()
    assert compared(tree)
    assert tried == []  # a failed trial is over


def test_a_trial_without_memory_beside_others_is_tried_again(tmp_path: Path) -> None:
    """The memory that other cells left is no property of its values: no loss, and no next round without it."""
    tree = of_dpo(tmp_path)

    def crowded(cell: Cell, place: int) -> Ended:
        if "trial-1" not in str(cell.folder):
            return at_once(cell, place)
        error = "CUDA out of memory"
        record_failure(cell.folder, error + advice_on_memory(error, 2))
        return Ended("failed")

    with pytest.raises(UserError, match=r"1 of 3 trials .* trial 1, .*jobs lower, and the same command tries it again"):
        run_compare(compare_config(tree), beside=Path(), start=crowded)
    folder = tmp_path / "compare"
    assert not list(folder.rglob("round-2/judged.json"))
    assert compared(tree)
    trial = tuning_of(folder)["arms"]["dpo"]["trials"][1]
    assert trial["error"] is None
    assert None not in trial["scores"]


def test_if_every_trial_fails_nothing_is_compared(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, seeds=[0], tune={"trials": 2}, arms={**ONLY_DPO, "dpo": None})
    tree["arms"] = {"bad": failing_arm(tmp_path)}
    for _ in range(2):  # it is tried again, not remembered as a loss
        with pytest.raises(UserError, match=r"every trial of tuning failed.*no such thing"):
            compared(tree)
    assert not list(read_jsonl(tmp_path / "compare" / "bad" / "seed-0" / COSTS))


def test_a_trial_whose_machine_fails_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spend = CostTracker.spend

    def fails(self: CostTracker, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        spend(self, step, metrics, tokens=tokens, seconds=seconds)
        if "trial-1" in str(self.path):
            raise RankLost("lost contact with another rank")

    tree = of_dpo(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(CostTracker, "spend", fails)
        with pytest.raises(UserError, match=r"1 of 3 trials .* not by their values\. .*trial 1, .*lost contact"):
            compared(tree)
    assert compared(tree)
    trial = tuning_of(tmp_path / "compare")["arms"]["dpo"]["trials"][1]
    assert trial["error"] is None
    assert None not in trial["scores"]


def test_the_same_failure_twice_is_a_loss(tmp_path: Path) -> None:
    def killed(cell: Cell, place: int) -> Ended:
        if "trial-1" not in str(cell.folder):
            return at_once(cell, place)
        record_failure(cell.folder, "ended by SIGKILL")
        return Ended("failed")

    config = compare_config(of_dpo(tmp_path))
    with pytest.raises(UserError, match="the same failure a second time is a loss"):
        run_compare(config, beside=Path(), start=killed)
    assert run_compare(config, beside=Path(), start=killed)
    trial = tuning_of(tmp_path / "compare")["arms"]["dpo"]["trials"][1]
    assert (trial["scores"], trial["error"]) == ([None], "ended by SIGKILL")


# The plan


def test_the_default_is_the_first_trial_and_every_arm_tries_the_same_quantiles(tmp_path: Path) -> None:
    plan = plan_of(compare_tree(tmp_path, tune=4))
    rates: dict[str, list[float]] = {}
    for arm in ("ppo", "grpo", "dpo"):
        first = [c.config for c in plan.trials if c.arm == arm and c.config.trial and c.config.trial.round == 1]
        assert [trial.trial.number for trial in first if trial.trial] == [0, 1, 2, 3]
        assert {trial.seed for trial in first} == {1000}
        rates[arm] = [trial.train.policy.lr for trial in first]
        written = plan.of(arm)[0].config.train
        assert first[0].train.model_copy(update={"run": None, "data": None, "checkpoint": None}) == written.model_copy(
            update={"run": None, "data": None, "checkpoint": None}
        )
        assert all(trial.train.schedule.steps == written.schedule.steps for trial in first)
    assert rates["ppo"] == rates["grpo"] == rates["dpo"] == [0.01, 0.003885, 0.01916, 0.001521]
    assert not [c for c in plan.trials if c.arm == "best_of_n"]
    assert not plan_of(compare_tree(tmp_path)).trials


def test_a_setting_that_an_arm_does_not_read_is_left_out_of_its_space(tmp_path: Path) -> None:
    space = {"policy.lr": {"factor": 2}, "critic.lr": {"factor": 2}, "algorithm.loss.beta": [0.05, 0.2]}
    plan = plan_of(compare_tree(tmp_path, tune={"trials": 3, "space": space}))
    tried = {c.arm: set(c.config.trial.values) for c in plan.trials if c.config.trial and c.config.trial.number}
    assert tried == {
        "ppo": {"policy.lr", "critic.lr"},
        "grpo": {"policy.lr"},
        "dpo": {"policy.lr", "algorithm.loss.beta"},
    }


def test_an_arm_has_a_space_of_its_own(tmp_path: Path) -> None:
    arms = {"ppo": {"tune": {"space": {"policy.lr": None, "batch": {"epochs": [1, 3, 4]}}}}}
    plan = plan_of(compare_tree(tmp_path, tune=3, arms=arms))
    tried = [c.config.trial.values for c in plan.trials if c.arm == "ppo" and c.config.trial and c.config.trial.number]
    assert {key for values in tried for key in values} == {"batch.epochs"}


def test_the_command_line_sets_trials_over_a_file(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, tune={"trials": 8, "seeds": [7]})
    config = compare_config(merge_overrides(tree, parse_overrides(["tune=3", "tune.space.policy.lr=[0.1,0.2]"])))
    assert config.tune is not None
    assert (config.tune.trials, config.tune.seeds) == (3, [7])
    assert list(config.tune.space) == ["policy.lr"]
    assert compare_config(merge_overrides(tree, parse_overrides(["tune=null"]))).tune is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tune": {"seeds": [5, 1]}}, r"tune.seeds and seeds both have 1"),
        ({"tune": {"seeds": [5, 5]}}, "tune: seeds: .* has a seed twice|has a seed twice"),
        ({"tune": 1}, "greater than or equal to 2"),
        ({"tune": {"trials": 8, "budget": 1000}}, r"tune.budget is 1,000, but with 219"),
        ({"tune": {"trials": 4, "budget": 40}}, r"round 1 of its tuning a trial has 5 completions.* one step of 16"),
        ({"tune": {"space": {"policy.learning": {"factor": 2}}}}, "no arm reads a setting policy.learning"),
        ({"tune": {"space": {"policy.lr": {"low": 2, "high": 1}}}}, r"tune.space.policy.lr.*low must be below high"),
        ({"tune": {"space": {"policy.lr": {"low": 0, "high": 1}}}}, "no logarithm"),
        ({"tune": {"space": {"policy.model": ["a", "b", "c"]}, "trials": 3}}, "set by start"),
        ({"tune": {"trials": 3, "space": {"policy.lr": [-1, -2]}}}, r"policy.lr.*in trial 1 of tuning"),
        ({"tune": {"trials": 6, "space": {"policy.lr": [1e-5, 2e-5]}}}, "has only 3 configurations"),
        ({"tune": 3, "arms": {"dpo": {"tune": {"space": {"critic.lr": [1.0]}}}}}, "reads no setting critic.lr"),
        ({"tune": 3, "arms": {"dpo": {"tune": {"trials": 9}}}}, "unknown key"),
        ({"tune": {"report_default": True}, "arms": {"ppo_untuned": {}}}, "give the other arm another name"),
    ],
)
def test_a_mistake_in_tuning_is_named_before_anything_runs(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(compare_tree(tmp_path, **changes))
    assert not (tmp_path / "compare").exists()


def test_prompts_of_the_report_are_no_tuning_prompts(tmp_path: Path) -> None:
    prompts = str(tmp_path / "prompts.jsonl")
    tree = compare_tree(tmp_path, tune={"trials": 2, "prompts": {"path": prompts}})
    with pytest.raises(ConfigError, match=r"tune.prompts: .*prompts.jsonl has the prompts that the arms are reported"):
        plan_of(tree)
    tree["tune"]["prompts"]["part"] = [0, 0.5]
    tree["shared"]["data"]["eval_prompts"] = {"part": [0.5, 1]}
    plan = plan_of(tree)
    assert [p.part for c in (plan.cells[0], plan.trials[0]) if (p := c.config.train.data.eval_prompts)] == [
        (0.5, 1.0),
        (0.0, 0.5),
    ]
