"""Chat templates as the families write them, cut down to the parts needed here, each with its tokenizer's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from made_tokenizers import CHATML, byte_tokenizer
from stored_templates import chat_template
from transformers import PreTrainedTokenizerBase

LLAMA3 = chat_template("llama3")
GEMMA = chat_template("gemma")
PHI3 = chat_template("phi3")
MISTRAL = chat_template("mistral")
QWEN3 = chat_template("qwen3")  # thoughts leave the history; the last answer always has one, if an empty one
R1 = chat_template("r1")  # opens a thought for the answer, and writes no answer's thought
MARKED = chat_template("marked")


@dataclass(frozen=True)
class Family:
    """A template, the tokenizer's special tokens, and the end of a turn."""

    template: str
    end: str
    eos: str
    bos: str | None = None
    extra: tuple[str, ...] = ()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Make a tokenizer of bytes with these special tokens; nothing is put before a text."""
        tokenizer = byte_tokenizer(bos=self.bos, eos=self.eos, pad=None, extra=self.extra)
        tokenizer.chat_template = self.template
        return tokenizer


_CHATML = {"end": "<|im_end|>", "eos": "<|im_end|>", "extra": ("<|im_start|>", "<|endoftext|>")}
FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, **_CHATML),  # type: ignore[arg-type]
    "llama3": Family(
        LLAMA3, "<|eot_id|>", "<|end_of_text|>", "<bos>", ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    ),
    "gemma": Family(GEMMA, "<end_of_turn>", "<eos>", "<bos>", ("<end_of_turn>", "<start_of_turn>")),
    "phi3": Family(PHI3, "<|end|>", "<|endoftext|>", None, ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")),
    "mistral": Family(MISTRAL, "</s>", "</s>", "<s>"),
    "qwen3": Family(QWEN3, **_CHATML),  # type: ignore[arg-type]
    "r1": Family(R1, "<|end_of_sentence|>", "<|end_of_sentence|>", "<bos>", ("<|User|>", "<|Assistant|>")),
    "marked": Family(MARKED, **_CHATML),  # type: ignore[arg-type]
}
