"""The notes of a run about its optimizations."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

from rlhf.config.run import Mode, ShardingConfig
from rlhf.models.policy_models import Models
from rlhf.runtime.engine import Engine

CPU = torch.device("cpu")


@pytest.mark.parametrize(("mode", "stage"), [("none", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_layers_that_deepspeed_watches_are_not_said_to_be_written_out(mode: Mode, stage: int) -> None:
    engine = Engine(CPU)
    engine.sharding = ShardingConfig(mode=mode)
    models = Models(policy=tiny(), temperature=1.0, dtype="float64", device=CPU, engine=engine)
    line, *reasons = models.fast_ways().lines()
    on, _, off = line.partition("; off: ")
    assert ("written-out layers" in on) == (stage < 2)
    assert ("written-out layers" in off) == (stage >= 2)
    assert [f"ZeRO-{stage} watches" in reason for reason in reasons] == [True] * (stage >= 2)
