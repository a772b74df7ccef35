"""The figure of the clip: counts of ratios and the objective by hand, from a run to its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import ppo_tree, trained

from rlhf.algo.kl import Coefs
from rlhf.algorithms.penalty import PenaltyLoss
from rlhf.algorithms.ppo import ClipLoss
from rlhf.report.charts import ratio_charts
from rlhf.report.page import write_report
from rlhf.report.record import read_record
from rlhf.runtime.distributed import SINGLE_PROCESS
from rlhf.training.ratios import BINS, RatioHistogram, objective_gain

COEFS = Coefs(kl=0.0, penalty=1.0)


def test_the_gain_of_the_clipped_objective_by_hand() -> None:
    loss = ClipLoss()
    assert objective_gain(loss, [0.5, 1.1, 1.5], 1.0, COEFS) == pytest.approx([-0.5, 0.1, 0.2])
    assert objective_gain(loss, [0.5, 0.9, 1.5], -1.0, COEFS) == pytest.approx([0.2, 0.1, -0.5])


def test_the_gain_of_the_penalty_has_its_kl() -> None:
    (gain,) = objective_gain(PenaltyLoss(), [2.0], 1.0, COEFS)
    assert gain == pytest.approx(1.0 - (1.0 - torch.tensor(2.0).log().item()))


def test_ratios_are_counted_by_the_sign_of_the_advantage() -> None:
    histogram = RatioHistogram(0.4, 1.6)  # bins of 0.02
    ratio = torch.tensor([[0.41, 1.01, 9.0, 1.59], [1.01, 1.01, 1.01, 1.01]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, 0.0], [-1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    histogram.add(ratio, advantages, mask)
    histogram.add(ratio, advantages, mask)
    figure = histogram.figure(ClipLoss(), COEFS, SINGLE_PROCESS)
    counts = figure["counts"]
    assert isinstance(counts, dict)
    assert (counts["positive"][0], counts["positive"][BINS - 1], sum(counts["positive"])) == (2.0, 2.0, 4.0)
    assert (counts["negative"][BINS // 2], sum(counts["negative"])) == (6.0, 6.0)


def test_the_range_follows_the_clip() -> None:
    assert ClipLoss().drawn_ratios == pytest.approx((0.4, 1.6))
    assert ClipLoss(clip_eps_low=0.5, clip_eps_high=0.1).drawn_ratios == pytest.approx((0.0, 1.3))


def test_a_run_draws_its_last_step(tmp_path: Path) -> None:
    trained(ppo_tree(tmp_path, eval={"every": 0}))
    figure = json.loads((tmp_path / "run" / "ratios.json").read_text())
    assert figure["step"] == 4
    tokens = sum(sum(counts) for counts in figure["counts"].values())
    assert 16 * 2 <= tokens <= 16 * 6 * 2  # 16 completions of at most 6 tokens, in 2 epochs
    record = read_record(tmp_path / "run")
    above, below = ratio_charts(record)
    assert above.title == "Ratios of step 4, advantages above 0"
    assert sum(y or 0.0 for y in above.series[0].ys) == pytest.approx(1.0)
    assert max(y or 0.0 for y in above.series[1].ys) == pytest.approx(0.2)
    assert below.series[1].ys[0] == pytest.approx(0.2)
    assert "Ratios of step 4" in write_report(tmp_path / "run").read_text()
    assert ratio_charts(record.until(3)) == []


def test_a_loss_without_a_ratio_has_no_figure(tmp_path: Path) -> None:
    one = {"algorithm": {"preset": "a2c"}, "batch": {"epochs": 1, "minibatches": 1}}
    trained(ppo_tree(tmp_path, **one, schedule={"steps": 1}))
    assert not (tmp_path / "run" / "ratios.json").exists()
