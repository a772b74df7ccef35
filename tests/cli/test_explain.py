"""rlhf config --explain: the meaning of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.algorithms.offline_loss import PairLoss
from rlhf.cli import main

SAPO = Path(__file__).resolve().parents[1] / "plugins" / "sapo.py"
PPO = str(Path(__file__).resolve().parents[2] / "configs" / "ppo.yaml")


def explained(capsys: pytest.CaptureFixture[str], key: str) -> str:
    assert main(["config", PPO, "policy.lr=2e-6", "--explain", key]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_setting_is_explained_with_its_value_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "policy.lr")
    assert "policy.lr = 2e-06" in text
    assert "Allowed: ≥ 0." in text
    assert "policy.max_grad_norm" not in text


def test_a_section_is_explained_with_all_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "algorithm.advantage")
    assert "Schulman et al. 2016" in text
    assert "algorithm.advantage.whiten = true" in text
    assert "algorithm.advantage.gae_lambda = 1.0" in text


def test_only_the_types_that_a_section_can_have_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A loss without a reference reads no pair that the policy has drawn; `sft` reads no pairs."""
    assert main(["config", PPO, "algorithm.preset=online_dpo", "--explain", "algorithm.policy_loss.loss"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    others = text.partition("Other types: ")[2].partition(" algorithm.")[0]
    allowed = {name for name, loss in PairLoss.choices().items() if loss.needs_reference}
    assert set(others.split(", ")) == allowed - {"dpo"}
    assert "ipo" in allowed
    assert "simpo" not in allowed


@pytest.mark.usefixtures("nothing_stays_registered")
def test_the_metrics_of_a_plugin_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["algorithm.preset=grpo", "algorithm.policy_loss.type=sapo", f"plugins=[{SAPO}]"]
    assert main(["config", PPO, *settings, "--explain", "algorithm.policy_loss"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "metric: policy/gate (share): mean slope of the gate, relative to that at ratio 1" in text


@pytest.mark.parametrize(
    "key, message",
    [
        ("policy.lrr", "policy.lrr: policy has no 'lrr'; did you mean lr?"),
        ("polcy.lr", "polcy.lr: the configuration has no 'polcy'; did you mean policy?"),
        ("policy.lr.x", "policy.lr.x: policy.lr is 2e-06, which has no settings"),
    ],
)
def test_a_wrong_key_is_named(capsys: pytest.CaptureFixture[str], key: str, message: str) -> None:
    assert main(["config", PPO, "policy.lr=2e-6", "--explain", key]) == 2
    captured = capsys.readouterr()
    assert message in " ".join((captured.out + captured.err).split())
