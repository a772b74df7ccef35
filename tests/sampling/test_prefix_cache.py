"""The beginning that a row's prompt shares with its last one is read once; completions are as for whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import BOS, prompts_of, tiny
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.sections import SamplingConfig
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.fast import prefix_cache
from rlhf.sampling.fast.engine import FastSampler
from rlhf.types import Completions, Prompts

CPU = torch.device("cpu")
ROWS = [[BOS, 5, 7], [BOS, 4], [BOS, 6, 8, 9, 3, 12], [8], [BOS, 11, 11, 3], [BOS, 17]]
OBSERVATIONS = [[4, 9], [6], [7, 7, 7], [10], [3, 5, 8, 8], [12, 4]]
WINDOWS = {"mistral": 5, "gemma3_text": 4}


def model_of(family: str) -> PreTrainedModel:
    window = {"sliding_window": WINDOWS[family]} if family in WINDOWS else {}
    return tiny(family, dtype=torch.float32, initializer_range=0.2, **window)


def sampler_of(model: PreTrainedModel, *, slots: int, lean: bool = True) -> FastSampler:
    config = SamplingConfig(max_new_tokens=6, batch_size=slots)
    return FastSampler(model, config, eos_ids=(2,), pad_id=0, dtype="float32", device=CPU, lean=lean)


@pytest.fixture
def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each reading of prompts, padding included."""
    read, counts = prefix_cache.prefill, []

    def counted(model: Any, ids: Tensor, mask: Tensor, past: Any) -> Any:
        counts.append(ids.numel() - (len(ids) * past[0][0].shape[2] if past else 0))
        return read(model, ids, mask, past)

    monkeypatch.setattr(prefix_cache, "prefill", counted)
    return counts


def continued(completions: Completions, observations: Sequence[Sequence[int]] = OBSERVATIONS) -> Prompts:
    """Return the prompts of the next turn: of each row its prompt, its action and an observation."""
    rows = zip(
        completions.prompt_ids,
        completions.prompt_mask,
        completions.completion_ids,
        completions.completion_mask,
        observations,
        strict=True,
    )
    return prompts_of(
        [[*prompt[seen].tolist(), *drawn[mask].tolist(), *added] for prompt, seen, drawn, mask, added in rows]
    )


def played(sampler: FastSampler, turns: int = 3) -> list[Completions]:
    """Play turns in which the policy does not change."""
    prompts, actions = prompts_of(ROWS), []
    for turn in range(turns):
        actions.append(sampler.sample(prompts, key=derive_seed(0, "turn", turn), group_size=1))
        prompts = continued(actions[-1])
    return actions


def same(first: Sequence[Completions], second: Sequence[Completions]) -> None:
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine.completion_ids, other.completion_ids)
        assert torch.equal(mine.finished, other.finished)
        torch.testing.assert_close(mine.sampler_logprobs, other.sampler_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots", [3, 100])
@pytest.mark.parametrize(
    "family,lean", [("llama", True), ("mistral", True), ("gemma3_text", True), ("gpt2", False), ("phi", False)]
)
def test_later_turns_are_those_of_prompts_read_in_whole(
    family: str, lean: bool, slots: int, tokens_read: list[int]
) -> None:
    model = model_of(family)
    whole, remembering = (sampler_of(model, slots=slots, lean=lean) for _ in range(2))
    expected, all_tokens = played(whole), sum(tokens_read)
    with remembering.prefixes.kept():
        actions = played(remembering)
    same(actions, expected)
    assert remembering.uses == ("lean" if lean else "model")
    assert sum(tokens_read) - all_tokens < all_tokens


def test_only_what_is_new_is_read(tokens_read: list[int]) -> None:
    sampler = sampler_of(model_of("llama"), slots=100)
    with sampler.prefixes.kept():
        actions = sampler.sample(prompts_of(ROWS), key=1, group_size=1)
        prompts = continued(actions)
        sampler.sample(prompts, key=2, group_size=1)
    added = prompts.prompt_mask.sum(dim=1) - torch.tensor([len(row) for row in ROWS])
    assert tokens_read == [len(ROWS) * max(len(row) for row in ROWS), len(ROWS) * int(added.max())]


def test_a_prompt_that_does_not_go_on_is_read_in_whole(tokens_read: list[int]) -> None:
    model = model_of("llama")
    sampler = sampler_of(model, slots=100)
    others = prompts_of([[BOS, 5, 7, 9], [BOS, 5], [BOS, 6, 8, 9, 3, 12], [9, 8], [BOS, 11, 11, 3, 3], [4]])
    with sampler.prefixes.kept():
        sampler.sample(prompts_of(ROWS), key=1, group_size=1)
        tokens_read.clear()
        actions = sampler.sample(others, key=2, group_size=1)
    assert tokens_read == [4 * 6, 2 * 1]  # rows 0 and 4 go on, each with one token
    same([actions], [sampler_of(model, slots=100).sample(others, key=2, group_size=1)])


def test_the_rows_of_a_group_share_what_was_read_of_their_prompt(tokens_read: list[int]) -> None:
    model = model_of("llama")
    results: list[Completions] = []
    for remembers in (False, True):
        sampler = sampler_of(model, slots=100)
        sampler.prefixes._is_on = remembers
        actions = sampler.sample(prompts_of(ROWS), key=1, group_size=2)
        assert tokens_read.pop() == len(ROWS) * max(len(row) for row in ROWS)
        results.append(sampler.sample(continued(actions, OBSERVATIONS * 2), key=2, group_size=1))
    same(results[:1], results[1:])


def test_new_weights_are_read_with_by_the_next_episodes() -> None:
    model = model_of("llama")
    sampler = sampler_of(model, slots=100)
    with sampler.prefixes.kept():
        played(sampler)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    with sampler.prefixes.kept():
        actions = played(sampler)
    same(actions, played(sampler_of(model, slots=100)))


def test_no_more_rows_are_remembered_than_run_together() -> None:
    sampler = sampler_of(model_of("llama"), slots=2)
    with sampler.prefixes.kept():
        sampler.sample(prompts_of(ROWS), key=1, group_size=1)
        assert len(sampler.prefixes._prefixes) == 2
    assert not sampler.prefixes._prefixes
