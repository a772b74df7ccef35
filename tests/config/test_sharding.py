"""sharding=zero3 and its kin: short for a section, presets over DeepSpeed's JSON, closed for keys that are ours."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.files import merge, parse_overrides
from rlhf.config.load import train_config
from rlhf.config.run import ShardingConfig, deepspeed_json
from rlhf.errors import ConfigError

BASE: dict[str, Any] = {
    "policy": {"model": "m"},
    "data": {"sft": {"path": "x.jsonl"}},
    "algorithm": {"preset": "sft"},
}


def sharding(*overrides: str, **tree: Any) -> ShardingConfig:
    return train_config(merge(merge(BASE, tree), parse_overrides(overrides))).sharding


def test_a_word_stands_for_the_mode() -> None:
    assert sharding().mode == "none"
    assert sharding("sharding=zero3").mode == "zero3"
    assert sharding(sharding="zero2").mode == "zero2"
    assert sharding("sharding=zero1", sharding={"mode": "zero3", "timeout_s": 5}).timeout_s == 5
    both = sharding("sharding=zero3", "sharding.deepspeed.zero_optimization.overlap_comm=true")
    assert both == sharding("sharding.deepspeed.zero_optimization.overlap_comm=true", "sharding=zero3")
    assert (both.mode, both.deepspeed) == ("zero3", {"zero_optimization": {"overlap_comm": True}})


@pytest.mark.parametrize(
    "mode, stage, offloaded",
    [
        ("zero1", 1, []),
        ("zero2", 2, []),
        ("zero3", 3, []),
        ("zero2_offload", 2, ["offload_optimizer"]),
        ("zero3_offload", 3, ["offload_optimizer", "offload_param"]),
    ],
)
def test_the_presets(mode: str, stage: int, offloaded: list[str]) -> None:
    config = ShardingConfig(mode=mode)  # type: ignore[arg-type]
    settings = deepspeed_json(config, processes=4, max_grad_norm=0.5)
    assert settings["zero_optimization"]["stage"] == config.stage == stage
    assert [key for key in settings["zero_optimization"] if key.startswith("offload")] == offloaded
    assert all(settings["zero_optimization"][key]["device"] == "cpu" for key in offloaded)
    assert settings["gradient_clipping"] == 0.5
    sizes = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * 4
    assert settings["train_batch_size"] == sizes
    assert deepspeed_json(config, processes=4, max_grad_norm=None)["gradient_clipping"] == 0.0


def test_any_other_key_is_the_users() -> None:
    theirs = {"zero_optimization": {"overlap_comm": True, "sub_group_size": 7}, "wall_clock_breakdown": True}
    settings = deepspeed_json(ShardingConfig(mode="zero3", deepspeed=theirs), processes=1, max_grad_norm=1.0)
    assert settings["zero_optimization"] | theirs["zero_optimization"] == settings["zero_optimization"]  # type: ignore[operator]
    assert settings["wall_clock_breakdown"] is True
    assert settings["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["sharding=zero4"], "sharding.mode"),
        (["sharding.mod=zero3"], "did you mean mode"),
        (["sharding=zero3", "sharding.deepspeed.gradient_clipping=2"], "policy.max_grad_norm"),
        (["sharding=zero3", "sharding.deepspeed.zero_optimization.stage=2"], "sharding.mode"),
        (["sharding=zero3", "sharding.deepspeed.fp16.enabled=true"], "policy.dtype"),
        (["sharding=zero3", "sharding.deepspeed.optimizer.type=Adam"], "policy.optimizer"),
        (["sharding=ddp", "sharding.deepspeed.wall_clock_breakdown=true"], "does not use DeepSpeed"),
        (["sharding=zero3", "sharding.cpu_adam=true"], "CPU memory"),
        (["sharding=zero2", "policy.dtype=float64"], "float64"),
        (["sharding=zero2", "sharding.rollout=layered"], "rollout=layered gathers the layers that zero3 splits"),
        (["sharding=zero3", "sharding.rollout=sharded"], "sharding.rollout"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharding(*overrides)
