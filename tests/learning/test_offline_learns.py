"""Every preference preset raises a known gold from pairs of random completions, sampling nothing to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from runs import labelled_file, offline_tree, trained_offline

LONG: dict[str, Any] = {
    "schedule": {"steps": 30},
    "eval": {"every": 0},
    "checkpoint": {"every": 0},
    "batch": {"micro_batch_size": 64},
}
WITHOUT_LIKELIHOOD = ("dpo", "cdpo", "robust_dpo", "ipo", "ipo_per_token", "hinge", "simpo", "kto")
WITH_LIKELIHOOD = ("slic", "orpo")  # they also imitate the chosen side, which is good only in part


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", quick(WITHOUT_LIKELIHOOD + WITH_LIKELIHOOD, ["dpo", "simpo", "kto", "orpo"]))
def test_every_preference_preset_raises_the_gold(tmp_path: Path, preset: str) -> None:
    trained_offline(offline_tree(tmp_path, preset, **LONG))
    rows = metrics(tmp_path)
    first, last = rows[0], rows[-1]
    assert first["eval/score"] < 0.1
    assert last["eval/score"] > (0.7 if preset in WITHOUT_LIKELIHOOD else 0.4)
    assert last["eval/preference_accuracy"] > (0.75 if preset in WITHOUT_LIKELIHOOD else 0.65)
    assert last["eval/preference_margin"] > first["eval/preference_margin"] + 0.1
    assert last["loss/preference"] < rows[1]["loss/preference"]
    if preset in WITH_LIKELIHOOD:
        assert last["eval/chosen_logprob"] > first["eval/chosen_logprob"] > last["eval/rejected_logprob"]


def test_with_its_likelihood_the_chosen_side_stays_likely(tmp_path: Path) -> None:
    """DPO alone takes probability from both sides; the gold is learned with both."""
    last = {}
    for nll_coef in (0.0, 1.0):
        folder = tmp_path / str(nll_coef)
        trained_offline(offline_tree(folder, "dpo", algorithm={"loss": {"nll_coef": nll_coef}}, **LONG))
        last[nll_coef] = metrics(folder)[-1]
    assert last[1.0]["eval/chosen_logprob"] > last[0.0]["eval/chosen_logprob"] + 1.0
    assert last[1.0]["eval/score"] > 0.4


def test_before_the_first_step_policy_and_reference_agree(tmp_path: Path) -> None:
    trained_offline(offline_tree(tmp_path, "dpo", schedule={"steps": 1}))
    start = metrics(tmp_path)[0]
    assert start["eval/preference_margin"] == pytest.approx(0.0, abs=1e-5)
    assert start["eval/preference_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert start["eval/kl"] == pytest.approx(0.0, abs=1e-5)


def test_kto_learns_from_completions_without_a_partner(tmp_path: Path) -> None:
    data = {
        "preferences": {"path": str(labelled_file(tmp_path))},
        "eval_preferences": {"path": str(labelled_file(tmp_path, count=60, seed=3))},
    }
    trained_offline(offline_tree(tmp_path, "kto", data=data, **LONG))
    rows = metrics(tmp_path)
    assert rows[0]["eval/score"] < 0.1
    assert rows[-1]["eval/score"] > 0.5
    assert rows[-1]["eval/preference_loss"] < rows[0]["eval/preference_loss"] - 0.05
    assert rows[-1]["eval/chosen_reward"] > rows[-1]["eval/rejected_reward"] + 0.3
    assert "eval/preference_margin" not in rows[-1]  # there are no pairs


def test_a_larger_beta_stays_nearer_to_the_reference(tmp_path: Path) -> None:
    """Smoothed labels ask for a margin of log((1 - e) / e) / beta nats; certain ones for ever more, at any beta."""
    spent = {}
    for beta in (0.1, 3.0):
        overrides = [f"algorithm.loss.beta={beta}", "algorithm.loss.label_smoothing=0.3"]
        trained_offline(
            offline_tree(tmp_path, "cdpo", **LONG), *overrides, f"run.out_dir={tmp_path / str(beta) / 'run'}"
        )
        spent[beta] = metrics(tmp_path / str(beta))[-1]["eval/kl"]
    assert spent[3.0] < 0.5 * spent[0.1]


def test_adapters_learn_too(tmp_path: Path) -> None:
    trained_offline(offline_tree(tmp_path, "dpo", policy={"lora": {"r": 4}, "lr": 1e-2}, **LONG))
    rows = metrics(tmp_path)
    assert rows[0]["eval/kl"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["eval/score"] > 0.4
