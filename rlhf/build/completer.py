"""A trained model as a function from texts to texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.build.context import model_folder
from rlhf.config.sections import SamplingConfig
from rlhf.data.chat import load_tokenizer, pad_id
from rlhf.data.prompts import encode_texts
from rlhf.models.backbone import check_vocabulary, eos_ids, freeze, load_causal_lm, place
from rlhf.sampling.choice import make_sampler
from rlhf.types import Completions


class Completer:
    """The model of a run, or in a model folder, ready to sample."""

    def __init__(self, path: str, sampling: SamplingConfig, device: torch.device | None = None) -> None:
        """`device` is a GPU where there is one, unless it is given."""
        folder = model_folder(path)
        self.tokenizer = load_tokenizer(folder)
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_causal_lm(folder)
        check_vocabulary(model, self.tokenizer, folder)
        freeze(model)
        self.model = place(model, device)
        self.sampler = make_sampler(
            self.model,
            sampling,
            eos_ids=eos_ids(model, self.tokenizer),
            pad_id=pad_id(self.tokenizer),
            dtype="float32",
            device=device,
        )

    def sample(self, prompts: Sequence[str], *, count: int, key: int, greedy: bool = False) -> Completions:
        """`count` completions of each prompt, as token ids."""
        return self.sampler.sample(encode_texts(prompts, self.tokenizer), key=key, group_size=count, greedy=greedy)

    def complete(self, prompts: Sequence[str], *, count: int, key: int) -> list[list[str]]:
        """`count` completions of each prompt, as text without special tokens."""
        drawn = self.sample(prompts, count=count, key=key)
        texts = [self.text(ids, mask) for ids, mask in zip(drawn.completion_ids, drawn.completion_mask, strict=True)]
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def text(self, ids: Tensor, mask: Tensor) -> str:
        """The live tokens of one completion, as text without special tokens."""
        text = self.tokenizer.decode(ids[mask], skip_special_tokens=True)
        assert isinstance(text, str)
        return text
