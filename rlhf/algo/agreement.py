"""Agreement of a judge's verdicts with people's: accuracy and Cohen's kappa, with intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """The agreement of a judge's preferences with people's; each figure with its 95 % interval."""

    pairs: int
    ties: int  # pairs on which the judge has no preference
    accuracy: tuple[float, float, float]  # value, low, high; a tie counts half
    kappa: tuple[float, float, float]  # Cohen's kappa over first, second and tie


def verdict_kappa(outcomes: Float[Tensor, "*R N"]) -> Float[Tensor, "*R"]:
    """Compute Cohen's kappa of verdicts on pairs with people's, who prefer one side of each (Cohen 1960).

        kappa = (p_o - p_e) / (1 - p_e)

    A pair can be shown in either order, so each counts in both: people name the first side half of the time, and the
    judge each side (1 - t) / 2 where t is its share of ties. So p_e = (1 - t) / 2, and p_o is the share of pairs on
    which it prefers people's side; a tie agrees with nobody.

    Args:
        outcomes: 1 if the judge prefers the side that people prefer, 0 for the other, 1/2 for a tie.
    """
    agreed = (outcomes == 1).double().mean(dim=-1)
    tied = (outcomes == 0.5).double().mean(dim=-1)
    expected = (1 - tied) / 2
    return (agreed - expected) / (1 - expected)


def agreement(outcomes: Float[Tensor, " N"], draws: Iterable[Int[Tensor, "R N"]]) -> Agreement:
    """Compute accuracy and kappa with the percentile intervals of these resamples of the pairs.

    Args:
        outcomes: as in `verdict_kappa`; at least one.
        draws: indices of the pairs, drawn with replacement, in one or several parts.
    """
    outcomes = outcomes.double()
    accuracies: list[Float[Tensor, " R"]] = []
    kappas: list[Float[Tensor, " R"]] = []
    for rows in draws:
        drawn = outcomes[rows]
        accuracies.append(drawn.mean(dim=1))
        kappas.append(verdict_kappa(drawn))
    return Agreement(
        pairs=len(outcomes),
        ties=int((outcomes == 0.5).sum()),
        accuracy=_with_interval(outcomes.mean(), torch.cat(accuracies)),
        kappa=_with_interval(verdict_kappa(outcomes), torch.cat(kappas)),
    )


def _with_interval(value: Float[Tensor, ""], resampled: Float[Tensor, " R"]) -> tuple[float, float, float]:
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(value), low, high
