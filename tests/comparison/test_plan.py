"""A comparison's cells: budgets become lengths, arms differ only in their own settings, mistakes are named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import GROUPS, compare_tree, here, plan_of
from runs import make_model, write_rows

from rlhf.comparison.page import differences
from rlhf.comparison.plan import CellPlan, ensure_owner, plan_cells, read_cell, read_plan
from rlhf.config.compare import START_FOLDER, CompareConfig, TrainedArm
from rlhf.config.load import compare_config, dump, load_any, load_compare, unread_warnings
from rlhf.config.run import UNKNOWN_LENGTH
from rlhf.errors import ConfigError
from rlhf.rewards.function import FunctionSource

ROOT = Path(__file__).resolve().parents[2]


def test_every_arm_gets_the_same_completions(tmp_path: Path) -> None:
    plan = plan_of(compare_tree(tmp_path))
    names = (START_FOLDER, "ppo", "grpo", "dpo", "best_of_n")
    assert [(c.arm, c.seed) for c in plan.cells] == [(name, seed) for seed in (0, 1) for name in names]
    for arm in ("ppo", "grpo", "dpo"):  # 16 a step each: 16 prompts, 4 groups of 4, 8 pairs
        train = plan.of(arm)[0].config.train
        assert train.schedule.steps == 4
        assert train.eval.every == 2
    train = plan.of("ppo")[1].config.train
    assert (train.run.seed, train.run.out_dir) == (1, str(tmp_path / "compare" / "ppo" / "seed-1"))
    assert plan_of(compare_tree(tmp_path, budget={"completions": 63})).of("ppo")[0].config.train.schedule.steps == 3


def test_what_an_arm_does_not_read_of_the_base_is_left_out_and_its_own_is_not(tmp_path: Path) -> None:
    plan = plan_of(compare_tree(tmp_path))
    for cell in plan.cells:
        if cell.config.budget is not None:
            assert unread_warnings(cell.config.train) == []
    dpo = plan.of("dpo")[0].config.train
    assert dpo.reward is None
    assert dpo.data.prompts is None
    assert dpo.batch.epochs == 1
    noisy = plan_of(compare_tree(tmp_path, arms={"dpo": {"critic": {"lr": 0.5}}}))
    assert "critic" in unread_warnings(noisy.of("dpo")[0].config.train)[0]


def test_start_reward_and_judge_are_the_same_for_all(tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=7)
    source = {"type": "function", "target": "a:b"}
    plan = plan_of(compare_tree(tmp_path, start=str(other), reward_source=source, judge={**source, "target": "c:d"}))
    for cell in plan.cells:
        train = cell.config.train
        assert train.policy.model == str(other)
        assert train.eval.source == FunctionSource(target="c:d")
        assert cell.config.proxy == FunctionSource(target="a:b")
        assert train.reward is None or train.reward.source == cell.config.proxy


@pytest.mark.parametrize("where", ["base", "shared", "arm"])
def test_a_reference_other_than_the_start_is_refused(tmp_path: Path, where: str) -> None:
    """The start cell would judge it, and best-of-n sample the start: two starts in one comparison."""
    other = {"reference": {"model": str(make_model(tmp_path / "other", seed=7))}}
    places = {"shared": {"shared": other}, "arm": {"arms": {"ppo": other}}}
    tree = compare_tree(tmp_path, **places.get(where, {}))
    if where == "base":
        path = Path(tree["base"])
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **other}))
    with pytest.raises(ConfigError, match=r"reference\.model=.*other.* the start model"):
        plan_of(tree)


def test_the_start_may_be_named_as_the_reference(tmp_path: Path) -> None:
    other = str(make_model(tmp_path / "other", seed=7))
    plan = plan_of(compare_tree(tmp_path, start=other, shared={"reference": {"model": other}}))
    assert {cell.config.train.reference.model for cell in plan.cells} == {other}


def test_the_lab_gives_start_pairs_and_reward(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, lab={"folder": "somewhere"})
    train = plan_of(tree).of("dpo")[0].config.train
    assert train.policy.model == "somewhere/sft"
    assert train.data.preferences is not None
    assert train.data.preferences.path == "somewhere/preferences/train.jsonl"
    config = plan_of(tree).of("ppo")[0].config
    assert config.proxy is not None
    assert config.proxy.model_dump()["path"] == "somewhere/rm"


@pytest.mark.parametrize("unit, limit", [("tokens", 1000), ("flops", 1e9), ("seconds", 2.5)])
def test_other_budgets_are_met_on_the_way(tmp_path: Path, unit: str, limit: float) -> None:
    plan = plan_of(compare_tree(tmp_path, budget={"completions": None, unit: limit}))
    cell = plan.of("ppo")[0].config
    assert cell.train.schedule.steps == UNKNOWN_LENGTH
    assert cell.train.eval.every == 2  # the base's
    assert cell.budget is not None
    assert (cell.budget.unit, cell.budget.limit) == (unit, limit)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"budget": {"tokens": 5}}, "exactly one"),
        ({"budget": {"completions": None}}, "exactly one"),
        ({"seeds": [1, 1]}, "twice"),
        ({"seeds": []}, "seeds"),
        ({"arms": {"start": {}}}, "cannot be the name of an arm"),
        ({"arms": {"../up": {}}}, "cannot be the name of an arm"),
        ({"arms": {"ppo": {"polcy": {}}}}, "^arms.ppo.polcy: unknown key; did you mean policy"),
        (
            {"arms": {"nope": {"n": 3}}},
            r"^arms\.nope\.n: unknown key; arms of type best_of_n have it: .*nope.type=best",
        ),
        ({"arms": {"ppo": {"tune": {"spac": {}}}}}, r"^arms\.ppo\.tune\.spac: unknown key; did you mean space"),
        ({"arms": {"train": {"best_of_n": 3}}}, r"^arms\.train\.best_of_n: unknown key"),
        ({"arms": {"ppo": {"policy": {"learning_rate": 1}}}}, "arms.ppo: policy.learning_rate"),
        ({"arms": {"ppo": {"schedule": {"steps": 3}}}}, "set by budget"),
        ({"arms": {"ppo": {"policy": {"model": "x"}}}}, "set by start"),
        ({"arms": {"ppo": {"eval": {"source": {}}}}}, "set by judge"),
        ({"shared": {"schedule": {"epochs": 1}}}, "set by budget"),
        ({"arms": {"best_of_n": {"samples": 1}}}, r"^arms\.best_of_n: samples is 1, but .* at least 2"),
        ({"arms": {"more": {"type": "search"}}}, "arms.more"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml"),
        ({"shared": {"eval": {"source": None}}}, "judge is missing"),
        ({"shared": {"data": {"eval_prompts": None}}}, "nothing to judge on"),
        (
            {"shared": {"data": {"eval_prompts": None, "holdout": 0.1, "prompts": {"part": [0, 0.5]}}}},
            "nothing to judge on",
        ),
        ({"budget": {"completions": 15}}, "arms.ppo: one step has 16 completions, more than the whole budget of 15"),
        ({"shared": {"schedule": {"decay": "linear"}}, "budget": {"completions": None, "tokens": 9}}, "constant"),
        ({"arms": {"grpo": {"sampling": {"completions_per_prompt": 1}}}}, "arms.grpo: a group baseline"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(compare_tree(tmp_path, **changes))
    assert not (tmp_path / "compare").exists()


COMPARED = {
    "compare.yaml": {"ppo", "grpo", "dpo", "best_of_n"},
    "compare_quick.yaml": {"ppo", "grpo", "dpo", "best_of_n"},
    "compare_trust_region.yaml": {"ppo", "ppo_penalty", "trpo", "npg"},
    "compare_tuned.yaml": {"ppo", "grpo", "dpo"},
    "ablate_ppo.yaml": {"ppo", "value_clip", "head_orthogonal", "no_shuffling", "lambda_0", "lambda_1", "epochs_30"},
}


def plan_of_the_lab(name: str, monkeypatch: pytest.MonkeyPatch) -> CellPlan:
    """With the lab's files not made: only the settings are looked at."""
    monkeypatch.setattr("rlhf.comparison.plan.resolve_lab_paths", lambda config, **_: config)
    monkeypatch.chdir(ROOT)
    return plan_cells(load_compare(ROOT / "configs" / "lab" / name), beside=ROOT / "configs" / "lab")


@pytest.mark.parametrize("name", COMPARED)
def test_the_lab_comparisons_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of_the_lab(name, monkeypatch)
    config = plan.config
    assert COMPARED[name] <= set(config.arms)
    for arm in config.arms:
        cell = plan.of(arm)[0].config
        if cell.budget is not None:
            assert unread_warnings(cell.train) == []
            assert cell.train.schedule.steps is not None
            assert cell.train.schedule.steps * cell.train.completions_per_step == config.budget.completions
            assert cell.train.eval.every * config.evaluations == cell.train.schedule.steps
    for trial in plan.trials:
        assert unread_warnings(trial.config.train) == []
    assert bool(plan.trials) == (config.tune is not None)


def test_every_arm_of_the_ablation_changes_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting, or the same one of policy and critic, or the two sides of the clip, or the settings of the KL."""
    plan = plan_of_the_lab("ablate_ppo.yaml", monkeypatch)
    changed: dict[str, set[str]] = {}
    for arm in plan.config.arms:
        trees = [plan.of(name)[0].config.train for name in ("ppo", arm)]
        changed[arm] = {key for key in differences(dict(zip("ab", trees, strict=True))) if not key.startswith("run.")}
    assert not changed.pop("ppo")
    assert len(changed) == 28
    assert changed.pop("kl_none") >= {"algorithm.kl.placement"}
    pairs = {arm: keys for arm, keys in changed.items() if len(keys) > 1}
    assert set(pairs) == {
        *("head_normal", "head_orthogonal", "no_gradient_clip", "adam_eps_1e-8"),
        *("kl_loss_k2", "kl_loss_k3", "clip_0.1", "clip_0.3", "clip_0.5"),
    }
    assert all(len(keys) == 2 for keys in pairs.values())
    assert all(changed.values())


def test_a_base_is_found_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = compare_tree(tmp_path) | {"base": "base.yaml"}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert plan_cells(compare_config(tree), beside=tmp_path).cells


def test_shared_sources_take_the_place_of_the_path_of_the_base(tmp_path: Path) -> None:
    path = str(tmp_path / "prompts.jsonl")
    sources = {name: {"path": path} for name in ("a", "b")}
    tree = compare_tree(tmp_path, shared={"data": {"prompts": {"sources": sources}}})
    prompts = plan_of(tree).of("ppo")[0].config.train.data.prompts
    assert prompts is not None
    assert (prompts.path, list(prompts.sources)) == ("", ["a", "b"])


def test_an_arm_set_to_null_is_left_out(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, arms={"dpo": None})
    assert list(compare_config(tree).arms) == ["ppo", "grpo", "best_of_n"]


def test_a_cell_is_read_back_as_it_was_written_and_no_other_takes_its_folder(tmp_path: Path) -> None:
    plan = plan_of(compare_tree(tmp_path))
    for cell in plan.cells:
        ensure_owner(cell)
        assert read_cell(cell.folder) == cell
        ensure_owner(cell)
    assert read_plan(plan.config, plan.folder).cells != []
    assert unread_warnings(read_cell(plan.of("grpo")[0].folder).config.train) == []
    changed = plan_of(compare_tree(tmp_path, arms={"grpo": {"policy": {"lr": 0.5}}}))
    with pytest.raises(ConfigError, match=r"train\.policy\.lr.*another out_dir"):
        ensure_owner(changed.of("grpo")[0])
    ensure_owner(changed.of("ppo")[0])


def test_a_cell_with_rows_held_out_of_its_data_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """The held-out section is filled in, not set: the file of the cell has only the training rows' part."""
    tree = compare_tree(tmp_path, shared={"data": {"holdout": 0.25}})
    tree["arms"] |= {"sft": {"algorithm": {"preset": "sft"}, "data": {"sft": {"path": str(tmp_path / "sft.jsonl")}}}}
    write_rows(tmp_path / "sft.jsonl", [{"prompt": f"p{i}", "completion": "good"} for i in range(40)])
    for name, held_out in (("dpo", "eval_preferences"), ("sft", "eval_sft"), ("ppo", "eval_prompts")):
        cell = plan_of(tree).of(name)[0]
        assert getattr(cell.config.train.data, held_out) is not None
        ensure_owner(cell)
        assert dump(read_cell(cell.folder).config) == dump(cell.config), name
        ensure_owner(plan_of(tree).of(name)[0])


def test_prompts_over_a_base_that_is_a_run_are_all_judged_on(tmp_path: Path) -> None:
    """The run's config.yaml has the part of its own prompts that data.holdout filled in."""
    tree = compare_tree(tmp_path, shared={"data": {"eval_prompts": None, "holdout": 0.25}})
    run = plan_of(tree).of("ppo")[0].config.train
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(dump(run)))
    mine = str(write_rows(tmp_path / "mine.jsonl", [{"prompt": "red one"}]))
    named = plan_of(
        compare_tree(tmp_path, base=str(tmp_path / "run"), shared={"data": {"eval_prompts": {"path": mine}}})
    )
    data = named.of("ppo")[0].config.train.data
    assert data.eval_prompts is not None
    assert (data.eval_prompts.path, data.eval_prompts.part, data.eval_prompts.limit) == (mine, None, None)


def test_a_cell_goes_on_with_other_settings_of_speed_memory_and_checkpoints(tmp_path: Path) -> None:
    before = plan_of(compare_tree(tmp_path)).of("grpo")[0]
    ensure_owner(before)
    smaller = plan_of(compare_tree(tmp_path, shared={"batch": {"micro_batch_size": 1}})).of("grpo")[0]
    assert smaller.config.train.batch.micro_batch_size != before.config.train.batch.micro_batch_size
    ensure_owner(smaller)
    assert read_cell(before.folder) == smaller
    saved_less = plan_of(compare_tree(tmp_path, shared={"checkpoint": {"every": 7, "keep": 3}})).of("grpo")[0]
    assert saved_less.config.train.checkpoint != before.config.train.checkpoint
    ensure_owner(saved_less)
    rounded = plan_of(compare_tree(tmp_path, shared={"policy": {"dtype": "float64"}})).of("grpo")[0]
    with pytest.raises(ConfigError, match=r"train\.policy\.dtype.*another out_dir"):
        ensure_owner(rounded)


def test_only_what_differs_is_a_difference(tmp_path: Path) -> None:
    plan = plan_of(compare_tree(tmp_path))
    configs = {arm: plan.of(arm)[0].config.train for arm in ("ppo", "grpo", "dpo")}
    different = differences(configs)
    assert different["algorithm.preset"] == {"ppo": "ppo", "grpo": "grpo", "dpo": "dpo"}
    assert different["sampling.completions_per_prompt"] == {"ppo": 1, "grpo": 4, "dpo": 1}
    assert different["critic.lr"] == {"ppo": 1e-2}  # the others have no critic
    assert not {"run.name", "run.out_dir", "policy.lr", "schedule.steps"} & set(different)
    assert GROUPS["batch"]["prompts_per_step"] == different["batch.prompts_per_step"]["grpo"]


def test_the_name_of_an_arm_may_have_dots_on_the_command_line(tmp_path: Path) -> None:
    tree = {**compare_tree(tmp_path), "arms": {"clip_0": {}, "clip_0.1": {}, "clip_0.3": {}, "dpo": {}}}
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    overrides = ["arms.clip_0.1=null", "arms.clip_0.3.policy.lr=0.5", "arms.clip_0.policy.lr=0.25", "arms.dpo=null"]
    for config in (load_compare(path, overrides), load_any(path, overrides)):
        assert isinstance(config, CompareConfig)
        arms = {name: arm.tree() for name, arm in config.arms.items() if isinstance(arm, TrainedArm)}
        assert arms == {"clip_0": {"policy": {"lr": 0.25}}, "clip_0.3": {"policy": {"lr": 0.5}}}


def test_an_empty_section_of_a_comparison_sets_nothing(tmp_path: Path) -> None:
    tree = compare_tree(tmp_path, shared={"sharding": "zero2"})
    written = dump(compare_config(tree))
    assert written["arms"]["ppo"]["sharding"] == {}
    plans = [plan_of(settings) for settings in (tree, written)]
    assert [cell.config.train.sharding.mode for cell in plans[0].of("ppo")] == ["zero2", "zero2"]
    assert [dump(cell.config) for cell in plans[0].cells] == [dump(cell.config) for cell in plans[1].cells]


def test_the_settings_of_the_last_arm_are_checked_too(tmp_path: Path) -> None:
    """With two seeds as with one: the cells of every arm are looked at."""
    tree = compare_tree(tmp_path)
    tree["arms"] = {"ppo": tree["arms"]["ppo"], "grpo": {**tree["arms"]["grpo"], "guard": {"on_alarm": "stop"}}}
    with pytest.raises(ConfigError, match=r"arms.grpo: an alarm that stops a run"):
        plan_of(tree)


def test_the_start_model_and_best_of_n_obey_no_rule_of_training(tmp_path: Path) -> None:
    """The base is PPO, which whitens over 8 completions or more; no arm is PPO."""
    tree = compare_tree(tmp_path, seeds=[0], shared={"batch": {"prompts_per_step": 4, "minibatches": 1}})
    with pytest.raises(ConfigError, match=r"^arms\.ppo: whitening over 4 completions is noise"):
        plan_of(tree)
    del tree["arms"]["ppo"]
    plan = plan_of(tree)
    assert [cell.arm for cell in plan.cells] == ["start", "grpo", "dpo", "best_of_n"]
    for cell in plan.cells:
        ensure_owner(cell)
        assert read_cell(cell.folder) == cell
    assert here(plan.cells[0]) == here(plan.cells[3]) == "done"


def test_a_teacher_of_all_arms_is_no_mistake_of_the_start_model(tmp_path: Path) -> None:
    """The base is PPO, which reads no teacher."""
    tree = compare_tree(tmp_path, seeds=[0], shared={"teacher": {"model": str(make_model(tmp_path / "teacher"))}})
    with pytest.raises(ConfigError, match=r"^arms\.ppo: teacher is set, but ppo reads none"):
        plan_of(tree)
    tree["arms"] = {"opd": {"algorithm": {"preset": "opd"}, **GROUPS}}
    assert [cell.arm for cell in plan_of(tree).cells] == ["start", "opd"]


def test_files_of_the_lab_are_named_without_a_rule_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.lab.build.lab_folder", lambda spec: tmp_path / "lab")
    tree = compare_tree(tmp_path, seeds=[0], shared={"batch": {"prompts_per_step": 4, "minibatches": 1}})
    tree["arms"] = {"grpo": {**tree["arms"]["grpo"], "data": {"prompts": {"path": "lab:prompts.jsonl"}}}}
    tree["shared"]["data"]["eval_prompts"] = {"path": "lab:eval_prompts.jsonl"}
    start = plan_of(tree).cells[0].config.train
    assert start.data.eval_prompts is not None
    assert start.data.eval_prompts.path.startswith(str(tmp_path / "lab"))
