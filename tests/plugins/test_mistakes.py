"""Mistakes in a plug-in: the error names the class and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import brief_tree, trained

import rlhf
from rlhf.algorithms.policy_loss import PolicyLoss
from rlhf.config.load import train_config
from rlhf.errors import ConfigError, UserError
from rlhf.guard.alarms.alarm import all_alarms
from rlhf.guard.lint import lint
from rlhf.plugins import load_plugins
from rlhf.tracking.metrics import METRICS

LOSS = """
from typing import Literal
from rlhf.algo.masked import Mean
from rlhf.algorithms.policy_loss import Surrogate, TokenLoss

class Loose(Surrogate):  # what the tests' checks of types let pass
    def __init__(self, **given):
        self.__dict__.update({"metrics": {}} | given)

class Mine(TokenLoss):
    type: Literal["mine"] = "mine"

    def per_token(self, tokens):
        values = -tokens.ratio * tokens.advantages
        return RETURNED
"""
ADVANTAGE = """
from typing import Literal
from rlhf.algorithms.advantage import Advantage

class Own(Advantage):
    type: Literal["own"] = "own"

    def compute(self, rollout, rewards):
        return RETURNED
"""
ALARM = """
from rlhf.guard.alarms.alarm import Above

class Long(Above):
    name = "long"
    metrics = ("completion/lenght",)
    limit, patience = 100.0, 3
    causes, cure, source = "", "", ""
"""
SHAPE = r"Mine\.per_token returned a tensor of shape \[{}\]: one value per token is needed, \[\d+, \d+\]"


def write(folder: Path, text: str) -> str:
    """A plug-in of this text."""
    file = folder / "mine.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    "returned, message",
    [
        ("values", r"Mine\.per_token returned a Tensor: it has to return a Surrogate\(per_token=a"),
        ("Loose(per_token=1.0)", r"Mine\.per_token returned a float: it has to return a tensor \[B, T\]"),
        ("Loose(per_token=values.sum())", SHAPE.format("")),
        ("Loose(per_token=values, clipped=tokens.mask[:, 0])", SHAPE.format(r"\d+")),
        (
            "Loose(per_token=values, metrics={'policy/ratio': values.mean()})",
            r"Mine\.per_token returned a Tensor as metric 'policy/ratio': it has to be Mean\.of\(",
        ),
        (
            "Loose(per_token=values, metrics={'policy/gaet': Mean.of(values, tokens.mask)})",
            r"policy/gaet: no row describes this metric; add one to `metrics`",
        ),
    ],
)
def test_a_policy_loss_that_returns_something_else(tmp_path: Path, returned: str, message: str) -> None:
    own = {"plugins": [write(tmp_path, LOSS.replace("RETURNED", returned))]}
    tree = own | brief_tree(tmp_path, algorithm={"policy_loss": {"type": "mine"}}, schedule={"steps": 1})
    with pytest.raises(ConfigError, match=message):
        trained(tree)
    if "metric" not in returned:
        assert "Mine.per_token returned a" in str(rlhf.check(PolicyLoss.choices()["mine"]))


@pytest.mark.parametrize(
    "returned, message",
    [
        ("rewards", r"Own\.compute returned a Tensor: it has to return \(advantages, returns\), two tensors \[B, T\]"),
        ("rewards.sum(1), rewards", r"Own\.compute returned a tensor of shape \[\d+\]: one value per token is needed"),
        ("rewards, rewards.sum(1)", r"Own\.compute returned a tensor of shape \[\d+\]: one value per token is needed"),
    ],
)
def test_an_advantage_that_returns_something_else(tmp_path: Path, returned: str, message: str) -> None:
    own = {"plugins": [write(tmp_path, ADVANTAGE.replace("RETURNED", returned))], "critic": {}}
    algorithm = {"preset": "grpo", "advantage": {"type": "own"}}
    tree = own | brief_tree(tmp_path, algorithm=algorithm, schedule={"steps": 1})
    with pytest.raises(ConfigError, match=message):
        trained(tree)


@pytest.mark.parametrize(
    "text, message",
    [
        (LOSS.replace("def per_token", "def pertoken"), r"Mine has to define per_token at "),
        (ADVANTAGE.replace("compute", "computes"), r"Own has to define compute at "),
        (LOSS.replace('    type: Literal["mine"] = "mine"\n', ""), r'Mine .*has no type, .*type: Literal\["mine"\]'),
        (LOSS.replace(' = "mine"', ""), "Mine .*has no type"),
        (ALARM.replace('    name = "long"\n', ""), 'Long .*has no name, .*name = "long"'),
        (LOSS + "    (\n", r"SyntaxError: '\(' was never closed at .*mine\.py:16$"),
    ],
)
def test_a_class_that_is_not_whole_is_refused_before_the_run(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_plugins({"plugins": [write(tmp_path, text)]})
    load_plugins({"plugins": [write(tmp_path, LOSS)]})  # it is mended, and the process goes on
    assert "mine" in PolicyLoss.choices()


def test_a_base_of_other_classes_needs_no_type(tmp_path: Path) -> None:
    base = LOSS.replace("Mine", "Base").replace('    type: Literal["mine"] = "mine"\n', "")
    abstract = "\nclass Other(TokenLoss): ...\n"
    own = '\nclass Mine(Base):\n    type: Literal["mine"] = "mine"\n'
    load_plugins({"plugins": [write(tmp_path, base + own + abstract)]})
    assert "mine" in PolicyLoss.choices()


def test_an_alarm_on_a_metric_that_does_not_exist(tmp_path: Path) -> None:
    tree = brief_tree(tmp_path) | {"plugins": [write(tmp_path, ALARM)]}
    with pytest.raises(ConfigError, match=r"alarm long: there is no metric 'completion/lenght'; did you mean compl"):
        lint(train_config(tree))
    assert {name for alarm in all_alarms() for name in alarm.metrics} - set(METRICS) == {"completion/lenght"}
