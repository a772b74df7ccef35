"""The offline losses as functions of numbers: h, log π or m of each side, one a completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.hinge import Hinge
from rlhf.algorithms.ipo import Ipo
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.orpo import Orpo
from rlhf.algorithms.robust_dpo import RobustDpo
from rlhf.algorithms.simpo import Simpo
from rlhf.algorithms.slic import Slic
from rlhf.types import Side


@dataclass(frozen=True)
class PairValues:
    """The figures of a loss on pairs."""

    per_pair: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


def side(numbers: Tensor) -> Side:
    """Completions of one token whose reference has log-probability 0: h, log π and m are the same numbers."""
    return Side(logprobs=numbers, ref_logprobs=torch.zeros_like(numbers), lengths=torch.ones_like(numbers))


def values_of(loss: PairLoss, chosen: Tensor, rejected: Tensor) -> PairValues:
    sides = side(chosen), side(rejected)
    return PairValues(loss.per_pair(*sides), *map(loss.reward, sides))


def _values(kind: type[PairLoss], chosen: Tensor, rejected: Tensor, **settings: Any) -> PairValues:
    return values_of(kind(**settings), chosen, rejected)


dpo: Callable[..., PairValues] = partial(_values, Dpo)
robust_dpo: Callable[..., PairValues] = partial(_values, RobustDpo)
ipo: Callable[..., PairValues] = partial(_values, Ipo)
hinge: Callable[..., PairValues] = partial(_values, Hinge)
slic: Callable[..., PairValues] = partial(_values, Slic)
simpo: Callable[..., PairValues] = partial(_values, Simpo)
orpo: Callable[..., PairValues] = partial(_values, Orpo)
