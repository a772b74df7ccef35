"""Find the answer in completions that are written in channels, as gpt-oss writes its analysis before the final answer.

Without its special tokens such a completion is one text, "analysisEasy sum.assistantfinal4", in which no answer can be
found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
FINAL = "final"
ENDS = ("<|end|>", "<|return|>", "<|call|>")


def writes_channels(tokenizer: Any) -> bool:
    """Return whether a tokenizer has the tokens of channels."""
    added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return CHANNEL in added and MESSAGE in added


def final_message(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode the last message of the final channel; without one, the whole completion with its special tokens."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    for part in reversed(text.split(CHANNEL)[1:]):
        name, message, answer = part.partition(MESSAGE)
        if message and name.split("<|")[0].strip() == FINAL:
            return answer[: min((answer.find(end) for end in ENDS if end in answer), default=len(answer))]
    return text
