"""Models that padding disturbs are named; models that leave it out are not."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, CamembertConfig, PreTrainedConfig, RwkvConfig

from rlhf.models.backbone import body_of
from rlhf.models.logprobs import of_bodies

SIZES = {"vocab_size": 64, "hidden_size": 32}
ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "is_disturbed"),
    [
        (RwkvConfig(**SIZES, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64), True),
        (CamembertConfig(**SIZES, **ENCODER, is_decoder=True, max_position_embeddings=70), True),
        (BloomConfig(**SIZES, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2), False),
    ],
    ids=["rwkv", "camembert", "bloom"],
)
def test_padding_that_changes_numbers_is_told(config: PreTrainedConfig, is_disturbed: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ways = of_bodies([body_of(model)], packing="auto")
    assert not ways.ways["no padding"]
    warnings = [reason for reason in ways.reasons if reason.startswith("warning: padding changes what")]
    assert bool(warnings) == is_disturbed
