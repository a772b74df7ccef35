"""sharding.rollout=layered samples by generate, in step with the other ranks, and says why if it cannot.

tests/distributed/test_zero_gate.py compares its completions with the ones of gathered weights.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import EOS, PAD, tiny

from rlhf.config.sections import SamplingConfig
from rlhf.errors import ConfigError
from rlhf.runtime.engine import Engine
from rlhf.sampling.generate import HFSampler
from rlhf.sampling.sampler import Sampler, make_sampler


class Layered(Engine):
    """An engine as under zero3 with sharding.rollout=layered."""

    @property
    def samples_in_layers(self) -> bool:
        return True


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


def sampler(backend: str, warnings: list[str], **changes: object) -> Sampler:
    device = torch.device("cpu")
    model = tiny(**changes)  # type: ignore[arg-type]
    config = SamplingConfig.model_validate({"backend": backend})
    return make_sampler(
        *(model, config),
        eos_ids=(EOS,),
        pad_id=PAD,
        dtype="float32",
        device=device,
        engine=Layered(device),
        warn=warnings.append,
    )


def test_it_samples_by_generate_and_says_so() -> None:
    warnings: list[str] = []
    assert isinstance(sampler("auto", warnings), HFSampler)
    assert len(warnings) == 1
    assert "sharding.rollout=layered" in warnings[0]


def test_the_fast_sampler_by_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set sampling\.backend=auto, or set sharding\.rollout=gather"):
        sampler("fast", [])


def test_a_model_whose_batches_may_differ_between_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="longrope"):
        sampler("auto", [], rope_parameters=LONGROPE)
