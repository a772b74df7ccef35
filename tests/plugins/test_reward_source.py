"""A reward source in a user's own file: one class, which trains, is checked, linted, printed and shown like ours."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from runs import online, ppo_tree, trained
from tiny_models import tokenizer

from rlhf.cli import main
from rlhf.comparison.page import comparison_charts, write_compare_page
from rlhf.comparison.results import ComparisonResults
from rlhf.config.load import load_any, train_config, validate
from rlhf.config.reward import RewardConfig
from rlhf.errors import ConfigError
from rlhf.factory.rewards import build_source
from rlhf.guard.lint import lint
from rlhf.rewards.ensemble import EnsembleReward
from rlhf.rewards.source import MainRankReward, Source, sources_in
from rlhf.runtime.engine import Engine
from rlhf.section import Facts

ROOT = Path(__file__).resolve().parents[2]

FILE = '''
"""A reward for vowels."""

from typing import Annotated, ClassVar, Literal

from annotated_types import MinLen

from rlhf.errors import ConfigError
from rlhf.rewards.source import Source, checked_scores, decode


class Vowels(Source):
    """The share of vowels among the letters of a completion."""

    is_learned: ClassVar[bool] = False

    type: Literal["vowels"] = "vowels"
    letters: Annotated[str, MinLen(1)] = "aeiou"
    """What is a vowel."""

    def check(self):
        if not self.letters.isalpha():
            raise ConfigError(f"reward.source.letters: {self.letters!r} has something in it that is no letter")

    def describe(self):
        return f"the share of {self.letters}"

    def build(self, context):
        def score(completions):
            texts = decode(completions, context.tokenizer)
            return checked_scores([self.share(text) for text in texts.completions], {}, texts, who="vowels")

        return score

    def share(self, text):
        letters = [letter for letter in text if letter.isalpha()]
        return sum(letter in self.letters for letter in letters) / max(len(letters), 1)


class Opinion(Vowels):
    """The same, as if a model had said it."""

    is_learned: ClassVar[bool] = True

    type: Literal["opinion"] = "opinion"
'''
ABOUT_LEARNED_REWARDS = {
    "no-brake-on-learned-reward",
    "kl-not-measured",
    "short-completions",
    "cut-off-unpunished",
    "judge-is-the-reward",
}
UNBRAKED = (
    "algorithm.preset=dapo",
    "algorithm.mask_truncated=false",
    "reward.shaping.missing_eos_penalty=0",
    "reference.measure=false",
    "sampling.max_new_tokens=8",
)


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The user's file, imported."""
    (tmp_path / "my_rewards.py").write_text(FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("my_rewards")
    del sys.modules["my_rewards"]
    for name in ("vowels", "opinion"):
        Source.members.pop(name)


def vowels_tree(folder: Path) -> dict[str, Any]:
    tree = ppo_tree(folder)
    tree["reward"]["source"] = {"type": "vowels", "letters": "ou"}
    return tree


def test_it_trains(tmp_path: Path) -> None:
    trained(vowels_tree(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    share = Source.choices()["vowels"](letters="ou").share  # type: ignore[attr-defined]
    assert {row["score"] for row in rows} != {0.0}
    assert [row["score"] for row in rows] == pytest.approx([share(row["completion"]) for row in rows])


def test_it_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    tree = vowels_tree(tmp_path)
    tree["policy"]["model"] = str(tmp_path / "nothing")
    tree["reward"]["source"]["letters"] = "a1"
    with pytest.raises(ConfigError, match=r"reward\.source\.letters: 'a1' has something"):
        online(tree)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"leters": "a"}, "reward.source.leters"),
        ({"letters": ""}, "reward.source.letters"),
        ({"type": "vowel"}, "did you mean vowels?"),
    ],
)
def test_its_settings_are_typed(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    tree = vowels_tree(tmp_path)
    tree["reward"]["source"] |= settings
    with pytest.raises(ConfigError) as error:
        train_config(tree)
    assert message in str(error.value)


def names_of_warnings(*overrides: str) -> set[str]:
    run = load_any("configs/ppo.yaml", [*UNBRAKED, "critic.init=policy", *overrides])
    return {violation.rule.name for violation in lint(run, Facts())}  # type: ignore[arg-type]


def test_lint_asks_it_whether_it_is_learned() -> None:
    judge = "eval.source={type: %s}"
    assert names_of_warnings("reward.source={type: opinion}", judge % "opinion") >= ABOUT_LEARNED_REWARDS
    assert not names_of_warnings("reward.source={type: vowels}", judge % "vowels") & ABOUT_LEARNED_REWARDS
    ruled = "reward.source={type: rules, rules: [{type: length, max: 9}], source: {type: %s}}"
    assert names_of_warnings(ruled % "opinion") >= ABOUT_LEARNED_REWARDS - {"judge-is-the-reward"}
    assert not names_of_warnings(ruled % "vowels") & ABOUT_LEARNED_REWARDS


def test_the_program_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(vowels_tree(tmp_path)), encoding="utf-8")
    assert main(["config", str(file), "reward.source.letters=y"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["reward"]["source"] == {"type": "vowels", "letters": "y"}


def test_a_comparison_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: ModuleType) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "comparison"))
    many = importlib.import_module("many").many
    plan, results, cells = many(tmp_path, count=2, seeds=1)
    plan.folder.mkdir()
    replace(results, judge=plugin.Vowels(type="vowels", letters="y")).write(plan.folder)
    read = ComparisonResults.read(plan.folder)
    assert read.judge == plugin.Vowels(letters="y")
    page = write_compare_page(plan, read, comparison_charts(read), cells)
    assert "the share of y" in page.read_text(encoding="utf-8")


def test_it_is_a_member_of_others(plugin: ModuleType) -> None:
    tree = {"type": "ensemble", "sources": [{"type": "vowels"}, {"type": "rules", "rules": [
        {"type": "length", "max": 9}], "source": {"type": "vowels", "letters": "y"}}]}  # fmt: skip
    source = validate(RewardConfig, {"source": tree}).source
    keys = [key for key, inner in sources_in(source, "reward.source") if isinstance(inner, plugin.Vowels)]
    assert keys == ["reward.source.sources.0", "reward.source.sources.1.source"]
    built = build_source(source, tokenizer(), Engine(torch.device("cpu")))
    assert isinstance(built, EnsembleReward)
    assert isinstance(built.members["sources.0"], MainRankReward)  # other processes get the scores of rank 0


def test_what_a_class_has_to_define_is_said_when_it_is_defined() -> None:
    with pytest.raises(TypeError, match="Silent has to define build, is_learned"):
        type("Silent", (Source,), {"__module__": __name__, "__annotations__": {"type": str}, "type": "silent"})
    assert "silent" not in Source.choices()


def test_no_file_of_ours_knows_it() -> None:
    ours = [path for package in ("rlhf", "reward_model") for path in (ROOT / package).rglob("*.py")]
    assert len(ours) > 100
    assert [path for path in ours if "vowels" in path.read_text(encoding="utf-8").lower()] == []
