"""Mean 0 and std 1 on the reference completions, kept with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from rm_cases import RAGGED, favorites, made_model
from tiny_models import tokenizer
from torch import Tensor

from reward_model.model import calibrate, score_pairs
from rlhf.config.reward import CalibrationConfig
from rlhf.errors import RewardError
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head

Reference = Literal["chosen", "both", "none"]


def scores(model: ScalarHeadModel) -> tuple[Tensor, Tensor]:
    return score_pairs(model, RAGGED, range(len(RAGGED)), micro_batch_size=8, dtype="float64")


@pytest.mark.parametrize("data", ["chosen", "both"])
def test_mean_zero_and_std_one_that_survive_a_folder(data: Reference, tmp_path: Path) -> None:
    model = made_model(tmp_path)
    before = scores(model)
    calibrate(model, RAGGED, CalibrationConfig(data=data), micro_batch_size=8, dtype="float64")
    model.save(tokenizer(), tmp_path / "rm")
    again = load_scalar_head(str(tmp_path / "rm"), tokenizer(), new_head=None, dtype="float64")
    chosen, rejected = scores(again)
    reference = chosen if data == "chosen" else torch.cat([chosen, rejected])
    assert reference.mean().item() == pytest.approx(0, abs=1e-9)
    assert reference.std(correction=0).item() == pytest.approx(1, abs=1e-9)
    assert torch.equal(torch.cat(before).argsort(), torch.cat([chosen, rejected]).argsort())


def test_it_does_not_depend_on_the_calibration_before(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    first = calibrate(model, RAGGED, CalibrationConfig(), micro_batch_size=8, dtype="float64")
    assert calibrate(model, RAGGED, CalibrationConfig(), micro_batch_size=8, dtype="float64") == pytest.approx(first)
    assert first != (0.0, 1.0)


def test_none_leaves_the_scores_as_they_are(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    model.calibrate(0.25, 2.0)
    calibration = calibrate(model, RAGGED, CalibrationConfig(data="none"), micro_batch_size=8, dtype="float64")
    assert calibration == model.calibration == (0.25, 2.0)


def test_the_limit_counts_completions_spread_over_the_pairs(tmp_path: Path) -> None:
    model, pairs = made_model(tmp_path), favorites(10, seed=0)
    chosen, rejected = score_pairs(model, pairs, range(10), micro_batch_size=8, dtype="float64")
    reference = torch.stack([chosen[0], rejected[0], chosen[3], rejected[3], chosen[6]])  # 3 of 10 pairs, 5 of 6 sides
    mean, std = calibrate(model, pairs, CalibrationConfig(limit=5), micro_batch_size=8, dtype="float64")
    assert mean == pytest.approx(reference.mean().item(), abs=1e-10)
    assert std == pytest.approx(reference.std(correction=0).item(), abs=1e-10)


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_scores_that_say_nothing_are_refused(weight: float, tmp_path: Path) -> None:
    model = made_model(tmp_path)
    with torch.no_grad():
        model.head.weight.fill_(weight)
    with pytest.raises(RewardError, match="cannot be calibrated"):
        calibrate(model, RAGGED, CalibrationConfig(), micro_batch_size=8, dtype="float64")


def test_one_completion_is_too_few(tmp_path: Path) -> None:
    config = CalibrationConfig(data="chosen", limit=1)
    with pytest.raises(RewardError, match=r"calibration\.limit"):
        calibrate(made_model(tmp_path), RAGGED, config, micro_batch_size=8, dtype="float64")
