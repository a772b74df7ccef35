"""The loss as `optimizer_step` sees it, the micro-batch cannot change it, it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fitting import TERMS, fit
from rm_cases import RAGGED, favorites, made_model
from torch import Tensor

from reward_model.model import BradleyTerryLoss, bradley_terry, score_pairs, win_indicator
from rlhf.config.reward import RewardModelLoss
from rlhf.config.sections import OptimizerConfig
from rlhf.data.datasets import BatchStream
from rlhf.data.pairs import PairSet
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.runtime.engine import Engine, TrainableModel
from rlhf.tracking.metrics import Metrics

SGD = OptimizerConfig(lr=0.05, optimizer="sgd")


def trained(model: ScalarHeadModel, config: OptimizerConfig = SGD) -> TrainableModel:
    return Engine(torch.device("cpu")).train("policy", model, config, terms=TERMS)


def weights(model: ScalarHeadModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def run(
    model: ScalarHeadModel,
    pairs: PairSet,
    *,
    steps: int,
    micro: int = 4,
    rows: int = 4,
    loss: RewardModelLoss | None = None,
    config: OptimizerConfig = SGD,
) -> list[Metrics]:
    objective = BradleyTerryLoss(model, loss or RewardModelLoss(), dtype="float64")
    stream = BatchStream(pairs, rows, seed=0)
    return fit(trained(model, config), objective, stream, steps=steps, micro_batch_size=micro)


def held_out(model: ScalarHeadModel, pairs: PairSet) -> tuple[float, float]:
    """Accuracy and loss."""
    chosen, rejected = score_pairs(model, pairs, range(len(pairs)), micro_batch_size=128, dtype="float32")
    loss = bradley_terry(chosen, rejected, torch.zeros_like(chosen), centering=0.0)
    return win_indicator(chosen - rejected).mean().item(), loss.mean().item()


def test_the_micro_batch_size_cannot_change_an_update(tmp_path: Path) -> None:
    loss = RewardModelLoss(use_margin=True, centering=0.1)
    results = []
    for micro in (1, 3, 4):
        model = made_model(tmp_path / str(micro))
        start = weights(model)
        run(model, RAGGED, steps=2, micro=micro, loss=loss)
        results.append(weights(model))
        assert (results[-1] - start).abs().max() > 1e-3
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-10)


def test_terms_and_observations_by_hand(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    chosen, rejected = score_pairs(model, RAGGED, range(4), micro_batch_size=4, dtype="float64")
    loss = BradleyTerryLoss(model, RewardModelLoss(use_margin=True, centering=0.2), dtype="float64")
    batch = RAGGED.collate(range(4))
    terms, observed = loss.terms(batch)
    rows = list(zip(chosen.tolist(), rejected.tolist(), [0.5, 0.0, 2.0, 1.0], strict=True))
    expected = [math.log1p(math.exp(-(c - r - m))) + 0.2 * (c + r) ** 2 for c, r, m in rows]
    assert loss.denominators(batch) == {"rm": 4.0}
    assert terms["rm"].item() == pytest.approx(sum(expected), rel=1e-9)
    assert observed["loss/rm"].value == pytest.approx(sum(expected) / 4, rel=1e-9)
    assert observed["rm/accuracy"].value == sum(c > r for c, r, _ in rows) / 4
    assert observed["rm/margin"].value == pytest.approx(sum(c - r for c, r, _ in rows) / 4)
    assert observed["rm/score_mean"].value == pytest.approx(sum(c + r for c, r, _ in rows) / 8)


def test_margins_count_only_when_asked_for(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    batch = RAGGED.collate(range(4))
    plain = BradleyTerryLoss(model, RewardModelLoss(), dtype="float64").terms(batch)[0]["rm"]
    wider = BradleyTerryLoss(model, RewardModelLoss(use_margin=True), dtype="float64").terms(batch)[0]["rm"]
    assert wider > plain + 0.1


def test_bfloat16_is_about_the_same_loss_in_float32(tmp_path: Path) -> None:
    model, batch = made_model(tmp_path, dtype="float32"), RAGGED.collate(range(4))
    exact = BradleyTerryLoss(model, RewardModelLoss(), dtype="float32").terms(batch)[0]["rm"]
    rounded = BradleyTerryLoss(model, RewardModelLoss(), dtype="bfloat16").terms(batch)[0]["rm"]
    assert rounded.dtype == torch.float32
    assert rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)


def test_it_learns_a_preference(tmp_path: Path) -> None:
    model, test = made_model(tmp_path, dtype="float32"), favorites(400, seed=1)
    accuracy_before, _ = held_out(model, test)
    metrics = run(
        model,
        favorites(1000, seed=0),
        steps=60,
        rows=64,
        micro=64,
        loss=RewardModelLoss(centering=0.01),
        config=OptimizerConfig(lr=1e-2),
    )
    accuracy, loss = held_out(model, test)
    assert accuracy_before < 0.8
    assert accuracy > 0.95
    assert loss < 0.25
    assert metrics[-1]["loss/rm"] < 0.5 * metrics[0]["loss/rm"]
