"""Completions in channels (gpt-oss): a reward reads the final answer, not all channels as one word."""

from __future__ import annotations

import pytest
import torch
from made_tokenizers import byte_tokenizer

from rlhf.rewards.source import decode
from rlhf.types import Completions

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
ANALYSIS = "<|channel|>analysis<|message|>Easy sum."
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>4"


def completion(text: str, extra: tuple[str, ...], *, finished: bool) -> str:
    """Return the text that a reward reads of a completion."""
    tokenizer = byte_tokenizer(eos="<|return|>", pad="<|pad|>", extra=extra)
    prompt, ids = tokenizer.encode("2+2="), tokenizer.encode(text + ("<|return|>" if finished else ""))
    ones = torch.ones(1, len(ids), dtype=torch.bool)
    texts = decode(
        Completions(
            prompt_ids=torch.tensor([prompt]),
            prompt_mask=torch.ones(1, len(prompt), dtype=torch.bool),
            completion_ids=torch.tensor([ids]),
            completion_mask=ones,
            finished=torch.tensor([finished]),
            sampler_logprobs=torch.zeros(1, len(ids)),
            row_ids=torch.tensor([0]),
            group_size=1,
            references=({},),
        ),
        tokenizer,
    )
    return texts.completions[0]


def test_the_final_channel_is_the_answer() -> None:
    assert completion(ANALYSIS + FINAL, TOKENS, finished=True) == "4"


def test_the_last_final_channel_counts_and_ends_at_its_end() -> None:
    text = ANALYSIS + FINAL + "<|end|><|start|>assistant<|channel|>final <|message|>5<|end|>rest"
    assert completion(text, TOKENS, finished=False) == "5"


@pytest.mark.parametrize("text", [ANALYSIS, "<|channel|>commentary to=f<|message|>{}<|call|>", "4"])
def test_without_a_final_channel_all_of_it_is_read(text: str) -> None:
    assert completion(text, TOKENS, finished=False) == text


def test_other_tokenizers_lose_their_special_tokens_as_before() -> None:
    assert completion("a<|end|>b", ("<|end|>",), finished=True) == "ab"
