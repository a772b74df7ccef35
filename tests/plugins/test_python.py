"""Instances of a user's classes from Python: the run and the comparison know the file that defines them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from runs import colored_prompts, make_model

import rlhf
from rlhf.errors import ConfigError

PARTS = '''
from typing import ClassVar, Literal

from rlhf.algorithms.policy_loss import Surrogate, TokenLoss
from rlhf.rewards.source import Source, checked_scores, decode


class Tempered(TokenLoss):
    """The ratio to a power."""

    type: Literal["tempered"] = "tempered"
    power: float = 1.0
    """The power."""

    def per_token(self, tokens):
        return Surrogate(per_token=-(tokens.ratio**self.power) * tokens.advantages)


class Count(Source):
    """Counts a word."""

    is_learned: ClassVar[bool] = False

    type: Literal["count"] = "count"
    word: str = "good"
    """What is counted."""

    def build(self, context):
        def score(completions):
            texts = decode(completions, context.tokenizer)
            return checked_scores([float(t.count(self.word)) for t in texts.completions], {}, texts, who="count")

        return score
'''
PROMPTS = colored_prompts()
SETTINGS: dict[str, Any] = {
    "sampling": {"completions_per_prompt": 2, "max_new_tokens": 4},
    "batch": {"prompts_per_step": 4},
    "policy": {"lr": 1e-3},
    "quiet": True,
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("own_parts")
    del sys.modules["own_parts"]


def trained(parts: ModuleType, folder: Path, **arguments: Any) -> dict[str, Any]:
    """The saved configuration of a run that takes one step."""
    start = str(make_model(folder / "start"))
    arguments = {"reward": parts.Count(), "prompts": PROMPTS, "steps": 1, "folder": folder / "run"} | arguments
    result = rlhf.train(start, "grpo", **arguments, **SETTINGS)
    return dict(yaml.safe_load((result.folder / "config.yaml").read_text()))


def test_a_run_lists_the_file_of_its_classes_and_is_read_by_another_process(parts: ModuleType, tmp_path: Path) -> None:
    saved = trained(parts, tmp_path, algorithm={"policy_loss": parts.Tempered(power=2)})
    assert saved["plugins"] == [str(tmp_path / "own_parts.py")]
    assert (saved["algorithm"]["policy_loss"]["type"], saved["algorithm"]["policy_loss"]["power"]) == ("tempered", 2.0)
    code = "import sys; from rlhf.config.load import load_run; print(load_run(sys.argv[1]).algorithm.policy_loss.power)"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, text=True, cwd="/", check=True).stdout == "2.0\n"


def test_the_loss_may_be_an_instance_and_rewards_weighted_instances(parts: ModuleType, tmp_path: Path) -> None:
    reward = [parts.Count(), (parts.Count(word="bad"), -1.0)]
    saved = trained(parts, tmp_path, reward=reward, loss=parts.Tempered(power=2))
    assert saved["plugins"] == [str(tmp_path / "own_parts.py")]
    assert saved["algorithm"]["policy_loss"]["power"] == 2.0
    assert [source["word"] for source in saved["reward"]["source"]["sources"]] == ["good", "bad"]


@pytest.mark.usefixtures("warm_start")
@pytest.mark.beside
def test_the_arms_of_a_comparison_are_processes_that_load_it(parts: ModuleType, tmp_path: Path) -> None:
    function = tmp_path / "train_on.py"
    function.write_text("def ones(completions):\n    return [float(len(t)) for t in completions]\n")
    result = rlhf.compare(
        str(make_model(tmp_path / "start")),
        {"own": {"algorithm": {"preset": "grpo", "policy_loss": parts.Tempered(power=2)}}},
        completions=16,
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:6],
        reward=f"{function}:ones",
        judge=parts.Count(),
        seeds=[0],
        folder=tmp_path / "compare",
        **SETTINGS,
    )
    assert result.results["arms"]["own"]["status"] == "done"


def test_a_class_of_a_script_cannot_go_to_other_processes(parts: ModuleType, tmp_path: Path) -> None:
    local = type("Local", (parts.Count,), {"__module__": "__main__", "__annotations__": {}, "__doc__": "Mine."})
    with pytest.raises(ConfigError, match=r"the class Local of a script or a notebook: put it into a \.py file"):
        rlhf.compare("model", ["grpo"], reward=local(), completions=16, prompts=PROMPTS, folder=tmp_path / "compare")
    assert not (tmp_path / "compare").exists()
