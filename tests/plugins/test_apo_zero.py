"""A preference loss in a user's file is a loss like ours: trained offline and online, linted, reported, a preset."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import offline_tree, ppo_tree, trained, trained_offline

import rlhf
from rlhf.algorithms.offline_loss import OfflineLoss, PairLoss
from rlhf.algorithms.presets import PRESETS
from rlhf.config.load import dump, train_config
from rlhf.errors import ConfigError
from rlhf.guard.lint import lint
from rlhf.plugins import load_plugins
from rlhf.report.page import write_report
from rlhf.section import Facts
from rlhf.tracking.metrics import describe
from rlhf.types import Side

APO_ZERO = '''
"""APO-zero (D'Oosterlinck et al. 2024)."""
from typing import Annotated, Literal

import torch
from pydantic import Field

from rlhf.algorithms.offline_loss import PairLoss
from rlhf.section import Usual


class ApoZero(PairLoss):
    """APO-zero (D'Oosterlinck et al. 2024).     L = σ(-β h_w) + σ(β h_l)"""

    type: Literal["apo_zero"] = "apo_zero"
    beta: Annotated[
        float,
        Field(gt=0),
        Usual(low=0.01, high=5.0, rule="apo-beta", reason="The rewards saturate.", source="the paper: 0.1", fix="0.1"),
    ] = 0.1
    """Factor of the log-ratio."""

    metrics = """
        preference/apo_chosen_up | share | chosen completions clearly likelier than under the reference
            held_out: eval/apo_chosen_up; chart/preferences: 9 Chosen above the reference
        eval/apo_chosen_up | share | the same on held-out pairs
    """

    def per_pair(self, chosen, rejected):
        return torch.sigmoid(-self.reward(chosen)) + torch.sigmoid(self.reward(rejected))

    def measure(self, chosen, rejected):
        return {"preference/apo_chosen_up": (chosen.log_ratios > 1e-4).double()}
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file; its registrations are forgotten after the test."""
    members, presets = dict(OfflineLoss.members), dict(PRESETS)
    monkeypatch.setattr("rlhf.plugins._loaded", {})
    path = tmp_path / "apo_zero.py"
    path.write_text(APO_ZERO, encoding="utf-8")
    yield path
    for registry, before in ((OfflineLoss.members, members), (PRESETS, presets)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]:
        del sys.modules[name]


def apo_zero(file: Path, **settings: Any) -> PairLoss:
    load_plugins({"plugins": [str(file)]})
    loss = OfflineLoss.choices()["apo_zero"](**settings)
    assert isinstance(loss, PairLoss)
    return loss


def side(*log_ratios: float) -> Side:
    h = torch.tensor(log_ratios, dtype=torch.float64)
    return Side(logprobs=h - 7.0, ref_logprobs=torch.full_like(h, -7.0), lengths=torch.full_like(h, 3.0))


def online_tree(folder: Path) -> dict[str, Any]:
    """A small run of online DPO."""
    tree = ppo_tree(folder, batch={"epochs": 1, "minibatches": 1})
    return {name: section for name, section in tree.items() if name not in ("algorithm", "critic")}


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_its_equation_by_hand(file: Path) -> None:
    """Beta 1/2, log-ratios 2 log 3 and -2 log 3: sigma(-log 3) = 1/4 each; at 0, 1/2 each."""
    loss, far = apo_zero(file, beta=0.5), 2 * math.log(3)
    values = loss.per_pair(side(far, 0.0), side(-far, 0.0))
    torch.testing.assert_close(values, torch.tensor([0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(loss.reward(side(far)), torch.tensor([math.log(3)], dtype=torch.float64))
    assert loss.needs_reference


def test_its_check_passes(file: Path) -> None:
    result = rlhf.check(apo_zero(file))
    assert (result.kind, result.passed) == ("pair loss", True), result


def test_it_trains_offline_and_its_own_metric_is_logged_and_reported(file: Path, tmp_path: Path) -> None:
    tree = offline_tree(tmp_path, "apo_zero", plugins=[str(file)])
    trained_offline(tree)
    held_out = [row["eval/apo_chosen_up"] for row in rows_of(tmp_path) if "eval/apo_chosen_up" in row]
    assert held_out[0] == 0.0 < held_out[-1] <= 1.0
    rows = [row for row in rows_of(tmp_path) if "loss/preference" in row]
    assert rows[0]["loss/preference"] == pytest.approx(1.0, abs=1e-6)  # the policy is its reference
    assert rows[-1]["loss/preference"] < rows[0]["loss/preference"]
    assert rows[-1]["preference/accuracy"] > 0.5
    assert rows[0]["preference/apo_chosen_up"] == 0.0
    assert 0 < rows[-1]["preference/apo_chosen_up"] <= 1
    assert "Chosen above the reference" in write_report(tmp_path / "run").read_text(encoding="utf-8")


def test_it_is_a_loss_of_sampled_pairs(file: Path, tmp_path: Path) -> None:
    algorithm = {"preset": "online_dpo", "policy_loss": {"loss": {"type": "apo_zero", "beta": 0.2}}}
    run = trained({**online_tree(tmp_path), "plugins": [str(file)], "algorithm": algorithm})
    assert run.algorithm.policy_loss.loss.type == "apo_zero"  # type: ignore[union-attr]
    rows = [row for row in rows_of(tmp_path) if "loss/preference" in row]
    assert rows[0]["loss/preference"] == pytest.approx(1.0, abs=1e-6)
    assert all("preference/apo_chosen_up" in row for row in rows)


@pytest.mark.parametrize(
    "algorithm, key",
    [
        ({"preset": "apo_zero", "loss": {"beta": 10}}, "algorithm.loss.beta"),
        (
            {"preset": "online_dpo", "policy_loss": {"loss": {"type": "apo_zero", "beta": 10}}},
            "algorithm.policy_loss.loss.beta",
        ),
    ],
)
def test_its_usual_range_is_checked(file: Path, tmp_path: Path, algorithm: dict[str, Any], key: str) -> None:
    tree = offline_tree(tmp_path, "dpo") if "loss" in algorithm else online_tree(tmp_path)
    config = train_config({**tree, "algorithm": algorithm, "plugins": [str(file)]})
    (violation,) = (violation for violation in lint(config, Facts()) if violation.rule.name == "apo-beta")
    assert violation.setting == f"{key} is 10"
    assert violation.rule.level == "warning"


def test_it_is_a_preset_and_its_configuration_is_read_again(file: Path, tmp_path: Path) -> None:
    config = train_config(offline_tree(tmp_path, "apo_zero", plugins=[str(file)]))
    assert config.algorithm.name == "apo_zero"
    assert config.completions_per_step == 32
    assert train_config(dump(config)) == config
    with pytest.raises(ConfigError, match=r"algorithm.loss.type: 'apo_zer' is not one of .*did you mean apo_zero"):
        train_config(offline_tree(tmp_path, "dpo", algorithm={"preset": None, "loss": {"type": "apo_zer"}}))


def test_a_loss_that_returns_one_number_for_all_pairs_is_an_error(file: Path, tmp_path: Path) -> None:
    file.write_text(APO_ZERO.replace("torch.sigmoid(self.reward(rejected))", "0.0).mean()").replace(
        "return torch.sigmoid(-", "return (torch.sigmoid(-"), encoding="utf-8")  # fmt: skip
    with pytest.raises(ConfigError, match=r"apo_zero: per_pair returned a tensor of shape \[\].*\[8\]"):
        trained_offline(offline_tree(tmp_path, "apo_zero", plugins=[str(file)]))


def test_a_metric_that_no_section_declares_is_an_error() -> None:
    with pytest.raises(ConfigError, match="preference/apo_chosen_up: no row describes this metric"):
        describe("preference/apo_chosen_up")
