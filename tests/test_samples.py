"""The lines of samples.jsonl are texts that a reader can read."""

from __future__ import annotations

import dataclasses

import torch
from tiny_models import BOS, EOS, completions_of, tokenizer

from rlhf.batching import extend
from rlhf.factory.models import make_decode
from rlhf.training.rollout import sample_records
from rlhf.types import Rollout


def test_completions_are_shown_without_special_tokens_and_prompts_as_they_are_read() -> None:
    drawn = completions_of([[BOS, 5], [BOS, 6]], [[7, EOS], [8, 9]])
    drawn = dataclasses.replace(drawn, references=({"prompt": "<s> [user] t5"}, {}))
    zeros = torch.zeros(drawn.completion_ids.shape)
    rollout = extend(
        Rollout,
        drawn,
        scores=torch.zeros(2),
        baselines=torch.zeros(2),
        logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        hinted=torch.zeros(2, dtype=torch.bool),
    )
    records = sample_records(rollout, make_decode(tokenizer()), step=1, split="train", limit=2, has_reference=True)
    assert [record["prompt"] for record in records] == ["<s> [user] t5", "t6"]
    assert [record["completion"] for record in records] == ["t7", "t8 t9"]
    assert [record["length"] for record in records] == [2, 2]
