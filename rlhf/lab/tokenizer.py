"""The lab's tokenizer: byte-level BPE, so that any text round-trips, trained on the texts of the lab."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
"""The special tokens, with ids 0, 1 and 2. A byte-level vocabulary needs no <unk>."""

VOCAB_SIZE = 1024
"""The vocabulary size: enough for every frequent word of the lab to be a single token."""

MAX_LENGTH = 128
"""Context of the lab's models, in tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens, which adds no special tokens and decodes without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
