"""The sampler's log-probs as the old ones: only if they are the trainer's, and then they change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import prompts_of, sampler_of, tiny
from torch import nn

from rlhf.config.sections import SamplingConfig
from rlhf.models.policy_models import Models, SharedValueHead
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.rollout import compute_logprobs_and_values, takes_sampler_logprobs
from rlhf.types import Completions, Rollout, Scores

CPU = torch.device("cpu")


def drawn(models: Models) -> Completions:
    config = SamplingConfig(max_new_tokens=6, temperature=0.7)
    return sampler_of(models.policy, config).sample(prompts_of([[1, 5, 7], [1, 4], [8]]), key=3, group_size=2)


def bundle(dtype: torch.dtype = torch.float32, **more: object) -> Models:
    name = {torch.float32: "float32", torch.float64: "float64"}[dtype]
    return Models(**{"policy": tiny(dtype=dtype), "temperature": 0.7, "dtype": name, "device": CPU, **more})  # type: ignore[arg-type]


def annotated(models: Models, batch: Completions, how: str) -> Rollout:
    scores = Scores(values=torch.zeros(len(batch)), parts={})
    return compute_logprobs_and_values(batch, scores, models, cut=AdaptiveMicroBatch(4).cut, old_log_probs=how)  # type: ignore[arg-type]


def test_they_are_the_trainers_to_rounding() -> None:
    models = bundle(reference=tiny(dtype=torch.float32, initializer_range=0.2))
    batch = drawn(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Models, "outputs", None)  # no pass over all rows
        taken = annotated(models, batch, "auto")
    computed = annotated(models, batch, "trainer")
    assert torch.equal(taken.logprobs, batch.sampler_logprobs)
    torch.testing.assert_close(taken.logprobs, computed.logprobs, rtol=0, atol=1e-5)
    for name in ("ref_logprobs", "values", "scores"):
        assert torch.equal(getattr(taken, name), getattr(computed, name))
        assert getattr(taken, name).dtype == getattr(computed, name).dtype


def test_weights_that_moved_since_are_noticed() -> None:
    models = bundle()
    batch = drawn(models)
    with torch.no_grad():
        head = models.policy.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        head.weight[7] += 0.01
    assert not takes_sampler_logprobs(batch, models, "auto")
    assert torch.equal(annotated(models, batch, "auto").logprobs, annotated(models, batch, "trainer").logprobs)
    assert takes_sampler_logprobs(batch, models, "sampler")


def test_another_temperature_is_noticed() -> None:
    models = bundle()
    assert not takes_sampler_logprobs(drawn(models), replace(models, temperature=0.8), "auto")


def test_not_in_bfloat16_nor_with_a_shared_critic() -> None:
    models = bundle()
    batch = drawn(models)
    assert takes_sampler_logprobs(batch, models, "auto")
    assert not takes_sampler_logprobs(batch, replace(models, dtype="bfloat16"), "auto")
    shared = replace(models, shared_head=SharedValueHead(16, torch.float32))
    assert not takes_sampler_logprobs(batch, shared, "auto")
    assert annotated(shared, batch, "auto").values.shape == batch.completion_ids.shape


def test_without_reference_or_critic_nothing_is_computed_but_the_compared_rows() -> None:
    models = bundle()
    batch = drawn(models)
    rollout = annotated(models, batch, "sampler")
    assert torch.equal(rollout.ref_logprobs, batch.sampler_logprobs)
    assert not rollout.values.any()
