"""The forms in which weights may be kept, and refusals by name with their cure."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.files import merge
from rlhf.config.load import reward_model_config, train_config
from rlhf.errors import ConfigError

PPO: dict[str, Any] = {
    "policy": {"model": "m"},
    "data": {"prompts": {"path": "p"}},
    "reward": {"source": {"type": "model", "path": "r"}},
    "algorithm": {"preset": "ppo"},
}
DPO: dict[str, Any] = {
    "policy": {"model": "m"},
    "data": {"preferences": {"path": "p"}},
    "algorithm": {"preset": "dpo"},
}
REWARD_MODEL: dict[str, Any] = {"model": {"model": "m"}, "data": {"preferences": {"path": "p"}}}
LOADED = {"ppo": (train_config, PPO), "dpo": (train_config, DPO), "rm": (reward_model_config, REWARD_MODEL)}
LORA = {"r": 4}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ppo", {"policy": {"weights": "nf4"}}, r"set policy\.lora\.r=16 .*or policy\.weights=bfloat16"),
        ("ppo", {"critic": {"weights": "int8"}}, r"set critic\.lora\.r=16"),
        ("rm", {"model": {"weights": "nf4"}}, r"set model\.lora\.r=16"),
        ("dpo", {"policy": {"weights": "bfloat16", "dtype": "float64"}}, r"set policy\.weights=auto"),
        ("dpo", {"policy": {"weights": "nf4", "lora": LORA}, "sharding": {"mode": "zero3"}}, r"set sharding=ddp"),
        ("dpo", {"reference": {"model": "r", "weights": "nf4"}, "sharding": {"mode": "zero2"}}, r"reference\.weights"),
        ("ppo", {"policy": {"lora": {"r": 4, "dropout": 0.1}}}, r"set policy\.lora\.dropout=0"),
        ("ppo", {"policy": {"lora": LORA}, "reference": {"weights": "nf4"}}, r"set policy\.weights instead"),
        ("ppo", {"critic": {"shared": True, "lora": LORA}}, r"set policy\.lora"),
        ("dpo", {"policy": {"export": "adapter"}}, r"policy\.export=merged"),
        ("rm", {"model": {"export": "both"}}, r"model\.export=merged"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_cure(kind: str, change: dict[str, Any], message: str) -> None:
    load, tree = LOADED[kind]
    load(tree)
    with pytest.raises(ConfigError, match=message):
        load(merge(tree, change))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("ppo", {"policy": {"weights": "nf4", "lora": LORA}, "critic": {"weights": "nf4", "lora": LORA}}),
        ("ppo", {"policy": {"weights": "bfloat16"}, "critic": {"weights": "bfloat16"}}),
        ("ppo", {"reward": {"source": {"type": "model", "path": "r", "weights": "int8"}}}),
        ("dpo", {"policy": {"lora": {"r": 4, "dropout": 0.1, "dora": True}, "export": "both"}}),
        ("dpo", {"reference": {"model": "r", "weights": "nf4"}}),
        ("rm", {"model": {"weights": "nf4", "lora": {"r": 4, "rslora": True, "target_modules": "attention"}}}),
    ],
)
def test_what_can_be_combined_loads(kind: str, change: dict[str, Any]) -> None:
    load, tree = LOADED[kind]
    load(merge(tree, change))
