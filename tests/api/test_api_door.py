"""A user's first lines in Python: names, shorthands, sections, the results of other runs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from runs import colored_prompts, make_model

import rlhf
from rlhf.api import keywords
from rlhf.api.inputs import SHORTHANDS, nested
from rlhf.comparison.results import ComparisonResults
from rlhf.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = colored_prompts()
FEW: dict[str, Any] = {
    "sampling": {"completions_per_prompt": 4, "max_new_tokens": 6},
    "batch": {"prompts_per_step": 4},
    "quiet": True,
}


def goodness(completions: list[str]) -> list[float]:
    return [float(text.count("good")) for text in completions]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_model(tmp_path / "start"))


def test_dir_lists_what_is_exported() -> None:
    assert {*rlhf.__all__, "__version__"} <= set(dir(rlhf))
    assert rlhf.__version__[0].isdigit()
    assert (Path(rlhf.__file__).parent / "py.typed").is_file()


def test_shorthands_are_the_keys_that_they_name() -> None:
    tree = nested({"lr": 1e-4, "steps": 3, "seed": 7, "max_new_tokens": 9}, rlhf.train)
    assert tree == {
        "policy": {"lr": 1e-4},
        "schedule": {"steps": 3},
        "run": {"seed": 7},
        "sampling": {"max_new_tokens": 9},
    }
    assert nested({"learning_rate": 1e-4}, rlhf.reward_model, "model") == {"model": {"lr": 1e-4}}


@pytest.mark.parametrize(
    ("keyword", "message"),
    [("prompt", "did you mean prompts"), ("rewards", "did you mean reward"), ("zzz", "by section")],
)
def test_a_wrong_keyword_names_the_right_one(keyword: str, message: str, model: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {keyword: ["red"], "reward": goodness, "folder": tmp_path / "run"}
    with pytest.raises(ConfigError, match=f"{keyword}: rlhf.train has no such argument.*{message}"):
        rlhf.train(model, "grpo", **arguments)


def test_sections_of_the_algorithm_go_over_the_preset(model: str, tmp_path: Path) -> None:
    result = rlhf.train(
        model,
        "grpo",
        algorithm={"kl": {"coef": 0.5}},
        prompts=PROMPTS,
        reward=goodness,
        folder=tmp_path / "run",
        steps=1,
        **FEW,
    )
    assert result.metrics["kl/coef"].tolist() == [0.5]
    with pytest.raises(ConfigError, match=r"preset='grpo' and algorithm='ppo' name two algorithms"):
        rlhf.train(model, "grpo", algorithm="ppo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "x")


def test_the_result_of_a_run_is_a_model(model: str, tmp_path: Path) -> None:
    first = rlhf.train(model, "grpo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "a", steps=1, **FEW)
    second = rlhf.train(first, "grpo", prompts=PROMPTS, reward=goodness, folder=tmp_path / "b", steps=1, **FEW)
    assert second.complete


def test_a_reward_that_is_no_place_is_said_in_plain_words(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward.source.path.*nope") as error:
        rlhf.train(model, "grpo", prompts=PROMPTS, reward="nope", folder=tmp_path / "run", quiet=True)
    assert "tokenizer" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_results_may_be_a_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ComparisonResults.read(str(tmp_path))


def test_the_cost_of_the_machine_is_logged_beside_the_times(model: str, tmp_path: Path) -> None:
    result = rlhf.train(
        model,
        "grpo",
        prompts=PROMPTS,
        reward=goodness,
        folder=tmp_path / "run",
        steps=2,
        cost={"per_hour": 3600.0},
        **FEW,
    )
    rows = [row for row in rlhf_timings(result.folder) if row["step"] > 0]
    assert len(rows) == 2
    for row in rows:
        assert row["usd"] == pytest.approx(sum(row["seconds"].values()))  # 3600 USD an hour: 1 USD a second
    assert "cost/usd" not in result.metrics  # these stay equal from run to run


def rlhf_timings(folder: Path) -> list[dict[str, Any]]:
    from rlhf.tracking.run_folder import RunFolder  # noqa: PLC0415

    return RunFolder(folder).read_timings()


def test_the_types_of_keywords_are_those_of_the_configuration() -> None:
    """The file equals its generator's output: run scripts/make_keywords.py after a change of the configuration."""
    path = ROOT / "scripts" / "make_keywords.py"
    spec = importlib.util.spec_from_file_location("make_keywords", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = ast.parse((ROOT / "rlhf" / "api" / "keywords.py").read_text(encoding="utf-8"))
    assert ast.dump(ast.parse(module.keywords())) == ast.dump(written)


@pytest.mark.parametrize(
    ("call", "kind", "model"),
    [
        (rlhf.train, keywords.TrainKeywords, "policy"),
        (rlhf.sft, keywords.SftKeywords, "policy"),
        (rlhf.reward_model, keywords.RewardModelKeywords, "model"),
        (rlhf.compare, keywords.CompareKeywords, "policy"),
    ],
)
def test_every_typed_keyword_is_taken_and_none_hides_an_argument(call: Any, kind: Any, model: str) -> None:
    names = set(kind.__annotations__)
    assert not names & set(inspect.signature(call).parameters)
    assert {"lr", "steps", "batch", "schedule"} <= names
    assert ("temperature" in names) == (model == "policy")
    for name in names:
        nested({name: {} if name not in SHORTHANDS else 1}, call, model)  # a ConfigError if it is not taken


def test_the_keys_of_a_section_have_types() -> None:
    hints = get_type_hints(keywords.TrainKeywords)
    policy, schedule = get_type_hints(hints["policy"]), get_type_hints(hints["schedule"])
    assert policy["lr"] is float
    assert schedule["steps"] == int | None
    assert get_type_hints(keywords.RewardModelKeywords)["lr"] is float


@pytest.mark.parametrize(
    ("call", "file", "right"),
    [
        (rlhf.train, "configs/reward_model.yaml", "rlhf.reward_model(config="),
        (rlhf.sft, "configs/reward_model.yaml", "rlhf.reward_model(config="),
        (rlhf.reward_model, "configs/ppo.yaml", "rlhf.train(config="),
        (rlhf.train, "configs/compare.yaml", "run `rlhf compare "),
    ],
)
def test_the_wrong_call_for_a_file_names_the_right_one(call: Any, file: str, right: str) -> None:
    with pytest.raises(ConfigError) as error:
        call(config=ROOT / file)
    assert right in str(error.value)


def test_a_call_that_fails_leaves_no_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    with pytest.raises(ConfigError, match=r"nothing to judge on: give held-out prompts, eval_prompts="):
        rlhf.compare(model, ["grpo"], prompts=PROMPTS, reward="mine.py:score", completions=10, quiet=True)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        rlhf.train(model, "grpo", prompts="gone.jsonl", reward="mine.py:score", quiet=True)
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        rlhf.train(model, "grpo", prompts="gone.jsonl", reward="mine.py:score", quiet=True)
    assert list((tmp_path / "runs").iterdir()) == []
