"""Text to token ids, at the seam between prompt and completion above all.

A prompt begins with the special tokens the tokenizer itself puts first (BOS, if it does), never twice and never
with an EOS at its end. A completion has no special tokens but one EOS, which ends it. The ids of the two, one after
the other, decode to the two texts, one after the other: a tokenizer which puts a space before whatever it is given
(SentencePiece) must not do so at the seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf.data.chat import Rendered, Template, choose_template, pad_id, render
from rlhf.data.conversation import Prompt
from rlhf.errors import DataError

_STARTS = ("\n", ".", ":", "a", "1")  # texts before a completion, to see past what is put before a text
_PROBES = ("x", " x", "x y", "\nx", '"x')


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and a chat template, and what was found out about the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    template: Template
    prefix: tuple[int, ...]  # the special tokens before every text
    start: str  # put before a completion to encode it, its tokens then dropped; empty where none is needed
    eos_id: int
    pad_id: int

    def render(self, prompt: Prompt, completions: Sequence[str] = ()) -> Rendered:
        """A prompt and its completions as text."""
        return render(self.tokenizer, self.template, prompt, completions)

    def prompts(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """The ids of each prompt. An empty one, where the tokenizer puts nothing first, has none."""
        plain = self._plain([r.prompt for r in rendered])
        return [ids if r.templated else self._started(ids) for r, ids in zip(rendered, plain, strict=True)]

    def completions(self, rendered: Sequence[Rendered], which: int) -> list[list[int]]:
        """The ids of completion `which` of each, ended by EOS."""
        texts = [r.completions[which] for r in rendered]
        inner = [i for i, r in enumerate(rendered) if r.prompt]
        ids = self._plain(texts)  # after no prompt a completion is a text like any other
        if self.start:
            for i, continued in zip(inner, self._continued([texts[i] for i in inner]), strict=True):
                ids[i] = ids[i] if continued is None else continued
        # A text which begins with BOS in so many words follows a prompt that is just that BOS.
        return [self._ended(row if r.prompt else self._unstarted(row)) for r, row in zip(rendered, ids, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        written = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(written, str)
        return written

    def seam_holds(self, rendered: Rendered, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Whether the ids of prompt and completion decode to what their texts, encoded as one, decode to."""
        joint = self._plain([rendered.prompt + rendered.completions[0]])[0]
        whole = joint if rendered.templated else self._started(joint)
        head = self.head(whole)  # kept from _ended, for BOS may be EOS
        return self.decode([*prompt, *completion]) == self.decode([*whole[:head], *self._ended(whole[head:])])

    def head(self, ids: Sequence[int]) -> int:
        """How many ids at the start are the special tokens before every text."""
        return len(self.prefix) if tuple(ids[: len(self.prefix)]) == self.prefix else 0

    def _started(self, ids: list[int]) -> list[int]:
        return ids if self.prefix and self.head(ids) else [*self.prefix, *ids]

    def _unstarted(self, ids: list[int]) -> list[int]:
        return ids[self.head(ids) :]

    def _ended(self, ids: list[int]) -> list[int]:
        if self.eos_id not in ids:
            return [*ids, self.eos_id]
        end = len(ids) - ids[::-1].index(self.eos_id)  # templates like to write a newline after their EOS
        return ids[:end] if not self.decode(ids[end:]).strip() else [*ids, self.eos_id]

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return _plain_ids(self.tokenizer, texts)

    def _continued(self, texts: list[str]) -> list[list[int] | None]:
        head = self._plain([self.start])[0]
        rows = self._plain([self.start + text for text in texts])
        # None where the start grew together with the text: then the seam may show a space.
        return [row[len(head) :] if row[: len(head)] == head else None for row in rows]


def make_encoder(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> Encoder:
    """An encoder for a tokenizer from `load_tokenizer`; `chat_template` as in `data.chat_template`."""
    eos_id = tokenizer.eos_token_id
    if not isinstance(eos_id, int):
        raise DataError("the tokenizer needs an EOS: see load_tokenizer")
    template = choose_template(tokenizer, chat_template)
    return Encoder(tokenizer, template, _prefix(tokenizer), _start(tokenizer), eos_id, pad_id(tokenizer))


def _plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before every text."""
    for probe in ("a", "x y", "0", "the"):
        bare = _plain_ids(tokenizer, [probe])[0]
        full = list(tokenizer(probe, verbose=False)["input_ids"])
        for at in range(len(full) - len(bare) + 1):
            if bare and full[at : at + len(bare)] == bare:
                return tuple(full[:at])
    return ()


def _start(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text to put before completions so that they are encoded as continuations; empty where that is what is done."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def holds(start: str) -> bool:
        head, before = _plain_ids(tokenizer, [start, "b"]) if start else ([], _plain_ids(tokenizer, ["b"])[0])
        rows = _plain_ids(tokenizer, [start + probe for probe in _PROBES])
        return all(
            row[: len(head)] == head and decode([*before, *row[len(head) :]]) == decode(before) + probe
            for row, probe in zip(rows, _PROBES, strict=True)
        )

    return next((start for start in ("", *_STARTS) if holds(start)), "")
