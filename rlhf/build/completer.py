"""A trained model as a function from texts to texts, and as a partner in a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from rlhf.build.context import model_folder
from rlhf.config.data import ChatFormat, DataConfig
from rlhf.config.load import read_yaml, validate
from rlhf.config.sections import SamplingConfig
from rlhf.data.chat import load_tokenizer
from rlhf.data.conversation import Message, Prompt
from rlhf.data.encode import make_encoder
from rlhf.data.prompts import encode_conversations
from rlhf.errors import DataError
from rlhf.models.backbone import check_vocabulary, context_length, eos_ids, freeze, load_causal_lm, place
from rlhf.sampling.choice import make_sampler
from rlhf.types import Completions

RAW = ChatFormat("none")


def chat_format_of(path: str) -> ChatFormat:
    """Read the chat keys of a run's configuration; those of a model folder are the defaults."""
    run = Path(path).expanduser() / "config.yaml"
    if not run.is_file():
        return ChatFormat()
    data = dict(read_yaml(run).get("data") or {})
    keys = ("chat_template", "chat_template_kwargs", "system")
    return validate(DataConfig, {key: data[key] for key in keys if key in data}).chat_format


class Completer:
    """The model of a run, or in a model folder, ready to sample."""

    def __init__(
        self, path: str, sampling: SamplingConfig, device: torch.device | None = None, *, chat: ChatFormat = RAW
    ) -> None:
        """`device` is a GPU where there is one, unless it is given; `chat`: how prompts are written."""
        folder = model_folder(path)
        self.tokenizer = load_tokenizer(folder)
        self.encoder = make_encoder(self.tokenizer, chat)
        self.sampling = sampling
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_causal_lm(folder)
        check_vocabulary(model, self.tokenizer, folder)
        freeze(model)
        self.model = place(model, device)
        self.eos_ids = tuple(sorted({*eos_ids(model, self.tokenizer), *self.encoder.end_ids}))
        self.sampler = make_sampler(
            self.model,
            sampling,
            eos_ids=self.eos_ids,
            pad_id=self.encoder.pad_id,
            dtype="float32",
            device=device,
        )

    def sample(self, prompts: Sequence[str], *, count: int, key: int, greedy: bool = False) -> Completions:
        """Draw `count` completions of each prompt, as token ids."""
        asked = [self.asked(text) for text in prompts]
        return self.sampler.sample(encode_conversations(asked, self.encoder), key=key, group_size=count, greedy=greedy)

    def asked(self, text: str) -> Prompt:
        """Make a prompt of a text: a user's turn where there is a chat template."""
        return [{"role": "user", "content": text}] if self.encoder.template.turns else text

    def complete(self, prompts: Sequence[str], *, count: int, key: int) -> list[list[str]]:
        """Draw `count` completions of each prompt, as text without special tokens."""
        drawn = self.sample(prompts, count=count, key=key)
        texts = [self.text(ids, mask) for ids, mask in zip(drawn.completion_ids, drawn.completion_mask, strict=True)]
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def text(self, ids: Tensor, mask: Tensor) -> str:
        """Return the live tokens of one completion as text without special tokens."""
        text = self.tokenizer.decode(ids[mask], skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def stream(self, prompt: Prompt, write: Callable[[str], None], *, top_p: float, greedy: bool) -> tuple[str, bool]:
        """Write one completion as it comes, drawn by torch's random numbers; return it, and whether it ended by itself.

        An interrupt (Ctrl-C) ends it early.

        Raises:
            DataError: the prompt leaves no room in the model's context.
        """
        ids = encode_conversations([prompt], self.encoder).prompt_ids.to(self.model.device)
        room = self._room(ids.shape[1])
        streamer = _Streamer(self.text_of, write)
        drawn = {} if greedy else {"temperature": self.sampling.temperature, "top_p": top_p, "top_k": 0}
        settings = GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=room,
            eos_token_id=list(self.eos_ids),
            pad_token_id=self.encoder.pad_id,
            **drawn,
        )
        model: Any = self.model
        try:
            with torch.no_grad():
                model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
        return streamer.written, bool(streamer.ids) and streamer.ids[-1] in self.eos_ids

    def text_of(self, ids: Sequence[int]) -> str:
        """Return ids as text without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _room(self, tokens: int) -> int:
        context = context_length(self.model)
        room = self.sampling.max_new_tokens if context is None else min(self.sampling.max_new_tokens, context - tokens)
        if room < 1:
            raise DataError(f"{tokens:,} tokens leave nothing of the model's context of {context:,}")
        return room


class _Streamer(BaseStreamer):
    """Decodes a completion as it grows, and writes what can no longer change."""

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self.decode, self.write = decode, write
        self.ids: list[int] = []
        self.written = ""
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids, which come first, or a new token's."""
        if not self.has_prompt:
            self.has_prompt = True
            return
        self.ids += value.flatten().tolist()
        text = self.decode(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is not complete yet
            self._show(text)

    def end(self) -> None:
        """Write what is left."""
        self._show(self.decode(self.ids))

    def _show(self, text: str) -> None:
        self.write(text[len(self.written) :])
        self.written = text


@dataclass
class Conversation:
    """A conversation with a model: what was said so far, and the next answer."""

    model: Completer
    system: str | None
    top_p: float
    greedy: bool
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        """Forget what was said."""
        self.messages.clear()

    def ask(self, text: str, write: Callable[[str], None]) -> bool:
        """Say something and write the answer as it comes; return whether it ended by itself."""
        start = [{"role": "system", "content": self.system}] if self.system is not None else []
        asked = [*self.messages, {"role": "user", "content": text}]
        answer, ended = self.model.stream([*start, *asked], write, top_p=self.top_p, greedy=self.greedy)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return ended
