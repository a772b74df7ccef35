"""An ensemble on one backbone: its members are single models, its loss, its bootstrap, its report card, its critic."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from rm_cases import RAGGED, favorites, made_model
from tiny_models import ragged, tokenizer
from transformers import AutoModelForSequenceClassification

from reward_model.ensemble import (
    EnsembleLoss,
    EnsembleModelSource,
    bootstrap_weights,
    calibrate_ensemble,
)
from reward_model.evaluate import auc, auc_interval, ensemble_card
from reward_model.model import BradleyTerryLoss, calibrate, score_pairs
from reward_model.source import RewardModelSource
from rlhf.config.reward import CalibrationConfig, RewardModelLoss
from rlhf.models.scalar_head import (
    EnsembleHeadModel,
    ScalarHeadModel,
    as_ensemble,
    load_reward_heads,
    sequence_member_scores,
    single_head,
)

SIZE = 3
ALL = range(4)
score_member_pairs = partial(score_pairs, scorer=sequence_member_scores)


def ensemble(folder: Path, *, same_head: bool = False) -> EnsembleHeadModel:
    return as_ensemble(made_model(folder), size=SIZE, seed=0, same_head=same_head).train()


def member(folder: Path, model: EnsembleHeadModel, number: int) -> ScalarHeadModel:
    """A single model with the weights of one head; the backbone is made from the same seed."""
    single = made_model(folder)
    with torch.no_grad():
        single.head.weight.copy_(model.head.weight[number : number + 1])
    return single


def test_members_score_like_single_models(tmp_path: Path) -> None:
    model = ensemble(tmp_path / "e")
    chosen, rejected = score_member_pairs(model, RAGGED, ALL, micro_batch_size=3, dtype="float64")
    assert chosen.shape == (4, SIZE)
    for number in range(SIZE):
        single = member(tmp_path / str(number), model, number)
        expected = score_pairs(single, RAGGED, ALL, micro_batch_size=2, dtype="float64")
        torch.testing.assert_close(chosen[:, number], expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(rejected[:, number], expected[1], rtol=0, atol=1e-12)
    mean, _ = score_pairs(model, RAGGED, ALL, micro_batch_size=4, dtype="float64")
    torch.testing.assert_close(mean, chosen.mean(dim=1), rtol=0, atol=1e-12)


def test_packed_and_padded_rows_score_alike(tmp_path: Path) -> None:
    model = ensemble(tmp_path)
    packed = score_member_pairs(model, RAGGED, ALL, micro_batch_size=4, dtype="float64")
    model.packing = "off"
    padded = score_member_pairs(model, RAGGED, ALL, micro_batch_size=4, dtype="float64")
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-10)


def test_heads_differ_unless_they_should_not(tmp_path: Path) -> None:
    rows = ensemble(tmp_path / "a").head.weight
    assert (rows[0] - rows[1]).abs().max() > 0.01
    same = ensemble(tmp_path / "b", same_head=True).head.weight
    torch.testing.assert_close(same, same[:1].expand_as(same))
    torch.testing.assert_close(same[0], rows[0])


def test_the_loss_is_the_mean_of_the_members(tmp_path: Path) -> None:
    model, config = ensemble(tmp_path / "e"), RewardModelLoss(use_margin=True, centering=0.1)
    batch = RAGGED.collate(ALL)
    terms, metrics = EnsembleLoss(model, config, dtype="float64", bootstrap=None).terms(batch)
    singles = [
        BradleyTerryLoss(member(tmp_path / str(k), model, k), config, dtype="float64").terms(batch) for k in range(SIZE)
    ]
    assert terms["rm"].item() == pytest.approx(sum(t["rm"].item() for t, _ in singles) / SIZE, rel=1e-12)
    assert metrics["rm/margin"].value == pytest.approx(sum(m["rm/margin"].value for _, m in singles) / SIZE)
    terms["rm"].backward()
    assert all(row.abs().max() > 0 for row in model.head.weight.grad)  # type: ignore[union-attr]


def test_the_bootstrap_weights_each_members_pairs(tmp_path: Path) -> None:
    model, batch = ensemble(tmp_path / "e"), RAGGED.collate(ALL)
    weights = bootstrap_weights(batch, range(SIZE), seed=7)
    total = 0.0
    for k in range(SIZE):
        single = member(tmp_path / str(k), model, k)
        loss = BradleyTerryLoss(
            single, RewardModelLoss(), dtype="float64", weigh=lambda b, k=k: bootstrap_weights(b, [k], seed=7)[:, 0]
        )
        total += loss.terms(batch)[0]["rm"].item()
    terms, _ = EnsembleLoss(model, RewardModelLoss(), dtype="float64", bootstrap=7).terms(batch)
    assert weights.unique().numel() > 1
    assert terms["rm"].item() == pytest.approx(total / SIZE, rel=1e-12)


def test_bootstrap_weights_are_poisson_and_follow_the_pair_not_its_batch() -> None:
    pairs = favorites(1500, seed=0)
    weights = bootstrap_weights(pairs.collate(range(1500)), [0, 1], seed=0)
    assert weights.mean().item() == pytest.approx(1.0, abs=0.06)
    assert weights.var().item() == pytest.approx(1.0, abs=0.12)
    assert (weights == 0).double().mean().item() == pytest.approx(0.368, abs=0.03)
    correlation = torch.corrcoef(weights.T)[0, 1]
    assert abs(correlation) < 0.08
    shuffled = bootstrap_weights(pairs.collate([9, 700, 3]), [1], seed=0)
    assert shuffled[:, 0].tolist() == weights[[9, 700, 3], 1].tolist()


def test_each_member_is_calibrated_and_the_folder_loads_with_plain_transformers(tmp_path: Path) -> None:
    model, config = ensemble(tmp_path / "e"), CalibrationConfig()
    calibrate_ensemble(model, RAGGED, config, micro_batch_size=4, dtype="float64")
    means, stds = model.member_calibration
    for k in range(SIZE):
        expected = calibrate(member(tmp_path / str(k), model, k), RAGGED, config, micro_batch_size=4, dtype="float64")
        assert (means[k].item(), stds[k].item()) == pytest.approx(expected, rel=1e-9)
    both = torch.cat(score_member_pairs(model, RAGGED, ALL, micro_batch_size=4, dtype="float64"))
    torch.testing.assert_close(both.mean(dim=0), torch.zeros(SIZE, dtype=torch.float64), rtol=0, atol=1e-9)
    model.save(tokenizer(), tmp_path / "saved")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(plain.score.weight.double(), model.head.weight, rtol=0, atol=1e-6)
    loaded = load_reward_heads(str(tmp_path / "saved"), tokenizer(), dtype="float64")
    assert isinstance(loaded, EnsembleHeadModel)
    again = torch.cat(score_member_pairs(loaded, RAGGED, ALL, micro_batch_size=4, dtype="float64"))
    torch.testing.assert_close(again, both, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["mean", "minimum", "mean_minus_std"])
def test_the_source_combines_the_members(how: str, tmp_path: Path) -> None:
    model = ensemble(tmp_path)
    model.calibrate_members([0.1, 0.2, 0.3], [1.0, 2.0, 0.5])
    inner = RewardModelSource(model, tokenizer(), policy_tokenizer=tokenizer(), micro_batch_size=2, dtype="float64")
    scores = EnsembleModelSource(inner, how=how, std_coef=0.5)(ragged(fill=17))  # type: ignore[arg-type]
    members = torch.stack([scores.parts[f"member.{k}"] for k in range(SIZE)])
    std = members.std(dim=0, correction=0)
    expected = {
        "mean": members.mean(dim=0),
        "minimum": members.amin(dim=0),
        "mean_minus_std": members.mean(dim=0) - 0.5 * std,
    }
    torch.testing.assert_close(scores.values, expected[how], rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.parts["disagreement"], std, rtol=0, atol=1e-6)
    torch.testing.assert_close(inner(ragged(fill=17)).values, expected["mean"], rtol=0, atol=1e-6)


def test_a_critic_starts_from_the_members_mean(tmp_path: Path) -> None:
    model = ensemble(tmp_path)
    model.calibrate_members([0.1, 0.2, 0.3], [1.0, 2.0, 0.5])
    expected = score_pairs(model, RAGGED, ALL, micro_batch_size=4, dtype="float64")
    folded = single_head(model)
    assert folded.head.out_features == 1
    assert not isinstance(folded, EnsembleHeadModel)
    torch.testing.assert_close(
        score_pairs(folded, RAGGED, ALL, micro_batch_size=4, dtype="float64"), expected, rtol=0, atol=1e-9
    )
    assert single_head(folded) is folded


def test_auc_by_hand() -> None:
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8])
    wrong = torch.tensor([False, True, False, True])
    # pairs (wrong, right): .4 > .1, .4 = .4, .8 > .1, .8 > .4
    assert auc(scores, wrong) == pytest.approx(3.5 / 4)
    assert auc(scores, torch.zeros(4, dtype=torch.bool)) is None
    nothing = auc_interval(scores, torch.ones(4, dtype=torch.bool), seed=0)
    assert (nothing.auc, nothing.low, nothing.high) == (None, None, None)


def test_the_card_tells_disagreement_that_predicts_error_from_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf.evaluation.win_rate.RESAMPLES", 200)
    generator = torch.Generator().manual_seed(0)
    hard = torch.rand(300, generator=generator, dtype=torch.float64) < 0.3
    noise = torch.randn(4, 300, generator=generator, dtype=torch.float64)
    gaps = torch.where(hard, -0.2 + noise * 2.0, 1.0 + noise * 0.1)
    card = ensemble_card(gaps, seed=0)
    assert card.members == 4
    assert card.predicts_error.low is not None
    assert card.predicts_error.low > 0.8
    assert card.disagreement_when_wrong > card.disagreement_when_right  # type: ignore[operator]
    even = ensemble_card(0.1 + noise, seed=0)
    assert even.predicts_error.low is not None
    assert even.predicts_error.low < 0.5 < even.predicts_error.high  # type: ignore[operator]
