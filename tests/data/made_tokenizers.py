"""Tokenizers made in memory: one token a byte, with the special tokens and habits a test wants."""

from __future__ import annotations

from stored_templates import chat_template
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = chat_template("chatml")
WITH_BOS = chat_template("with_bos")


def byte_tokenizer(
    *,
    bos: str | None = None,
    eos: str | None = "</s>",
    pad: str | None = None,
    adds: str = "",
    extra: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """One token a byte, the special tokens first; `adds` is put around a text, as in "<s> $A </s>"."""
    special = [name for name in dict.fromkeys([bos, eos, pad, *extra]) if name]
    vocab = {name: i for i, name in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    if adds:
        inner.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=[(name, vocab[name]) for name in special if name in adds]
        )
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **{k: v for k, v in named.items() if v})
