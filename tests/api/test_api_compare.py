"""rlhf.compare: arms from Python objects, and objects that cannot go to their processes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from lock_holder import held_elsewhere
from runs import colored_prompts, make_model

import rlhf
from rlhf.comparison.plan import ensure_owner, plan_cells
from rlhf.config.compare import CompareConfig
from rlhf.config.files import format_yaml
from rlhf.config.load import dump, load_train, read_yaml
from rlhf.errors import CheckpointError, ConfigError, UserError

PROMPTS = colored_prompts()
PAIRS = [{"prompt": prompt, "chosen": "good good", "rejected": "bad bad"} for prompt in PROMPTS]
SETTINGS = {
    "sampling": {"completions_per_prompt": 2, "max_new_tokens": 4},
    "batch": {"prompts_per_step": 4},
    "policy": {"lr": 1e-3},
}


@pytest.mark.usefixtures("warm_start")
def test_two_arms_and_best_of_n(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def count(completions):\n    return [float(t.count('good')) for t in completions]\n"
    )
    reward = f"{tmp_path / 'judge.py'}:count"
    result = rlhf.compare(
        str(make_model(tmp_path / "start")),
        {"grpo": "grpo", "dpo": "dpo", "pick": {"type": "best_of_n", "n": 2, "samples": 4}},
        completions=16,
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:6],
        preferences=PAIRS,
        reward=reward,
        seeds=[0],
        folder=tmp_path / "compare",
        quiet=True,
        **SETTINGS,
    )
    assert result.complete
    assert set(result.results["arms"]) == {"grpo", "dpo", "pick"}
    assert all(arm["status"] == "done" for arm in result.results["arms"].values())
    assert result.report.is_file()
    assert set(result.table["arm"]) >= {"grpo", "dpo", "pick"}


def test_a_call_that_continues_changes_no_file_of_a_comparison_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "compare"
    told = r"compare is in use by another process .* or choose another folder$"
    with held_elsewhere(folder), pytest.raises(CheckpointError, match=told):
        rlhf.compare("gone", ["grpo"], completions=16, judge="judge.py:count", folder=folder, resume=True, quiet=True)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def planned(folder: Path, config: Path | None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Call rlhf.compare over a configuration without training, and return the comparison's folder."""
    monkeypatch.setattr("rlhf.api.runs.run_compare", lambda *_, **__: True)
    (folder / "judge.py").write_text("def count(completions):\n    return [0.0 for _ in completions]\n")
    result = rlhf.compare(
        str(make_model(folder / "start")),
        {"slow": {"policy": {"lr": 1e-6}}},
        completions=512,
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:6],
        reward=f"{folder / 'judge.py'}:count",
        config=config,
        folder=folder / "compare",
        quiet=True,
    )
    return result.folder


def test_an_arm_without_a_preset_has_the_algorithm_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.yaml").write_text("algorithm: {preset: ppo, advantage: {gae_lambda: 0.9}}\n")
    folders = []
    for config, expected in ((tmp_path / "base.yaml", "ppo"), (None, "grpo")):
        folders.append(planned(tmp_path, config, monkeypatch))
        assert read_yaml(folders[-1] / "base.yaml")["algorithm"]["preset"] == expected
    assert read_yaml(folders[0] / "base.yaml")["algorithm"]["advantage"] == {"gae_lambda": 0.9}


def test_prompts_over_the_settings_of_a_run_are_used_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's config.yaml has the parts of its own prompts that data.holdout filled in."""
    (tmp_path / "config.yaml").write_text(format_yaml(dump(load_train("configs/ppo.yaml"))))
    data = read_yaml(planned(tmp_path, tmp_path, monkeypatch) / "base.yaml")["data"]
    assert data["prompts"].get("part") is data["eval_prompts"].get("part") is data["eval_prompts"].get("limit") is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"resume": "always", "prompts": PROMPTS[:4]}, r"^resume is 'always': a comparison continues with the rows"),
        ({"resume": True, "prompts": PROMPTS[:4]}, r"the comparison in .* or leave resume out for a new comparison$"),
        ({"resume": True, "lr": 1e-2}, r"start/seed-0 was made with other settings \(train.policy.lr\)"),
    ],
)
def test_a_refused_continuation_changes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    def begin(config: CompareConfig, *, beside: Path, **_: object) -> bool:
        for cell in plan_cells(config, beside=beside).cells:
            ensure_owner(cell)
        return True

    def contents() -> dict[str, bytes]:
        files = [path for path in (tmp_path / "compare").rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): path.read_bytes() for path in files}

    monkeypatch.setattr("rlhf.api.runs.run_compare", begin)
    (tmp_path / "judge.py").write_text("def count(completions):\n    return [0.0 for _ in completions]\n")
    model, arms = str(make_model(tmp_path / "start")), {"slow": {"policy": {"lr": 1e-6}}}
    arguments: dict[str, Any] = {
        **{"completions": 512, "prompts": PROMPTS, "eval_prompts": PROMPTS[:6], "seeds": [0]},
        **{"reward": f"{tmp_path / 'judge.py'}:count", "folder": tmp_path / "compare", "quiet": True},
    }
    rlhf.compare(model, arms, **arguments)
    before = contents()
    rlhf.compare(model, arms, **arguments, resume=True)
    with pytest.raises(UserError, match=message):
        inspect.unwrap(rlhf.compare)(model, arms, **{**arguments, **changes})
    assert contents() == before


def test_a_lambda_cannot_go_to_other_processes(tmp_path: Path) -> None:
    arguments = {"completions": 16, "prompts": PROMPTS, "folder": tmp_path / "compare"}
    with pytest.raises(ConfigError, match=r"put the function into a \.py file"):
        rlhf.compare("model", ["grpo"], reward=lambda completions: [0.0] * len(completions), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a reward or a judge"):
        rlhf.compare("model", ["dpo"], **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "compare").exists()


def test_arms_and_a_budget_of_another_form_are_named(tmp_path: Path) -> None:
    compare = inspect.unwrap(rlhf.compare)
    for arms, budget, message in (
        (None, {"tokens": 8}, 'arms is a NoneType: give presets, as in \\["ppo", "grpo"\\]'),
        ("grpo", {"tokens": 8}, "arms is a str: give presets"),
        (["grpo"], 8, 'budget is a int: give {"completions": 8}, or completions=8'),
    ):
        with pytest.raises(ConfigError, match=message):
            compare("model", arms, prompts=PROMPTS, reward="my.py:score", budget=budget, folder=tmp_path / "compare")  # type: ignore[arg-type]
    assert not (tmp_path / "compare").exists()


def test_a_loaded_reward_without_a_judge_is_known_as_the_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = rlhf.reward_model(
        str(make_model(tmp_path / "start")), PAIRS, folder=tmp_path / "rm", steps=1, batch={"prompts_per_step": 4}
    )
    seen: list[CompareConfig] = []
    monkeypatch.setattr("rlhf.api.runs.run_compare", lambda config, **_: bool(seen.append(config)))
    loaded = (reward.model, reward.tokenizer)
    rlhf.compare(str(tmp_path / "start"), ["grpo"], completions=16, prompts=PROMPTS, eval_prompts=PROMPTS[:2],
                 reward=loaded, folder=tmp_path / "compare", quiet=True, **SETTINGS)  # fmt: skip
    (config,) = seen
    base = yaml.safe_load((tmp_path / "compare" / "base.yaml").read_text(encoding="utf-8"))
    assert config.judge.path == base["reward"]["source"]["path"]  # type: ignore[union-attr]
