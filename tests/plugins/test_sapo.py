"""A policy loss and an advantage of the user's: the cost of one file of each, and that no other code has to know it."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ppo_tree, trained

import rlhf
from rlhf.algo.kl import Coefs
from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.policy_loss import PolicyLoss, Tokens
from rlhf.config.files import merge
from rlhf.config.load import dump, train_config
from rlhf.errors import ConfigError
from rlhf.guard.lint import lint
from rlhf.plugins import load_plugins
from rlhf.section import Facts
from rlhf.tracking.metrics import describe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAPO, MEDIAN = str(HERE / "sapo.py"), str(HERE / "median_baseline.py")


@pytest.fixture(autouse=True)
def registered() -> None:
    load_plugins({"plugins": [SAPO, MEDIAN]})


def tree_of(folder: Path, **algorithm: Any) -> dict[str, Any]:
    """A small run of GRPO's kind with the loss and the advantage of the two files."""
    tree = ppo_tree(folder, sampling={"completions_per_prompt": 4}, batch={"prompts_per_step": 8})
    own = {"advantage": {"type": "median"}, "policy_loss": {"type": "sapo"}}
    return tree | {"plugins": [SAPO, MEDIAN], "algorithm": merge(own, algorithm), "critic": {}}


def of_one_token(ratio: float, advantage: float, **settings: float) -> tuple[float, float, float]:
    """Loss, its slope in the ratio, and the metric."""
    variable = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    loss = PolicyLoss.choices()["sapo"].model_validate(settings)
    surrogate = loss.per_token(  # type: ignore[attr-defined]
        Tokens(
            ratio=variable,
            logprobs=zero,
            old_logprobs=zero,
            advantages=zero + advantage,
            mask=zero == 0,
            old_kl=zero,
            coefs=Coefs(kl=0.0, penalty=0.0),
        )
    )
    (slope,) = torch.autograd.grad(surrogate.per_token.sum(), variable)
    return float(surrogate.per_token.detach()), float(slope), surrogate.metrics["policy/gate"].value


def test_its_values_by_hand() -> None:
    loss, slope, gate = of_one_token(1.0, 2.0)
    assert loss == pytest.approx(-0.5 * 4 * 2)
    assert (slope, gate) == (pytest.approx(-2.0), pytest.approx(1.0))
    loss, slope, gate = of_one_token(2.0, -1.0, tau_neg=2.0)
    share = 1 / (1 + math.exp(-2.0))
    assert loss == pytest.approx(share * 4 / 2)
    assert slope == pytest.approx(4 * share * (1 - share))
    assert gate == pytest.approx(4 * share * (1 - share))


def test_at_ratio_one_its_expected_gradient_is_the_policy_gradient() -> None:
    for loss in (PolicyLoss.choices()["sapo"], PolicyLoss.choices()["sapo"].model_validate({"tau_neg": 2.0})):
        result = rlhf.check(loss)
        assert result.passed, result
        assert "ok   the expected gradient is the policy gradient\n" in str(result)
        assert "later updates on the same completions are corrected" in str(result)


def test_the_advantage_is_checked_too() -> None:
    result = rlhf.check(Advantage.choices()["median"])
    assert result.kind == "advantage"
    assert "equal scores of a group give no advantage over each other" in str(result)


def test_they_train_and_report_their_metrics(tmp_path: Path) -> None:
    run = trained(tree_of(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/gate" in row]
    assert len(steps) == 4
    assert all(0 < row["policy/gate"] < 1 and row["policy/clip_fraction"] == 0 for row in steps)
    assert all(math.isfinite(row["group/median"]) for row in steps)
    evaluated = [row["eval/score"] for row in rows if "eval/score" in row]
    assert evaluated[-1] > evaluated[0]
    assert describe("policy/gate").meaning.startswith("mean slope of the gate")
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "type: sapo" in saved
    assert train_config(dump(run.config)) == run.config


def test_they_are_linted_and_their_mistakes_explained(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, policy_loss={"tau_pos": 9.0}, drop_uniform_groups=True)
    violations = {violation.rule.name: violation for violation in lint(train_config(tree), Facts())}
    assert violations["sapo-temperature"].setting == "algorithm.policy_loss.tau_pos is 9"
    assert "sapo-temperature" not in {v.rule.name for v in lint(train_config(tree_of(tmp_path)), Facts())}
    allowed = tree | {"guard": {"allow": ["sapo-temperature"]}}
    assert "sapo-temperature" not in {v.rule.name for v in lint(train_config(allowed), Facts())}
    with pytest.raises(ConfigError, match=r"^algorithm\.policy_loss\.tau: unknown key"):
        train_config(tree_of(tmp_path, policy_loss={"tau": 1.0}))
    with pytest.raises(ConfigError, match=r"advantage\.type=median has no critic"):
        train_config(tree_of(tmp_path, value_loss={}))


def test_no_file_of_the_product_mentions_them() -> None:
    for name in ("sapo", "MedianBaseline"):
        done = subprocess.run(
            ["git", "grep", "-il", name, "--", "rlhf", "reward_model"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout == ""
