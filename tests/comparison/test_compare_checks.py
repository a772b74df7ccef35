"""rlhf compare looks at everything that its arms name before anything runs, and its exit code tells of failed arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import compare_tree, plan_of
from runs import prompts_file

from rlhf.api.checks import check_arm_files
from rlhf.api.comparing import check_arms, run_compare
from rlhf.cli import main
from rlhf.comparison.plan import plan_cells
from rlhf.config.load import compare_config, load_compare
from rlhf.data.paths import Lookups
from rlhf.errors import ConfigError
from rlhf.lab.build import PREFIX

ROOT = Path(__file__).resolve().parents[2]
OWN = """
def cubic(logprobs, old_logprobs, advantages, mask, *, power=3):
    return -(logprobs - old_logprobs).exp() * advantages**power

def raw(rewards, mask, group_size):
    return rewards * mask
"""


def own(folder: Path, **section: Any) -> dict[str, Any]:
    """An arm with a loss of its own, changed by `section`."""
    (folder / "mine.py").write_text(OWN)
    loss = {"type": "function", "target": f"{folder / 'mine.py'}:cubic", **section}
    grpo: dict[str, Any] = {"preset": "grpo", "policy_loss": loss}
    return {"own": {"algorithm": grpo, "sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 4}}}


def problems(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        check_arms(plan_of(tree))
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prompts_file(tmp_path)
    return tmp_path


def test_a_comparison_whose_parts_are_there_passes(folder: Path) -> None:
    check_arms(plan_of(compare_tree(folder, arms=own(folder, kwargs={"power": 2}))))


def test_a_misspelt_loss_is_named_with_its_arm(folder: Path) -> None:
    text = problems(compare_tree(folder, arms=own(folder, target=f"{folder / 'mine.py'}:kubic")))
    assert text.startswith("arms.own: loss target")
    assert "did you mean cubic?" in text


def test_a_misspelt_keyword_is_named_before_it_runs(folder: Path) -> None:
    text = problems(compare_tree(folder, arms=own(folder, kwargs={"powr": 2})))
    assert "arms.own: algorithm.policy_loss.kwargs: 'powr' is no argument of" in text
    assert "did you mean power?" in text
    assert "user_code" not in text


def test_every_problem_is_listed_once(folder: Path) -> None:
    tree = compare_tree(
        folder,
        arms=own(folder, target=f"{folder / 'mine.py'}:kubic"),
        start=str(folder / "gone"),
        suites={"ifeval": {"dataset": {"path": str(folder / "ifeval.jsonl")}}},
    )
    lines = problems(tree).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["start", "all arms", "arms.own"]
    assert "start: no such file or folder" in lines[0]
    assert "suites.ifeval: dataset.path: no such file or folder" in lines[1]
    assert "kubic" in lines[2]


def test_tasks_of_lm_eval_are_suites(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    plan = plan_of(compare_tree(folder, suites={"lm-eval:truthfulqa_mc2": {"limit": 4}}))
    settings = plan.cells[0].config.suites["lm-eval:truthfulqa_mc2"]
    assert (settings["limit"], settings["num_fewshot"]) == (4, None)


def test_an_unknown_suite_names_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"suites: 'ifevl' is not one of .*did you mean ifeval"):
        plan_of(compare_tree(folder, suites={"ifevl": {}}))


def test_a_folder_that_cannot_be_written_is_said_first(folder: Path) -> None:
    (folder / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"out_dir: cannot write into .*taken \(it is a file\)"):
        check_arms(plan_of(compare_tree(folder, out_dir=str(folder / "taken"))))


def test_problems_have_the_keys_of_the_comparison(folder: Path) -> None:
    tree = compare_tree(
        folder,
        start=str(folder / "sft"),
        reward_source={"type": "model", "path": str(folder / "reward")},
        judge={"type": "model", "path": str(folder / "judge")},
        shared={"data": {"prompts": {"path": str(folder / "none.jsonl")}}},
    )
    keys = [line.split(": ")[0] for line in problems(tree).splitlines()]
    assert keys == ["start", "reward_source.path", "judge.path", "shared.data.prompts.path"]


def test_a_misspelt_loss_is_named_before_the_lab_is_made(folder: Path) -> None:
    arms = own(folder, target=f"{folder / 'mine.py'}:kubic")
    config = compare_config(compare_tree(folder, arms=arms, lab={"folder": str(folder / "lab")}))
    with pytest.raises(ConfigError, match=r"^arms\.own: loss target .*did you mean cubic\?$"):
        run_compare(config, beside=folder)
    assert not (folder / "lab" / "sft").exists()


def test_the_hub_is_asked_once_for_a_model_of_all_arms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("rlhf.data.paths._not_on_hub", asked.append)
    check_arms(plan_of(compare_tree(folder, start="owner/name", seeds=[0, 1, 2])))
    assert asked == ["owner/name"]


def test_the_command_names_a_missing_file_of_a_loss_before_any_file_of_the_lab_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loss = "arms.ppo.algorithm.policy_loss={type: function, target: 'mine.py:kubic'}"
    assert main(["compare", str(ROOT / "configs" / "lab" / "compare_quick.yaml"), loss]) != 0
    assert "error: arms.ppo: no algorithm.policy_loss file 'mine.py'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_of_the_lab_are_made_later_and_not_missed() -> None:
    config = load_compare(ROOT / "configs" / "lab" / "compare_quick.yaml")
    assert config.lab is not None
    later = Path(config.lab.folder)
    plan = plan_cells(config, beside=ROOT / "configs" / "lab", lab_files=False)
    check_arm_files(plan, Lookups(later=later, prefix=PREFIX))
    with pytest.raises(ConfigError, match=r"lab:eval_prompts\.jsonl"):
        check_arm_files(plan, Lookups(later=later))
