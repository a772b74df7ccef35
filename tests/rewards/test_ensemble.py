"""Mean, minimum and mean less c standard deviations, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import completions_of

from rlhf.errors import ConfigError
from rlhf.rewards.ensemble import EnsembleMode, EnsembleReward
from rlhf.types import Completions, Scores

BATCH = completions_of([[5], [5]], [[3], [4]])


class Fixed:
    """Always these scores."""

    def __init__(self, values: Sequence[float], **parts: Sequence[float]) -> None:
        self.scores = Scores(
            values=torch.tensor(values), parts={name: torch.tensor(part) for name, part in parts.items()}
        )

    def __call__(self, completions: Completions) -> Scores:
        assert completions is BATCH
        return self.scores


# Rows (1, 3, 8) and (2, 2, 2): means 4 and 2; population std sqrt(((-3)^2 + (-1)^2 + 4^2) / 3) = sqrt(26/3) and 0.
MEMBERS = [Fixed([1.0, 2.0]), Fixed([3.0, 2.0]), Fixed([8.0, 2.0])]
STD = (26 / 3) ** 0.5


@pytest.mark.parametrize(
    "how, std_coef, expected",
    [
        ("mean", 1.0, [4.0, 2.0]),
        ("minimum", 1.0, [1.0, 2.0]),
        ("mean_minus_std", 1.0, [4.0 - STD, 2.0]),
        ("mean_minus_std", 0.5, [4.0 - 0.5 * STD, 2.0]),
        ("mean_minus_std", 0.0, [4.0, 2.0]),
    ],
)
def test_combinations_by_hand(how: EnsembleMode, std_coef: float, expected: list[float]) -> None:
    scores = EnsembleReward(MEMBERS, how=how, std_coef=std_coef)(BATCH)
    assert scores.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert scores.parts["disagreement"].tolist() == pytest.approx([STD, 0.0], rel=1e-6)


def test_parts_name_each_member_and_keep_its_own() -> None:
    members = [Fixed([1.0, 2.0], fit=[0.5, 0.0]), Fixed([3.0, 4.0])]
    parts = EnsembleReward(members, how="mean")(BATCH).parts
    assert {name: part.tolist() for name, part in parts.items()} == {
        "sources.0": [1.0, 2.0],
        "sources.0/fit": [0.5, 0.0],
        "sources.1": [3.0, 4.0],
        "disagreement": [1.0, 1.0],
    }
    named = EnsembleReward(members, how="mean", names=["rm", "length"])(BATCH).parts
    assert list(named) == ["rm", "rm/fit", "length", "disagreement"]


def test_one_member_is_itself_without_disagreement() -> None:
    for how in ("mean", "minimum", "mean_minus_std"):
        scores = EnsembleReward([Fixed([1.5, -2.0])], how=how)(BATCH)
        assert scores.values.tolist() == [1.5, -2.0]
        assert scores.parts["disagreement"].tolist() == [0.0, 0.0]


def test_an_ensemble_in_an_ensemble() -> None:
    inner = EnsembleReward(MEMBERS, how="minimum")
    scores = EnsembleReward([inner, Fixed([3.0, 4.0])], how="mean")(BATCH)
    assert scores.values.tolist() == [2.0, 3.0]
    assert scores.parts["sources.0/sources.2"].tolist() == [8.0, 2.0]


def test_no_member_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"reward\.source\.sources is empty"):
        EnsembleReward([], how="mean")
