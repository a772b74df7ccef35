"""The report card: each figure against a model whose scores are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rm_cases import FAVORITE, RAGGED, favorites, made_model, pair_set
from tiny_models import BOS, EOS
from torch import Tensor, nn

from reward_model.evaluate import ReportCard, evaluate_reward_model
from reward_model.model import calibrate
from rlhf.config.reward import CalibrationConfig
from rlhf.data.pairs import PairSet
from rlhf.errors import DataError, RewardError
from rlhf.models.logprobs import Sequences
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.report.charts import calibration_bins, card_tables


class Counting(ScalarHeadModel):
    """A model whose raw score is a weight for every favorite token and one for every token."""

    def __init__(self, model: ScalarHeadModel, *, favorite: float, token: float) -> None:
        super().__init__(model.classifier)
        self.packing = "off"  # its forward counts in a rectangle
        self.favorite = favorite
        self.token = token

    def forward(self, sequences: Sequences) -> Tensor:
        live = sequences.attention_mask.double()
        raw = self.favorite * (sequences.input_ids == FAVORITE) * live + self.token * live
        mean, std = self.calibration
        return (raw.cumsum(dim=1) - mean) / std


def counting(folder: Path, *, favorite: float = 0.0, token: float = 0.0) -> ScalarHeadModel:
    return Counting(made_model(folder), favorite=favorite, token=token)


def card(model: ScalarHeadModel, pairs: PairSet, *, train: PairSet = RAGGED) -> ReportCard:
    return evaluate_reward_model(model, pairs, train=train, eos_ids=(EOS,), micro_batch_size=16, dtype="float64")


SIX = pair_set(
    [
        ([BOS], [FAVORITE, FAVORITE, EOS], [5, EOS]),  # longer wins, rightly
        ([BOS], [FAVORITE, 5, 6, EOS], [5, EOS]),
        ([BOS], [5, EOS], [6, 8, 9, 10, EOS]),  # a tie for favorites; the shorter is chosen
        ([BOS], [5, 6, EOS], [FAVORITE, EOS]),
        ([BOS], [FAVORITE, EOS], [5, 6, 8, EOS]),
        ([BOS], [FAVORITE, 6, EOS], [5, 9, EOS]),  # of one length
    ],
    margins=[1.0, 2.0, 1.0, 2.0, 3.0, 3.0],
)


def test_accuracy_and_loss_by_hand(tmp_path: Path) -> None:
    report = card(counting(tmp_path, favorite=1.0), SIX)
    gaps = [2, 1, 0, -1, 1, 1]
    assert (report.accuracy, report.n) == (pytest.approx(4.5 / 6), 6)
    assert report.accuracy_low <= report.accuracy <= report.accuracy_high
    assert report.loss == pytest.approx(sum(math.log1p(math.exp(-gap)) for gap in gaps) / 6)
    scores = [2, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0]
    assert report.score_mean == pytest.approx(0.5)
    assert report.score_std == pytest.approx(torch.tensor(scores).double().std(correction=0).item())


def test_the_scale_of_calibration_is_undone_where_scores_are_probabilities(tmp_path: Path) -> None:
    model = counting(tmp_path, favorite=1.0)
    before = card(model, SIX)
    calibrate(model, SIX, CalibrationConfig(), micro_batch_size=16, dtype="float64")
    after = card(model, SIX)
    assert after.score_std == pytest.approx(1.0)
    assert after.loss == pytest.approx(before.loss)
    assert after.calibration.ece == pytest.approx(before.calibration.ece)


def test_accuracy_by_the_datas_margin(tmp_path: Path) -> None:
    by_margin = card(counting(tmp_path, favorite=1.0), SIX).by_margin
    assert by_margin.of == "margin in the data"
    assert [(b.low, b.high, b.accuracy, b.n) for b in by_margin.bins] == [
        (1.0, 1.0, 0.75, 2),
        (2.0, 2.0, 0.5, 2),
        (3.0, 3.0, 1.0, 2),
    ]


def test_accuracy_by_score_gap_where_the_data_have_no_margin(tmp_path: Path) -> None:
    pairs = favorites(60, seed=0)
    by_margin = card(counting(tmp_path, favorite=1.0), pairs).by_margin
    assert by_margin.of == "score gap"
    assert sum(b.n for b in by_margin.bins) == 60
    assert {b.accuracy for b in by_margin.bins} == {1.0}


def test_length_by_hand(tmp_path: Path) -> None:
    by_length = card(counting(tmp_path / "a", token=1.0), SIX).length
    assert by_length.pearson == pytest.approx(1.0)
    assert by_length.spearman == pytest.approx(1.0)
    accuracies = {name: (part.accuracy, part.n) for name, part in by_length.accuracy.items()}
    assert accuracies == {"chosen_longer": (1.0, 3), "chosen_shorter": (0.0, 2), "same_length": (0.5, 1)}
    shorter = card(counting(tmp_path / "b", token=-1.0), SIX).length
    assert shorter.spearman == pytest.approx(-1.0)
    assert shorter.accuracy["chosen_shorter"].accuracy == 1.0


def test_baselines_are_measured_on_the_same_pairs(tmp_path: Path) -> None:
    test, train = favorites(100, seed=1), favorites(300, seed=0)
    report = card(counting(tmp_path, favorite=-1.0), test, train=train)
    assert report.accuracy == 0.0
    assert report.baselines["bag_of_words"].accuracy > 0.9
    assert report.baselines["bag_of_words"].n_train == 300
    longer = [len(c) - len(r) for c, r in zip(test.chosen, test.rejected, strict=True)]
    share = sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in longer) / 100
    assert report.baselines["longer_wins"].accuracy == pytest.approx(share)
    assert set(card(counting(tmp_path / "few"), SIX, train=RAGGED).baselines) == {"longer_wins"}


@pytest.mark.parametrize("token, repeated, halved", [(1.0, 1.0, 0.0), (-1.0, 0.0, 1.0), (0.0, 0.5, 0.5)])
def test_probes_find_a_taste_for_length(token: float, repeated: float, halved: float, tmp_path: Path) -> None:
    pairs = favorites(20, seed=0)
    probes = card(counting(tmp_path, token=token), pairs).probes
    assert {name: (probe.scores_higher, probe.n) for name, probe in probes.items()} == {
        "repeated": (repeated, 20),
        "halved": (halved, 20),
    }


def test_copies_that_do_not_fit_the_context_are_not_counted(tmp_path: Path) -> None:
    long = pair_set([([BOS], [5] * 50 + [EOS], [6, EOS]), ([BOS], [5, 6, 8, EOS], [6, EOS])])  # the context is 64
    probes = card(counting(tmp_path, token=1.0), long).probes
    assert (probes["repeated"].n, probes["halved"].n) == (1, 2)


def test_a_real_model_gets_a_card_that_json_and_the_report_understand(tmp_path: Path) -> None:
    pairs = favorites(30, seed=0)
    plain = card(made_model(tmp_path), pairs, train=favorites(60, seed=1)).as_dict()
    loaded = json.loads(json.dumps(plain, allow_nan=False))
    bins = calibration_bins(loaded)
    assert sum(count for _, _, count in bins) == 30
    titles = {table.title.lower() for table in card_tables(loaded)}
    assert {"figures", "baselines", "probes", "by margin · bins", "calibration · bins"} <= titles


def test_no_pairs_and_no_numbers_are_refused(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    with pytest.raises(DataError, match=r"data\.eval_preferences"):
        card(model, pair_set([]))
    nn.init.constant_(model.head.weight, float("nan"))
    with pytest.raises(RewardError, match="NaN"):
        card(model, RAGGED)
